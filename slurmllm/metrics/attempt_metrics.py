"""The columnar reader of our metrics files, one per attempt; several threads read blocks of lines.

Rows of the trainer are uniform: the same keys in the same order, all numbers. Such blocks are
parsed by pyarrow's CSV reader, at about 150 MB/s per core. Other blocks are read line by line, with
the same result.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv

from slurmllm.format import format_plural
from slurmllm.metrics.curves import COLUMNS, DamageWarning
from slurmllm.metrics.merge import FileRows, RowBlock
from slurmllm.metrics.row_reader import (
    CUT_LINE,
    json_number,
    line_error,
    parse_row,
    read_error,
    row_fault,
)
from slurmllm.run.safe_files import LONGEST_LINE, open_regular

_BLOCK_BYTES = 4 << 20
# Smaller runs are read line by line in less time than the import of pyarrow's reader takes.
_SMALL_BYTES = 256 << 10

LineFault = tuple[int, str]  # line, from 0 in its block, and what is wrong with it


@dataclass
class _Block:
    """Result of reading a block of lines."""

    lines: int  # number of newlines
    rows: RowBlock | None = None
    cut: LineFault | None = None  # truncated last line; an error if a non-blank line follows
    faults: list[LineFault] = field(default_factory=list)
    unknown_values: list[LineFault] = field(default_factory=list)  # skipped
    empty: bool = False  # all lines are blank


def read_attempts(
    files: list[Path], lenient: bool, by_file: FileRows | None = None
) -> tuple[list[RowBlock], list[str]]:
    """Read metrics files, each of an attempt; rows without an attempt get their file's index.

    Args:
        by_file: Filled with what was read of each file, for a second reader.

    Returns:
        The rows in the order read, and warnings that name file and line.

    Raises:
        RunError: a file cannot be read; or, if not lenient, a line before the last is broken.
    """
    rows: list[RowBlock] = []
    warnings: list[str] = []
    try:
        large = sum(path.stat().st_size for path in files) >= _SMALL_BYTES
        spans = [_block_spans(path) for path in files]
        with ThreadPoolExecutor(max_workers=min(4, (os.cpu_count() or 1) + 1)) as pool:
            # Many files are read side by side, and so are the blocks of a large one.
            blocks = (pool.map if large else map)(
                partial(_read_block, lenient=lenient, fast=large),
                (number for number, file_spans in enumerate(spans) for _ in file_spans),
                (path for path, file_spans in zip(files, spans, strict=True) for _ in file_spans),
                chain.from_iterable(spans),
            )
            for path, file_spans in zip(files, spans, strict=True):
                content = _collect(path, islice(blocks, len(file_spans)), lenient)
                rows += content[0]
                warnings += content[1]
                if by_file is not None:
                    by_file[path] = content
    except OSError as error:
        raise read_error(Path(error.filename or files[0]), error) from error
    return rows, warnings


def _block_spans(path: Path) -> list[tuple[int, int]]:
    """Return begin and end, in bytes, of blocks of whole lines."""
    info = path.stat()
    if stat.S_ISREG(info.st_mode) and 0 < info.st_size <= _BLOCK_BYTES:
        return [(0, info.st_size)]  # opened once only, to be read
    spans, begin = [], 0
    with open_regular(path) as stream:
        size = os.fstat(stream.fileno()).st_size
        while begin < size:
            stream.seek(begin + _BLOCK_BYTES)
            if len(stream.readline(LONGEST_LINE + 1)) > LONGEST_LINE:
                what = f"a line of more than {LONGEST_LINE:,} bytes"
                raise OSError(errno.EFBIG, what, str(path))
            spans.append((begin, min(stream.tell(), size)))
            begin = spans[-1][1]
    return spans


def _collect(
    path: Path, blocks: Iterable[_Block], lenient: bool
) -> tuple[list[RowBlock], list[str]]:
    """Return the rows of a file, with warnings about what was skipped.

    Raises:
        RunError: a line is not a row, and this is not lenient.
    """
    rows: list[RowBlock] = []
    faults: list[LineFault] = []
    unknown_values: list[LineFault] = []
    cut: LineFault | None = None
    first = 1  # the block's first line
    for block in blocks:
        if cut is not None and not block.empty:
            faults.append(cut)
            cut = None
        faults += [(first + line, what) for line, what in block.faults]
        unknown_values += [(first + line, what) for line, what in block.unknown_values]
        if block.cut is not None:
            cut = (first + block.cut[0], block.cut[1])
        if faults and not lenient:
            raise line_error(path, *faults[0])
        first += block.lines
        rows += [] if block.rows is None else [block.rows]
    warnings = list[str]()
    if faults:
        others = format_plural(len(faults) - 1, "other invalid line")
        also = f" and {others}" if len(faults) > 1 else ""
        text = f"{path}:{faults[0][0]}: {faults[0][1]}; skipped this line{also}"
        warnings.append(DamageWarning(text, [line for line, _ in faults]))
    if unknown_values:
        line, what = unknown_values[0]
        text = (
            f"{path}:{line}: {what}; such values are treated as missing; a newer version of "
            "slurmllm may have written the file"
        )
        warnings.append(DamageWarning(text, [line for line, _ in unknown_values]))
    if cut is not None:
        warnings.append(f"{path}:{cut[0]}: skipped the truncated last line")
    return rows, warnings


def _read_block(
    attempt: int, path: Path, span: tuple[int, int], lenient: bool, fast: bool
) -> _Block:
    """Read a block by the fast reader, or else line by line."""
    with open_regular(path) as stream:
        text = os.pread(stream.fileno(), span[1] - span[0], span[0])
    rows = read_uniform(text, attempt) if fast else None
    if rows is not None:
        return _Block(text.count(b"\n"), rows)
    return _read_lines(text, attempt, lenient)


def _read_lines(text: bytes, attempt: int, lenient: bool) -> _Block:
    """Read a block line by line, up to the first broken line if not lenient."""
    block = _Block(text.count(b"\n"), empty=True)
    rows: list[tuple[int, int, dict[str, float]]] = []
    for number, line in enumerate(text.split(b"\n")):
        if not line.strip():
            continue
        block.empty = False
        if block.cut is not None:
            block.faults.append(block.cut)
            block.cut = None
        row = parse_row(line)
        if row is None:
            block.cut = (number, CUT_LINE)
        elif (fault := row_fault(row)) is not None:
            block.faults.append((number, fault))
        else:
            of_row = row.get("attempt", attempt)
            values = {name: json_number(row[name]) for name in COLUMNS if name in row}
            unknown = [
                f"{name} is {row[name]!r:.40}, not a number"
                for name, value in values.items()
                if value is None
            ]
            if type(of_row) is not int or not 0 <= of_row < 2**53:
                what = f"attempt is {of_row!r:.40}, not a whole number from 0"
                block.faults.append((number, what))
            elif unknown and not lenient:
                block.faults.append((number, unknown[0]))
            else:
                block.unknown_values += [(number, what) for what in unknown]
                numbers = {name: value for name, value in values.items() if value is not None}
                rows.append((row["step"], of_row, numbers))
        if block.faults and not lenient:
            break
    if rows:
        steps, attempts, by_row = zip(*rows, strict=True)
        columns, absent = {}, {}
        for name in COLUMNS:
            missing = np.array([name not in values for values in by_row])
            if not missing.all():
                columns[name] = np.array([values.get(name, math.nan) for values in by_row])
                if missing.any():
                    absent[name] = missing
        block.rows = RowBlock(np.array(steps), np.array(attempts), columns, absent)
    return block


_COMMAS = bytes.maketrans(b":}", b",,")
_PLAIN_KEY = re.compile(r"\w+", re.ASCII)
_INTEGERS = ("step", "attempt")
_END = "end"
_PARSE_BYTES = 1 << 20  # pieces of this size stay in a core's cache


def read_uniform(block: bytes, attempt: int) -> RowBlock | None:
    """Read whole lines of a metrics file as CSV, in which keys and values alternate.

    Returns:
        The rows, None if they are not uniform; `attempt` is used for rows without one.
    """
    # pyarrow takes a carriage return for the end of a line, JSON for a space.
    if b"\r" in block:
        return None
    keys = _uniform_keys(block[: block.find(b"\n") + 1])
    if keys is None:
        return None
    # The empty cell after the last value shows that no row has extra cells.
    types = {_END: pa.binary()}
    for key in keys:
        types[f"key {key}"] = pa.binary()
        types[key] = pa.int64() if key in _INTEGERS else pa.float64()
    names = [column for key in keys for column in (f"key {key}", key)]
    try:
        table = pyarrow.csv.read_csv(
            pa.BufferReader(block.translate(_COMMAS)),
            read_options=pyarrow.csv.ReadOptions(
                column_names=[*names, _END], block_size=_PARSE_BYTES, use_threads=False
            ),
            parse_options=pyarrow.csv.ParseOptions(quote_char=False),
            convert_options=pyarrow.csv.ConvertOptions(
                check_utf8=False,
                column_types=types,
                null_values=["null"],
                strings_can_be_null=False,
            ),
        )
    except pa.ArrowException:  # another number of cells, or a value that is not a number
        return None
    cells = [b'"%s"' % key.encode() for key in keys] + [b""]
    cells[0] = b"{" + cells[0]
    cell_names = [*(f"key {key}" for key in keys), _END]
    if not all(_is_constant(table[n], cell) for n, cell in zip(cell_names, cells, strict=True)):
        return None
    columns = {}
    for key in keys:
        values = _to_numpy(table[key])
        # pyarrow reads names of numbers ("inf", "nan") that JSON does not have.
        odd = np.count_nonzero(~np.isfinite(values))
        if odd != table[key].null_count or (odd and key in _INTEGERS):
            return None
        columns[key] = values
    steps = columns["step"]
    attempts = columns.get("attempt", np.full(len(steps), attempt, dtype=np.int64))
    if min(steps.min(), attempts.min()) < 0 or max(steps.max(), attempts.max()) >= 2**53:
        return None
    return RowBlock(steps, attempts, {key: columns[key] for key in COLUMNS if key in columns})


def _uniform_keys(line: bytes) -> list[str] | None:
    """Return the keys of a row of numbers in their order; None if it is something else."""
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


def _to_numpy(column: pa.ChunkedArray) -> npt.NDArray[Any]:
    """Return the values of a column; NaN for nulls among floats.

    pyarrow's own `to_numpy` and `fill_null` import pandas if it is installed, which takes half a
    second.
    """
    kind = np.int64 if pa.types.is_integer(column.type) else np.float64
    chunks = []
    for chunk in column.chunks:
        begin, count = chunk.offset, len(chunk)
        present, values = chunk.buffers()
        numbers = np.frombuffer(values, kind, count, begin * np.dtype(kind).itemsize)
        if chunk.null_count and kind is np.float64:
            bits = np.unpackbits(np.frombuffer(present, np.uint8), bitorder="little")
            numbers = np.where(bits[begin : begin + count], numbers, np.nan)
        chunks.append(numbers)
    return np.concatenate(chunks)


def _is_constant(column: pa.ChunkedArray, cell: bytes) -> bool:
    """Return whether every row of a column equals `cell`, with the same spaces around it."""
    for chunk in column.chunks:
        first = chunk[0].as_py()
        ends = np.frombuffer(chunk.buffers()[1], dtype=np.int32, count=len(chunk) + 1)
        if first.strip() != cell or ends[-1] != len(first) * len(chunk):
            return False
        if first and not chunk.buffers()[2][: ends[-1]].equals(pa.py_buffer(first * len(chunk))):
            return False
    return True
