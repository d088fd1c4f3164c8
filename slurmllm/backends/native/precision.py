"""The formats of each precision mode, and its optimizer.

| mode | weights and optimizer state | products | gradient sums |
|---|---|---|---|
| fp32 | fp32 | fp32 | fp32 |
| bf16_mixed | fp32 | bf16 | fp32 |
| bf16_sr | bf16, each update rounded stochastically | bf16 | fp32, then bf16 |
| bf16 | bf16, each update rounded to nearest | bf16 | fp32, then bf16 |

bf16_sr and bf16 use 8 bytes a parameter, 2 each for weight, gradient and the two moments; the
others use 16. All compute an update in fp32. Stochastic rounding is our own
(`stochastic_rounding.py`), not torchao's optimizer (0.18), which draws from the global generator of
each worker, so that copies of a parameter diverge, and is compiled again for each shape.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from slurmllm.backends.native.stochastic_rounding import StochasticAdamW
from slurmllm.config.recipe import OptimConfig, TrainConfig

_PURE = ("bf16_sr", "bf16")


def store_weights(model: nn.Module, precision: str) -> None:
    """Convert the parameters of a model on the meta device to their storage format."""
    if precision not in _PURE:
        return
    # Not model.to(): the rotary table stays fp32, because bf16 cannot separate far positions.
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(parameter.to(torch.bfloat16)))


def compute_dtype(precision: str) -> torch.dtype:
    """Return the format of activations."""
    return torch.float32 if precision == "fp32" else torch.bfloat16


def sharding_policy(precision: str) -> MixedPrecisionPolicy:
    """Return the formats that FSDP casts weights and gradients to."""
    if precision == "fp32":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
    )


def make_optimizer(
    named_parameters: Iterable[tuple[str, Tensor]], optim: OptimConfig, train: TrainConfig
) -> torch.optim.Optimizer:
    """Make AdamW over this worker's shards, under their names in the whole model."""
    # Matrices and embeddings have two dimensions; norms and biases have one. The fused kernel needs
    # all tensors of a group on one mesh.
    groups: dict[tuple[bool, Any], list[Tensor]] = {}
    names: dict[Tensor, str] = {}
    for name, parameter in named_parameters:
        names[parameter] = name
        decayed = parameter.ndim > 1 or optim.decay_norms_and_biases
        groups.setdefault((decayed, getattr(parameter, "device_mesh", None)), []).append(parameter)
    param_groups: list[dict[str, Any]] = [
        {"params": tensors, "weight_decay": optim.weight_decay if decayed else 0.0}
        for (decayed, _), tensors in groups.items()
    ]
    options: dict[str, Any] = {"lr": optim.lr, "betas": optim.betas, "eps": optim.eps}
    if train.precision == "bf16_sr":
        return StochasticAdamW(
            param_groups, names, **options, seed=train.seed, compiled=train.compile
        )
    return torch.optim.AdamW(param_groups, **options, fused=True)
