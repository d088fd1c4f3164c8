"""Supervision of a run on its allocation: from the batch script's process to the workers.

`supervisor.py` is the batch script's process. It opens an attempt, broadcasts the graphs, starts a
`launcher.py` per node, monitors them (`attempt_monitor.py`, `watchdog.py`), collects the
`evidence.py`, classifies the ending (`classify.py`) and decides the action (`policy.py`).

Nothing here imports torch.
"""
