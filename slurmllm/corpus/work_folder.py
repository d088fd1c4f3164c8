"""The work folder of a build, `.<out>.build` next to `<out>`, its lock and the output files.

The output files are hashed while they are written, and renamed together once all of them are
complete.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import io
import os
import shutil
import socket
import stat
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, Self

from slurmllm.errors import DataError, StorageError
from slurmllm.run.rundir import fsync_dir
from slurmllm.run.safe_files import untrusted_error

_LOCK = "lock"
# Below this, passing data to a thread takes longer than hashing it.
_SMALL_BYTES = 64 << 10


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
        """The manifest of a complete corpus, until it is renamed after the corpus files."""
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
                # strip '.' and '.build'
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
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                self.path.mkdir(mode=0o700)
            try:
                # Whoever may write to it could have links written through, and shards read.
                info = self.path.lstat()
                if reason := untrusted_error(info):
                    text = f"{reason}; remove {self.path} if it is yours"
                    raise PermissionError(errno.EPERM, text, str(self.path))
                if not stat.S_ISDIR(info.st_mode):
                    raise NotADirectoryError(errno.ENOTDIR, "not a folder", str(self.path))
                flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
                descriptor = os.open(path, flags, 0o644)
            except FileNotFoundError:
                continue  # another build has just finished and removed the folder
            try:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError as error:
                    if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
                        raise
                    return descriptor  # the file system has no locks
                # Race: the locked file may be in a folder that another build has since removed.
                if path.exists() and os.path.samestat(path.stat(), os.fstat(descriptor)):
                    return descriptor
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)


class OutputFile(io.RawIOBase):
    """A file open for writing, whose sha256 is computed while it is written.

    Attributes:
        size_bytes: Bytes written so far.
    """

    def __init__(self, stream: BinaryIO, path: Path, hasher: ThreadPoolExecutor) -> None:
        self._stream, self._path, self._hasher = stream, path, hasher
        self._digest = hashlib.sha256()
        self.size_bytes = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.size_bytes

    def write(self, data: Any) -> int:
        """Write bytes; raises StorageError if the file system refuses."""
        count = memoryview(data).nbytes
        hashed = None
        if count > _SMALL_BYTES:
            # hashlib and write both release the GIL, so a large block is hashed meanwhile.
            hashed = self._hasher.submit(self._digest.update, data)
        else:
            self._digest.update(data)
        try:
            self._stream.write(data)
        except OSError as error:
            raise write_error(self._path, error) from error
        if hashed is not None:
            hashed.result()
        self.size_bytes += count
        return count

    @property
    def sha256(self) -> str:
        """Digest of the bytes written so far, in hexadecimal."""
        return self._digest.hexdigest()

    def finish(self) -> None:
        """Write everything to the disk, and close the file."""
        self._stream.flush()
        os.fchmod(self._stream.fileno(), 0o644)
        os.fsync(self._stream.fileno())
        self._stream.close()

    def discard(self) -> None:
        with contextlib.suppress(OSError):  # closing flushes, which fails again on a full disk
            self._stream.close()


@contextlib.contextmanager
def output_files(paths: Sequence[Path], work: WorkFolder) -> Iterator[list[OutputFile]]:
    """Open files in the work folder, and rename them if the block ends without an error.

    The last of them is the manifest. While the other files are renamed, the manifest is named
    `work.ready`. If it exists, a killed build had finished, and the corpus files are its own.

    Args:
        paths: The files and the manifest. An old manifest is removed before any file is renamed,
            since it must not describe a new corpus.
        work: A folder on the same file system; files of a failed build stay there.

    Raises:
        StorageError: the file system refused.
    """
    *others, manifest = paths
    with contextlib.ExitStack() as stack:
        hasher = stack.enter_context(ThreadPoolExecutor(1))
        files: list[OutputFile] = []
        for path in paths:
            try:
                work.scratch(path.name).unlink(missing_ok=True)  # of a failed build
                files.append(OutputFile(work.scratch(path.name).open("xb"), path, hasher))
            except OSError as error:
                raise write_error(path, error) from error
            stack.callback(files[-1].discard)
        yield files
        for path, file in zip(paths, files, strict=True):
            try:
                file.finish()
            except OSError as error:
                raise write_error(path, error) from error
        try:
            # The order matters: `ready` must be on disk before the first rename, and the old
            # manifest gone before it.
            work.scratch(manifest.name).replace(work.ready)
            fsync_dir(work.path)
            for old in reversed(paths[1:]):
                old.unlink(missing_ok=True)
            for path in others:
                work.scratch(path.name).replace(path)
            work.ready.replace(manifest)
            fsync_dir(manifest.parent)
        except OSError as error:
            raise write_error(paths[0], error) from error


def refuse_existing(out: Path, overwrite: bool) -> None:
    """Raise a DataError if an output exists and may not be replaced."""
    if out.is_dir():
        raise DataError(f"--out {out} is a folder; name a file in it")
    if out.exists() and not overwrite:
        raise DataError(f"{out} already exists; choose another --out, or add --overwrite")


def write_error(path: Path, error: OSError) -> StorageError:
    return StorageError(
        f"cannot write {path}: {error.strerror or error}; free space or choose another --out. "
        "The output is incomplete. Finished shards are kept; run the same command again to "
        "continue"
    )
