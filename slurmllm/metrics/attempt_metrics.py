"""One metrics file of ours as parts of a table, a block of lines at a time.

Even blocks go through `uniform`, on several threads; others through the exact reader here, line
by line. Both read the same.
"""

from __future__ import annotations

import json
import math
import os
import re
from array import array
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv

from slurmllm.metrics.column_cache import keep, load_kept
from slurmllm.metrics.curves import COLUMNS
from slurmllm.metrics.merge import RowBlock
from slurmllm.metrics.row_reader import (
    CUT_LINE,
    Row,
    line_error,
    parse_row,
    read_error,
    row_fault,
)

_BLOCK_BYTES = 4 << 20
# Below this the exact reader is done before pyarrow is imported.
_SMALL_BYTES = 256 << 10
_SPELT = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}

Fault = tuple[int, str]  # line in its block, from 0, and what is wrong with it


@dataclass
class _Block:
    """Lines of a file as they are read.

    Attributes:
        part: The rows; None where there are none.
        torn: The last line of all, where it is not whole: cut, if nothing follows in the file.
        faults: Lines that are no rows.
        newer: Values of a kind that this version does not know, left out.
        empty: Whether there are blank lines alone.
        even: Whether `uniform` read it.
    """

    part: RowBlock | None = None
    torn: Fault | None = None
    faults: list[Fault] = field(default_factory=list)
    newer: list[Fault] = field(default_factory=list)
    empty: bool = False
    even: bool = False


def read_attempts(files: list[Path], lenient: bool) -> tuple[list[RowBlock], list[str]]:
    """Read metrics files, each of an attempt.

    Args:
        files: The files; rows that do not name their attempt are of their file's place here.
        lenient: Leave broken lines out with a warning.

    Returns:
        The rows in the order read, and warnings that name file and line.

    Raises:
        RunError: a file cannot be read; or, if not lenient, a line before the last is broken.
    """
    parts: list[RowBlock] = []
    warnings: list[str] = []
    try:
        large = sum(path.stat().st_size for path in files) >= _SMALL_BYTES
        with ThreadPoolExecutor(max_workers=min(4, (os.cpu_count() or 1) + 1)) as pool:
            for order, path in enumerate(files):
                status = path.stat()
                if (kept := load_kept(path, order, status)) is not None:
                    parts += kept
                    continue
                file = _File(path, order, lenient)
                blocks = list(file.blocks(pool if large else None))
                rows = [block.part for block in blocks if block.part is not None]
                if all(block.even for block in blocks):
                    keep(path, order, status, rows)
                parts += rows
                warnings += file.warnings()
    except OSError as error:
        raise read_error(Path(error.filename or files[0]), error) from error
    return parts, warnings


class _File:
    """A metrics file, and what was found wrong with it so far."""

    def __init__(self, path: Path, order: int, lenient: bool) -> None:
        self._path, self._order, self._lenient = path, order, lenient
        self._torn: Fault | None = None
        self._faults: list[Fault] = []
        self._newer: list[Fault] = []

    def blocks(self, pool: ThreadPoolExecutor | None) -> Iterator[_Block]:
        """The blocks in their order; a few are read ahead of the one that is yielded.

        Raises:
            RunError: a line is no row, and this is not lenient.
            OSError: the file cannot be read.
        """
        ahead: deque[tuple[int, Future[_Block]]] = deque()
        with self._path.open("rb") as stream:
            for begin, end in _spans(stream):
                if pool is None:
                    text = os.pread(stream.fileno(), end - begin, begin)
                    yield self._checked(read_exact(text, self._order, self._lenient), begin)
                    continue
                work = pool.submit(_read, stream.fileno(), begin, end, self._order, self._lenient)
                ahead.append((begin, work))
                if len(ahead) > 6:
                    first, done = ahead.popleft()
                    yield self._checked(done.result(), first)
            for first, done in ahead:
                yield self._checked(done.result(), first)

    def warnings(self) -> list[str]:
        """What was left out."""
        found = []
        if self._faults:
            line, what = self._faults[0]
            count = len(self._faults)
            lines = "the line is" if count == 1 else f"it and {count - 1} more such are"
            found.append(f"{self._path}:{line}: {what}; {lines} left out")
        if self._newer:
            line, what = self._newer[0]
            found.append(
                f"{self._path}:{line}: {what}; such values count as absent: the file may be of a "
                "newer version of slurmllm"
            )
        if self._torn is not None:
            found.append(f"{self._path}:{self._torn[0]}: the last line is cut and left out")
        return found

    def _checked(self, block: _Block, offset: int) -> _Block:
        """Take the faults of a block down, or raise the first of them."""
        if self._torn is not None and not block.empty:
            self._faults.append(self._torn)
            self._torn = None
        if block.faults or block.newer or block.torn:
            first = self._lines_before(offset) + 1
            self._faults += [(first + line, what) for line, what in block.faults]
            self._newer += [(first + line, what) for line, what in block.newer]
            if block.torn is not None:
                self._torn = (first + block.torn[0], block.torn[1])
        if self._faults and not self._lenient:
            raise line_error(self._path, *self._faults[0])
        return block

    def _lines_before(self, offset: int) -> int:
        count, left = 0, offset
        with self._path.open("rb") as stream:
            while left > 0 and (text := stream.read(min(left, _BLOCK_BYTES))):
                count += text.count(b"\n")
                left -= len(text)
        return count


def _spans(stream: BinaryIO) -> Iterator[tuple[int, int]]:
    """Begin and end, in bytes, of blocks of whole lines; the last one ends with the file."""
    begin, size = 0, os.fstat(stream.fileno()).st_size
    while begin < size:
        stream.seek(begin + _BLOCK_BYTES)
        stream.readline()
        end = min(stream.tell(), size)
        yield begin, end
        begin = end


def _read(descriptor: int, begin: int, end: int, attempt: int, lenient: bool) -> _Block:
    """Read a block by the fast reader, or by the exact one where that gives up."""

    text = os.pread(descriptor, end - begin, begin)
    part = read_uniform(text, attempt)
    return _Block(part, even=True) if part is not None else read_exact(text, attempt, lenient)


def read_exact(text: bytes, attempt: int, lenient: bool) -> _Block:
    """Read a block line by line.

    Args:
        text: Lines of a metrics file.
        attempt: Of rows that do not name theirs.
        lenient: Read on after a line that is no row.
    """
    block, rows = _Block(empty=True), _Rows()
    for number, line in enumerate(text.split(b"\n")):
        if not line.strip():
            continue
        block.empty = False
        if block.torn is not None:
            block.faults.append(block.torn)
            block.torn = None
        row = parse_row(line)
        wrong = row_fault(row) if row is not None else None
        if row is None:
            block.torn = (number, CUT_LINE)
        elif wrong is None:
            wrong, newer = rows.append(row, attempt, lenient)
            block.newer += [(number, what) for what in newer]
        if wrong is not None:
            block.faults.append((number, wrong))
        if block.faults and not lenient:
            break
    block.part = rows.part()
    return block


class _Rows:
    """Rows of a block, column by column."""

    def __init__(self) -> None:
        self._steps, self._attempts = array("q"), array("q")
        self._columns = {name: array("d") for name in COLUMNS}
        self._absent: dict[str, list[int]] = {name: [] for name in COLUMNS}

    def append(self, row: Row, attempt: int, lenient: bool) -> tuple[str | None, list[str]]:
        """Append a row.

        Returns:
            What is wrong with it, where it was not appended; and values that were left out.
        """
        number = row.get("attempt", attempt)
        if type(number) is not int or not 0 <= number < 2**53:
            return f"attempt is {number!r:.40}, not a whole number from 0", []
        values: dict[str, float] = {}
        newer: list[str] = []
        for name in COLUMNS:
            if name in row:
                value = _number(row[name])
                if value is None:
                    newer.append(f"{name} is {row[name]!r:.40}, not a number")
                else:
                    values[name] = value
        if newer and not lenient:
            return newer[0], []
        for name, column in self._columns.items():
            if name not in values:
                self._absent[name].append(len(self._steps))
            column.append(values.get(name, math.nan))
        self._steps.append(row["step"])
        self._attempts.append(number)
        return None, newer

    def part(self) -> RowBlock | None:
        """The rows; None where there are none."""
        count = len(self._steps)
        present = [name for name in COLUMNS if len(self._absent[name]) < count]
        absent = {}
        for name in present:
            if self._absent[name]:
                absent[name] = np.zeros(count, dtype=bool)
                absent[name][self._absent[name]] = True
        return (
            RowBlock(
                np.frombuffer(self._steps, dtype=np.int64),
                np.frombuffer(self._attempts, dtype=np.int64),
                {name: np.frombuffer(self._columns[name]) for name in present},
                absent,
            )
            if count
            else None
        )


def _number(value: object) -> float | None:
    """A value as a float; pydantic writes NaN as null or as its name."""
    if type(value) is float:
        return value
    if value is None:
        return math.nan
    if isinstance(value, str):
        return _SPELT.get(value)
    if isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            return math.inf if value > 0 else -math.inf
    return None


_COMMA, _OTHER_SEPARATORS = ord(","), (ord(":"), ord("}"))
_PLAIN_KEY = re.compile(r"\w+", re.ASCII)
_INTEGERS = ("step", "attempt")
_END = "end"
# The parser works through pieces of this size: they and their cells stay in a core's cache.
_PIECE_BYTES = 1 << 20
_SMALL_PIECE_BYTES = 1 << 18


def read_uniform(block: bytes, attempt: int) -> RowBlock | None:
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
    return RowBlock(steps, attempts, {key: columns[key] for key in COLUMNS if key in columns})


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
