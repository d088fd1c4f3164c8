"""Writing the native format, torch.distributed.checkpoint's (DCP): by workers, and offline."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from io import BufferedWriter, FileIO
from itertools import accumulate
from pathlib import Path
from typing import IO, TYPE_CHECKING

import torch
from torch import Tensor

from slurmllm.checkpoint.formats.dcp_index import Chunk, Place, SaveIndex
from slurmllm.checkpoint.formats.pickles import METADATA
from slurmllm.checkpoint.formats.safetensors_files import own_storage
from slurmllm.checkpoint.shards import Region
from slurmllm.control.plane import ControlPlane

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer

    from slurmllm.display.progress import OnProgress

_CHUNK_BYTES = 8 * 2**20  # hashed right after the write, while it is in the CPU's cache
_FLUSH_BYTES = 32 * 2**20
PIECE_BYTES = 64 * 2**20  # offline: rounded to rows of the tensor, at least one
FILE_BYTES = 4 * 10**9  # offline

Keys = tuple[str, ...]


class ChecksumFiles:
    """Files for torch.save that hash what they write and raise the file system's own errors.

    torch.save hides them behind "unexpected pos 704 vs 598". `written` is file name → sha256.
    """

    def __init__(self) -> None:
        self.written: dict[str, str] = {}

    @contextmanager
    def create(self, path: Path) -> Iterator[IO[bytes]]:
        """Open a new file; it is durable (fsync) when the block completes."""
        # CRC32 would take a fifth of the CPU time; the manifest has sha256, torch.load needs none.
        torch.serialization.set_crc32_options(False)
        file = _ChecksumFile(path)
        try:
            with BufferedWriter(file) as stream:
                yield stream
                stream.flush()
                os.fsync(stream.fileno())
        except Exception as error:
            if file.error is not None:
                raise file.error from error
            raise
        self.written[path.name] = file.checksum.hexdigest()


class _ChecksumFile(FileIO):
    def __init__(self, path: Path) -> None:
        super().__init__(path, "wb")
        self.error: OSError | None = None
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
            self.error = self.error or error
            raise
        return done


def file_name(rank: int, number: int) -> str:
    return f"__{rank}_{number}.distcp"


def write_chunk(stream: IO[bytes], name: str, values: Tensor) -> Place:
    """Write one chunk to the file `name` in DCP's form."""
    offset = stream.tell()
    torch.save(own_storage(values.detach().cpu()), stream)
    return Place(name, offset, stream.tell() - offset)


def write_dcp(
    folder: Path,
    shapes: Mapping[Keys, tuple[int, ...]],
    dtype: torch.dtype,
    read: Callable[[Keys, Region], Tensor],
    on_progress: OnProgress = lambda _: None,
) -> None:
    """Write `.metadata` and the shard files into an existing folder, one piece of a tensor at once.

    `shapes` are by the keys that lead to the tensors in the state; `read` returns a region of one.
    Scalars are fp32. Raises an OSError if the file system failed a write.
    """
    chunks = [
        Chunk(keys, dtype if shape else torch.float32, shape, offsets, sizes)
        for keys, shape in shapes.items()
        for offsets, sizes in _pieces(shape, dtype)
    ]
    done = iter(accumulate(chunk.num_bytes for chunk in chunks))
    files, places = ChecksumFiles(), list[Place]()
    while len(places) < len(chunks):
        name = file_name(0, len(files.written))
        with files.create(folder / name) as stream:
            while len(places) < len(chunks) and stream.tell() < FILE_BYTES:
                chunk = chunks[len(places)]
                places.append(write_chunk(stream, name, read(chunk.path, chunk.region)))
                on_progress(next(done))
    index = SaveIndex(ControlPlane(), chunks)
    index.collect(places)
    with files.create(folder / METADATA) as stream:
        stream.write(index.content())


def _pieces(
    shape: tuple[int, ...], dtype: torch.dtype
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield offsets and sizes of groups of rows of at most PIECE_BYTES."""
    if not shape:
        yield (), ()
        return
    row_bytes = torch.Size(shape[1:]).numel() * dtype.itemsize
    each = max(1, PIECE_BYTES // (row_bytes or 1))
    for start in range(0, shape[0], each):
        zeros = (0,) * (len(shape) - 1)
        yield (start, *zeros), (min(each, shape[0] - start), *shape[1:])
