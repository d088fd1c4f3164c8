"""How far apart two correct computations of one number may be: tolerances for any processor.

Processors add in different orders, in vectors of different lengths, with or without fused
multiply-adds, and all of them are right. So a tolerance is derived from the operations that round,
never from what one processor printed. `make numerics` runs the tests that use it as others compute.
"""

import math

import torch
from numpy.typing import ArrayLike

from slurmllm.core.config.recipe import ModelConfig
from slurmllm.core.config.resolve import RunConfig

# Exceeded with a probability below 2 exp(-λ² / 2) = 7e-4, were all roundings as large as u.
_LAMBDA = 4


def rounding_bound(terms: int, dtype: torch.dtype = torch.float32, *, mean_of: int = 1) -> float:
    """Return how far apart two computations may be, relative to the largest magnitude.

    Each of n operations in a row rounds by at most u = eps / 2 of its result. The roundings are
    not all of one sign: together they stay below λ √n u (Higham and Mary, SIAM J. Sci. Comput. 41,
    2019, theorem 2.4), and below n u in any case. Two computations are twice as far apart.

    Args:
        terms: Operations that round, one after the other: of a sum its terms.
        dtype: Format of the results.
        mean_of: Values of this error whose mean or norm is compared: the errors average out.
    """
    worst_of_one = min(_LAMBDA * math.sqrt(terms), terms)
    return torch.finfo(dtype).eps * max(1.0, worst_of_one / math.sqrt(mean_of))


def assert_rounded(
    actual: ArrayLike, expected: ArrayLike, terms: int, *, scale: float = 0.0, name: str = ""
) -> None:
    """Assert that two fp32 tensors differ by at most `rounding_bound(terms)` of the largest one.

    Elements near 0 are sums that cancel: their errors are of the size of the terms.

    Args:
        found: Any shape.
        expected: The same shape.
        terms: Operations that round, one after the other.
        scale: The largest magnitude, if the tensor may be all zero but for rounding.
        name: What is compared, for the message.
    """
    a, b = (torch.as_tensor(values).detach().double() for values in (actual, expected))
    assert a.shape == b.shape, name
    apart, largest = float((a - b).abs().max()), max(float(b.abs().max()), scale)
    allowed = rounding_bound(terms) * largest
    assert apart <= allowed, f"{name}: {apart:.3g} apart, {allowed:.3g} allowed of {largest:.3g}"


def forward_terms(model: ModelConfig) -> int:
    """Return the terms of the sums on the way from a token to its loss."""
    heads = model.num_heads * model.head_width
    attention = model.hidden_size + model.head_width + 2 * model.seq_len + heads
    norms = 2 * (model.hidden_size + model.qk_norm * model.head_width)
    layer = norms + attention + model.hidden_size + model.ffn_hidden_size
    return model.num_layers * layer + 2 * model.hidden_size + model.padded_vocab_size


def gradient_terms(model: ModelConfig, tokens: int) -> int:
    """Return those on the way to a gradient: forward, backward, and the sum over the tokens."""
    return 2 * forward_terms(model) + tokens


def training_rounding(config: RunConfig, steps: int, *, targets: int | None = None) -> float:
    """Return the tolerance of losses and norms of some steps.

    Each step's rounding adds to those before: at a learning rate at which training is stable they
    do not grow by themselves. A loss is a mean over the targets of the batch and a norm one over
    more elements.

    Args:
        config: The run.
        steps: Steps that both computations make from the same weights.
        targets: Of a global batch; by default all of its tokens.
    """
    model, train = config.recipe.model, config.recipe.train
    tokens = train.global_batch * model.seq_len
    return rounding_bound(steps * gradient_terms(model, tokens), mean_of=targets or tokens)
