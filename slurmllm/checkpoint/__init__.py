"""Checkpoints of a run: written whole or not at all, verified before use, kept to a number.

`save.py` writes, `resume.py` finds the newest one that verifies, `manifest.py` is the list of
files and checksums between them, `state.py` what the training loop itself must remember. The
shards in between are the backend's. No torch here.
"""
