"""CSV and TSV: a row a document, the text in the column that the first line names.

Cells may be quoted and hold line ends. Rows are counted from 1, without the line of names.
"""

from __future__ import annotations

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

_NAMES_BYTES = 64 << 10
# Arrow reads no cell that is longer than a block.
_BLOCK_BYTES = 16 << 20


def read_delimited(
    stream: OpenedInput, options: ReadOptions, on_fault: OnFault
) -> Iterator[Documents]:
    """The documents of a CSV or TSV file."""
    name = stream.file.name
    keys = options.keys
    rows = 0
    skipped: list[int] = []
    odd: list[str] = []  # faults; Arrow may be some rows ahead, and swallows what is raised in it

    def odd_row(row: Any) -> str:
        skipped.append(row.number - 1)  # Arrow counts the line of names
        odd.append(
            f"{name}: row {skipped[-1]} has {row.actual_columns} columns where the first line "
            f"names {row.expected_columns}: {row.text[:60]!r}"
        )
        return "skip"

    def report_odd() -> None:
        while odd:
            on_fault(odd.pop(0))

    try:
        reader = pc.open_csv(
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
        for batch in reader:
            report_odd()
            yield good_rows(batch.columns, keys, rows + 1, name, on_fault, skipped)
            rows += batch.num_rows
        report_odd()
    except pa.ArrowKeyError:  # whose text has one name and not the others
        names = _names(stream)
        missing = next(key for key in keys if key not in names)
        on_fault(f"{name}: {no_column(missing, names)}")
    except pa.ArrowInvalid as error:
        report_odd()
        if stream.offset_bytes == 0:
            reason = "an empty file, without the line of names"
        elif "straddling" in str(error):
            reason = (
                f"after row {rows + len(skipped)}: a cell of more than {_BLOCK_BYTES >> 20} MB, or "
                "a quotation mark that is never closed"
            )
        else:
            reason = f"after row {rows + len(skipped)}: {error}"
        on_fault(f"{name}: {reason}")


def _delimiter(stream: OpenedInput) -> str:
    return "\t" if stream.file.tabs else ","


def _names(stream: OpenedInput) -> list[str]:
    with OpenedInput(stream.file) as again:
        begin = again.read(_NAMES_BYTES).decode("utf-8-sig", "replace")
    return next(csv.reader(io.StringIO(begin, newline=""), delimiter=_delimiter(stream)), [])
