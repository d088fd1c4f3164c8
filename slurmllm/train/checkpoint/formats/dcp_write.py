"""Writing the native format, torch.distributed.checkpoint's (DCP), by the workers of a run.

DCP's `.metadata` says where which chunk of a checkpoint is, of all workers. Each worker sends the
names and places of its chunks to rank 0, as plain numbers, in the first save of an attempt. Names,
shapes and file layout stay the same from save to save; then one small reduction is all that is
exchanged, and rank 0 writes the same bytes again.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, make_dataclass
from io import BufferedWriter, FileIO
from itertools import starmap
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

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
from torch.utils import serialization

from slurmllm.core.errors import CodeError
from slurmllm.train.checkpoint.formats.safetensors_files import own_storage
from slurmllm.train.control.plane import ControlPlane
from slurmllm.train.model.init import local_part, local_region
from slurmllm.train.model.private_names import CHECKPOINT_INDEX
from slurmllm.train.model.regions import sizes_of

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer


_CHUNK_BYTES = 8 * 2**20  # hashed right after the write, while it is in the CPU's cache
_FLUSH_BYTES = 32 * 2**20

Keys = tuple[str, ...]  # that lead to a tensor in the nested state
Numbers = tuple[int, ...]


class Chunk(NamedTuple):
    """A chunk that a worker writes: what DCP's `.metadata` has of it, apart from its place."""

    path: Keys
    dtype: torch.dtype
    shape: Numbers  # of the whole tensor
    offsets: Numbers
    sizes: Numbers


def make_chunk(path: Keys, tensor: Tensor) -> Chunk:
    """Describe this worker's part of a tensor."""
    region = local_region(tensor)
    return Chunk(
        path,
        local_part(tensor).dtype,
        tuple(tensor.shape),
        tuple(bounds.start for bounds in region),
        tuple(sizes_of(region)),
    )


class Place(NamedTuple):
    """Where a chunk is stored."""

    file: str
    offset: int
    length: int


@dataclass
class SaveIndex:
    """`.metadata` of the saves of an attempt; `chunks` are those that this worker always writes."""

    control: ControlPlane
    chunks: Sequence[Chunk]
    content: bytes = b""  # of `.metadata`, on rank 0
    _places: Sequence[Place] | None = None

    def collect(self, places: Sequence[Place]) -> None:
        """Set `content` on rank 0 if it has changed since the last save (collective).

        `places` are of this worker's chunks, in their order. A CodeError if chunks are missing.
        """
        if any(self.control.all_reduce([int(places != self._places)], "max")):
            self._places = places
            parts = self.control.gather(pack_part(self.chunks, places))
            if parts is not None:
                self.content = pickle.dumps(build_metadata(parts))


def pack_part(chunks: Sequence[Chunk], places: Sequence[Place]) -> bytes:
    # Plain tuples, whose classes are not named once per chunk. Names of parameters repeat:
    # compressed, they take a tenth.
    return zlib.compress(pickle.dumps(([*map(tuple, chunks)], [*map(tuple, places)])), 1)


def build_metadata(parts: Sequence[bytes]) -> Metadata:
    """Make DCP's metadata of all workers' parts; CodeError if chunks are not the whole tensors."""
    if CHECKPOINT_INDEX.missing() is not None:
        # A torch without its class of a chunk's place: one that pickles under its name. `pickles`
        # reads both, because it makes none of the objects that a pickle names.
        stand_in = make_dataclass("_StorageInfo", ["relative_path", "offset", "length"])
        stand_in.__module__ = filesystem.__name__
        setattr(filesystem, stand_in.__name__, stand_in)
    (storage_info,) = CHECKPOINT_INDEX.get()
    tensors: dict[str, Any] = {}  # TensorStorageMetadata
    paths: dict[str, Keys] = {}
    places: dict[MetadataIndex, Any] = {}
    sizes: dict[Numbers, torch.Size] = {}  # one object per shape: pickles refer to it

    def size(numbers: Numbers) -> torch.Size:
        return sizes.setdefault(numbers, torch.Size(numbers))

    for packed in parts:
        chunks, chunk_places = pickle.loads(zlib.decompress(packed))  # noqa: S301 (of this attempt's workers)
        for chunk, location in zip(
            starmap(Chunk, chunks), starmap(Place, chunk_places), strict=True
        ):
            key = ".".join(chunk.path)
            tensor = tensors.get(key)
            if tensor is None:
                properties = TensorProperties(chunk.dtype)
                tensor = TensorStorageMetadata(properties, size(chunk.shape), [])
                tensors[key], paths[key] = tensor, chunk.path
            index = MetadataIndex(key, chunk.offsets, len(tensor.chunks))
            if index in places:
                raise CodeError(
                    f"{key} at {chunk.offsets} is written twice: into "
                    f"{places[index].relative_path} and {location.file}"
                )
            places[index] = storage_info(*location)
            tensor.chunks.append(ChunkStorageMetadata(size(chunk.offsets), size(chunk.sizes)))
    for key, tensor in tensors.items():
        written = sum(chunk.sizes.numel() for chunk in tensor.chunks)
        if written != tensor.size.numel():
            raise CodeError(f"{written} of {tensor.size.numel()} values of {key} are written")
    # Without the identity of the folder, whose name is a temporary one until all is written.
    return Metadata(tensors, paths, places, StorageMeta(), filesystem.CURRENT_DCP_VERSION)


class ChecksumFiles:
    """Files for torch.save that hash what they write and raise the file system's own errors.

    torch.save hides them behind "unexpected pos 704 vs 598". `written` is file name → sha256.
    """

    def __init__(self) -> None:
        self.written: dict[str, str] = {}

    @contextmanager
    def create(self, path: Path) -> Iterator[IO[bytes]]:
        """Open a new file; it is durable (fsync) when the block completes."""
        file = _ChecksumFile(path)
        try:
            # CRC32 would take a fifth of the CPU time, and torch.load needs none.
            # `patch` is added at run time.
            config: Any = serialization.config
            no_crc32 = config.patch("save.compute_crc32", False)
            with no_crc32, BufferedWriter(file) as stream:
                yield stream
                stream.flush()
                os.fsync(stream.fileno())
        except Exception as error:
            if file.error is not None:
                raise file.error from error
            raise
        self.written[path.name] = file.checksum.hexdigest()


class _ChecksumFile(FileIO):
    def __init__(self, path: Path) -> None:
        super().__init__(path, "wb")
        self.error: OSError | None = None
        self.checksum = hashlib.sha256()
        self._unflushed = 0

    def write(self, data: Buffer) -> int:
        view = memoryview(data).cast("B")
        done = 0
        # write(2) may write less than asked: near a quota, or above 2 GiB.
        try:
            while done < len(view):
                chunk = view[done : done + _CHUNK_BYTES]
                written = super().write(chunk)
                self.checksum.update(chunk[:written])
                done += written
                self._unflushed += written
                if self._unflushed >= _FLUSH_BYTES and hasattr(os, "posix_fadvise"):
                    # Starts the write-back: otherwise the kernel waits until the fsync at the end.
                    start = self.tell() - self._unflushed
                    os.posix_fadvise(self.fileno(), start, self._unflushed, os.POSIX_FADV_DONTNEED)
                    self._unflushed = 0
        except OSError as error:
            self.error = self.error or error
            raise
        return done


def file_name(rank: int, number: int) -> str:
    return f"__{rank}_{number}.distcp"


def write_chunk(stream: IO[bytes], name: str, values: Tensor) -> Place:
    """Write one chunk to the file `name` in DCP's form."""
    offset = stream.tell()
    torch.save(own_storage(values.detach().cpu()), stream)
    return Place(name, offset, stream.tell() - offset)
