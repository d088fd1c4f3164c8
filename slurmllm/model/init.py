"""Initial weights that depend on the seed, the parameter's name and the place in it alone.

A matrix is drawn in tiles, each from a random generator of its own, always on the CPU: a worker
draws the tiles that its share touches and no others, and the weights are the same on any mesh, any
device and in any order of construction.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from slurmllm.config.recipe import ModelConfig

# Rows and columns: wide enough that seeding costs nothing beside drawing, low enough that a share
# of a few rows wastes little.
_TILE = (64, 1024)
_SCALED = ("attention.out.weight", "mlp.down.weight")


def initialize(model: nn.Module, config: ModelConfig, seed: int) -> None:
    """Set all weights and buffers: matrices normal, biases 0, norm weights 1.

    Args:
        model: A decoder or a stage of one, on its device, parameters plain tensors or DTensors.
        config: Gives the standard deviations.
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
                _draw(parameter, standard_deviation(config, name), seed, name)
    _reset_buffers(model)


def fill(model: nn.Module, read: Callable[[str, tuple[slice, ...]], Tensor]) -> None:
    """Set all weights from elsewhere, and the buffers.

    Args:
        model: As for `initialize`.
        read: Values of a parameter, by its name and the region of the whole that is wanted.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            local, size, offset = _local(parameter)
            region = tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))
            local.copy_(read(name, region))
    _reset_buffers(model)


def _reset_buffers(model: nn.Module) -> None:
    for module in model.modules():
        reset = getattr(module, "reset_buffers", None)
        if reset is not None:
            reset()


def standard_deviation(config: ModelConfig, name: str) -> float:
    """Of a matrix's initial weights (scaled: Fan et al. 2024, HLAT, section 4)."""
    if config.scaled_init and name.endswith(_SCALED):
        return config.init_std / math.sqrt(2 * config.num_layers)
    if config.output_init_std is not None and name.endswith(_SCALED):
        return config.output_init_std
    return config.init_std


def normal(
    shape: Sequence[int],
    std: float,
    seed: int,
    name: str,
    offset: Sequence[int] = (0, 0),
    size: Sequence[int] | None = None,
) -> Tensor:
    """fp32 values of a matrix, or of a rectangle of it.

    Args:
        shape: Of the whole matrix, [rows, columns].
        std: Standard deviation.
        seed: Of the run.
        name: The parameter's.
        offset: First row and column of the rectangle.
        size: Rows and columns of it; up to the end where left out.
    """
    height, width = size or (shape[0] - offset[0], shape[1] - offset[1])
    values = torch.empty(height, width, dtype=torch.float32)
    if values.numel() == 0:
        return values
    down, across = _TILE
    for top in range(offset[0] // down * down, offset[0] + height, down):
        for left in range(offset[1] // across * across, offset[1] + width, across):
            tile = _tile(shape, seed, name, top, left).mul_(std)
            row, column = top - offset[0], left - offset[1]
            target = values[max(row, 0) : row + down, max(column, 0) : column + across]
            source = tile[max(-row, 0) :, max(-column, 0) :]
            target.copy_(source[: target.shape[0], : target.shape[1]])
    return values


def _tile(shape: Sequence[int], seed: int, name: str, top: int, left: int) -> Tensor:
    digest = hashlib.sha256(f"{seed}/{name}/{top}/{left}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    extent = [
        min(tile, whole - at) for tile, whole, at in zip(_TILE, shape, (top, left), strict=True)
    ]
    return torch.empty(extent, dtype=torch.float32).normal_(0.0, 1.0, generator=generator)


def _draw(parameter: Tensor, std: float, seed: int, name: str) -> None:
    local, size, offset = _local(parameter)
    local.copy_(normal(tuple(parameter.shape), std, seed, name, offset, size))


def _local(parameter: Tensor) -> tuple[Tensor, Sequence[int], Sequence[int]]:
    """This worker's part of a parameter, its size, and where in the whole it begins."""
    if not isinstance(parameter, DTensor):
        return parameter, parameter.shape, [0] * parameter.ndim
    size, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    return parameter.to_local(), size, offset
