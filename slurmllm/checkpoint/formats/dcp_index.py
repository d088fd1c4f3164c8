"""Where which chunk of a checkpoint is: DCP's `.metadata`, written by rank 0.

It lists the chunks of all workers. Each worker sends the names and places of its chunks as plain
numbers in the first save of an attempt. Names, shapes and file layout stay the same from save to
save; then one small reduction is all that is exchanged, and rank 0 writes the same bytes again.
"""

from __future__ import annotations

import math
import pickle
import zlib
from collections.abc import Sequence
from dataclasses import make_dataclass
from itertools import starmap
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from slurmllm.checkpoint.shards import Region
from slurmllm.control.plane import ControlPlane
from slurmllm.errors import CodeError, SlurmllmError
from slurmllm.model.init import local_part, local_region
from slurmllm.model.private_names import CHECKPOINT_INDEX

Numbers = tuple[int, ...]


class Chunk(NamedTuple):
    """A chunk that a worker writes: what DCP's `.metadata` has of it, apart from its place."""

    path: tuple[str, ...]  # keys of the nested state that lead to the tensor
    dtype: torch.dtype
    shape: Numbers  # of the whole tensor
    offsets: Numbers
    sizes: Numbers
    requires_grad: bool = False
    pinned: bool = False

    @classmethod
    def of(cls, path: tuple[str, ...], tensor: Tensor) -> Chunk:
        """Describe this worker's part of a tensor."""
        region, local = local_region(tensor), local_part(tensor)
        return cls(
            path,
            local.dtype,
            tuple(tensor.shape),
            tuple(part.start for part in region),
            tuple(part.stop - part.start for part in region),
            local.requires_grad,
            local.is_pinned(),
        )

    @property
    def key(self) -> str:
        return ".".join(self.path)

    @property
    def region(self) -> Region:
        return tuple(slice(o, o + n) for o, n in zip(self.offsets, self.sizes, strict=True))

    @property
    def num_bytes(self) -> int:
        return math.prod(self.sizes) * self.dtype.itemsize


class Place(NamedTuple):
    """Where a chunk is stored."""

    file: str
    offset: int
    length: int


class SaveIndex:
    """`.metadata` of the saves of an attempt; `chunks` are those that this worker always writes."""

    def __init__(self, control: ControlPlane, chunks: Sequence[Chunk]) -> None:
        self._control, self._chunks = control, chunks
        self._places: Sequence[Place] | None = None
        self._parts: Sequence[bytes] | None = None  # of all workers, on rank 0
        self._content: bytes | None = None

    def collect(self, places: Sequence[Place], fault: SlurmllmError | None = None) -> None:
        """Pass on to rank 0 what has changed since the last save (collective).

        `places` are of this worker's chunks, in their order. A worker's `fault` is raised on all.
        """
        states = int(fault is not None), int(places != self._places)
        failed, changed = self._control.all_reduce(states, "max")
        if failed:
            first = self._control.first(fault)
            assert first is not None
            raise first
        if changed:
            self._places, self._content = places, None
            self._parts = self._control.gather(pack_part(self._chunks, places))

    def content(self) -> bytes:
        """Return the content of `.metadata` on rank 0; CodeError if chunks are missing."""
        if self._content is None:
            assert self._parts is not None, "the places are collected"
            self._content = pickle.dumps(build_metadata(self._parts))
            self._parts = None
        return self._content


def pack_part(chunks: Sequence[Chunk], places: Sequence[Place]) -> bytes:
    """Return a worker's part of the index."""
    # Plain tuples, whose classes are not named once per chunk. Names of parameters repeat:
    # compressed, they take a tenth.
    return zlib.compress(pickle.dumps(([*map(tuple, chunks)], [*map(tuple, places)])), 1)


def build_metadata(parts: Sequence[bytes]) -> Metadata:
    """Make DCP's metadata of all workers' parts; CodeError if chunks are not the whole tensors."""
    storage_info = _storage_info()
    tensors: dict[str, TensorStorageMetadata] = {}
    paths: dict[str, tuple[str, ...]] = {}
    places: dict[MetadataIndex, Any] = {}
    sizes: dict[Numbers, torch.Size] = {}  # one object per shape: pickles refer to it

    def size(numbers: Numbers) -> torch.Size:
        return sizes.setdefault(numbers, torch.Size(numbers))

    for part in parts:
        chunks, chunk_places = pickle.loads(zlib.decompress(part))  # noqa: S301 (of this attempt's workers)
        for chunk, place in zip(starmap(Chunk, chunks), starmap(Place, chunk_places), strict=True):
            key = chunk.key
            tensor = tensors.get(key)
            if tensor is None:
                properties = TensorProperties(
                    chunk.dtype, requires_grad=chunk.requires_grad, pin_memory=chunk.pinned
                )
                tensor = TensorStorageMetadata(properties, size(chunk.shape), [])
                tensors[key], paths[key] = tensor, chunk.path
            index = MetadataIndex(key, chunk.offsets, len(tensor.chunks))
            if index in places:
                raise CodeError(
                    f"{key} at {chunk.offsets} is written twice: into "
                    f"{places[index].relative_path} and {place.file}"
                )
            places[index] = storage_info(*place)
            tensor.chunks.append(ChunkStorageMetadata(size(chunk.offsets), size(chunk.sizes)))
    for key, tensor in tensors.items():
        written = sum(chunk.sizes.numel() for chunk in tensor.chunks)
        if written != tensor.size.numel():
            raise CodeError(f"{written} of {tensor.size.numel()} values of {key} are written")
    # Without the identity of the folder, whose name is a temporary one until all is written.
    return Metadata(
        dict(tensors), dict(paths), places, StorageMeta(), filesystem.CURRENT_DCP_VERSION
    )


def _storage_info() -> type[Any]:
    """Return torch's class of a chunk's place; if there is none, one that pickles under its name.

    `pickles` reads both, because it makes none of the objects that a pickle names.
    """
    if CHECKPOINT_INDEX.missing() is not None:
        fields = ["relative_path", "offset", "length"]
        stand_in = make_dataclass("_StorageInfo", fields)
        stand_in.__module__ = filesystem.__name__
        setattr(filesystem, stand_in.__name__, stand_in)
    (storage_info,) = CHECKPOINT_INDEX.get()
    return cast(type[Any], storage_info)
