"""The work folder of a build, `.<out>.build` next to `<out>`, and its lock."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Self

from slurmllm.errors import DataError, StorageError

_LOCK = "lock"


class WorkFolder:
    """Names of all files of an unfinished build.

    `<shard>/` is a finished shard; `<shard>.partial-<host>-<process>/` one that is being written,
    renamed once it is complete; `<shard>.progress` counts the input bytes that it has read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def of(cls, out: Path) -> Self:
        return cls(out.parent.absolute() / f".{out.name}.build")

    def shard(self, name: str) -> Path:
        return self.path / name

    def partial(self, name: str) -> Path:
        """A shard that this process writes."""
        # Host and process id: on Slurm a requeued task may run while the old one still does.
        return self.path / f"{name}.partial-{socket.gethostname()}-{os.getpid()}"

    def progress(self, name: str) -> Path:
        """Input bytes read of a shard, as a decimal number."""
        return self.path / f"{name}.progress"

    def scratch(self, name: str) -> Path:
        """A file that only the building process uses."""
        return self.path / f"scratch.{name}"

    @property
    def ready(self) -> Path:
        """The manifest of a complete corpus, until the corpus and then it are renamed."""
        return self.path / "ready.json"

    @property
    def logs(self) -> Path:
        return self.path / "slurm"

    def shard_names(self) -> set[str]:
        return {
            path.name for path in self.path.iterdir() if path.is_dir() and "." not in path.name
        } - {self.logs.name}

    def running(self) -> dict[str, int]:
        """Input bytes read so far of each shard that is being written."""
        counts = {}
        for path in self.path.glob("*.progress"):
            with contextlib.suppress(OSError, ValueError):  # removed, or not yet written
                counts[path.stem] = int(path.read_text())
        return counts

    def remove_except(self, shards: Iterable[str]) -> None:
        """Remove all files except some shards, logs, `ready` and the lock; needs the lock."""
        kept = {*shards, _LOCK, self.logs.name, self.ready.name}
        for path in self.path.iterdir():
            if path.name in kept:
                continue
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove the folder with its lock; needs the lock."""
        shutil.rmtree(self.path, ignore_errors=True)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Exclude other builds of the same output.

        Raises:
            DataError: another build is running.
            StorageError: the folder cannot be made.
        """
        try:
            descriptor = self._lock()
        except BlockingIOError as error:
            raise DataError(
                f"another `data build` is writing {self.path.name[1:-6]}; wait for it, or choose "
                "another --out"
            ) from error
        except OSError as error:
            raise StorageError(
                f"cannot write {self.path}: {error.strerror or error}; free space or choose "
                "another --out"
            ) from error
        try:
            yield
        finally:
            os.close(descriptor)

    def _lock(self) -> int:
        path = self.path / _LOCK
        while True:
            self.path.mkdir(parents=True, exist_ok=True)
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            except FileNotFoundError:
                continue  # another build has just finished and removed the folder
            try:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError as error:
                    if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
                        raise
                    return descriptor  # the file system has no locks
                # Race: the lock may be of a folder that another build has removed meanwhile.
                if path.exists() and os.path.samestat(path.stat(), os.fstat(descriptor)):
                    return descriptor
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)
