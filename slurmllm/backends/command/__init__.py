"""The workers of a recipe with a command: processes of another project's trainer.

It has no `runtime.py`; `supervise/trainer.py` starts them.
"""
