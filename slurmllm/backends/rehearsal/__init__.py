"""Everything of a run but the arithmetic: to rehearse a cluster's Slurm path without accelerators.

Launchers, rendezvous, data, checkpoints, metrics and signals are real; a worker needs 50 MB and no
torch, so that hundreds fit where one model would not. The figures are made up, yet each is an exact
function of what was read and of the state: a lost, doubled or misordered step shows in every later
one.
"""
