"""The training worker: one process for each device.

`worker.py` is its entry and its exits, `job.py` sets up backend, model, data and checkpoint,
`loop.py` is the training loop, `hooks/` what is done after each step besides training.
"""
