"""CSV and TSV files: one row per document, the text in one column, or in two.

Arrow reads them. It counts rows, not lines, and a row may span several lines; so for the line of an
unreadable row the file is read again, up to that row, by Python's slower reader.
"""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.csv as pc

from slurmllm.corpus.decompress import OpenedInput
from slurmllm.corpus.options import ERROR_EXAMPLES, Extent, ReadOptions
from slurmllm.corpus.readers.base import Documents, OnError, good_rows, line_blocks, no_column

# Bytes read for the names of the columns.
_HEADER_BYTES = 64 << 10
# Arrow reads no cell longer than a block.
_BLOCK_BYTES = 16 << 20

# A row's cells as latin-1, which keeps every byte.
Cells = list[str]


class RowErrors:
    """Errors of rows, reported in the order of the rows.

    The first ERROR_EXAMPLES of a file, which are those shown, are reported with their lines.
    """

    def __init__(self, stream: OpenedInput, delimiter: str, on_error: OnError) -> None:
        self._name, self._on_error = stream.file.name, on_error
        self._errors: dict[int, tuple[str, Callable[[Cells], bool]]] = {}
        self._rows = _rows(stream, delimiter)
        self._last = -1  # the header is row 0
        self._lines_left = ERROR_EXAMPLES

    def close(self) -> None:
        self._rows.close()

    def add(self, row: int, reason: str, fits: Callable[[Cells], bool]) -> None:
        """Add the error of a row, counted from 1 without the header.

        `fits` checks that cells can be the row's; otherwise the two readers disagree.
        """
        self._errors[row] = reason, fits

    def report(self, last: int) -> None:
        for row in sorted(row for row in self._errors if row <= last):
            reason, fits = self._errors.pop(row)
            line = self._find_line(row, fits)
            place = f"row {row} (counted without the header)" if line is None else f"row {row}"
            self._on_error(f"{self._name}:{'' if line is None else f'{line}:'} {place} {reason}")

    def _find_line(self, row: int, fits: Callable[[Cells], bool]) -> int | None:
        """The line at which a row begins, None if it is unknown."""
        if not self._lines_left:
            return None
        self._lines_left -= 1
        try:
            for line, cells in self._rows:
                self._last += 1
                if self._last == row:
                    return line if fits(cells) else None
        except (csv.Error, OSError):  # csv.Error: a cell of more than 131,072 bytes
            self._lines_left = 0
        return None


def is_utf8(cells: Cells) -> bool:
    try:
        "".join(cells).encode("latin-1").decode()
    except UnicodeDecodeError:
        return False
    return True


def _rows(stream: OpenedInput, delimiter: str) -> Generator[tuple[int, Cells], None, None]:
    """First line and cells of each row that is not blank."""

    def refuse(error: str, _: Extent = "document") -> None:
        raise csv.Error(error)

    with OpenedInput(stream.file) as again:
        lines = itertools.chain.from_iterable(
            io.StringIO(block.decode("latin-1"), newline="") for block in line_blocks(again, refuse)
        )
        reader = csv.reader(lines, delimiter=delimiter)
        first = 1
        for cells in reader:
            if cells:
                yield first, cells
            first = reader.line_num + 1


def read_delimited(
    stream: OpenedInput, options: ReadOptions, on_error: OnError
) -> Iterator[Documents]:
    name = stream.file.name
    rows = 0
    skipped: list[int] = []
    with contextlib.closing(RowErrors(stream, _delimiter(stream), on_error)) as errors:
        try:
            for batch in _open_csv(stream, options.keys, skipped, errors):
                good = good_rows(
                    batch.columns,
                    options.keys,
                    rows + 1,
                    lambda row, reason: errors.add(row, reason, lambda cells: not is_utf8(cells)),
                    skipped,
                )
                rows += batch.num_rows
                errors.report(rows + len(skipped))
                yield good
            errors.report(rows + len(skipped))
        except pa.ArrowKeyError:  # its message does not list the columns
            with OpenedInput(stream.file) as again:
                header = again.read(_HEADER_BYTES).decode("utf-8-sig", "replace")
            lines = io.StringIO(header, newline="")
            names = next(csv.reader(lines, delimiter=_delimiter(stream)), [])
            missing = next(key for key in options.keys if key not in names)
            on_error(f"{name}: {no_column(missing, names)}", "file")
        except pa.ArrowInvalid as error:
            errors.report(rows + len(skipped))
            if stream.offset_bytes == 0:
                on_error(f"{name}: an empty file, without a header", "file")
                return
            reason = str(error)
            if "straddling" in reason:
                reason = (
                    f"a cell of more than {_BLOCK_BYTES >> 20} MB, or a quotation mark that is "
                    "never closed"
                )
            on_error(
                f"{name}: after row {rows + len(skipped)} (counted without the header): {reason}",
                "rest",
            )


def _open_csv(
    stream: OpenedInput, keys: tuple[str, ...], skipped: list[int], errors: RowErrors
) -> pc.CSVStreamingReader:
    """Arrow's reader of the columns; adds rows of another length to `skipped` and `errors`.

    CAUTION: Arrow reads ahead of the batches and ignores exceptions of the handler, so errors are
    only collected here and reported with their batch.
    """

    def odd_row(row: Any) -> str:
        columns = row.actual_columns
        skipped.append(row.number - 1)  # Arrow counts the header
        errors.add(
            skipped[-1],
            f"has {columns} columns, the header has {row.expected_columns}: {row.text[:60]!r}",
            lambda cells: len(cells) == columns,
        )
        return "skip"

    return pc.open_csv(
        pa.PythonFile(stream, "r"),
        # One thread: other processes read other shards at the same time.
        read_options=pc.ReadOptions(use_threads=False, block_size=_BLOCK_BYTES),
        parse_options=pc.ParseOptions(
            delimiter=_delimiter(stream), newlines_in_values=True, invalid_row_handler=odd_row
        ),
        convert_options=pc.ConvertOptions(
            # Binary: good_rows checks for UTF-8, and finds the row.
            column_types={key: pa.large_binary() for key in keys},
            include_columns=list(keys),
            strings_can_be_null=False,
        ),
    )


def _delimiter(stream: OpenedInput) -> str:
    return "\t" if stream.file.tabs else ","
