"""Logs as tables (CSV, TSV) and as JSON, such as Lightning's CSVLogger and wandb write them."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from slurmllm.errors import RunError
from slurmllm.metrics.log_series import Log, RowCollector, log_suffix, open_log
from slurmllm.metrics.row_reader import parse_row
from slurmllm.metrics.tags import step_keys

# wandb's table of a chart: `<run> - <metric>`, and the range over the runs that were averaged
_WANDB_COLUMN = re.compile(r"(?P<run>.+?) - (?P<metric>.+)")
_WANDB_RANGE = ("__MIN", "__MAX")
# Keys of a JSON document that may hold the rows, preferred first
_ROW_KEYS = ("log_history", "history", "metrics", "logs", "rows", "data")
_NAMED_NUMBERS = {"NaN": math.nan, "nan": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def read_table(path: Path, tags: Mapping[str, str]) -> Log:
    """Read a table; a cell that is blank or no number is an absent value.

    Raises:
        RunError: it has no header or no rows, or no column is the step.
        OSError: the file cannot be read.
    """
    rows, warnings = RowCollector(), list[str]()
    with open_log(path, warnings) as stream:
        text = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="replace", newline="")
        # A node that crashed may leave NUL bytes, which csv refuses.
        lines = (line.replace("\0", "") for line in text)
        header_line = next(lines, "")
        tab = log_suffix(path) == ".tsv"
        delimiter = "\t" if tab else max(",;\t", key=header_line.count)
        header: list[str] = []
        with contextlib.suppress(csv.Error):  # a line of 128 KiB without a separator
            cells = next(csv.reader([header_line], delimiter=delimiter), [])
            header = [name.strip() for name in cells]
        if not any(header):
            raise RunError(f"no metrics in {path}: it has no header; a table of metrics has one")
        names = _metric_names(header)
        if any(tag in header and tag not in names for tag in tags.values()):
            names = header
        reader = csv.reader(lines, delimiter=delimiter)
        short: list[int] = []  # line numbers; the header is line 1
        last = 0
        try:
            for cells in reader:
                if not cells:
                    continue
                last = reader.line_num + 1
                if len(cells) < len(names):
                    short.append(last)
                else:
                    rows.add(_cell_numbers(names, cells))
        except csv.Error as error:
            warnings.append(f"{path}:{reader.line_num + 1}: {error}; read as far as that")
    if short == [last]:
        warnings.append(f"{path}:{last}: the last line is cut and left out")
    elif short:
        warnings.append(
            f"{path}:{short[0]}: {len(short)} rows have fewer than the header's {len(names)} "
            "columns and are left out"
        )
    return rows.log(path, "csv", tags, warnings)


def _metric_names(header: list[str]) -> list[str]:
    """Returns the columns' names, without the run's name if all are of one run."""
    matches = [_WANDB_COLUMN.fullmatch(name) for name in header]
    runs = {match["run"] for match in matches if match}
    unmatched = [name for name, match in zip(header, matches, strict=True) if not match]
    if len(runs) != 1 or not all(step_keys([name], {}) or not name for name in unmatched):
        return header
    return [match["metric"] if match else name for name, match in zip(header, matches, strict=True)]


def _cell_numbers(names: list[str], cells: list[str]) -> Iterator[tuple[str, float]]:
    for name, cell in zip(names, cells, strict=False):
        if cell and name and not name.endswith(_WANDB_RANGE):
            with contextlib.suppress(ValueError):
                yield name, float(cell)


def read_json_lines(path: Path, tags: Mapping[str, str]) -> Log:
    """Read JSON lines; other lines are skipped with a warning.

    Raises:
        RunError: it holds no rows, or no key is the step.
        OSError: the file cannot be read.
    """
    rows, broken, last = RowCollector(), list[int](), 0
    warnings: list[str] = []
    with open_log(path, warnings) as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            last = number
            row = parse_row(line)
            if isinstance(row, dict):
                rows.add(_json_numbers(row))
            else:
                broken.append(number)
    if broken == [last]:
        warnings.append(f"{path}:{last}: the last line is cut and left out")
    elif broken:
        lines = "1 line is" if len(broken) == 1 else f"{len(broken)} lines are"
        warnings.append(f"{path}:{broken[0]}: {lines} no JSON object and left out")
    return rows.log(path, "jsonl", tags, warnings)


def read_json(path: Path, tags: Mapping[str, str]) -> Log:
    """Read a JSON document that holds a list of rows, or a list of values for each key.

    Raises:
        RunError: it holds neither, or no key is the step.
        OSError: the file cannot be read.
    """
    warnings: list[str] = []
    with open_log(path, warnings) as stream:
        text = stream.read()
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        # JSON lines in a file that is called .json
        if text.lstrip().startswith(b"{") and text.strip().count(b"\n"):
            return read_json_lines(path, tags)
        raise RunError(
            f"{path} is no whole JSON document: {error!s:.100}; restore it, or give another log"
        ) from error
    rows = RowCollector()
    for row in _document_rows(document):
        rows.add(_json_numbers(row))
    return rows.log(path, "jsonl", tags, warnings)


def _document_rows(document: Any) -> list[dict[str, Any]]:
    """Returns the rows of a JSON document; none if it has another form."""
    if isinstance(document, dict):
        lists = {key: value for key, value in document.items() if isinstance(value, list)}
        for key in _ROW_KEYS:
            if any(isinstance(row, dict) for row in lists.get(key, ())):
                return [row for row in lists[key] if isinstance(row, dict)]
        columns = {key: values for key, values in lists.items() if values}
        return [
            dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=False)
        ]
    return [row for row in document if isinstance(row, dict)] if isinstance(document, list) else []


def _json_numbers(row: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield the numbers of a row by dotted path; null counts as absent."""
    for key, value in row.items():
        kind = type(value)
        if kind is float:
            yield prefix + key, value
        elif kind is int:
            yield prefix + key, float(value) if abs(value) < 2**1023 else math.inf
        elif kind is dict:
            yield from _json_numbers(value, f"{prefix}{key}.")
        elif kind is str and value in _NAMED_NUMBERS:
            yield prefix + key, _NAMED_NUMBERS[value]
