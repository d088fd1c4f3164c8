"""Writing by torch.distributed.checkpoint: with checksums, and the refusals of the file system."""

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

_SPLIT_BYTES = 64 * 2**20  # from here on several files
_CHUNK_BYTES = 8 * 2**20  # written and then added to the checksum while it is in the cache
_SEND_BYTES = 32 * 2**20


class ChecksumFileSystem(FileSystem):
    """Files for torch.save, with their checksums, and the refusals of the file system kept.

    torch.save swallows what its stream raises ("unexpected pos 704 vs 598").

    Attributes:
        refusals: What the file system refused.
        written: sha256 of each file, by name, of the bytes as they were written.
    """

    def __init__(self) -> None:
        self.refusals: list[OSError] = []
        self.written: dict[str, str] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[IOBase]:
        """Open a file."""
        file = _WatchedFile(path, mode, self.refusals)
        with BufferedWriter(file) as stream:
            yield stream
        self.written[Path(path).name] = file.checksum.hexdigest()


class _WatchedFile(FileIO):
    def __init__(self, path: str | os.PathLike[str], mode: str, refusals: list[OSError]) -> None:
        super().__init__(os.fspath(path), mode)
        self._refusals = refusals
        self.checksum = hashlib.sha256()
        self._unsent = 0

    def write(self, data: Buffer) -> int:
        view = memoryview(data).cast("B")
        done = 0
        try:
            while done < len(view):
                chunk = view[done : done + _CHUNK_BYTES]
                written = super().write(chunk)
                self.checksum.update(chunk[:written])
                done += written
                self._send(written)
        except OSError as error:
            self._refusals.append(error)
            raise
        return done

    def _send(self, written: int) -> None:
        """Let the disk begin: left alone, the kernel waits until the fsync at the end."""
        self._unsent += written
        if self._unsent >= _SEND_BYTES and hasattr(os, "posix_fadvise"):
            start = self.tell() - self._unsent
            os.posix_fadvise(self.fileno(), start, self._unsent, os.POSIX_FADV_DONTNEED)
            self._unsent = 0


class DcpWriter(FileSystemWriter):
    """DCP's writer, raising the file system's own error where there is one.

    Args:
        directory: An existing folder.
        threads: Files that a worker writes at once, where there is enough to write.
    """

    def __init__(self, directory: Path, threads: int = 1) -> None:
        super().__init__(directory, sync_files=True)
        self.fs: ChecksumFileSystem = ChecksumFileSystem()
        self._threads = threads

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the planned pieces."""
        # torch.load reads them without, and the manifest has sha256: a fifth of the CPU's time.
        torch.serialization.set_crc32_options(False)
        try:
            return self._write(plan, planner)
        except Exception as error:
            if self.fs.refusals:
                raise self.fs.refusals[0] from error
            raise

    def _write(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        num_bytes = sum(_item_size(i) for i in plan.items if i.tensor_data is not None)
        if self._threads == 1 or num_bytes < _SPLIT_BYTES:
            return super().write_data(plan, planner)
        return self._write_at_once(plan, planner)

    def _write_at_once(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """By several threads; DCP's own lose what is raised in any but the first."""
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
    """Write one piece as DCP does.

    Args:
        stream: The file.
        name: Its name.
        item: What is written.
        values: Its content.
    """
    offset = stream.tell()
    if isinstance(values, torch.Tensor):
        torch.save(own_storage(values.detach().cpu()), cast(IO[bytes], stream))
    else:
        cast(IO[bytes], stream).write(values.getbuffer())
    length = stream.tell() - offset
    return WriteResult(item.index, length, _StorageInfo(name, offset, length))


def dcp_error(error: CheckpointException, what: str) -> SlurmllmError:
    """The file system's refusals told from faults of the code."""
    rank, (cause, _) = next(iter(error.failures.items()))
    if isinstance(cause, SlurmllmError):
        return cause
    told = cause.strerror if isinstance(cause, OSError) and cause.strerror else str(cause)
    kind = StorageError if isinstance(cause, OSError) else CodeError
    return kind(f"{what}: {told} (rank {rank})")
