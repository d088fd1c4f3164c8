"""Checks of the nodes (`slurmllm health`) and of installation and cluster (`slurmllm doctor`).

1. `node.py` checks the node that it runs on: the hidden verb `check-node`, one line of output a
   finding. `devices.py` (devices, drivers, EFA) and `storage.py` (disks) hold its checks.
2. `probe.py` starts it on all nodes, reads the lines, and compares the nodes with each other:
   which do not respond, whose clock or versions differ.
3. `bandwidth.py` measures the all-reduce over all nodes: with AWS's nccom-test on Neuron devices,
   with PyTorch (`allreduce.py`) elsewhere.
4. `installation.py`, `cluster.py` and `storage.py` are the checks of `doctor`, on the login node.

Every check yields `records.Finding`s. Only `allreduce.py`, a program of its own, imports torch.
"""
