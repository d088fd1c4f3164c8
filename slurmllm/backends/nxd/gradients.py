"""Norms over all workers, clipping, and the gradients of repeated keys and values.

Ours instead of NxD's `clip_grad_norm`, which counts repeated keys and values once for each copy,
and its ZeRO-1's, which clips at 1 whatever is asked for. Both run inside NxD's step: as a hook of
the optimizer that makes the update, when gradients have been reduced (and, under ZeRO-1, shared
out). Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from neuronx_distributed.parallel_layers import parallel_state
from torch import Tensor

from slurmllm.plan.mesh import Mesh


class CopyCounts(NamedTuple):
    """How often the elements of a parameter lie on the workers of one data-parallel replica.

    Attributes:
        copies: Of every row, or of the first `rows`.
        rows: Rows with `copies` copies; None for all.
        later: Copies of the rows after them.
    """

    copies: int
    rows: int | None = None
    later: int = 1


class Norm:
    """The 2-norm over a model's parameters, or over their gradients.

    Its graph is the same on all workers: what differs between them is data.

    Args:
        counted: Of each parameter, in the optimizer's order.
        rows: Of each parameter on this worker.
        mesh: The run's.
        device: Where the parameters are.
        sharded: Whether the optimizer has a share of each parameter (ZeRO-1).
    """

    def __init__(
        self,
        counted: Sequence[CopyCounts],
        rows: Sequence[int],
        mesh: Mesh,
        device: torch.device,
        *,
        sharded: bool,
    ) -> None:
        self._mesh, self._sharded = mesh, sharded
        self._weights = [self._weight(c, n, device) for c, n in zip(counted, rows, strict=True)]

    def _weight(self, counted: CopyCounts, rows: int, device: torch.device) -> float | Tensor:
        """What a square counts: one over its copies; a number, or one for each row."""
        if counted.rows is None:
            return 1 / counted.copies
        weights = torch.full((rows,), 1 / counted.later)
        weights[: counted.rows] = 1 / counted.copies
        if self._sharded:  # rows are padded to a multiple of the workers, and each has as many
            each = -(-rows // self._mesh.data)
            weights = torch.cat([weights, weights.new_zeros(each * self._mesh.data - rows)])
            weights = torch.split(weights, each)[parallel_state.get_data_parallel_rank()]
        return weights.to(device)

    def of(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """fp32 [], on the device (collective over all workers).

        Args:
            tensors: One for each parameter, this worker's shard of it under ZeRO-1; None counts 0.
        """
        parts = [
            _squares(tensor.detach(), weight)
            for tensor, weight in zip(tensors, self._weights, strict=True)
            if tensor is not None
        ]
        total = torch.stack(parts).sum()
        if self._mesh.tensor > 1:
            dist.all_reduce(total, group=parallel_state.get_tensor_model_parallel_group())
        if self._mesh.pipeline > 1:
            dist.all_reduce(total, group=parallel_state.get_pipeline_model_parallel_group())
        if self._sharded and self._mesh.data > 1:
            dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
        return total.sqrt()


def _squares(tensor: Tensor, weight: float | Tensor) -> Tensor:
    squares = tensor.to(torch.float32).square()
    if isinstance(weight, Tensor) and squares.ndim > 1:
        squares = squares.flatten(1).sum(1)
    return (squares * weight).sum() if isinstance(weight, Tensor) else squares.sum() * weight


def clip_(gradients: Sequence[Tensor], norm: Tensor, limit: float) -> None:
    """Scale gradients down to a norm of `limit`, if theirs is larger; nothing where it is 0."""
    if limit > 0:
        factor = (limit / (norm + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(factor.to(gradient.dtype))


def sum_replicated_kv(gradients: Sequence[tuple[Tensor, int]]) -> None:
    """Add up the gradients of keys and values over the workers that hold the same head.

    Each has the gradients of its own queries alone; afterwards all have the sum, and the copies
    stay equal. One message for all layers.

    Args:
        gradients: Of coalesced matrices and biases, with the first row of the key.
    """
    parts = [gradient[row:] for gradient, row in gradients]
    if not parts:
        return
    message = torch.cat([part.flatten() for part in parts])
    dist.all_reduce(message, group=parallel_state.get_kv_shared_group())
    summed = torch.split(message, [part.numel() for part in parts])
    for part, values in zip(parts, summed, strict=True):
        part.copy_(values.view_as(part))
