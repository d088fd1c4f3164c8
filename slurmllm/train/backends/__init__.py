"""The backends that train a model: `native` (PyTorch), `nxd` (neuronx-distributed), `rehearsal`.

`rehearsal` does everything except the computation. `base.py` is the interface. Each backend has a
torch-free `environment.py`, used on the login node and by the supervisor, and a `runtime.py`,
imported in the workers alone.
"""
