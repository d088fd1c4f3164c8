"""One metrics file of ours as parts of a table, a block of lines at a time.

Even blocks go through `uniform`, on several threads; others through the exact reader here, line
by line. Both read the same.
"""

from __future__ import annotations

import math
import os
from array import array
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np

from slurmllm.analysis.curves import COLUMNS
from slurmllm.analysis.reading.kept import keep, load_kept
from slurmllm.analysis.reading.rows import (
    NOT_WHOLE,
    Row,
    fault_at,
    fault_of_row,
    parse_row,
    unreadable,
)
from slurmllm.analysis.reading.table import Part

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

    part: Part | None = None
    torn: Fault | None = None
    faults: list[Fault] = field(default_factory=list)
    newer: list[Fault] = field(default_factory=list)
    empty: bool = False
    even: bool = False


def read_attempts(files: list[Path], lenient: bool) -> tuple[list[Part], list[str]]:
    """Read metrics files, each of an attempt.

    Args:
        files: The files; rows that do not name their attempt are of their file's place here.
        lenient: Leave broken lines out with a warning.

    Returns:
        The rows in the order read, and warnings that name file and line.

    Raises:
        RunError: a file cannot be read; or, if not lenient, a line before the last is broken.
    """
    parts: list[Part] = []
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
        raise unreadable(Path(error.filename or files[0]), error) from error
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
            raise fault_at(self._path, *self._faults[0])
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
    from slurmllm.analysis.reading.uniform import read_uniform

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
        wrong = fault_of_row(row) if row is not None else None
        if row is None:
            block.torn = (number, NOT_WHOLE)
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

    def part(self) -> Part | None:
        """The rows; None where there are none."""
        count = len(self._steps)
        present = [name for name in COLUMNS if len(self._absent[name]) < count]
        absent = {}
        for name in present:
            if self._absent[name]:
                absent[name] = np.zeros(count, dtype=bool)
                absent[name][self._absent[name]] = True
        return (
            Part(
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
