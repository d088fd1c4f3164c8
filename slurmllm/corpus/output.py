"""Files that take their names together when they are whole, digested while they are written."""

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

# Below this, handing data to a thread takes longer than digesting them.
_SMALL_BYTES = 64 << 10


class OutputFile(io.RawIOBase):
    """A file to write, whose digest is computed beside the writing.

    Attributes:
        size_bytes: Written so far.
    """

    def __init__(self, stream: BinaryIO, path: Path, digester: ThreadPoolExecutor) -> None:
        self._stream, self._path, self._digester = stream, path, digester
        self._digest = hashlib.sha256()
        self.size_bytes = 0

    def writable(self) -> bool:
        """Yes."""
        return True

    def tell(self) -> int:
        """Where the next byte goes."""
        return self.size_bytes

    def write(self, data: Any) -> int:
        """Write bytes.

        Raises:
            StorageError: the file system refused.
        """
        count = memoryview(data).nbytes
        if count > _SMALL_BYTES:
            digested = self._digester.submit(self._digest.update, data)
            self._put(data)
            digested.result()
        else:
            self._digest.update(data)
            self._put(data)
        self.size_bytes += count
        return count

    def _put(self, data: Any) -> None:
        try:
            self._stream.write(data)
        except OSError as error:
            raise write_error(self._path, error) from error

    @property
    def sha256(self) -> str:
        """Of what was written so far, in hexadecimal."""
        return self._digest.hexdigest()


@contextlib.contextmanager
def output_files(paths: Sequence[Path], work: WorkFolder) -> Iterator[list[OutputFile]]:
    """Files in the work folder, which take their names when the block ends without an error.

    The last of them is the manifest. It is called `work.ready` from when all files are whole and
    on disk until the others have their names, so that a build that is killed in between can be
    told from a corpus that was there before.

    Args:
        paths: The files and the manifest. An old manifest is removed before anything takes its
            name, for it must not be found beside a new corpus.
        work: On the same file system; whatever fails leaves its files there.

    Raises:
        StorageError: the file system refused.
    """
    *others, manifest = paths
    with contextlib.ExitStack() as stack:
        digester = stack.enter_context(ThreadPoolExecutor(1))
        streams: list[BinaryIO] = []
        files = []
        for path in paths:
            try:
                streams.append(work.scratch(path.name).open("wb"))
            except OSError as error:
                raise write_error(path, error) from error
            stack.callback(_close, streams[-1])
            files.append(OutputFile(streams[-1], path, digester))
        yield files
        for path, stream in zip(paths, streams, strict=True):
            try:
                stream.flush()
                os.fsync(stream.fileno())
                stream.close()
                work.scratch(path.name).chmod(0o644)
            except OSError as error:
                raise write_error(path, error) from error
        try:
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
    """Raise a DataError where an output is there already and may not be replaced."""
    if out.is_dir():
        raise DataError(f"--out {out} is a folder; name a file in it")
    if out.exists() and not overwrite:
        raise DataError(f"{out} is already there; choose another --out, or add --overwrite")


def write_error(path: Path, error: OSError) -> StorageError:
    """The error of a file that cannot be written."""
    return StorageError(
        f"cannot write {path}: {error.strerror or error}; free space or choose another --out. "
        "No part of it was kept, but what is read of the inputs is: the same command goes on "
        "from there"
    )


def _close(stream: BinaryIO) -> None:
    with contextlib.suppress(OSError):  # what is left to flush is thrown away
        stream.close()
