"""The work folder of a build, `.<out>.build` beside `<out>`, and who may use it."""

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


class WorkFolder:
    """Names of all files of a build that is not finished.

    `<shard>/` is a finished shard; `<shard>.partial-<host>-<process>/` one that is being written,
    which takes the other name when it is whole; `<shard>.progress` says how far that is.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def of(cls, out: Path) -> Self:
        """The work folder of an output."""
        return cls(out.parent.absolute() / f".{out.name}.build")

    def shard(self, name: str) -> Path:
        """A finished shard."""
        return self.path / name

    def partial(self, name: str) -> Path:
        """A shard that this process writes."""
        return self.path / f"{name}.partial-{socket.gethostname()}-{os.getpid()}"

    def progress(self, name: str) -> Path:
        """How many bytes of a shard's input are read, as a decimal number."""
        return self.path / f"{name}.progress"

    def scratch(self, name: str) -> Path:
        """A file for this process alone."""
        return self.path / f"scratch.{name}"

    @property
    def ready(self) -> Path:
        """The manifest of a corpus that is whole and takes its name, until it has one itself."""
        return self.path / "ready.json"

    @property
    def logs(self) -> Path:
        """Of Slurm jobs."""
        return self.path / "slurm"

    def shard_names(self) -> set[str]:
        """The finished shards."""
        return {
            path.name for path in self.path.iterdir() if path.is_dir() and "." not in path.name
        } - {self.logs.name}

    def running(self) -> dict[str, int]:
        """Bytes of input read so far of each shard that is being written."""
        found = {}
        for path in self.path.glob("*.progress"):
            with contextlib.suppress(OSError, ValueError):  # it has just ended, or begun
                found[path.stem] = int(path.read_text())
        return found

    def empty_but(self, shards: Iterable[str]) -> None:
        """Remove all but some shards, logs, `ready` and the lock, which must be held."""
        kept = {*shards, _LOCK, self.logs.name, self.ready.name}
        for path in self.path.iterdir():
            if path.name not in kept:
                _remove(path)

    def remove(self) -> None:
        """Remove the folder, the lock with it, which must be held."""
        shutil.rmtree(self.path, ignore_errors=True)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other builds to the same name away.

        Raises:
            DataError: one is running.
            StorageError: the folder cannot be made.
        """
        try:
            descriptor = self._locked()
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

    def _locked(self) -> int:
        path = self.path / _LOCK
        while True:
            self.path.mkdir(parents=True, exist_ok=True)
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            except FileNotFoundError:
                continue  # another build has just finished
            try:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError as error:
                    if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
                        raise
                    return descriptor  # a file system without locks
                # Not the lock of a build that has removed its folder meanwhile.
                if path.exists() and os.path.samestat(path.stat(), os.fstat(descriptor)):
                    return descriptor
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)


_LOCK = "lock"


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
