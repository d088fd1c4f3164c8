"""The columnar reader of our metrics files, one per attempt.

Rows of the trainer are uniform: the same keys, all numbers. Such blocks are parsed by pyarrow, in
a fraction of the time that it takes line by line, as other blocks are read, with the same result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.json

from slurmllm.core.format import format_plural
from slurmllm.core.metrics.curves import COLUMNS, DamageWarning
from slurmllm.core.metrics.merge import FileContent, FileRows, RowBlock
from slurmllm.core.metrics.row_reader import (
    CUT_LINE,
    json_number,
    line_error,
    parse_row,
    reading,
    row_fault,
)
from slurmllm.core.run.safe_files import open_regular, read_pieces

_BLOCK_BYTES = 4 << 20
_LONGEST_LINE = 4 << 20  # bytes: a crash may leave that many NUL bytes
# Smaller runs are read line by line in less time than pyarrow's first call takes.
_SMALL_BYTES = 256 << 10

LineFault = tuple[int, str]  # line, and what is wrong with it


def read_attempts(files: list[Path], lenient: bool, by_file: FileRows | None = None) -> FileContent:
    """Read metrics files, each of an attempt; rows without an attempt get their file's index.

    Returns the rows, and warnings that name file and line; fills `by_file` for a second reader.
    Raises RunError if a file cannot be read or, if not lenient, a line but the last is broken.
    """
    rows = []
    warnings = []

    def read(path: Path, attempt: int) -> FileContent:
        with reading(path):
            return _read_file(path, attempt, lenient=lenient, fast=fast)

    # A file that is not there is reported by its reader.
    fast = sum(path.stat().st_size for path in files if path.is_file()) >= _SMALL_BYTES
    with ThreadPoolExecutor(4) as pool:
        for path, content in zip(files, pool.map(read, files, count()), strict=False):
            rows += content[0]
            warnings += content[1]
            if by_file is not None:
                by_file[path] = content
    return rows, warnings


def _read_file(path: Path, attempt: int, *, lenient: bool, fast: bool) -> FileContent:
    """Read a file in blocks, each by the fast reader or line by line."""
    blocks = []
    faults = []
    unknown_values = []  # skipped
    cut: LineFault | None = None  # truncated last line; an error if a non-blank line follows
    number = 0
    with open_regular(path) as stream:
        for block in read_pieces(stream, _BLOCK_BYTES, _LONGEST_LINE):
            uniform = read_uniform(block, attempt) if fast and cut is None else None
            if uniform is not None:
                blocks.append(uniform)
                number += len(uniform.steps)
                continue
            rows = []
            for line in BytesIO(block):
                number += 1
                if not line.strip():
                    continue
                if cut is not None:
                    faults.append(cut)
                    cut = None
                row = parse_row(line)
                if row is None:
                    cut = (number, CUT_LINE)
                elif (fault := row_fault(row)) is not None:
                    faults.append((number, fault))
                else:
                    of_row = row.get("attempt", attempt)
                    values = {name: json_number(row[name]) for name in COLUMNS if name in row}
                    unknown = [
                        f"{name} is {row[name]!r:.40}, not a number"
                        for name, value in values.items()
                        if value is None
                    ]
                    if type(of_row) is not int or not 0 <= of_row < 2**53:
                        complaint = f"attempt is {of_row!r:.40}, not a whole number from 0"
                        faults.append((number, complaint))
                    elif unknown and not lenient:
                        faults.append((number, unknown[0]))
                    else:
                        unknown_values += [(number, complaint) for complaint in unknown]
                        numbers = {n: value for n, value in values.items() if value is not None}
                        rows.append((row["step"], of_row, numbers))
                if faults and not lenient:
                    raise line_error(path, *faults[0])
            blocks += _row_block(rows)
    return blocks, _damage_warnings(path, faults, unknown_values, cut)


def _damage_warnings(
    path: Path,
    faults: Sequence[LineFault],
    unknown_values: Sequence[LineFault],
    cut: LineFault | None,
) -> list[str]:
    further = format_plural(len(faults) - 1, "other invalid line")
    notes = (
        (faults, f"skipped this line{f' and {further}' if len(faults) > 1 else ''}"),
        (
            unknown_values,
            "such values are treated as missing; a newer version of slurmllm may have written the "
            "file",
        ),
    )
    warnings: list[str] = [
        DamageWarning(
            f"{path}:{damaged[0][0]}: {damaged[0][1]}; {note}", [line for line, _ in damaged]
        )
        for damaged, note in notes
        if damaged
    ]
    if cut is not None:
        warnings.append(f"{path}:{cut[0]}: skipped the truncated last line")
    return warnings


def _row_block(rows: list[tuple[int, int, dict[str, float]]]) -> list[RowBlock]:
    if not rows:
        return []
    steps, attempts, by_row = zip(*rows, strict=True)
    columns = {}
    absent = {}
    for name in COLUMNS:
        missing = np.array([name not in values for values in by_row])
        if not missing.all():
            columns[name] = np.array([values.get(name, math.nan) for values in by_row])
            if missing.any():
                absent[name] = missing
    return [RowBlock(np.array(steps), np.array(attempts), columns, absent)]


_INTEGERS = ("step", "attempt")
_PARSE_BYTES = 1 << 20  # pieces of this size stay in a core's cache


def read_uniform(block: bytes, attempt: int) -> RowBlock | None:
    """Read whole lines by pyarrow; None if not all have the keys of the first one, and numbers."""
    first = parse_row(block[: block.find(b"\n") + 1])
    if not isinstance(first, dict) or "step" not in first:
        return None
    types = [(key, pa.int64() if key in _INTEGERS else pa.float64()) for key in first]
    try:
        table = pyarrow.json.read_json(
            pa.BufferReader(block),
            pyarrow.json.ReadOptions(use_threads=False, block_size=_PARSE_BYTES),
            pyarrow.json.ParseOptions(pa.schema(types), unexpected_field_behavior="error"),
        )
    # Another key, or a value that is not a number; or a key that is no Unicode
    except (pa.ArrowException, UnicodeEncodeError):
        return None
    # pyarrow reads several objects on a line, one on several lines, and a missing key as null.
    characters = np.frombuffer(block, np.uint8)
    newlines = np.flatnonzero(characters == ord("\n"))
    if (characters[newlines - 1] != ord("}")).any() or not block.endswith(b"}\n"):
        return None
    with_null = [key for key in first if table[key].null_count]  # the others are in each row
    counts = [len(newlines), *(block.count(b'"%s"' % key.encode()) for key in with_null)]
    if any(count != table.num_rows for count in counts):
        return None
    columns = {key: _to_numpy(table[key]) for key in first}
    for key, values in columns.items():
        # pyarrow reads names of numbers ("Inf", "-NaN") that JSON, as Python reads it, lacks.
        nulls = table[key].null_count
        if np.count_nonzero(~np.isfinite(values)) != nulls or (nulls and key in _INTEGERS):
            return None
    steps = columns["step"]
    attempts = columns.get("attempt", np.full(len(steps), attempt, np.int64))
    if min(steps.min(), attempts.min()) < 0 or max(steps.max(), attempts.max()) >= 2**53:
        return None
    return RowBlock(steps, attempts, {key: columns[key] for key in COLUMNS if key in columns})


def _to_numpy(column: pa.ChunkedArray) -> npt.NDArray[Any]:
    """Return the values of a column; NaN for nulls among floats.

    pyarrow's own `to_numpy` and `fill_null` import pandas, which takes half a second.
    """
    kind = np.int64 if pa.types.is_integer(column.type) else np.float64
    chunks = []
    for chunk in column.chunks:
        begin = chunk.offset
        count = len(chunk)
        present, values = chunk.buffers()
        numbers = np.frombuffer(values, kind, count, begin * np.dtype(kind).itemsize)
        if chunk.null_count and kind is np.float64:
            bits = np.unpackbits(np.frombuffer(present, np.uint8), bitorder="little")
            numbers = np.where(bits[begin : begin + count], numbers, np.nan)
        chunks.append(numbers)
    return np.concatenate(chunks)
