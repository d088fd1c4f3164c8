"""A backend without the computation, to rehearse a cluster's Slurm path without accelerators.

Launchers, rendezvous, data, checkpoints, metrics and signals are real; a worker needs 31 MB and no
torch, so that hundreds of them fit on a machine. Losses and norms are made up, but each is an exact
function of the batches read and of the state: a lost, repeated or misordered step changes all later
ones.
"""
