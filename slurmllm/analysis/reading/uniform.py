"""Metrics rows at the speed of a CSV parser.

A process writes the same keys in the same order into every row. With `:` and `}` read as commas
such rows are CSV: key, value, key, value, …, and pyarrow's parser takes them in half a JSON
parser's time, without Python's lock. The keys are read too, to see that they are the same in every
row. Whatever is not so even (a row with another key, a string, an infinite value, a cut line) is
left to the exact reader.
"""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv

from slurmllm.analysis.curves import COLUMNS
from slurmllm.analysis.reading.table import Part

_COMMA, _OTHER_SEPARATORS = ord(","), (ord(":"), ord("}"))
_PLAIN_KEY = re.compile(r"\w+", re.ASCII)
_INTEGERS = ("step", "attempt")
_END = "end"
# The parser works through pieces of this size: they and their cells stay in a core's cache.
_PIECE_BYTES = 1 << 20
_SMALL_PIECE_BYTES = 1 << 18


def read_uniform(block: bytes, attempt: int) -> Part | None:
    """Read whole lines of a metrics file.

    Args:
        block: The lines.
        attempt: Of rows that do not name theirs.

    Returns:
        The rows; None where they are not as even as this reader needs.
    """
    if b"\r" in block:
        return None
    keys = _keys(block[: block.find(b"\n") + 1])
    if keys is None:
        return None
    try:
        table = _parse(block, keys)
    except pa.ArrowException:
        return None
    cells = [b'"%s"' % key.encode() for key in keys] + [b""]
    cells[0] = b"{" + cells[0]
    names = [*(f"key {key}" for key in keys), _END]
    if not all(_holds(table[name], cell) for name, cell in zip(names, cells, strict=True)):
        return None
    columns = {}
    for key in keys:
        values = _numbers(table[key])
        odd = np.count_nonzero(~np.isfinite(values))
        if odd != table[key].null_count or (odd and key in _INTEGERS):
            return None
        columns[key] = values
    steps = columns["step"]
    attempts = columns.get("attempt", np.full(len(steps), attempt, dtype=np.int64))
    if min(steps.min(), attempts.min()) < 0 or max(steps.max(), attempts.max()) >= 2**53:
        return None
    return Part(steps, attempts, {key: columns[key] for key in COLUMNS if key in columns})


def _keys(line: bytes) -> list[str] | None:
    """The keys of a row of numbers, in their order; None where it is something else."""
    try:
        pairs: Any = json.loads(line, object_pairs_hook=tuple)
    except (ValueError, RecursionError):
        return None
    if not isinstance(pairs, tuple):
        return None
    keys = [key for key, _ in pairs]
    numbers = all(value is None or type(value) in (int, float) for _, value in pairs)
    plain = all(_PLAIN_KEY.fullmatch(key) for key in keys)
    unique = len(set(keys)) == len(keys)
    return keys if "step" in keys and numbers and plain and unique else None


def _parse(block: bytes, keys: list[str]) -> pa.Table:
    """Keys and values of every row, a column each, and what follows on the last value.

    Raises:
        pa.ArrowException: a row has more or fewer cells, or a value that is no number.
    """
    types = {_END: pa.binary()}
    for key in keys:
        types[f"key {key}"] = pa.binary()
        types[key] = pa.int64() if key in _INTEGERS else pa.float64()
    names = [column for key in keys for column in (f"key {key}", key)]
    return pyarrow.csv.read_csv(
        pa.BufferReader(pa.py_buffer(_with_commas(block))),
        read_options=pyarrow.csv.ReadOptions(
            column_names=[*names, _END], block_size=_PIECE_BYTES, use_threads=False
        ),
        parse_options=pyarrow.csv.ParseOptions(quote_char=False),
        convert_options=pyarrow.csv.ConvertOptions(
            check_utf8=False, column_types=types, null_values=["null"], strings_can_be_null=False
        ),
    )


def _with_commas(block: bytes) -> npt.NDArray[np.uint8]:
    """The block with commas for `:` and `}`: arithmetic, which lets go of Python's lock."""
    text = np.frombuffer(block, dtype=np.uint8)
    found = np.empty_like(text)
    for begin in range(0, len(text), _SMALL_PIECE_BYTES):
        piece = text[begin : begin + _SMALL_PIECE_BYTES]
        commas = found[begin : begin + _SMALL_PIECE_BYTES]
        commas[:] = piece
        for separator in _OTHER_SEPARATORS:
            commas -= (piece == separator).view(np.uint8) * np.uint8(separator - _COMMA)
    return found


def _numbers(column: pa.ChunkedArray) -> npt.NDArray[Any]:
    """The values of a column; NaN where a number with a fraction is null.

    Not by pyarrow's own `to_numpy`, which imports pandas where it is installed, half a second.
    """
    kind = np.int64 if pa.types.is_integer(column.type) else np.float64
    parts = []
    for chunk in column.chunks:
        if chunk.null_count and kind is np.float64:
            chunk = chunk.fill_null(np.nan)
        begin = chunk.offset * np.dtype(kind).itemsize
        parts.append(np.frombuffer(chunk.buffers()[1], kind, len(chunk), begin))
    return np.concatenate(parts)


def _holds(column: pa.ChunkedArray, cell: bytes) -> bool:
    """Whether every row of a column is this cell, spaces around it aside."""
    for chunk in column.chunks:
        found = chunk[0].as_py()
        ends = np.frombuffer(chunk.buffers()[1], dtype=np.int32, count=len(chunk) + 1)
        if found.strip() != cell or ends[-1] != len(found) * len(chunk):
            return False
        if found and not chunk.buffers()[2][: ends[-1]].equals(pa.py_buffer(found * len(chunk))):
            return False
    return True
