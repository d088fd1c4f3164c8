"""What of a mesh goes into compiled graphs and their cache keys: nothing that differs by worker.

A block under tensor parallelism is compiled with its collectives. They name a process group, and
the graph takes the mesh as an input. torch (2.13) numbers the groups of all workers, or names them
by their ranks, and hashes the whole mesh into the key: rank, group names and the mesh's own hash,
which Python salts anew in each process. So no worker would ever find a graph in the cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from torch._C._distributed_c10d import _register_process_group, _unregister_process_group
from torch.distributed.device_mesh import DeviceMesh

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import GroupName
else:
    GroupName = str  # what it is to type checkers alone; torch 2.9 has not got it


class _AlikeMesh(DeviceMesh):
    """A mesh of which only axes and sizes are pickled: for cache keys, and not to be read back."""

    def __getstate__(self) -> dict[str, Any]:
        return {"axes": self.mesh_dim_names, "sizes": tuple(self.shape)}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


def alike_everywhere(mesh: DeviceMesh, name: str) -> None:
    """Let graphs that are compiled with a mesh be equal on all workers, at any world size.

    Args:
        mesh: One-dimensional, a slice of its own; changed in place. Its group is the same one.
        name: What graphs call the group: on each worker the one that this worker is in.
    """
    if not hasattr(mesh, "_get_root_mesh"):
        return  # torch 2.9 keeps groups elsewhere: there, tensor-parallel graphs are compiled anew
    group = mesh.get_group()
    _unregister_process_group(GroupName(name))
    _register_process_group(GroupName(name), group)
    mesh._get_root_mesh()._pg_registry[name] = group
    mesh._dim_group_names = [GroupName(name)]
    mesh.__class__ = _AlikeMesh
