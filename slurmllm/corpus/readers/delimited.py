"""Rows of a CSV file that cannot be read, and the lines at which they begin.

Arrow counts rows, not lines, and a row may span several. So for a fault the file is read a second
time, up to the row, by Python's slower reader.
"""

from __future__ import annotations

import contextlib
import csv
import io
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.csv as pc

from slurmllm.corpus.decompress import OpenedInput
from slurmllm.corpus.options import ERROR_EXAMPLES, ReadOptions
from slurmllm.corpus.readers.base import (
    BOM,
    Documents,
    OnError,
    good_rows,
    line_blocks,
    no_column,
)

# A row's cells as latin-1, which keeps every byte.
Cells = list[str]


class RowFaults:
    """Faults of rows, put into the order of the rows.

    The first ones, which are those that are shown, are reported with their lines.
    """

    def __init__(self, stream: OpenedInput, delimiter: str, on_fault: OnError) -> None:
        self._name, self._on_fault = stream.file.name, on_fault
        self._faults: dict[int, tuple[str, Callable[[Cells], bool]]] = {}
        self._rows = _rows(stream, delimiter)
        self._last = -1  # the row of names is row 0
        self._lines_left = ERROR_EXAMPLES

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


_NAMES_BYTES = 64 << 10
# Arrow reads no cell that is longer than a block.
_BLOCK_BYTES = 16 << 20


def read_delimited(
    stream: OpenedInput, options: ReadOptions, on_fault: OnError
) -> Iterator[Documents]:
    """The documents of a CSV or TSV file."""
    name = stream.file.name
    rows = 0
    skipped: list[int] = []
    with contextlib.closing(RowFaults(stream, _delimiter(stream), on_fault)) as faults:
        try:
            for batch in _open(stream, options.keys, skipped, faults):
                good = good_rows(
                    batch.columns,
                    options.keys,
                    rows + 1,
                    lambda row, reason: faults.add(row, reason, lambda cells: not is_utf8(cells)),
                    skipped,
                )
                rows += batch.num_rows
                faults.report(rows + len(skipped))
                yield good
            faults.report(rows + len(skipped))
        except pa.ArrowKeyError:  # whose text has one name and not the others
            names = _names(stream)
            missing = next(key for key in options.keys if key not in names)
            on_fault(f"{name}: {no_column(missing, names)}", "file")
        except pa.ArrowInvalid as error:
            faults.report(rows + len(skipped))
            if stream.offset_bytes == 0:
                on_fault(f"{name}: an empty file, without the line of names", "file")
                return
            reason = str(error)
            if "straddling" in reason:
                reason = (
                    f"a cell of more than {_BLOCK_BYTES >> 20} MB, or a quotation mark that is "
                    "never closed"
                )
            on_fault(
                f"{name}: after row {rows + len(skipped)} (counted without the header): {reason}",
                "rest",
            )


def _open(
    stream: OpenedInput, keys: tuple[str, ...], skipped: list[int], faults: RowFaults
) -> pc.CSVStreamingReader:
    """Arrow's reader of the columns; adds rows of another length to `skipped` and `faults`.

    It may be some rows ahead, and swallows what is raised in it.
    """

    def odd_row(row: Any) -> str:
        columns = row.actual_columns
        skipped.append(row.number - 1)  # Arrow counts the line of names
        faults.add(
            skipped[-1],
            f"has {columns} columns where the first line names {row.expected_columns}: "
            f"{row.text[:60]!r}",
            lambda cells: len(cells) == columns,
        )
        return "skip"

    return pc.open_csv(
        pa.PythonFile(stream, "r"),
        read_options=pc.ReadOptions(use_threads=False, block_size=_BLOCK_BYTES),
        parse_options=pc.ParseOptions(
            delimiter=_delimiter(stream),
            newlines_in_values=True,
            invalid_row_handler=odd_row,
        ),
        convert_options=pc.ConvertOptions(
            # Binary: the check for UTF-8 is good_rows', which finds the row.
            column_types={key: pa.large_binary() for key in keys},
            include_columns=list(keys),
            strings_can_be_null=False,
        ),
    )


def _delimiter(stream: OpenedInput) -> str:
    return "\t" if stream.file.tabs else ","


def _names(stream: OpenedInput) -> list[str]:
    with OpenedInput(stream.file) as again:
        begin = again.read(_NAMES_BYTES).decode("utf-8-sig", "replace")
    return next(csv.reader(io.StringIO(begin, newline=""), delimiter=_delimiter(stream)), [])
