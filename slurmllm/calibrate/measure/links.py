"""Collectives as training has them: within nodes, and between workers of equal place on nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from slurmllm.calibrate.measure.clock import Item

Collective = Callable[[Tensor, Tensor, dist.ProcessGroup], object]


def groups(nodes: int, workers: int) -> dict[str, list[list[int]]]:
    """Ranks of the groups of each kind; all groups of a kind communicate at the same time."""
    found: dict[str, list[list[int]]] = {}
    if workers > 1:
        found["node"] = [list(range(n * workers, (n + 1) * workers)) for n in range(nodes)]
    if nodes > 1:
        found["network"] = [list(range(n, nodes * workers, workers)) for n in range(workers)]
    return found


def collectives(
    nodes: int, workers: int, device: torch.device, sizes: tuple[int, ...]
) -> Iterator[Item]:
    """All-reduces of every size, and the two halves of one for the largest (collective).

    Args:
        nodes: In all.
        workers: Of a node.
        device: Where the tensors are.
        sizes: Bytes of the whole, on each worker.
    """
    for where, ranks in groups(nodes, workers).items():
        own, _ = dist.new_subgroups_by_enumeration(ranks)  # type: ignore[no-untyped-call]
        members = len(ranks[0])
        for size in sizes:
            yield _item("all_reduce", where, members, size, own, device)
        yield _item("all_gather", where, members, sizes[-1], own, device)
        yield _item("reduce_scatter", where, members, sizes[-1], own, device)


def _item(
    kind: str, where: str, members: int, size: int, group: dist.ProcessGroup, device: torch.device
) -> Item:
    numbers = max(1, size // 4 // members) * members
    whole = torch.zeros(numbers, device=device)
    share = torch.zeros(numbers // members, device=device)
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, share, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(share, whole, group=group),
    }
    return Item(kind, where, (members, 4 * numbers), calls[kind], together=True)  # type: ignore[arg-type]
