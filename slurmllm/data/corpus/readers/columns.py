"""Parquet, Arrow and CSV files: one row per document, of one string column or two.

Rows count from 1. pandas reads CSV and TSV files, as in `datasets`, but hashed as they are read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.ipc
import pyarrow.parquet as pq

from slurmllm.core.run.file_formats import HEAD_BYTES, foreign_format
from slurmllm.data.corpus.addresses import RemoteFile, open_input
from slurmllm.data.corpus.decompress import OpenedInput
from slurmllm.data.corpus.options import ReadOptions
from slurmllm.data.corpus.readers.base import (
    CHUNK_BYTES,
    SEE_KEYS,
    Documents,
    OnError,
    good_rows,
    no_column,
    reinterpret,
)
from slurmllm.data.sources.arrow import FILE_BEGIN, MappedBatches
from slurmllm.data.sources.base import Integers

_MOST_ROWS = 1 << 16
_BINARY = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary()}


class _NoColumnError(Exception):
    """A column is missing, or has another type."""


def read_table(stream: OpenedInput, options: ReadOptions, on_error: OnError) -> Iterator[Documents]:
    name = stream.file.name
    kind = "Parquet"
    read = _parquet_batches
    if stream.file.format == "arrow":
        kind = "Arrow"
        read = _arrow_batches
        if stream.file.size_bytes == 0:
            on_error(f"{name}: an empty file, not an Arrow file", "file")
            return
    row = 0
    try:
        for batch in read(stream, options):
            yield good_rows(batch, options.keys, name, row + 1, on_error)
            row += batch.num_rows
    except _NoColumnError as error:
        on_error(f"{name}: {error}", "file")
    except (pa.ArrowException, UnicodeDecodeError) as error:  # the second: names of columns
        refusal = None
        if not row and stream.file.compression is None:
            with open_input(stream.file.path) as opened:
                refusal = foreign_format(name, opened.read(HEAD_BYTES) or b"", kind)
        reason = refusal or f"{name}: not a readable {kind} file: {error}"
        on_error(reason, "rest" if row else "file")


def _parquet_batches(stream: OpenedInput, options: ReadOptions) -> Iterator[pa.RecordBatch]:
    # pre_buffer would hold whole row groups, often a gigabyte, in memory.
    path = stream.file.path
    file = pq.ParquetFile(path if isinstance(path, Path) else RemoteFile(path), pre_buffer=False)
    keys = _check_columns(options, file.schema_arrow)
    # Rows that hold about CHUNK_BYTES, by the size of all columns.
    data = file.metadata
    total = sum(data.row_group(i).total_byte_size for i in range(data.num_row_groups))
    rows = min(max(data.num_rows * CHUNK_BYTES // max(total, 1), 16), _MOST_ROWS)
    done = 0
    # One thread: other processes read other shards at the same time.
    for batch in file.iter_batches(rows, columns=keys, use_threads=False):
        done += batch.num_rows
        stream.mapped_bytes = stream.file.size_bytes * done // data.num_rows
        yield batch


def _arrow_batches(stream: OpenedInput, options: ReadOptions) -> Iterator[pa.RecordBatch]:
    mapped = None
    batches: Iterable[pa.RecordBatch]
    if stream.file.compression is None and isinstance(stream.file.path, Path):
        # Mapped: a batch may be as large as the file.
        mapped = batches = MappedBatches(stream.file.path)
    else:
        # The file format is the stream format between eight bytes and a footer, so a file that
        # is compressed, or elsewhere, can be read as a stream.
        # An error of the first bytes is raised by `stream`, which knows its place.
        with suppress(OSError), OpenedInput(stream.file, options.zstd_long) as opened:
            if opened.read(len(FILE_BEGIN)) == FILE_BEGIN:
                stream.read(len(FILE_BEGIN))
        batches = pa.ipc.open_stream(pa.PythonFile(stream, "r"))
    for whole in batches:
        batch = whole.select(_check_columns(options, whole.schema))
        for column in batch.columns:
            _check_bounds(column)
        for begin, end in _slices(batch.columns):
            yield batch.slice(begin, end - begin)
            if mapped:
                mapped.release()
                # A corpus of `data build` has a single batch.
                stream.mapped_bytes = mapped.offset_bytes * end // batch.num_rows


def _check_columns(options: ReadOptions, schema: pa.Schema) -> list[str]:
    """Return the columns to read; each must be of strings."""
    for key in options.keys:
        if key not in schema.names:
            raise _NoColumnError(no_column(key, schema.names))
        if (count := schema.names.count(key)) > 1:
            raise _NoColumnError(f"{count} columns are called {key!r}; rename one of them")
        kind = schema.field(key).type
        value_type = kind.value_type if pa.types.is_dictionary(kind) else kind
        if value_type not in (*_BINARY, pa.string_view()):
            raise _NoColumnError(f"column {key!r} is {kind}, not strings; {SEE_KEYS}")
    return list(dict.fromkeys(options.keys))


def _check_bounds(column: pa.Array) -> None:
    """Check that no value is outside the file's map; `good_rows` checks that a row is UTF-8.

    The offsets of plain strings are checked in slices.
    """
    column.validate()
    if pa.types.is_string_view(column.type):
        column.cast(pa.binary_view()).validate(full=True)
    elif pa.types.is_dictionary(column.type):
        values = column.dictionary
        values = values.cast(_BINARY.get(values.type, values.type))
        pa.DictionaryArray.from_arrays(column.indices, values, safe=False).validate(full=True)
    elif column.type not in _BINARY:
        column.validate(full=True)


def _slices(columns: list[pa.Array]) -> Iterator[tuple[int, int]]:
    """Yield runs of rows that hold about CHUNK_BYTES of text, or one longer row."""
    rows = len(columns[0])
    begin = 0
    while begin < rows:
        # Bytes up to the end of each of the next rows.
        ends = np.cumsum(sum(_sizes(column.slice(begin, _MOST_ROWS)) for column in columns))
        end = begin + max(int(np.searchsorted(ends, CHUNK_BYTES, side="right")), 1)
        yield begin, end
        begin = end


def _sizes(column: pa.Array) -> Integers:
    """Return the bytes of each row, after a check of a plain string's offsets."""
    if pa.types.is_dictionary(column.type):  # of each row: many may share a long text
        sizes = pc.binary_length(column.dictionary).take(column.indices)
    elif pa.types.is_string_view(column.type):  # 16 bytes a row, of which four are its size
        views = np.frombuffer(column.buffers()[1], np.int32).reshape(-1, 4)
        return views[column.offset : column.offset + len(column), 0].astype(np.int64)
    else:
        column = reinterpret(column, _BINARY[column.type])
        column.validate(full=True)
        sizes = pc.binary_length(column)
    return np.asarray(sizes.fill_null(0), np.int64)


_ROWS = 256  # at once


def read_delimited(
    stream: OpenedInput, options: ReadOptions, on_error: OnError
) -> Iterator[Documents]:
    import pandas as pd

    path = stream.file.path
    name = stream.file.name
    file_name = path.stem if stream.file.compression else path.name
    row = 0
    try:
        frames = pd.read_csv(
            stream,
            sep="\t" if file_name.lower().endswith(".tsv") else ",",
            dtype=str,
            na_filter=False,
            chunksize=_ROWS,
        )
        for frame in frames:
            for key in options.keys:
                if key not in frame.columns:
                    on_error(f"{name}: {no_column(key, [*map(str, frame.columns)])}", "file")
                    return
            if not isinstance(frame.index, pd.RangeIndex):  # pandas takes it for a row's name
                on_error(f"{name}: rows have more columns than the header", "file")
                return
            yield tuple(
                pa.array(frame[key], pa.large_string()).fill_null("") for key in options.keys
            )
            row += len(frame)
    except pd.errors.EmptyDataError:
        on_error(f"{name}: an empty file, without a header", "file")
    except (pd.errors.ParserError, UnicodeError, pa.ArrowException) as error:
        reason = str(error).removeprefix("Error tokenizing data. C error: ")
        on_error(f"{name}: after row {row}: {reason}", "rest" if row else "file")
