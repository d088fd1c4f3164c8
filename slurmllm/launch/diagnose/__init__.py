"""Checks of the nodes (`slurmllm health`) and of installation and cluster (`slurmllm doctor`).

`probe.py` starts `node.py` on all nodes and compares them; `bandwidth.py` measures the all-reduce.
`login_node.py` and `storage.py` are the checks of `doctor`. Every check yields `records.Finding`s.
Only `allreduce.py`, a program of its own, imports torch.
"""
