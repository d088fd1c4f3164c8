"""The model: one decoder; what distinguishes the families is in `config/families/`.

`decoder.py` holds the modules, `attention.py` rotary positions and the document mask, `output.py`
head and loss, `init.py` the initial weights, which depend on the seed and never on how the
weights are sharded, `regions.py` parts of tensors. This file imports nothing, so torch-free code
may import the constant.
"""

# A label without loss or gradient, as `ignore_index` of torch's cross_entropy.
IGNORED = -100
