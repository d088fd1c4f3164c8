"""Parquet and Arrow files: a row a document, the text in one string column, or in two.

An Arrow file is an IPC file or an IPC stream, as its first bytes tell. Rows are counted from 1.
"""

from __future__ import annotations

import io
import mmap
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq

from slurmllm.corpus.decompress import OpenedInput
from slurmllm.corpus.options import ReadOptions
from slurmllm.corpus.readers.base import (
    CHUNK_BYTES,
    Documents,
    OnError,
    good_rows,
    missing_column,
)

_MOST_ROWS = 1 << 16
_ARROW_FILE = b"ARROW1\0\0"
_FEATHER_1 = b"FEA1"

# Called with the part of the file that is read, 0 … 1.
OnPart = Callable[[float], None]


def read_parquet(
    stream: OpenedInput, options: ReadOptions, on_fault: OnError, on_part: OnPart
) -> Iterator[Documents]:
    """The documents of a Parquet file."""
    name, keys = stream.file.name, options.keys
    row = 0
    try:
        # pre_buffer would hold whole row groups, often a gigabyte, in memory.
        file = pq.ParquetFile(stream.file.path, pre_buffer=False)
        if fault := missing_column(keys, file.schema_arrow):
            on_fault(f"{name}: {fault}", "file")
            return
        batches = file.iter_batches(_rows_at_once(file), columns=list(keys), use_threads=False)
        for batch in batches:
            columns = [batch.column(key) for key in keys]
            yield good_rows(columns, keys, row + 1, _on_row(name, on_fault))
            row += batch.num_rows
            on_part(row / file.metadata.num_rows)
    except pa.ArrowInvalid as error:
        on_fault(f"{name}: not a readable Parquet file: {error}", "rest" if row else "file")


def _rows_at_once(file: Any) -> int:
    """Rows that hold about CHUNK_BYTES, by the size of all columns."""
    groups = range(file.metadata.num_row_groups)
    total = sum(file.metadata.row_group(index).total_byte_size for index in groups)
    rows = file.metadata.num_rows * CHUNK_BYTES // max(total, 1)
    return int(min(max(rows, 16), _MOST_ROWS))


def read_arrow(
    stream: OpenedInput, options: ReadOptions, on_fault: OnError, on_part: OnPart
) -> Iterator[Documents]:
    """The documents of an Arrow file, in any of its batches."""
    name, keys = stream.file.name, options.keys
    if stream.file.size_bytes == 0:
        on_fault(f"{name}: an empty file, not an Arrow file", "file")
        return
    row = 0
    try:
        mapped = _Mapped(stream) if stream.file.compression is None else None
        for index, batch in enumerate(mapped.batches() if mapped else _unpacked_batches(stream)):
            if fault := missing_column(keys, batch.schema):
                on_fault(f"{name}: {fault}", "file")
                return
            columns = [batch.column(key) for key in keys]
            for begin, end in _slices(columns):
                pieces = [column.slice(begin, end - begin) for column in columns]
                yield good_rows(pieces, keys, row + 1, _on_row(name, on_fault))
                row += end - begin
                if mapped:
                    mapped.release()
                    on_part(mapped.part(index, end / batch.num_rows))
    except pa.ArrowInvalid as error:
        on_fault(f"{name}: not a readable Arrow file: {error}", "rest" if row else "file")


def _on_row(name: str, on_fault: OnError) -> Callable[[int, str], None]:
    return lambda row, reason: on_fault(f"{name}: row {row} {reason}")


class _Mapped:
    """An Arrow file in the memory map: a batch may be as large as the file."""

    def __init__(self, stream: OpenedInput) -> None:
        with stream.file.path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._source = pa.BufferReader(pa.py_buffer(self._map))
        self._count = 0  # of batches, where it is known

    def batches(self) -> Iterator[pa.RecordBatch]:
        if self._map[: len(_ARROW_FILE)] == _ARROW_FILE:
            reader = pa.ipc.open_file(self._source)
            self._count = reader.num_record_batches
            for index in range(self._count):
                yield reader.get_batch(index)
        elif self._map[: len(_FEATHER_1)] == _FEATHER_1:
            raise pa.ArrowInvalid("Feather version 1; write it again as version 2")
        else:
            yield from pa.ipc.open_stream(self._source)

    def part(self, index: int, of_batch: float) -> float:
        """How much of the file is read."""
        if self._count:
            return (index + of_batch) / self._count
        return float(self._source.tell() / len(self._map))

    def release(self) -> None:
        """Give back the pages, which count as memory of this process until then."""
        self._map.madvise(mmap.MADV_DONTNEED)


def _unpacked_batches(stream: OpenedInput) -> Iterator[pa.RecordBatch]:
    # The file format is the stream format with eight bytes before and a footer after it.
    begin = stream.read(len(_ARROW_FILE))
    whole = stream if begin == _ARROW_FILE else _Rejoined(begin, stream)
    yield from pa.ipc.open_stream(pa.PythonFile(whole, "r"))


class _Rejoined(io.RawIOBase):
    """A stream with its beginning put back."""

    def __init__(self, begin: bytes, stream: OpenedInput) -> None:
        self._begin, self._stream = begin, stream

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        taken, self._begin = self._begin[:size], self._begin[size:]
        return taken + self._stream.read(size - len(taken))


def _slices(columns: list[pa.Array]) -> Iterator[tuple[int, int]]:
    """Runs of rows that hold about CHUNK_BYTES, or one row that is longer."""
    rows = len(columns[0])
    begin = 0
    while begin < rows:
        # Bytes up to and with each of the next rows.
        ends = np.zeros(min(rows - begin, _MOST_ROWS), np.int64)
        for column in columns:
            ends += _ends(column.slice(begin, len(ends)))
        end = begin + max(int(np.searchsorted(ends, CHUNK_BYTES, side="right")), 1)
        yield begin, end
        begin = end


def _ends(column: pa.Array) -> npt.NDArray[np.int64]:
    """Where each row of a column ends, in bytes of text; guessed where only Arrow knows."""
    if column.type not in (pa.string(), pa.large_string()):
        share = column.nbytes // len(column)
        return np.cumsum(np.full(len(column), share, np.int64))
    kind = np.dtype(np.int64 if column.type == pa.large_string() else np.int32)
    _, buffer, values = column.buffers()
    offsets = np.frombuffer(buffer, kind)[column.offset : column.offset + len(column) + 1]
    if np.any(np.diff(offsets) < 0) or offsets[0] < 0:
        raise pa.ArrowInvalid("offsets that do not ascend")
    if offsets[-1] > (values.size if values is not None else 0):
        raise pa.ArrowInvalid("offsets beyond the end of the text")
    return np.cumsum(np.diff(offsets), dtype=np.int64)
