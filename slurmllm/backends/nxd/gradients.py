"""Norms over all workers, clipping, and the gradients of replicated keys and values.

They replace NxD's `clip_grad_norm`, which counts replicated keys and values once for each copy, and
that of its ZeRO-1, which clips at 1 whatever the setting. They run inside NxD's step, in a hook of
the inner optimizer, after the gradients have been reduced (and, with ZeRO-1, sharded). Nothing here
waits for the device.
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
    """The number of copies of a parameter's rows on the workers of a data-parallel replica.

    Attributes:
        copies: Of every row, or of the first `rows`.
        rows: Number of rows with `copies` copies; None for all.
        later: Copies of the rows after them.
    """

    copies: int
    rows: int | None = None
    later: int = 1


class Norm:
    """The 2-norm over a model's parameters, or over their gradients.

    Its graph is the same on all workers: differences between them are data.

    Args:
        counts: Of each parameter, in the optimizer's order.
        rows: Number of rows of each parameter on this worker.
        sharded: Whether the optimizer has a shard of each parameter (ZeRO-1).
    """

    def __init__(
        self,
        counts: Sequence[CopyCounts],
        rows: Sequence[int],
        mesh: Mesh,
        device: torch.device,
        *,
        sharded: bool,
    ) -> None:
        self._mesh, self._sharded = mesh, sharded
        self._weights = [self._weight(c, n, device) for c, n in zip(counts, rows, strict=True)]

    def _weight(self, counts: CopyCounts, rows: int, device: torch.device) -> float | Tensor:
        """Return the weight of a square, one over its copies; a number, or one for each row."""
        if counts.rows is None:
            return 1 / counts.copies
        weights = torch.full((rows,), 1 / counts.later)
        weights[: counts.rows] = 1 / counts.copies
        if self._sharded:  # ZeRO-1 pads the rows to a multiple of the workers
            each = -(-rows // self._mesh.data)
            weights = torch.cat([weights, weights.new_zeros(each * self._mesh.data - rows)])
            weights = torch.split(weights, each)[parallel_state.get_data_parallel_rank()]
        return weights.to(device)

    def of(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """Return the norm, fp32 [] on the device (collective over all workers).

        Args:
            tensors: One for each parameter, with ZeRO-1 this worker's shard of it; None counts 0.
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
    """Scale gradients down to a norm of `limit` if theirs is larger; a limit of 0 is none."""
    if limit > 0:
        factor = (limit / (norm + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(factor.to(gradient.dtype))


def sum_replicated_kv(gradients: Sequence[tuple[Tensor, int]]) -> None:
    """Sum the gradients of keys and values over the workers with copies of the same head.

    Each worker has the gradients of its own queries only; afterwards all have the sum, and the
    copies stay equal. One message for all layers.

    Args:
        gradients: Of fused matrices and biases, with the first row of the key.
    """
    parts = [gradient[row:] for gradient, row in gradients]  # views: `copy_` below changes them
    if not parts:
        return
    message = torch.cat([part.flatten() for part in parts])
    dist.all_reduce(message, group=parallel_state.get_kv_shared_group())
    summed = torch.split(message, [part.numel() for part in parts])
    for part, values in zip(parts, summed, strict=True):
        part.copy_(values.view_as(part))
