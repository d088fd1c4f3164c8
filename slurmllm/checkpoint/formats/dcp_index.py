"""Where which chunk of a checkpoint is: DCP's `.metadata`, as far as each worker needs it.

`.metadata` lists the chunks of all workers, so it grows with their number. Rank 0 alone writes and
reads it, and workers exchange plain numbers instead of DCP's objects:

- Saving (`SaveIndex`): each worker sends the names and places of its chunks in the first save of an
  attempt. Names, shapes and file layout stay the same from save to save; then one small reduction
  is all that is exchanged, and rank 0 writes the same bytes again.
- Loading (`ChunkTable`): rank 0 reads the file and passes on one array of numbers per tensor; each
  worker makes DCP's objects for the chunks that it reads, and for no others.
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Mapping, Sequence
from itertools import starmap
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import WriteItem

from slurmllm.control.plane import ControlPlane
from slurmllm.errors import CodeError, SlurmllmError, StorageError
from slurmllm.model.init import local_region

Numbers = tuple[int, ...]
Rows = np.ndarray[Any, np.dtype[np.int64]]


class Chunk(NamedTuple):
    """A chunk that a worker writes: what DCP's `.metadata` has of it, apart from its place."""

    key: str
    path: tuple[str | int, ...]  # keys of the nested state that lead to the tensor
    dtype: torch.dtype
    requires_grad: bool
    pinned: bool
    shape: Numbers  # of the whole tensor
    offsets: Numbers
    sizes: Numbers

    @classmethod
    def of(cls, item: WriteItem, path: Sequence[str | int]) -> Chunk:
        data = item.tensor_data
        assert data is not None, "a state holds tensors only"
        kind, chunk = data.properties, data.chunk
        return cls(
            item.index.fqn, tuple(path), kind.dtype, kind.requires_grad, kind.pin_memory,
            tuple(data.size), tuple(chunk.offsets), tuple(chunk.sizes),
        )  # fmt: skip


class Place(NamedTuple):
    """Where a chunk is stored."""

    file: str
    offset: int
    length: int

    @classmethod
    def of(cls, stored: _StorageInfo) -> Place:
        return cls(stored.relative_path, stored.offset, stored.length)


class SaveIndex:
    """`.metadata` of the saves of an attempt; on every worker.

    Args:
        chunks: Those that this worker writes, the same in every save.
    """

    def __init__(self, control: ControlPlane, chunks: Sequence[Chunk]) -> None:
        self._control, self._chunks = control, chunks
        self._places: Sequence[Place] | None = None
        self._parts: Sequence[bytes] | None = None  # of all workers, on rank 0
        self._content: bytes | None = None

    def collect(self, places: Sequence[Place], fault: SlurmllmError | None = None) -> None:
        """Pass on to rank 0 what has changed since the last save (collective).

        Args:
            places: Of this worker's chunks, in their order.
            fault: Why this worker could not write them; raised on all workers.
        """
        states = int(fault is not None), int(places != self._places)
        failed, changed = self._control.all_reduce(states, "max")
        if failed:
            found = self._control.first(fault)
            assert found is not None
            raise found
        if changed:
            self._places, self._content = places, None
            self._parts = self._control.gather(pack_part(self._chunks, places))

    def content(self) -> bytes:
        """Return the content of `.metadata`; on rank 0.

        Raises:
            CodeError: The chunks of all workers are not the whole tensors.
        """
        if self._content is None:
            assert self._parts is not None, "the places are collected"
            self._content = pickle.dumps(build_metadata(self._parts))
            self._parts = None
        return self._content


def pack_part(chunks: Sequence[Chunk], places: Sequence[Place]) -> bytes:
    """A worker's part of the index."""
    # Plain tuples, whose classes are not named once per chunk. Names of parameters repeat:
    # compressed, they take a tenth.
    return zlib.compress(pickle.dumps(([*map(tuple, chunks)], [*map(tuple, places)])), 1)


def build_metadata(parts: Sequence[bytes]) -> Metadata:
    """Make DCP's metadata of the parts (`pack_part`) of all workers, by rank.

    Raises a CodeError if the chunks of a tensor are not the whole tensor.
    """
    tensors: dict[str, TensorStorageMetadata] = {}
    paths: dict[str, tuple[str | int, ...]] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    sizes: dict[Numbers, torch.Size] = {}  # one object per shape: pickles refer to it

    def size(numbers: Numbers) -> torch.Size:
        return sizes.setdefault(numbers, torch.Size(numbers))

    for part in parts:
        chunks, own = pickle.loads(zlib.decompress(part))  # noqa: S301 (of this attempt's workers)
        for chunk, place in zip(starmap(Chunk, chunks), starmap(Place, own), strict=True):
            tensor = tensors.get(chunk.key)
            if tensor is None:
                properties = TensorProperties(
                    chunk.dtype, requires_grad=chunk.requires_grad, pin_memory=chunk.pinned
                )
                tensor = TensorStorageMetadata(properties, size(chunk.shape), [])
                tensors[chunk.key], paths[chunk.key] = tensor, chunk.path
            index = MetadataIndex(chunk.key, chunk.offsets, len(tensor.chunks))
            if index in places:
                raise CodeError(
                    f"{chunk.key} at {chunk.offsets} is written twice: into "
                    f"{places[index].relative_path} and {place.file}"
                )
            places[index] = _StorageInfo(*place)
            tensor.chunks.append(ChunkStorageMetadata(size(chunk.offsets), size(chunk.sizes)))
    for key, tensor in tensors.items():
        written = sum(chunk.sizes.numel() for chunk in tensor.chunks)
        if written != tensor.size.numel():
            raise CodeError(f"{written} of {tensor.size.numel()} values of {key} are written")
    # Without the identity of the folder, whose name is a temporary one until all is written.
    return Metadata(dict(tensors), paths, places, StorageMeta(), CURRENT_DCP_VERSION)


class _Stored(NamedTuple):
    """The chunks of a tensor, or an object that is no tensor."""

    dtype: torch.dtype | None  # None: no tensor
    shape: Numbers
    # [chunks, 2 * dims + 3], int64: offsets, sizes, number of the file, offset, length
    rows: Rows


class ChunkTable(NamedTuple):
    """What `.metadata` says of all tensors, to be sent to workers."""

    files: list[str]
    stored: dict[str, _Stored]

    @classmethod
    def of(cls, metadata: Metadata) -> ChunkTable:
        files: dict[str, int] = {}
        rows: dict[str, list[Numbers]] = {key: [] for key in metadata.state_dict_metadata}
        sizes = {
            MetadataIndex(key, chunk.offsets): chunk.sizes
            for key, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
            for chunk in entry.chunks
        }
        for index, place in metadata.storage_data.items():
            file = files.setdefault(place.relative_path, len(files))
            if index.fqn in rows:  # DCP never looks up any other
                chunk = (*(index.offset or ()), *sizes.get(index, ()))
                rows[index.fqn].append((*chunk, file, place.offset, place.length))
        stored = {}
        for key, entry in metadata.state_dict_metadata.items():
            tensor = entry if isinstance(entry, TensorStorageMetadata) else None
            shape = tuple(tensor.size) if tensor else ()
            width = 2 * len(shape) + 3
            # A place without a chunk is of no use, nor is one of other dimensions.
            complete = [row for row in rows[key] if len(row) == width]
            numbers = np.array(complete, dtype=np.int64).reshape(-1, width)
            stored[key] = _Stored(tensor.properties.dtype if tensor else None, shape, numbers)
        return cls(list(files), stored)

    def metadata(self, wanted: Mapping[str, Tensor]) -> Metadata:
        """Make DCP's metadata of the chunks that this worker's parts of some tensors need.

        Args:
            wanted: Key in the checkpoint → tensor, or DTensor, that is read. A key that the
                checkpoint does not have is left out.

        Raises:
            StorageError: The checkpoint has not all values of a part.
        """
        entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        places: dict[MetadataIndex, _StorageInfo] = {}
        for key, tensor in wanted.items():
            if key not in self.stored:
                continue
            dtype, shape, rows = self.stored[key]
            if dtype is None:
                entries[key] = BytesStorageMetadata()
            else:
                if shape == tuple(tensor.shape):  # DCP reports any other
                    rows = _overlapping(key, rows, tensor)
                entries[key] = TensorStorageMetadata(TensorProperties(dtype), torch.Size(shape), [])
            for row in rows.tolist():
                at, sizes = torch.Size(row[: len(shape)]), torch.Size(row[len(shape) : -3])
                index = MetadataIndex(key, None if dtype is None else at)
                places[index] = _StorageInfo(self.files[row[-3]], row[-2], row[-1])
                if isinstance(entry := entries[key], TensorStorageMetadata):
                    entry.chunks.append(ChunkStorageMetadata(at, sizes))
        return Metadata(dict(entries), {}, places, StorageMeta())


def _overlapping(key: str, rows: Rows, tensor: Tensor) -> Rows:
    """The rows of the chunks that overlap this worker's part of a tensor."""
    region = local_region(tensor)
    starts = np.array([part.start for part in region], dtype=np.int64)
    stops = np.array([part.stop for part in region], dtype=np.int64)
    offsets, sizes = rows[:, : len(region)], rows[:, len(region) : -3]
    common = (np.minimum(stops, offsets + sizes) - np.maximum(starts, offsets)).clip(min=0)
    found, needed = common.prod(axis=1), int((stops - starts).prod())
    # DCP itself would leave what is missing as it is, without an error.
    if found.sum() < needed:
        raise StorageError(f"{found.sum()} of {needed} values of {key} are stored; restore it")
    overlapping: Rows = rows[found > 0]
    return overlapping
