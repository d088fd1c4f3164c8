"""Parquet and Arrow files: one row per document, of one string column or two, or of messages.

Rows count from 1.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.ipc
import pyarrow.parquet as pq

from slurmllm.corpus.decompress import OpenedInput
from slurmllm.corpus.options import ReadOptions
from slurmllm.corpus.readers.base import (
    CHUNK_BYTES,
    Documents,
    OnError,
    conversation_text,
    good_rows,
    missing_column,
    no_column,
    reinterpret,
)
from slurmllm.data.sources.arrow_batches import FILE_BEGIN, ArrowBatches

_MOST_ROWS = 1 << 16
# Rows of messages read at once: they become Python objects.
_CONVERSATIONS = 1 << 8


def read_parquet(
    stream: OpenedInput, options: ReadOptions, on_error: OnError
) -> Iterator[Documents]:
    name = stream.file.name
    row = 0
    try:
        # pre_buffer would hold whole row groups, often a gigabyte, in memory.
        file = pq.ParquetFile(stream.file.path, pre_buffer=False)
        keys, reason = _columns(options, file.schema_arrow)
        if reason:
            on_error(f"{name}: {reason}", "file")
            return
        # Rows that hold about CHUNK_BYTES, by the size of all columns.
        groups = (file.metadata.row_group(i) for i in range(file.metadata.num_row_groups))
        total = sum(group.total_byte_size for group in groups)
        rows = file.metadata.num_rows * CHUNK_BYTES // max(total, 1)
        rows = min(max(rows, 16), _CONVERSATIONS if options.messages_key else _MOST_ROWS)
        # One thread: other processes read other shards at the same time.
        for batch in file.iter_batches(rows, columns=list(keys), use_threads=False):
            yield _documents(batch, keys, options, row + 1, _on_row(name, on_error))
            row += batch.num_rows
            stream.mapped_bytes = stream.file.size_bytes * row // file.metadata.num_rows
    except (pa.ArrowException, UnicodeDecodeError) as error:  # the second: names of columns
        on_error(f"{name}: not a readable Parquet file: {error}", "rest" if row else "file")


def read_arrow(stream: OpenedInput, options: ReadOptions, on_error: OnError) -> Iterator[Documents]:
    name = stream.file.name
    if stream.file.size_bytes == 0:
        on_error(f"{name}: an empty file, not an Arrow file", "file")
        return
    row = 0
    try:
        mapped = None
        batches: Iterable[pa.RecordBatch]
        if stream.file.compression is None:
            # Mapped: a batch may be as large as the file.
            mapped = ArrowBatches(stream.file.path)
            count = len(mapped.rows)
            batches = map(mapped.__getitem__, range(count))
        else:
            # The file format is the stream format between eight bytes and a footer, so a
            # compressed file can be read as a stream.
            magic = stream.read(len(FILE_BEGIN))
            source = stream if magic == FILE_BEGIN else _Prefixed(magic, stream)
            batches = pa.ipc.open_stream(pa.PythonFile(source, "r"))
        for index, batch in enumerate(batches):
            keys, reason = _columns(options, batch.schema)
            if reason:
                on_error(f"{name}: {reason}", "file")
                return
            columns = [batch.column(key) for key in keys]
            for column in columns:
                _check_bounds(column)
            for begin, end in _slices(columns, options):
                part = batch.slice(begin, end - begin)
                yield _documents(part, keys, options, row + 1, _on_row(name, on_error))
                row += end - begin
                if mapped:
                    mapped.release()
                    part_of_file = (index + end / batch.num_rows) / count
                    stream.mapped_bytes = int(part_of_file * stream.file.size_bytes)
        if mapped and mapped.fault:
            raise pa.ArrowInvalid(mapped.fault)
    except (pa.ArrowException, UnicodeDecodeError) as error:  # the second: names of columns
        on_error(f"{name}: not a readable Arrow file: {error}", "rest" if row else "file")


def _columns(options: ReadOptions, schema: pa.Schema) -> tuple[tuple[str, ...], str | None]:
    """Return the columns to read, and the reason why the table cannot be read."""
    if options.messages_key is None:
        return options.keys, missing_column(options.keys, schema)
    if options.messages_key not in schema.names:
        return (), no_column(options.messages_key, schema.names)
    return (*options.keys, *({"tools"} & set(schema.names) - {*options.keys})), None


def _documents(
    batch: pa.RecordBatch,
    keys: tuple[str, ...],
    options: ReadOptions,
    first_row: int,
    on_row: Callable[[int, str], None],
) -> Documents:
    columns = [batch.column(key) for key in keys]
    if options.messages_key is None:
        return good_rows(columns, keys, first_row, on_row)
    table = pa.RecordBatch.from_arrays(columns, list(keys))
    table.validate(full=True)
    texts = []
    for row, record in enumerate(table.to_pylist(), start=first_row):
        try:
            texts.append(conversation_text(record, options.messages_key))
        except ValueError as error:
            on_row(row, f"cannot be used: {error}")
    return (pa.array(texts, pa.large_string()),)


def _check_bounds(column: pa.Array) -> None:
    """Check that no value is outside the file's map; `good_rows` checks that a row is UTF-8.

    The offsets of plain strings are checked in slices.
    """
    column.validate()
    if pa.types.is_string_view(column.type):
        column.cast(pa.binary_view()).validate(full=True)
    elif pa.types.is_dictionary(column.type):
        values = column.dictionary
        if values.type in (pa.string(), pa.large_string()):
            values = values.cast(pa.binary() if values.type == pa.string() else pa.large_binary())
        pa.DictionaryArray.from_arrays(column.indices, values, safe=False).validate(full=True)
    elif column.type not in (pa.string(), pa.large_string()):
        column.validate(full=True)


def _on_row(name: str, on_error: OnError) -> Callable[[int, str], None]:
    return lambda row, reason: on_error(f"{name}: row {row} {reason}")


class _Prefixed(io.RawIOBase):
    """A stream whose first bytes were read already."""

    def __init__(self, begin: bytes, stream: OpenedInput) -> None:
        self._begin, self._stream = begin, stream

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        taken, self._begin = self._begin[:size], self._begin[size:]
        return taken + self._stream.read(size - len(taken))


def _slices(columns: list[pa.Array], options: ReadOptions) -> Iterator[tuple[int, int]]:
    """Yield runs of rows that hold about CHUNK_BYTES of text, or one longer row."""
    rows = len(columns[0])
    begin = 0
    while begin < rows:
        if options.messages_key is not None:
            end = min(begin + _CONVERSATIONS, rows)
        else:
            # Bytes up to the end of each of the next rows.
            ends = np.cumsum(sum(_sizes(column.slice(begin, _MOST_ROWS)) for column in columns))
            end = begin + max(int(np.searchsorted(ends, CHUNK_BYTES, side="right")), 1)
        yield begin, end
        begin = end


def _sizes(column: pa.Array) -> npt.NDArray[np.int64]:
    """Return the bytes of each row, after a check of a plain string's offsets."""
    if pa.types.is_dictionary(column.type):  # of each row: many may share a long text
        sizes = pc.binary_length(column.dictionary).take(column.indices)
    elif pa.types.is_string_view(column.type):  # 16 bytes a row, of which four are its size
        views = np.frombuffer(column.buffers()[1], np.int32).reshape(-1, 4)
        return views[column.offset : column.offset + len(column), 0].astype(np.int64)
    else:
        binary = pa.binary() if column.type == pa.string() else pa.large_binary()
        column = reinterpret(column, binary)
        column.validate(full=True)
        sizes = pc.binary_length(column)
    return np.asarray(sizes.fill_null(0), np.int64)
