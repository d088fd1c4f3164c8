"""The model: one decoder; what sets the families apart is in `config/families.py`.

`decoder.py` holds the modules, `rotary.py` the rotary positions, `init.py` the initial weights,
which depend on the seed and never on how the weights are shared out.
"""
