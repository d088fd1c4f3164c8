"""What the readers of all formats share: chunks of documents, blocks of lines, unreadable rows.

A reader decides where a document ends, not what happens at an error: it calls `on_error`, which
either raises, or counts the error and returns.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from slurmllm.core.format import Texts, printable
from slurmllm.data.corpus.decompress import OpenedInput
from slurmllm.data.corpus.options import Extent
from slurmllm.data.sources.base import Integers

# Text of one chunk, about. Memory holds only a few copies of it, and they fit into a processor's
# cache.
CHUNK_BYTES = 2 << 20
# Bytes of a line or document. A longer one is an error, and is skipped without being held: a small
# compressed file can unpack to terabytes.
LARGEST_DOCUMENT = 256 << 20
BOM = b"\xef\xbb\xbf"
SEE_KEYS = "see --text-key, or --prompt-key and --completion-key"

# Some documents: a large_string array without nulls per column, all of one length and UTF-8.
Documents = tuple[pa.LargeStringArray, ...]


class OnError(Protocol):
    """Called with file, place and reason, and how much of the file is unreadable."""

    def __call__(self, error: str, extent: Extent = "document", /) -> None: ...


def line_blocks(
    stream: OpenedInput,
    on_error: OnError,
    *,
    begin: bytes = b"",
) -> Iterator[bytes]:
    """Yield blocks that end after a line feed, or with the file; `begin` was read before.

    A block has about CHUNK_BYTES, or is one longer line. A line of more than LARGEST_DOCUMENT is an
    error, and becomes an empty line.
    """
    held: list[bytes] = []  # the beginning of a line
    lines = 0
    skipping = False
    for data in itertools.chain([begin], stream.blocks(CHUNK_BYTES)):
        if skipping:
            index = data.find(b"\n")
            if index < 0:
                continue
            data = data[index:]
            skipping = False
        end = data.rfind(b"\n") + 1
        lines += data.count(b"\n")
        if not end and sum(map(len, held)) + len(data) > LARGEST_DOCUMENT:
            on_error(f"{stream.file.name}:{lines + 1}: {too_large('line')}")
            held = []
            skipping = True
            continue
        if end:
            yield b"".join([*held, memoryview(data)[:end]])
            held = []
        held.append(data[end:])
    if last := b"".join(held):
        yield last


def too_large(kind: str) -> str:
    return f"a {kind} of more than {LARGEST_DOCUMENT >> 20} MiB, the largest that is read"


def large_strings(offsets: Integers, block: bytes) -> pa.LargeStringArray:
    """Return the texts between offsets into a block, int64 [texts + 1]; no copies, no checks."""
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(block)]
    return pa.Array.from_buffers(pa.large_string(), len(offsets) - 1, buffers, null_count=0)


def valid_utf8(block: bytes) -> bool:
    """Return whether bytes are UTF-8, checked at 10 GB/s and more."""
    return _is_valid(large_strings(np.array([0, len(block)], np.int64), block))


def _is_valid(column: pa.LargeStringArray) -> bool:
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def good_rows(
    batch: pa.RecordBatch, keys: Texts, name: str, first_row: int, on_error: OnError
) -> Documents:
    """Return the rows of a file `name` that are UTF-8; others are errors. Null is an empty text."""
    large = pa.large_string()
    binary = pa.large_binary()
    # Reinterpreted: a cast to string would check the bytes first, and raise without the row.
    texts = [
        reinterpret(column, large) if column.type == binary else column.cast(large)
        for column in map(batch.column, keys)
    ]
    texts = [values.fill_null("") if values.null_count else values for values in texts]
    if all(map(_is_valid, texts)):
        return tuple(texts)
    keep = np.ones(len(texts[0]), bool)
    for row in range(len(keep)):
        for key, values in zip(keys, texts, strict=True):
            if keep[row] and not _is_valid(values.slice(row, 1)):
                on_error(f"{name}: row {first_row + row} of column {key!r} is not UTF-8")
                keep[row] = False
    mask = pa.array(keep)
    return tuple(reinterpret(reinterpret(values, binary).filter(mask), large) for values in texts)


def drop_blank(documents: Documents) -> Documents:
    """Drop documents of white space only; of a pair, the completion counts."""
    last = documents[-1]
    # utf8_is_space is false of an empty string.
    blank = pc.or_(pc.utf8_is_space(last), pc.equal(pc.binary_length(last), 0))
    if not pc.any(blank).as_py():
        return documents
    return tuple(column.filter(pc.invert(blank)) for column in documents)


def reinterpret(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return the same buffers as another type, without a check of the bytes."""
    return pa.Array.from_buffers(
        kind, len(column), column.buffers(), column.null_count, column.offset
    )


def no_column(key: str, names: Sequence[str]) -> str:
    columns = ", ".join(f"{printable(name):.40}" for name in names[:10])
    return f"no column {key!r} (columns: {columns}); {SEE_KEYS}"
