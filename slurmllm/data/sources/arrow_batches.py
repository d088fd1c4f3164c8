"""The record batches of an Arrow file, mapped into memory.

The stream format (`pa.ipc.new_stream`, Hugging Face datasets) is a sequence of messages: a schema,
dictionaries, record batches, an end marker. The file format is a stream between a magic and a
footer. `data build` writes a stream and the footer: readers of both formats read such a file.
(https://arrow.apache.org/docs/format/Columnar.html#serialization-and-interprocess-communication-ipc)
"""

from __future__ import annotations

import hashlib
import mmap
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.ipc

from slurmllm.core.run.safe_files import open_regular

_MAGIC = b"ARROW1"
FILE_BEGIN = _MAGIC + b"\0\0"  # of the file format
_FOOTER_END = 4 + len(_MAGIC)  # after the footer: its length (int32) and the magic
_INT32 = struct.Struct("<i")


class MappedBatches:
    """The record batches of a stream or a file, in their order; iterates once.

    Batches that are not compressed are not copied: their pages are read when they are used.

    Attributes:
        schema: The columns.
        size_bytes: Size of the file.
        offset_bytes: Where the next message begins.

    Raises:
        OSError: the file cannot be read.
        pa.ArrowException, UnicodeDecodeError: it is not an Arrow file, or damaged. The iterator
            raises it after the last complete batch.
    """

    def __init__(self, path: Path) -> None:
        with open_regular(path) as stream:
            if not stream.peek(1):
                raise pa.ArrowInvalid("it is empty")
            self._map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        self._source = pa.BufferReader(pa.py_buffer(self._map))
        if self._map[: len(FILE_BEGIN)] == FILE_BEGIN:
            self._source.seek(len(FILE_BEGIN))
        try:
            self._reader = pa.ipc.open_stream(self._source)
        except OSError as error:  # of memory: the file was cut
            raise pa.ArrowInvalid(str(error)) from error
        self.schema: pa.Schema = self._reader.schema
        self.size_bytes = len(self._map)
        self._begins: list[int] = []
        self._rows: list[int] = []

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        begin = self.offset_bytes
        while (batch := self._next_batch()) is not None:
            self._begins.append(begin)
            self._rows.append(batch.num_rows)
            yield batch
            begin = self.offset_bytes
        # Arrow takes the end of a file that was cut between two batches for the end marker.
        end, footer = self.offset_bytes, self._footer_length()
        if end == begin:
            raise self._error(
                "it has no end marker: it was cut off, or its writer did not close it"
            )
        has_footer = end < self.size_bytes or self._map[: len(_MAGIC)] == _MAGIC
        if has_footer and not 0 < footer <= self.size_bytes - end - _FOOTER_END:
            extra = self.size_bytes - end
            raise self._error(f"{extra:,} bytes follow its end marker, and not a whole footer")

    def _next_batch(self) -> pa.RecordBatch | None:
        try:
            batch = self._reader.read_next_batch()
            # Buffers as long as the rows need, in constant time: Arrow reads what is beyond them.
            batch.validate()
        except StopIteration:
            return None
        except (pa.ArrowException, OSError) as error:  # the second: of memory, the file was cut
            raise self._error(str(error)) from error
        return batch

    def _error(self, reason: str) -> pa.ArrowInvalid:
        batches, rows = len(self._rows), sum(self._rows)
        return pa.ArrowInvalid(f"{reason} (readable: {batches:,} batches, {rows:,} rows)")

    @property
    def offset_bytes(self) -> int:
        return int(self._source.tell())

    def release(self) -> None:
        """Release the pages, which count as memory of this process until then."""
        self._map.madvise(mmap.MADV_DONTNEED)

    @property
    def layout(self) -> str:
        """Hex digest of the file's size and footer, or of offsets and rows of all its batches."""
        footer = self._footer_length()
        if footer:
            digest = hashlib.sha256(self._map[-_FOOTER_END - footer : -_FOOTER_END])
        else:
            digest = hashlib.sha256(np.array([self._begins, self._rows], "<i8").tobytes())
        digest.update(str(self.size_bytes).encode())
        return digest.hexdigest()[:16]

    def _footer_length(self) -> int:
        """Return the size of the footer at the end of the file; 0 if there is none."""
        if self.size_bytes < _FOOTER_END or self._map[-len(_MAGIC) :] != _MAGIC:
            return 0
        (length,) = _INT32.unpack_from(self._map, self.size_bytes - _FOOTER_END)
        return int(length) if 0 < length <= self.size_bytes - _FOOTER_END else 0
