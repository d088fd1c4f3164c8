"""Which worker writes which chunk of a checkpoint: decided by each worker, without a message.

A chunk that one worker holds is written by it. Workers that hold the same chunk, such as the norms
of a tensor-parallel group, hold the same list of such chunks: each of them divides the list in the
same way and takes its own share.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.tensor import DTensor

from slurmllm.checkpoint.formats.dcp_write import chunk_bytes
from slurmllm.plan.mesh import Mesh

RANDOM = "random"  # prefix of the state that every worker has of its own
_ITEM_BYTES = 1024  # what a file has of each tensor apart from its values
# Keys of an embedding that first and last pipeline stage share.
_TIED = ("model.embed.weight", "optimizer.embed.weight.")


@dataclass(frozen=True)
class Holders:
    """The workers that hold the same chunk: this one's place among them."""

    axes: tuple[str, ...]  # of the mesh, over which the chunk is replicated
    place: int
    count: int


class MeshPlace:
    """A worker's place on the mesh, which tells which other workers hold the same chunks.

    Args:
        tied: Whether the first and the last pipeline stage share the embedding.
    """

    def __init__(self, mesh: Mesh, rank: int, *, tied: bool = False) -> None:
        # Axis → this worker's index, and the axis' degree.
        self._axes = {
            "data": (mesh.data_rank(rank), mesh.data),
            "tensor": (rank % mesh.tensor, mesh.tensor),
        }
        self._ends = (int(mesh.pipeline_rank(rank) > 0), 2)
        self._tied = tied and mesh.pipeline > 1

    def holders(self, key: str, tensor: Tensor) -> Holders:
        if key.startswith(RANDOM):
            return Holders((), 0, 1)
        axes = dict(self._axes)
        if isinstance(tensor, DTensor):
            names = tensor.device_mesh.mesh_dim_names
            assert names is not None, key
            for name, placement in zip(names, tensor.placements, strict=True):
                if not placement.is_replicate():
                    del axes[name]
        if self._tied and key.startswith(_TIED):
            axes["pipeline"] = self._ends
        place, count = 0, 1
        for index, degree in axes.values():
            place, count = place * degree + index, count * degree
        return Holders(tuple(axes), place, count)


def own_items(
    items: Sequence[WriteItem], state: Mapping[str, Any], mesh_place: MeshPlace
) -> list[WriteItem]:
    """Return those of the chunks that a worker holds that it writes, in their order.

    Args:
        items: One per chunk that the worker holds.
        state: Key → tensor.
    """
    groups: dict[Holders, list[WriteItem]] = {}
    for item in items:
        if chunk_bytes(item):  # FSDP leaves some workers without a part of a small parameter
            groups.setdefault(mesh_place.holders(item.index.fqn, state[item.index.fqn]), []).append(
                item
            )
    kept: set[str] = set()
    for holders, held in groups.items():
        # The largest first, each to the holder that has the least so far.
        loads = [(0, place) for place in range(holders.count)]
        for item in sorted(held, key=lambda item: (-chunk_bytes(item), item.index.fqn)):
            load, place = loads[0]
            heapq.heapreplace(loads, (load + chunk_bytes(item) + _ITEM_BYTES, place))
            if place == holders.place:
                kept.add(item.index.fqn)
    return [item for item in items if item.index.fqn in kept]
