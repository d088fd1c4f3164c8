"""Initial weights that depend only on the seed, the parameter's name and the index in it.

A matrix is drawn in tiles, each from its own random generator, always on the CPU. A worker draws
only the tiles that its shard overlaps, and the weights are the same on any mesh, any device and in
any order of construction.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from slurmllm.core.config.families import FAMILIES
from slurmllm.core.config.recipe import ModelConfig
from slurmllm.train.model.regions import Region, intersection, relative_to, sizes_of

# Rows and columns: large enough that seeding is cheap compared with drawing, few enough rows that a
# small shard wastes little. CAUTION: another size gives other weights for every seed.
_TILE = (64, 1024)
# Output matrices of a layer.
_SCALED = ("attention.out.weight", "mlp.down.weight")


def initialize(model: nn.Module, config: ModelConfig, seed: int) -> None:
    """Set all weights and buffers: matrices normal, biases 0, norms the identity's.

    The model is a decoder or a pipeline stage on its device, of plain tensors or DTensors.
    """
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    fill(model, lambda name, region: initial_values(config, name, shapes[name], region, seed))


def initial_values(
    config: ModelConfig, name: str, shape: Sequence[int], region: Region, seed: int
) -> Tensor:
    """Return the initial values of a region of the parameter `name`, of the given whole shape."""
    size = sizes_of(region)
    if name.endswith(".bias"):
        return torch.zeros(size)
    if len(size) == 1:  # weight of a norm
        one_plus = FAMILIES[config.family].norm_weight == "one_plus"
        return torch.zeros(size) if one_plus else torch.ones(size)
    return normal(shape, standard_deviation(config, name), seed, name, region)


def fill(model: nn.Module, read: Callable[[str, Region], Tensor]) -> None:
    """Set all weights, and compute the buffers; `read` returns a region of a parameter by name."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Only the worker's own region is read.
            local_part(parameter).copy_(read(name, local_region(parameter)))
    for module in model.modules():
        reset = getattr(module, "reset_buffers", None)
        if reset is not None:
            reset()


def standard_deviation(config: ModelConfig, name: str) -> float:
    """Return the standard deviation of a matrix (scaled: Fan et al. 2024, HLAT, section 4)."""
    if not name.endswith(_SCALED):
        return config.init_std
    if config.scaled_init:
        return config.init_std / math.sqrt(2 * config.num_layers)
    return config.init_std if config.output_init_std is None else config.output_init_std


def normal(shape: Sequence[int], std: float, seed: int, name: str, region: Region) -> Tensor:
    """Return fp32 values of a rectangle of the parameter `name` [rows, columns]."""
    rows, columns = region
    values = torch.empty(sizes_of(region), dtype=torch.float32)
    if values.numel() == 0:
        return values
    down, across = _TILE
    for top in range(rows.start // down * down, rows.stop, down):
        for left in range(columns.start // across * across, columns.stop, across):
            key = hashlib.sha256(f"{seed}/{name}/{top}/{left}".encode()).digest()
            # 63 bits: torch's generators take a signed 64-bit seed.
            generator = torch.Generator().manual_seed(int.from_bytes(key[:8], "little") >> 1)
            whole = slice(top, min(top + down, shape[0])), slice(left, min(left + across, shape[1]))
            tile = torch.empty(sizes_of(whole), dtype=torch.float32)
            tile.normal_(0.0, 1.0, generator=generator).mul_(std)
            common = intersection(whole, region)
            values[relative_to(common, region)] = tile[relative_to(common, whole)]
    return values


def local_part(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, DTensor):
        return tensor
    local = tensor.to_local()
    # torchao's wrapper of a weight that FSDP gathers in fp8 has the values here.
    return getattr(local, "_tensor", local)


def local_region(tensor: Tensor) -> Region:
    size = tuple(tensor.shape)
    offset = (0,) * tensor.ndim
    if isinstance(tensor, DTensor):
        size, offset = compute_local_shape_and_global_offset(
            size, tensor.device_mesh, tensor.placements
        )
    return tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))
