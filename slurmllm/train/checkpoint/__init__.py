"""Checkpoints of a run: published atomically, verified before use, retained by number and age.

Only `formats/` imports torch; `shards.py` is the interface to the backends.
"""
