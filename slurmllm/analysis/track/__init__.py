"""Trackers: a run's metrics in Weights & Biases and MLflow, read from the run directory.

Training knows nothing of them. `sync.py` turns the merged metrics into a tracker's calls and
remembers up to which step it has.
"""
