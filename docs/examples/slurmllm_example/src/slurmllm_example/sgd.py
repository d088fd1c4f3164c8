"""The optimizer `sgd`: torch's, with a momentum."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slurmllm.core.config.recipe import Recipe


def sgd(
    parameters: Sequence[tuple[str, Tensor]],
    recipe: Recipe,
    *,
    momentum: float = 0.9,
    nesterov: bool = True,
) -> torch.optim.Optimizer:
    """Make the optimizer of the parameters, of which matrices decay."""
    decays = recipe.optim.weight_decay
    groups = [
        {"params": [p for _, p in parameters if p.ndim > 1], "weight_decay": decays},
        {"params": [p for _, p in parameters if p.ndim == 1], "weight_decay": 0.0},
    ]
    return torch.optim.SGD(groups, recipe.optim.lr, momentum, nesterov=nesterov)
