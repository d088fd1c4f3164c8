"""Checkpoints of a run: published atomically, verified before use, retained by number and age.

`save.py` writes and `resume.py` finds the newest checkpoint that verifies. `folder.py` is the
folder with its manifest, `catalogue.py` lists and removes folders, `replicas.py` copies them,
`state.py` is the training state and the model. `shards.py` is the interface to the backends. None
of these imports torch. `formats/` reads and writes the native, NxD and Hugging Face formats.
"""
