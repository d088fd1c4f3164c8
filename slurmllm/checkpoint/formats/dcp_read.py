"""A checkpoint of the native backend, whatever the mesh that wrote it: a tensor or a part of one.

`torch.distributed.checkpoint` says in `.metadata` which piece of which tensor lies where. Only the
pieces asked for are read, one at a time.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from slurmllm.checkpoint.formats.safetensors_files import DTYPES, Region, StoredTensor
from slurmllm.checkpoint.state import MOMENTS
from slurmllm.errors import StorageError

# As the backend's state names weights, and the optimizer's state of each: moments and step.
MODEL, OPTIMIZER = "model.", "optimizer."
METADATA = ".metadata"
_CODES = {dtype: code for code, dtype in DTYPES.items()}


class DcpFiles:
    """One checkpoint folder.

    Attributes:
        tensors: The weights.
        moments: The optimizer's, by kind and parameter; empty where weights alone were saved.

    Raises:
        StorageError: it is damaged or holds no weights.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._reader = FileSystemReader(directory)
        try:
            metadata = self._reader.read_metadata()
        except Exception as error:  # unpickling damaged bytes may raise anything
            raise StorageError(f"cannot read {directory / METADATA}: {error}") from error
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        self._held = {
            key: stored
            for key, stored in metadata.state_dict_metadata.items()
            if isinstance(stored, TensorStorageMetadata)
        }
        self.tensors = {
            key.removeprefix(MODEL): _described(stored)
            for key, stored in self._held.items()
            if key.startswith(MODEL)
        }
        if not self.tensors:
            raise StorageError(f"{directory} holds no weights: nothing there begins with {MODEL}")
        self.moments = {
            (kind, name): _described(self._held[_key(name, kind)])
            for kind in MOMENTS
            for name in self.tensors
            if _key(name, kind) in self._held
        }

    def read(self, name: str, region: Region | None = None) -> Tensor:
        """A weight or a part of it.

        Raises:
            StorageError: a shard is missing or damaged.
        """
        return self._read(MODEL + name, name, region)

    def read_moment(self, kind: str, name: str, region: Region | None = None) -> Tensor:
        """One of a parameter's moments or a part of it.

        Raises:
            StorageError: a shard is missing or damaged.
        """
        return self._read(_key(name, kind), f"{kind} of {name}", region)

    def step(self, name: str) -> float:
        """How often a parameter was updated.

        Raises:
            StorageError: a shard is missing or damaged.
        """
        return float(self._read(_key(name, "step"), f"step of {name}", None))

    def _read(self, key: str, what: str, region: Region | None) -> Tensor:
        stored = self._held.get(key)
        if stored is None:
            raise StorageError(f"{self.directory} holds no {what}; restore it")
        if region:
            offsets = torch.Size(part.start for part in region)
            sizes = torch.Size(part.stop - part.start for part in region)
        else:
            offsets, sizes = torch.Size([0] * len(stored.size)), stored.size
        out = torch.empty(sizes, dtype=stored.properties.dtype)
        wanted = ChunkStorageMetadata(offsets=offsets, sizes=sizes)
        items = create_read_items_for_chunk_list(key, stored, [wanted])
        found = sum(item.lengths.numel() for item in items)
        if found < out.numel():
            raise StorageError(
                f"{self.directory} holds {found} of {out.numel()} values of {what}; restore it"
            )
        try:
            self._reader.read_data(LoadPlan(items), _Into(out)).wait()
        except Exception as error:  # as above
            raise StorageError(f"cannot read {what} from {self.directory}: {error}") from error
        return out


def _key(name: str, kind: str) -> str:
    return f"{OPTIMIZER}{name}.{kind}"


def _described(stored: TensorStorageMetadata) -> StoredTensor:
    dtype = stored.properties.dtype
    return StoredTensor(tuple(stored.size), dtype, _CODES[dtype])


class _Into(LoadPlanner):
    """Puts what is read into one tensor."""

    def __init__(self, target: Tensor) -> None:
        self._target = target

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        out = self._target
        for dim, (start, length) in enumerate(
            zip(read_item.dest_offsets, read_item.lengths, strict=True)
        ):
            out = out.narrow(dim, start, length)
        return out

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pass

    # The reader calls the two above; these make the class whole.
    def set_up_planner(self, *_: object, **__: object) -> None: ...
    def create_local_plan(self) -> LoadPlan:
        raise NotImplementedError

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        raise NotImplementedError

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        raise NotImplementedError

    def load_bytes(self, *_: object) -> None:
        raise NotImplementedError
