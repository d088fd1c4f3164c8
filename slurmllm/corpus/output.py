"""Output files that take their names together once all are complete, hashed while written."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

from slurmllm.corpus.work_folder import WorkFolder
from slurmllm.errors import DataError, StorageError
from slurmllm.rundir import fsync_dir

# Below this, passing data to a thread takes longer than hashing them.
_SMALL_BYTES = 64 << 10


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
        """Write bytes.

        Raises:
            StorageError: the file system refused.
        """
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


@contextlib.contextmanager
def output_files(paths: Sequence[Path], work: WorkFolder) -> Iterator[list[OutputFile]]:
    """Open files in the work folder, and rename them if the block ends without an error.

    The last of them is the manifest. It is called `work.ready` from the moment that all files are
    complete and on disk until the others have their names. A build that is killed in between is
    recognized by it: the corpus is its own, not an older one.

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
        streams: list[BinaryIO] = []
        for path in paths:
            try:
                streams.append(work.scratch(path.name).open("wb"))
            except OSError as error:
                raise write_error(path, error) from error
            stack.callback(_discard, streams[-1])
        yield [OutputFile(streams[index], path, hasher) for index, path in enumerate(paths)]
        for path, stream in zip(paths, streams, strict=True):
            try:
                stream.flush()
                os.fsync(stream.fileno())
                stream.close()
                work.scratch(path.name).chmod(0o644)
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


def _discard(stream: BinaryIO) -> None:
    with contextlib.suppress(OSError):  # closing flushes, which fails again on a full disk
        stream.close()


def refuse_existing(out: Path, overwrite: bool) -> None:
    """Raise a DataError if an output exists and may not be replaced."""
    if out.is_dir():
        raise DataError(f"--out {out} is a folder; name a file in it")
    if out.exists() and not overwrite:
        raise DataError(f"{out} already exists; choose another --out, or add --overwrite")


def write_error(path: Path, error: OSError) -> StorageError:
    return StorageError(
        f"cannot write {path}: {error.strerror or error}; free space or choose another --out. "
        "No part of the output was kept; finished shards were: the same command continues from "
        "them"
    )
