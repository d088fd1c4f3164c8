"""Checks of the nodes (`slurmllm health`) and of installation and cluster (`slurmllm doctor`).

1. `node.py` checks the node that it runs on (memory, devices, drivers, EFA, and with `storage.py`
   disks): the hidden verb `check-node`, one line of output a finding.
2. `probe.py` starts it on all nodes, reads the lines, and compares the nodes with each other:
   which do not respond, whose clock or versions differ.
3. `bandwidth.py` measures the all-reduce over all nodes: with AWS's nccom-test on Neuron devices,
   with PyTorch (`allreduce.py`) elsewhere.
4. `login_node.py` (Python, packages, Slurm) and `storage.py` are the checks of `doctor`.

Every check yields `records.Finding`s. Only `allreduce.py`, a program of its own, imports torch.
"""
