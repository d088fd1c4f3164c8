"""Collectives as training has them: within nodes, and between workers of equal place on nodes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist

from slurmllm.calibrate.measure.clock import Item
from slurmllm.calibrate.sample import Kind


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

    The halves with the copy between parameters and one buffer that FSDP makes after it gathers and
    before it scatters.

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
    kind: Kind, where: str, members: int, size: int, group: dist.ProcessGroup, device: torch.device
) -> Item:
    numbers = max(1, size // 4 // members) * members
    whole, apart = (torch.zeros(numbers, device=device) for _ in range(2))
    share = torch.zeros(numbers // members, device=device)

    def gather() -> None:
        dist.all_gather_into_tensor(whole, share, group=group)
        apart.copy_(whole)

    def scatter() -> None:
        whole.copy_(apart)
        dist.reduce_scatter_tensor(share, whole, group=group)

    def reduce() -> None:
        dist.all_reduce(whole, group=group)

    works = {"all_gather": gather, "reduce_scatter": scatter, "all_reduce": reduce}
    return Item(kind, where, (members, 4 * numbers), works[kind], together=True)
