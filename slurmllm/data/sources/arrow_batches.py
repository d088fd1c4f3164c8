"""The record batches of an Arrow file, mapped into memory and read by their index.

The stream format (`pa.ipc.new_stream`, Hugging Face datasets) is a sequence of messages: a schema,
dictionaries, record batches, an end marker. The file format is a stream between a magic and a
footer. `data build` writes a stream and the footer: readers of both formats read such a file.
(https://arrow.apache.org/docs/format/Columnar.html#serialization-and-interprocess-communication-ipc)

To open a file, only the header of each message is read, one page per batch.
"""

from __future__ import annotations

import hashlib
import mmap
import struct
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.ipc

from slurmllm.run.safe_files import open_regular

_MAGIC = b"ARROW1"
FILE_BEGIN = _MAGIC + b"\0\0"  # of the file format
_FOOTER_END = 4 + len(_MAGIC)  # after the footer: its length (int32) and the magic
_CONTINUATION = b"\xff\xff\xff\xff"  # before each message
_HEADER, _COMPRESSION = 2, 3  # numbers of fields (format/Message.fbs)
_INT32, _UINT16 = struct.Struct("<i"), struct.Struct("<H")


class ArrowBatches:
    """The record batches of a stream or a file, by index.

    Attributes:
        schema: The columns.
        rows: Number of rows of each batch.
        compressed: Whether a batch is decompressed when it is read, instead of mapped.
        largest_bytes: Size of the largest batch in the file.
        fault: Why reading stops after the last complete batch; None if the file is complete.

    Raises:
        OSError: the file cannot be read.
        pa.ArrowException, UnicodeDecodeError: it is not an Arrow file, or its schema is damaged.
    """

    def __init__(self, path: Path) -> None:
        with open_regular(path) as stream:
            if not stream.peek(1):
                raise pa.ArrowInvalid("it is empty")
            self._map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        begin = len(FILE_BEGIN) if self._map[: len(FILE_BEGIN)] == FILE_BEGIN else 0
        if self._map[begin : begin + 4] != _CONTINUATION:
            raise pa.ArrowInvalid(f"it begins with {self._map[: begin + 8]!r}")
        self.rows: list[int] = []
        self.compressed, self.largest_bytes = False, 0
        self._begins: list[int] = []
        self._dictionaries: list[int] = []  # before which batch each is
        self._source = pa.BufferReader(pa.py_buffer(self._map))
        self._source.seek(begin)
        self.fault = self._scan()
        self._source.seek(begin)
        self._reader = pa.ipc.open_stream(self._source)
        self.schema: pa.Schema = self._reader.schema
        self._held: list[pa.RecordBatch] | None = None
        if any(self._dictionaries):  # replaced or extended later: only reading in order knows them
            self._held = [self._reader.read_next_batch() for _ in self.rows]
        elif self._dictionaries and self.rows:
            self._reader.read_next_batch()  # reads the dictionaries too

    def __getitem__(self, index: int) -> pa.RecordBatch:
        """Read a batch; raises pa.ArrowException or an OSError if it is damaged."""
        if self._held is not None:
            batch = self._held[index]
        else:
            self._source.seek(self._begins[index])
            batch = self._reader.read_next_batch()
        # Buffers as long as the rows need, in constant time: Arrow reads what is beyond them.
        batch.validate()
        return batch

    def release(self) -> None:
        """Release the pages, which count as memory of this process until then."""
        self._map.madvise(mmap.MADV_DONTNEED)

    @property
    def layout(self) -> str:
        """Hex digest of the file's size and footer, or of the places and rows of its batches."""
        footer = _footer_length(self._map)
        if footer:
            digest = hashlib.sha256(self._map[-_FOOTER_END - footer : -_FOOTER_END])
        else:
            digest = hashlib.sha256(np.array([self._begins, self.rows], "<i8").tobytes())
        digest.update(str(len(self._map)).encode())
        return digest.hexdigest()[:16]

    def _scan(self) -> str | None:
        """Find the batches; return why reading stops after the last one (None: the file ends)."""
        fault, no_columns = None, pa.schema([])
        try:
            while True:
                begin = self._source.tell()
                message = pa.ipc.read_message(self._source)
                if message.type == "dictionary":
                    self._dictionaries.append(len(self.rows))
                elif message.type == "record batch":
                    rows = pa.ipc.read_record_batch(message, no_columns).num_rows
                    self._begins.append(begin)
                    self.rows.append(rows)
                    self.compressed = self.compressed or _is_compressed(message)
                    self.largest_bytes = max(self.largest_bytes, self._source.tell() - begin)
        except EOFError:
            end, size = self._source.tell(), len(self._map)
            footer, is_file = _footer_length(self._map), self._map[: len(_MAGIC)] == _MAGIC
            if end == begin:
                fault = "it has no end marker: it was cut off, or its writer did not close it"
            elif (end < size or is_file) and not 0 < footer <= size - end - _FOOTER_END:
                fault = f"{size - end:,} bytes follow its end marker, and not a whole footer"
        except (pa.ArrowException, OSError) as error:
            fault = f"after byte {begin:,} of {len(self._map):,}: {error}"
        return fault and f"{fault} (readable: {len(self.rows):,} batches, {sum(self.rows):,} rows)"


def _footer_length(data: mmap.mmap) -> int:
    """Return the size of the footer at the end of a file; 0 if there is none."""
    if len(data) < _FOOTER_END or data[-len(_MAGIC) :] != _MAGIC:
        return 0
    (length,) = _INT32.unpack_from(data, len(data) - _FOOTER_END)
    return int(length) if 0 < length <= len(data) - _FOOTER_END else 0


def _is_compressed(message: pa.ipc.Message) -> bool:
    """Return whether a batch has `header.compression`, which pyarrow does not tell."""
    data = memoryview(message.metadata)
    (root,) = _INT32.unpack_from(data)
    header = _field(data, root, _HEADER)
    (distance,) = _INT32.unpack_from(data, header)
    return _field(data, header + distance, _COMPRESSION) > 0


def _field(data: memoryview, table: int, number: int) -> int:
    """Return the place of a field of a Flatbuffers table; 0 if it is absent.

    A table begins with the distance back to its vtable: uint16 sizes of vtable and table, then the
    offset of each field in the table (https://flatbuffers.dev/internals/).
    """
    vtable = table - _INT32.unpack_from(data, table)[0]
    slot, (size,) = 4 + 2 * number, _UINT16.unpack_from(data, vtable)
    (offset,) = _UINT16.unpack_from(data, vtable + slot) if slot < size else (0,)
    return offset and table + int(offset)
