"""What the readers of all formats share: chunks of documents, and the rows that cannot be read.

A reader decides where a document ends, never what a fault costs: whatever cannot be read is
handed to `on_fault`, which either raises or counts and goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from slurmllm.corpus.decompress import OpenedInput
from slurmllm.corpus.options import Extent

# Text of one chunk, about: a few copies of it are all the text that memory holds, and they fit
# into a processor's cache.
CHUNK_BYTES = 2 << 20
BOM = b"\xef\xbb\xbf"
SEE_KEYS = "see --text-key, or --prompt-key and --completion-key"

# Some documents: a large_string array without nulls a column, all of one length and UTF-8.
Documents = tuple[pa.LargeStringArray, ...]


class OnError(Protocol):
    """Told of a fault: file, place and reason, and how much of the file cannot be read for it."""

    def __call__(self, fault: str, extent: Extent = "document", /) -> None: ...


def strings(values: list[str]) -> pa.LargeStringArray:
    """Strings as a column of a chunk."""
    return pa.array(values, pa.large_string())


def valid_utf8(block: bytes) -> bool:
    """Whether bytes are UTF-8, at 10 GB/s and more."""
    offsets = pa.py_buffer(np.array([0, len(block)], np.int64))
    whole = [None, offsets, pa.py_buffer(block)]
    return _is_valid(pa.Array.from_buffers(pa.large_string(), 1, whole, null_count=0))


def good_rows(
    columns: list[pa.Array],
    keys: tuple[str, ...],
    first_row: int,
    on_row: Callable[[int, str], None],
    skipped: Sequence[int] = (),
) -> Documents:
    """Rows of a table without those that are null or not UTF-8, which are faults.

    Args:
        columns: An array a key: of strings of any kind, or of binary that should be UTF-8.
        keys: The names of the columns.
        first_row: Number of the first row among those read; that of a file is 1.
        on_row: Called with the row and the reason of each fault, in the order of the rows.
        skipped: Numbers in the file of rows that are not among those read, ascending.
    """
    texts = [_large_string(column) for column in columns]
    faults: dict[int, str] = {}
    for key, text in zip(keys, texts, strict=True):
        if text.null_count:
            null = np.flatnonzero(pc.is_null(text).to_numpy(zero_copy_only=False))
            faults |= dict.fromkeys(null.tolist(), f"of column {key!r} is null")
        if not _is_valid(text):
            for row in range(len(text)):
                if not _is_valid(text.slice(row, 1)):
                    faults.setdefault(row, f"of column {key!r} is not UTF-8")
    for row, reason in sorted(faults.items()):
        number = first_row + row
        for other in skipped:
            number += other <= number
        on_row(number, reason)
    if faults:
        keep = np.ones(len(texts[0]), bool)
        keep[list(faults)] = False
        texts = [_from_binary(_binary(text).filter(pa.array(keep))) for text in texts]
    return tuple(texts)


def is_text(kind: pa.DataType) -> bool:
    """Whether a column of this type holds strings."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return bool(
        pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    )


def missing_column(keys: tuple[str, ...], schema: pa.Schema) -> str | None:
    """What is wrong with a table in which not every key is a string column; None if all are."""
    for key in keys:
        if key not in schema.names:
            return no_column(key, schema.names)
        kind = schema.field(key).type
        if not is_text(kind):
            return f"column {key!r} is {kind}, not strings; {SEE_KEYS}"
    return None


def no_column(key: str, names: Sequence[str]) -> str:
    """What to say where a table lacks a column."""
    return f"no column {key!r} (there is {', '.join(names[:10])}); {SEE_KEYS}"


def _is_valid(text: pa.LargeStringArray) -> bool:
    try:
        text.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _large_string(column: pa.Array) -> pa.LargeStringArray:
    if column.type == pa.large_binary():
        return _from_binary(column)
    return column.cast(pa.large_string())


def _binary(text: pa.LargeStringArray) -> pa.LargeBinaryArray:
    return pa.Array.from_buffers(
        pa.large_binary(), len(text), text.buffers(), text.null_count, text.offset
    )


def _from_binary(data: pa.LargeBinaryArray) -> pa.LargeStringArray:
    # A cast would check the bytes first, and raise without the row.
    return pa.Array.from_buffers(
        pa.large_string(), len(data), data.buffers(), data.null_count, data.offset
    )


def line_blocks(stream: OpenedInput) -> Iterator[bytes]:
    """Blocks that end after a line feed, or with the file.

    A block holds about CHUNK_BYTES, or one line that is longer.
    """
    held: list[bytes] = []  # the beginning of a line
    for data in stream.blocks(CHUNK_BYTES):
        end = data.rfind(b"\n") + 1
        if end:
            yield b"".join([*held, memoryview(data)[:end]])
            held = []
        held.append(data[end:])
    last = b"".join(held)
    if last:
        yield last
