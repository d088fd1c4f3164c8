"""Which worker writes which chunk of a checkpoint: decided by each worker, without a message.

A chunk that one worker holds is written by it. Workers that hold the same chunk, such as the norms
of a tensor-parallel group, hold the same list of such chunks: each of them divides the list in the
same way and takes its own share.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor import DTensor

from slurmllm.plan.mesh import Mesh
from slurmllm.train.model.init import local_part

RANDOM = "random"  # prefix of the state that every worker has of its own
_ITEM_BYTES = 1024  # what a file has of each tensor apart from its values
# Keys of an embedding that first and last pipeline stage share.
_TIED = ("model.embed.weight", "optimizer.embed.weight.")


@dataclass(frozen=True)
class Holders:
    """This worker's place among the workers that hold the same chunk."""

    axes: tuple[str, ...]  # of the mesh, over which the chunk is replicated
    holder: int
    count: int


class MeshPlace:
    """A worker's place on the mesh, which tells which other workers hold the same chunks.

    `tied`: the first and the last pipeline stage share the embedding.
    """

    def __init__(self, mesh: Mesh, rank: int, *, tied: bool = False) -> None:
        # Axis → this worker's index, and the axis' degree.
        self._axes = {
            "replicate": (mesh.data_rank(rank) // mesh.shard, mesh.replicate),
            "shard": (mesh.shard_rank(rank), mesh.shard),
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
        holder, count = 0, 1
        for index, degree in axes.values():
            holder, count = holder * degree + index, count * degree
        return Holders(tuple(axes), holder, count)


def own_tensors(state: Mapping[str, Tensor], mesh_place: MeshPlace) -> list[str]:
    """Return the keys of the tensors whose local chunks this worker writes, in their order."""
    groups: dict[Holders, dict[str, int]] = {}
    for key, tensor in state.items():
        if num_bytes := local_part(tensor).nbytes:  # FSDP leaves some workers without a part
            groups.setdefault(mesh_place.holders(key, tensor), {})[key] = num_bytes
    shares = (share_out(sizes, holders.count)[holders.holder] for holders, sizes in groups.items())
    written = {key for share in shares for key in share}
    return [key for key in state if key in written]


def share_out(sizes_bytes: Mapping[str, int], count: int) -> list[list[str]]:
    """Distribute tensors: the largest first, each to the share with the least bytes so far."""
    shares: list[list[str]] = [[] for _ in range(count)]
    loads = [(0, holder) for holder in range(count)]
    for key in sorted(sizes_bytes, key=lambda key: (-sizes_bytes[key], key)):
        load, holder = loads[0]
        heapq.heapreplace(loads, (load + sizes_bytes[key] + _ITEM_BYTES, holder))
        shares[holder].append(key)
    return shares
