"""Norms and scaling over tensors that are shared out."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


def total_norm(tensors: Sequence[Tensor], mesh: DeviceMesh) -> float:
    """The 2-norm over all elements of all tensors, by one message (collective).

    torch's own clip_grad_norm_ sends one message a tensor when these are DTensors.

    Args:
        tensors: DTensors on `mesh`, sharded or replicated; partial sums are not norms yet.
        mesh: One-dimensional.
    """
    # fp64: fp32 sums over a large matrix are off in the sixth digit, and by another amount where
    # the matrix is cut otherwise.
    norms = torch._foreach_norm([local_part(tensor) for tensor in tensors], 2, torch.float64)
    copies = [_copies(tensor) for tensor in tensors]
    weights = torch.tensor(copies, dtype=torch.float64, device=norms[0].device)
    squares = (torch.stack(norms).square() / weights).sum()
    dist.all_reduce(squares, group=mesh.get_group())
    return math.sqrt(squares.item())


def scale_(tensors: Sequence[Tensor], factor: float) -> None:
    """Multiply in place."""
    torch._foreach_mul_([local_part(tensor) for tensor in tensors], factor)


def local_part(tensor: Tensor) -> Tensor:
    """What of a tensor lies on this worker."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _copies(tensor: Tensor) -> int:
    """On how many workers each element lies."""
    assert isinstance(tensor, DTensor)
    assert not any(placement.is_partial() for placement in tensor.placements)
    return math.prod(
        tensor.device_mesh.size(axis)
        for axis, placement in enumerate(tensor.placements)
        if placement.is_replicate()
    )
