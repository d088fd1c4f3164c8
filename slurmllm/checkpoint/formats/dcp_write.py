"""Writing the native format, torch.distributed.checkpoint's (DCP): by workers, and offline.

`DcpWriter` adds checksums and the file system's own errors to DCP's writer. `write_dcp` writes a
whole checkpoint in one process, one piece of a tensor at a time.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from io import BufferedWriter, BytesIO, FileIO, IOBase
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import (
    DEFAULT_SUFFIX,
    FileSystem,
    FileSystemWriter,
    _split_by_size_and_type,
    _StorageInfo,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_saver import save as save_state
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from slurmllm.checkpoint.formats.pickles import METADATA
from slurmllm.checkpoint.formats.safetensors_files import own_storage
from slurmllm.checkpoint.shards import Region
from slurmllm.errors import CodeError, SlurmllmError, StorageError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer

    from slurmllm.display.progress import OnProgress


_SPLIT_BYTES = 64 * 2**20  # size of a worker's state from which on it takes several files
_CHUNK_BYTES = 8 * 2**20  # hashed right after the write, while it is in the CPU's cache
_FLUSH_BYTES = 32 * 2**20
PIECE_BYTES = 64 * 2**20  # offline: rounded to rows of the tensor, at least one
FILE_BYTES = 4 * 10**9  # offline

Keys = tuple[str, ...]
PieceReader = Callable[[Keys, Region], Tensor]


class ChecksumFileSystem(FileSystem):
    """Files for torch.save that hash what they write and keep the errors of failed writes.

    torch.save hides what its stream raises behind "unexpected pos 704 vs 598".

    Attributes:
        errors: Errors of failed writes.
        written: sha256 of each file's bytes as they were written, by name.
    """

    def __init__(self) -> None:
        self.errors: list[OSError] = []
        self.written: dict[str, str] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[IOBase]:
        file = _ChecksumFile(path, mode, self.errors)
        with BufferedWriter(file) as stream:
            yield stream
        self.written[Path(path).name] = file.checksum.hexdigest()


class _ChecksumFile(FileIO):
    def __init__(self, path: str | os.PathLike[str], mode: str, errors: list[OSError]) -> None:
        super().__init__(os.fspath(path), mode)
        self._errors = errors
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
            self._errors.append(error)
            raise
        return done


class DcpWriter(FileSystemWriter):
    """DCP's writer, but raising the file system's own error; writes `threads` files at once."""

    def __init__(self, directory: Path, threads: int = 1) -> None:
        super().__init__(directory, sync_files=True)
        self.fs: ChecksumFileSystem = ChecksumFileSystem()
        self._threads = threads

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        # CRC32 would take a fifth of the CPU time; the manifest has sha256, torch.load needs none.
        torch.serialization.set_crc32_options(False)
        try:
            return self._write(plan, planner)
        except Exception as error:  # torch.save's own, see ChecksumFileSystem
            if self.fs.errors:
                raise self.fs.errors[0] from error
            raise

    def _write(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        def write_file(name: str, items: Sequence[WriteItem]) -> list[WriteResult]:
            with self.fs.create_stream(Path(self.path) / name, "wb") as stream:
                found = [write_item(stream, name, i, planner.resolve_data(i)) for i in items]
                stream.flush()  # of the buffer, before the fsync of the file
                os.fsync(stream.fileno())
            return found

        # Of this worker's chunks; DCP's own count takes whole tensors.
        num_bytes = sum(map(chunk_bytes, plan.items))
        if self._threads == 1 or num_bytes < _SPLIT_BYTES:
            return super().write_data(plan, planner)
        # Our own threads: DCP's lose what is raised in any but the first.
        buckets = [b for b in _split_by_size_and_type(self._threads, plan.items) if b]
        names = [f"{plan.storage_data.prefix}{n}{DEFAULT_SUFFIX}" for n in range(len(buckets))]
        with ThreadPoolExecutor(self._threads) as pool:
            parts = list(pool.map(write_file, names, buckets))
        return _completed([result for part in parts for result in part])

    def write_metadata(self, content: bytes) -> None:
        with self.fs.create_stream(Path(self.path) / METADATA, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())


def chunk_bytes(item: WriteItem) -> int:
    """Size of the values of an item, which is a chunk of a tensor."""
    data = item.tensor_data
    assert data is not None, "a state holds tensors only"
    return data.chunk.sizes.numel() * data.properties.dtype.itemsize


def _completed(results: list[WriteResult]) -> Future[list[WriteResult]]:
    done: Future[list[WriteResult]] = Future()
    done.set_result(results)
    return done


def write_item(
    stream: IOBase, name: str, item: WriteItem, values: torch.Tensor | BytesIO
) -> WriteResult:
    """Writes one item to the file `name` in DCP's form."""
    offset = stream.tell()
    if isinstance(values, torch.Tensor):
        torch.save(own_storage(values.detach().cpu()), cast(IO[bytes], stream))
    else:
        cast(IO[bytes], stream).write(values.getbuffer())
    length = stream.tell() - offset
    return WriteResult(item.index, length, _StorageInfo(name, offset, length))


def dcp_error(error: CheckpointException, what: str) -> SlurmllmError:
    """Returns a StorageError for an error of the file system, a CodeError for any other."""
    rank, (cause, _) = next(iter(error.failures.items()))
    if isinstance(cause, SlurmllmError):
        return cause
    reason = cause.strerror if isinstance(cause, OSError) and cause.strerror else str(cause)
    kind = StorageError if isinstance(cause, OSError) else CodeError
    return kind(f"{what}: {reason} (rank {rank})")


def write_dcp(
    folder: Path,
    shapes: Mapping[str, Any],
    dtype: torch.dtype,
    read: PieceReader,
    on_progress: OnProgress = lambda _: None,
) -> None:
    """Writes `.metadata` and the shard files into an existing folder.

    Args:
        shapes: The state, nested as in the backend, with shapes in place of tensors.
        dtype: Type of the tensors; scalars are fp32.
        read: Returns a region of a tensor, given the keys that lead to it in `shapes`.
        on_progress: Receives the bytes written so far.

    Raises:
        StorageError: The file system failed a write, or `read` raised it.
    """
    planner = _OfflinePlanner(read, on_progress)
    try:
        with warnings.catch_warnings():
            # There is no process group, on purpose.
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            save_state(
                _meta_tensors(shapes, dtype),
                storage_writer=_SequentialWriter(folder),
                planner=planner,
                no_dist=True,
            )
    except CheckpointException as error:
        raise dcp_error(error, "cannot write shards") from error


def _meta_tensors(shapes: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return {
        key: _meta_tensors(value, dtype)
        if isinstance(value, Mapping)
        else torch.empty(value, dtype=dtype if value else torch.float32, device="meta")
        for key, value in shapes.items()
    }


class _SequentialWriter(DcpWriter):
    """Releases each piece once it is written; DCP's own writer holds a whole file (torch 2.13)."""

    def _write(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results: list[WriteResult] = []
        items = list(plan.items)
        number = 0
        while items:
            name = f"__0_{number}{DEFAULT_SUFFIX}"
            with self.fs.create_stream(Path(self.path) / name, "wb") as stream:
                while items and stream.tell() < FILE_BYTES:
                    item = items.pop(0)
                    results.append(write_item(stream, name, item, planner.resolve_data(item)))
                stream.flush()
                os.fsync(stream.fileno())
            number += 1
        return _completed(results)


class _OfflinePlanner(DefaultSavePlanner):
    """Splits tensors into pieces and reads the values of each when it is written."""

    def __init__(self, read: PieceReader, on_progress: OnProgress) -> None:
        super().__init__()
        self._read, self._on_progress, self._done_bytes = read, on_progress, 0

    def create_local_plan(self) -> SavePlan:
        items = []
        for key, tensor in self.state_dict.items():
            # Groups of rows of at most PIECE_BYTES: memory holds one at a time.
            rows = tensor.shape[0] if tensor.ndim else 1
            each = max(1, PIECE_BYTES // (tensor.nbytes // rows or 1))
            for start in range(0, rows, each):
                sizes, offsets = list(tensor.shape), [0] * tensor.ndim
                if tensor.ndim:
                    sizes[0], offsets[0] = min(each, rows - start), start
                data = TensorWriteData(
                    chunk=ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)),
                    properties=TensorProperties.create_from_tensor(tensor),
                    size=tensor.size(),
                )
                index = MetadataIndex(key, torch.Size(offsets))
                items.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data))
        self.plan = replace(SavePlan(items), planner_data=self.mappings)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        data = write_item.tensor_data
        assert data is not None
        region = tuple(
            slice(o, o + n) for o, n in zip(data.chunk.offsets, data.chunk.sizes, strict=True)
        )
        keys = tuple(str(key) for key in self.mappings[write_item.index.fqn])
        values = self._read(keys, region)
        self._done_bytes += values.nbytes
        self._on_progress(self._done_bytes)
        return values
