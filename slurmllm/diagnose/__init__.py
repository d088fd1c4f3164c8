"""Whether the nodes have what their profile says: before every attempt, and as `slurmllm health`.

1. `node.py` runs on every node, as the hidden verb `check-node`, and reports a line a finding;
   `devices.py`, `network.py` and `host.py` are its checks.
2. `asking.py` starts that on all nodes and reads the lines; `across.py` sets the nodes beside each
   other: who did not answer, whose clock or versions differ.
3. `bandwidth.py` measures the all-reduce over all nodes: with AWS's tool (`nccom.py`) on Neuron
   devices, with PyTorch (`allreduce.py`) elsewhere.

Only `allreduce.py`, a program of its own, imports torch.
"""
