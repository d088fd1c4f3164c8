"""What sets the model families apart, in one place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Family:
    """The choices that make a decoder a GPT-NeoX rather than something else.

    Attributes:
        norm: (width, epsilon) → the normalization before attention, feed-forward and head.
        activation: Between the two matrices of the feed-forward layer.
        bias: Whether the matrices of the blocks have biases (the head never has).
        parallel_residual: Attention and feed-forward both read the block's input, and one sum
            adds them; else the feed-forward layer reads what attention has added.
    """

    norm: Callable[[int, float], nn.Module]
    activation: Callable[[Tensor], Tensor]
    bias: bool
    parallel_residual: bool


def _layer_norm(width: int, eps: float) -> nn.Module:
    return nn.LayerNorm(width, eps=eps)


FAMILIES: dict[str, Family] = {
    # Black et al. 2022 (arXiv 2204.06745), Biderman et al. 2023 (arXiv 2304.01373). GELU by erf,
    # as in transformers' GPTNeoXConfig (hidden_act "gelu").
    "neox": Family(norm=_layer_norm, activation=F.gelu, bias=True, parallel_residual=True),
}
