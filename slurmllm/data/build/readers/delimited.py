"""CSV and TSV: a row a document, the text in the column that the first line names.

Cells may be quoted and hold line ends.
"""

from __future__ import annotations

import contextlib
import csv
import io
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.csv as pc

from slurmllm.data.build.opening import OpenedInput
from slurmllm.data.build.options import ReadOptions
from slurmllm.data.build.readers.base import (
    Documents,
    OnFault,
    good_rows,
    no_column,
)
from slurmllm.data.build.readers.csv_rows import RowFaults, is_utf8

_NAMES_BYTES = 64 << 10
# Arrow reads no cell that is longer than a block.
_BLOCK_BYTES = 16 << 20


def read_delimited(
    stream: OpenedInput, options: ReadOptions, on_fault: OnFault
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
