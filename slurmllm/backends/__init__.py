"""What a model trains through: `native` (PyTorch) and `nxd` (neuronx-distributed).

`rehearsal` does everything but the training.

`base.py` is the seam. Each backend has a torch-free `environment.py`, read on the login node and
by the supervisor, and a `runtime.py`, loaded in the workers alone.
"""
