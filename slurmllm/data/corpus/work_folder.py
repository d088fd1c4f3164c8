"""The work folder of a build, `.<out>.build` next to `<out>`, its lock and the output files.

The output files are hashed while they are written, and renamed together once all of them are
complete.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import socket
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

from slurmllm.core.display.progress import OnProgress
from slurmllm.core.errors import DataError
from slurmllm.core.run.rundir import fsync_dir, storage_errors
from slurmllm.core.run.safe_files import open_lock, untrusted_error

_LOCK = "lock"


@dataclass(frozen=True)
class WorkFolder:
    """Names of all files of an unfinished build.

    `<shard>/` is a finished shard; `<shard>.partial-<host>-<process>/` one that is being written,
    renamed once it is complete; `<shard>.progress` counts the input bytes that it has read.
    """

    path: Path

    @classmethod
    def of(cls, out: Path) -> Self:
        return cls(out.parent.absolute() / f".{out.name}.build")

    def shard(self, name: str) -> Path:
        return self.path / name

    def partial(self, name: str) -> Path:
        """Return the folder of a shard that this process writes."""
        # Host and process id: on Slurm a requeued task may run while the old one still does.
        return self.path / f"{name}.partial-{socket.gethostname()}-{os.getpid()}"

    def progress(self, name: str) -> Path:
        return self.path / f"{name}.progress"

    def scratch(self, name: str) -> Path:
        """Return a file that only the building process uses."""
        return self.path / f"scratch.{name}"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def shard_names(self) -> set[str]:
        return {
            path.name for path in self.path.iterdir() if path.is_dir() and "." not in path.name
        } - {self.logs.name}

    def running(self) -> dict[str, int]:
        """Input bytes read so far of each shard that is being written."""
        counts = {}
        for path in self.path.glob("*.progress"):
            with suppress(OSError, ValueError):  # removed, or not yet written
                counts[path.stem] = int(path.read_text())
        return counts

    def remove_except(self, shards: Iterable[str]) -> None:
        """Remove all files except some shards, logs and the lock; needs the lock."""
        for path in self.path.iterdir():
            if path.name in {*shards, _LOCK, self.logs.name}:
                continue
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    def remove_unfinished(self) -> None:
        """Keep finished shards for the next build, and logs; needs the lock."""
        shards = self.shard_names()
        self.remove_except(shards)
        if not shards and not any(path.stat().st_size for path in self.logs.rglob("*.*")):
            self.remove()

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Exclude other builds of the same output; a DataError if one is running."""
        with storage_errors(f"cannot write {self.path}", "free space or choose another --out"):
            try:
                stream = self._lock()
            except BlockingIOError as error:
                raise DataError(
                    # strip '.' and '.build'
                    f"another `data build` is writing {self.path.name[1:-6]}; wait for it, or "
                    "choose another --out"
                ) from error
        with stream:
            yield

    def _lock(self) -> BinaryIO:
        path = self.path / _LOCK
        while True:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):
                self.path.mkdir(mode=0o700)
            # Race: another build may finish now and remove the folder, with a lock that is held.
            with suppress(FileNotFoundError), ExitStack() as stack:
                # Whoever may write to it could have links written through, and shards read.
                if reason := untrusted_error(self.path.lstat()):
                    message = f"{reason}; remove {self.path} if it is yours"
                    raise PermissionError(errno.EPERM, message, str(self.path))
                stream = stack.enter_context(open_lock(path))
                flock(stream)
                if os.path.samestat(path.stat(), os.fstat(stream.fileno())):
                    stack.pop_all()
                    return stream


def flock(stream: BinaryIO, *, wait: bool = False) -> None:
    """Lock a file, if the file system has locks; a BlockingIOError if another process has it."""
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
            raise


class OutputFile:
    """A file open for writing; `on_write` is called with `size_bytes` after each write."""

    def __init__(self, stream: BinaryIO, path: Path, hasher: ThreadPoolExecutor) -> None:
        self._stream = stream
        self._path = path
        self._hasher = hasher
        self._digest = hashlib.sha256()
        self.size_bytes = 0
        self.on_write: OnProgress = lambda size_bytes: None

    def write(self, data: Any) -> None:
        # hashlib and write both release the GIL, so a block is hashed meanwhile.
        hashed = self._hasher.submit(self._digest.update, data)
        with writing(self._path):
            self._stream.write(data)
        hashed.result()
        self.size_bytes += memoryview(data).nbytes
        self.on_write(self.size_bytes)

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()

    def finish(self) -> None:
        with writing(self._path):
            self._stream.flush()
            os.fchmod(self._stream.fileno(), 0o644)
            os.fsync(self._stream.fileno())
            self._stream.close()

    def discard(self) -> None:
        with suppress(OSError):  # closing flushes, which fails again on a full disk
            self._stream.close()


@contextmanager
def output_files(paths: Sequence[Path], work: WorkFolder) -> Iterator[list[OutputFile]]:
    """Open files in the work folder, and rename them if the block ends without an error.

    `paths` are the corpus first, its manifest last; the files of a failed build stay in the folder.
    """
    with ExitStack() as stack:
        hasher = stack.enter_context(ThreadPoolExecutor(1))
        files = []
        for path in paths:
            with writing(path):
                work.scratch(path.name).unlink(missing_ok=True)  # of a failed build
                files.append(OutputFile(work.scratch(path.name).open("xb"), path, hasher))
            stack.callback(files[-1].discard)
        yield files
        for file in files:
            file.finish()
        # A new corpus appears last: until then, the same command continues. An old one is never
        # absent, and its manifest must not describe the new one.
        order = paths[::-1]
        with writing(paths[0]):
            if paths[0].exists():
                order = paths
                paths[-1].unlink(missing_ok=True)
            for path in order:
                work.scratch(path.name).replace(path)
            fsync_dir(paths[0].parent)


def refuse_existing(out: Path, overwrite: bool) -> None:
    if out.is_dir():
        raise DataError(f"--out {out} is a folder; name a file in it")
    if out.exists() and not overwrite:
        raise DataError(f"{out} already exists; choose another --out, or add --overwrite")


def writing(path: Path) -> AbstractContextManager[None]:
    """Raise a StorageError if the file system refuses to write the output `path`."""
    return storage_errors(
        f"cannot write {path}",
        "free space or choose another --out. The output is incomplete. Finished shards are kept; "
        "run the same command again to continue",
    )
