"""Rows of a CSV file that cannot be read, and the lines at which they begin.

Arrow counts rows, not lines, and a row may span several. So for a fault the file is read a second
time, up to the row, by Python's slower reader.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Generator, Iterator

from slurmllm.data.build.faults import FAULT_EXAMPLES
from slurmllm.data.build.opening import OpenedInput
from slurmllm.data.build.readers.base import BOM, OnFault
from slurmllm.data.build.readers.lines import line_blocks

# A row's cells as latin-1, which keeps every byte.
Cells = list[str]


class RowFaults:
    """Faults of rows, put into the order of the rows.

    The first ones, which are those that are shown, are reported with their lines.
    """

    def __init__(self, stream: OpenedInput, delimiter: str, on_fault: OnFault) -> None:
        self._name, self._on_fault = stream.file.name, on_fault
        self._faults: dict[int, tuple[str, Callable[[Cells], bool]]] = {}
        self._rows = _rows(stream, delimiter)
        self._last = -1  # the row of names is row 0
        self._lines_left = FAULT_EXAMPLES

    def close(self) -> None:
        """Close the file."""
        self._rows.close()

    def add(self, row: int, reason: str, fits: Callable[[Cells], bool]) -> None:
        """Add a fault.

        Args:
            row: Counted from 1, without the row of names.
            reason: What is wrong with it.
            fits: Whether cells may be the row's; else the two readers disagree.
        """
        self._faults[row] = reason, fits

    def report(self, last: int) -> None:
        """Hand on the faults of rows up to this one."""
        for row in sorted(row for row in self._faults if row <= last):
            reason, fits = self._faults.pop(row)
            line = self._line(row, fits)
            place = f"row {row} (counted without the header)" if line is None else f"row {row}"
            self._on_fault(f"{self._name}:{'' if line is None else f'{line}:'} {place} {reason}")

    def _line(self, row: int, fits: Callable[[Cells], bool]) -> int | None:
        """The line at which a row begins, None where it is not known."""
        if not self._lines_left:
            return None
        self._lines_left -= 1
        try:
            for line, cells in self._rows:
                self._last += 1
                if self._last == row:
                    return line if fits(cells) else None
        except (csv.Error, OSError):
            self._lines_left = 0
        return None


def is_utf8(cells: Cells) -> bool:
    """Whether a row is UTF-8."""
    try:
        "".join(cells).encode("latin-1").decode()
    except UnicodeDecodeError:
        return False
    return True


def _rows(stream: OpenedInput, delimiter: str) -> Generator[tuple[int, Cells], None, None]:
    """First line and cells of each row that is not blank."""
    with OpenedInput(stream.file) as again:
        reader = csv.reader(_lines(again), delimiter=delimiter)
        first = 1
        for cells in reader:
            if cells:
                yield first, cells
            first = reader.line_num + 1


def _lines(stream: OpenedInput) -> Iterator[str]:
    begin = True
    for block in line_blocks(stream):
        text = (block.removeprefix(BOM) if begin else block).decode("latin-1")
        begin = False
        yield from io.StringIO(text, newline="")
