"""A writer for torch.distributed.checkpoint (DCP): checksums, and the file system's own errors."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from io import BufferedWriter, BytesIO, FileIO, IOBase
from itertools import repeat
from pathlib import Path
from typing import IO, TYPE_CHECKING, cast

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import (
    DEFAULT_SUFFIX,
    FileSystem,
    FileSystemWriter,
    _item_size,
    _split_by_size_and_type,
    _StorageInfo,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from slurmllm.checkpoint.formats.safetensors_files import own_storage
from slurmllm.errors import CodeError, SlurmllmError, StorageError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer

_SPLIT_BYTES = 64 * 2**20  # size of a worker's state from which on it takes several files
_CHUNK_BYTES = 8 * 2**20  # hashed right after the write, while it is in the CPU's cache
_FLUSH_BYTES = 32 * 2**20


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
    """DCP's writer, but raising the file system's own error.

    Args:
        directory: An existing folder.
        threads: Number of files that a worker writes at once if its state is large.
    """

    def __init__(self, directory: Path, threads: int = 1) -> None:
        super().__init__(directory, sync_files=True)
        self.fs: ChecksumFileSystem = ChecksumFileSystem()
        self._threads = threads

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        # CRC32 would take a fifth of the CPU time; the manifest has sha256, torch.load needs none.
        torch.serialization.set_crc32_options(False)
        try:
            return self._write(plan, planner)
        except Exception as error:
            if self.fs.errors:
                raise self.fs.errors[0] from error
            raise

    def _write(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        num_bytes = sum(_item_size(i) for i in plan.items if i.tensor_data is not None)
        if self._threads == 1 or num_bytes < _SPLIT_BYTES:
            return super().write_data(plan, planner)
        # Our own threads: DCP's lose what is raised in any but the first.
        buckets = [b for b in _split_by_size_and_type(self._threads, plan.items) if b]
        names = [f"{plan.storage_data.prefix}{n}{DEFAULT_SUFFIX}" for n in range(len(buckets))]
        with ThreadPoolExecutor(self._threads) as pool:
            parts = list(pool.map(self._write_file, names, buckets, repeat(planner)))
        done: Future[list[WriteResult]] = Future()
        done.set_result([result for part in parts for result in part])
        return done

    def _write_file(
        self, name: str, items: Sequence[WriteItem], planner: SavePlanner
    ) -> list[WriteResult]:
        with self.fs.create_stream(Path(self.path) / name, "wb") as stream:
            results = [write_item(stream, name, item, planner.resolve_data(item)) for item in items]
            stream.flush()
            os.fsync(stream.fileno())
        return results


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
