"""Initial weights that depend on the seed and the parameter's name alone.

Every parameter has a random generator of its own, always on the CPU, so the weights are the same
on any mesh, any device and in any order of construction. Each worker draws a parameter whole, one
at a time, and keeps its own share.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from slurmllm.config.recipe import ModelConfig


def initialize(model: nn.Module, config: ModelConfig, seed: int) -> None:
    """Set all weights and buffers: matrices normal, biases 0, norm weights 1.

    Args:
        model: A decoder on its device, its parameters plain tensors or DTensors.
        config: Gives the standard deviation.
        seed: Of the run.
    """
    norms = {
        name for name, module in model.named_modules() if name.rpartition(".")[2].endswith("norm")
    }
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            module, _, leaf = name.rpartition(".")
            if leaf == "bias":
                parameter.zero_()
            elif module in norms:
                parameter.fill_(1.0)
            else:
                _assign(parameter, normal(parameter.shape, config.init_std, seed, name))
    for module_ in model.modules():
        reset = getattr(module_, "reset_buffers", None)
        if reset is not None:
            reset()


def normal(shape: torch.Size, std: float, seed: int, name: str) -> Tensor:
    """fp32 values of one parameter, from a generator seeded by run seed and name."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.empty(shape, dtype=torch.float32).normal_(0.0, std, generator=generator)


def _assign(parameter: Tensor, full: Tensor) -> None:
    full = full.to(parameter.device)
    if isinstance(parameter, DTensor):
        # src_data_rank=None: every worker slices its own copy, nothing is sent.
        full = distribute_tensor(
            full, parameter.device_mesh, parameter.placements, src_data_rank=None
        )
    parameter.copy_(full)
