"""Checkpoints of a run: published atomically, verified before use, retained by number and age.

`save.py` writes, `resume.py` finds the newest checkpoint that verifies, `manifest.py` lists files
and checksums, `state.py` is the training loop's own state, `catalogue.py` reads what exists,
`retention.py` removes, `replicas.py` copies elsewhere. The shards are the backend's (`shards.py`).
None of these imports torch. `origin.py` knows whose weights a folder holds; `formats/` reads and
writes the native, NxD and Hugging Face formats.
"""
