"""The training worker: one process for each device.

`worker.py` is its entry, `exits.py` its stop requests and failures, `job.py` sets up backend,
model, data and checkpoint, `loop.py` is the training loop, `hooks/` the other work of a step.
"""
