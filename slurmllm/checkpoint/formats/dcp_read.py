"""Reading the native backend's checkpoints without a process group: tensors or regions of them.

DCP's `.metadata` lists which chunk of which tensor is in which file, for any mesh that wrote it.
Only the chunks that overlap a region are read, one at a time.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from slurmllm.checkpoint.formats.pickles import DcpReader
from slurmllm.checkpoint.formats.safetensors_files import StoredTensor
from slurmllm.checkpoint.shards import Region
from slurmllm.checkpoint.state import MOMENTS
from slurmllm.errors import StorageError

# Prefixes in the backend's state: weights, and the optimizer's moments and step of each.
MODEL, OPTIMIZER = "model.", "optimizer."


class DcpFiles:
    """One checkpoint folder in DCP's format; see `weights.TrainingFiles`.

    The constructor and every read raise a StorageError if the folder is damaged.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._reader = DcpReader(directory)
        metadata = self._reader.metadata
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        self._chunks = {
            key: stored
            for key, stored in metadata.state_dict_metadata.items()
            if isinstance(stored, TensorStorageMetadata)
        }
        self.tensors = {
            key.removeprefix(MODEL): StoredTensor.of(stored.size, stored.properties.dtype)
            for key, stored in self._chunks.items()
            if key.startswith(MODEL)
        }
        if not self.tensors:
            raise StorageError(f"{directory} holds no weights: no tensor begins with {MODEL}")
        self.moments = {
            (kind, name): StoredTensor.of(stored.size, stored.properties.dtype)
            for kind in MOMENTS
            for name in self.tensors
            if (stored := self._chunks.get(_key(name, kind))) is not None
        }

    def read(self, name: str, region: Region | None = None) -> Tensor:
        return self._read(MODEL + name, name, region)

    def read_moment(self, kind: str, name: str, region: Region | None = None) -> Tensor:
        return self._read(_key(name, kind), f"{kind} of {name}", region)

    def step(self, name: str) -> float:
        return float(self._read(_key(name, "step"), f"step of {name}", None))

    def _read(self, key: str, what: str, region: Region | None) -> Tensor:
        stored = self._chunks.get(key)
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
        # A gap between the chunks would leave uninitialized values in `out`.
        found = sum(item.lengths.numel() for item in items)
        if found < out.numel():
            raise StorageError(
                f"{self.directory} holds {found} of {out.numel()} values of {what}; restore it"
            )
        try:
            self._reader.read_data(LoadPlan(items), _TensorLoadPlanner(out)).wait()
        except Exception as error:  # damaged bytes may raise anything
            raise StorageError(f"cannot read {what} from {self.directory}: {error}") from error
        return out


def _key(name: str, kind: str) -> str:
    return f"{OPTIMIZER}{name}.{kind}"


class _TensorLoadPlanner(DefaultLoadPlanner):
    """Loads every item into one tensor; the reader calls only `resolve_tensor` and a commit."""

    def __init__(self, target: Tensor) -> None:
        super().__init__()
        self._target = target

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        out = self._target
        for dim, (start, length) in enumerate(
            zip(read_item.dest_offsets, read_item.lengths, strict=True)
        ):
            out = out.narrow(dim, start, length)
        return out
