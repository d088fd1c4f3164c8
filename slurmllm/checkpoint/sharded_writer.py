"""Writing by torch.distributed.checkpoint, with the file system's refusals told as such."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedWriter, FileIO, IOBase
from pathlib import Path
from typing import TYPE_CHECKING

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from slurmllm.errors import CodeError, SlurmllmError, StorageError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer


class Files(FileSystem):
    """Files for torch.save, with the refusals of the file system kept.

    torch.save swallows what its stream raises ("unexpected pos 704 vs 598").
    """

    def __init__(self) -> None:
        self.refusals: list[OSError] = []

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[IOBase]:
        """Open a file."""
        with BufferedWriter(_WatchedFile(path, mode, self.refusals)) as stream:
            yield stream


class _WatchedFile(FileIO):
    def __init__(self, path: str | os.PathLike[str], mode: str, refusals: list[OSError]) -> None:
        super().__init__(os.fspath(path), mode)
        self._refusals = refusals

    def write(self, data: Buffer) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self._refusals.append(error)
            raise


class Writer(FileSystemWriter):
    """DCP's writer, raising the file system's own error where there is one."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, sync_files=True)
        self.fs: Files = Files()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the planned pieces."""
        try:
            return self._write(plan, planner)
        except Exception as error:
            if self.fs.refusals:
                raise self.fs.refusals[0] from error
            raise

    def _write(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        return super().write_data(plan, planner)


def blamed(error: CheckpointException, what: str) -> SlurmllmError:
    """The file system's refusals told from faults of the code."""
    rank, (cause, _) = next(iter(error.failures.items()))
    if isinstance(cause, SlurmllmError):
        return cause
    told = cause.strerror if isinstance(cause, OSError) and cause.strerror else str(cause)
    kind = StorageError if isinstance(cause, OSError) else CodeError
    return kind(f"{what}: {told} (rank {rank})")
