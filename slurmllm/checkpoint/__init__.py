"""Checkpoints of a run: written whole or not at all, verified before use, kept to a number.

`save.py` writes, `resume.py` finds the newest one that verifies, `manifest.py` is the list of
files and checksums between them, `state.py` what the training loop itself must remember,
`catalogue.py` what there is. The shards in between are the backend's. No torch in these.

Hugging Face in and out: `huggingface.py` holds names and layouts, `huggingface_config.py` the
config.json, `importing.py` and `exporting.py` move weights one file at a time. `origin.py` says
which model a checkpoint folder is of, `weights.py` fills a model from it.
"""
