"""The training worker: one process a device.

`worker.py` is its entry and its ways out, `job.py` puts backend, model, data and checkpoint
together, `loop.py` is the training loop, `hooks/` what happens beside it.
"""
