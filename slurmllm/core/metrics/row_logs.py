"""Logs that hold rows of numbers: tables and JSON."""

from __future__ import annotations

import csv
import errno
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from slurmllm.core.errors import RunError
from slurmllm.core.format import Json, Values, format_plural
from slurmllm.core.metrics.curves import DamageWarning, SourceKind
from slurmllm.core.metrics.log_series import (
    LONGEST_NUMBER,
    MISSING,
    Log,
    LogReader,
    log_suffix,
    parse_value,
)
from slurmllm.core.metrics.row_reader import json_number, parse_row
from slurmllm.core.metrics.tags import Tags, step_keys
from slurmllm.core.run.safe_files import LARGEST_RECORD

_LARGEST_JSON = 256 << 20  # parsed, a document takes ten times that
_WANDB_RANGE = ("__MIN", "__MAX")  # W&B's range over the runs that were averaged
# Keys of a JSON document that may hold the rows, preferred first
_ROW_KEYS = ("log_history", "history", "metrics", "logs", "rows", "data")
_TAG_TABLE = ["Wall time", "Step", "Value"]  # TensorBoard's "Download as CSV"
TAG_CSV = re.compile(r".*-tag-(?P<tag>.+)\.csv")  # its name of the file


class LineReader(LogReader):
    """Reads lines; a longer one than `LARGEST_RECORD` raises OSError."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._number = 0  # of the last line
        self._rest = b""

    def feed(self, data: bytes) -> None:
        end = data.rfind(b"\n") + 1
        if end:
            self._read_lines((self._rest + data[:end]).splitlines(keepends=True))
            self._rest = b""
        self._rest += data[end:]
        if len(self._rest) > LARGEST_RECORD:
            raise OSError(
                errno.EFBIG, f"a line of more than {LARGEST_RECORD:,} bytes", str(self._path)
            )

    def flush(self, last: bool = False) -> None:
        if last and self._rest:
            lines = self._rest.splitlines(keepends=True)
            self._rest = b""
            self._read_lines(lines)

    def _read_lines(self, lines: Sequence[bytes]) -> None:
        raise NotImplementedError


class TableReader(LineReader):
    """Reads a table; a cell that is blank or not a number is a missing value.

    A last line without a newline is skipped if its last value is shorter than all others of that
    column: it is probably truncated within a number.
    """

    kind: SourceKind = "csv"

    def __init__(self, path: Path, tags: Tags) -> None:
        super().__init__(path)
        self._tags = tags
        self._delimiter = ","
        self._names = list[str]()
        # Numbers of lines
        self._short = list[int]()
        self._wide = list[int]()
        self._shortest: int | None = None  # last cell, characters
        self._is_damaged = False

    def _read_lines(self, lines: Sequence[bytes]) -> None:
        # A node that crashed may leave NUL bytes, which csv refuses.
        texts = [line.decode("utf-8", "replace").replace("\0", "") for line in lines]
        if not self._names:
            header = texts.pop(0).removeprefix("\ufeff")
            self._delimiter, self._names = column_names(header, self._path, self._tags)
            self._number = 1
        reader = csv.reader(texts, delimiter=self._delimiter)
        begin = self._number
        try:
            for cells in reader:
                self._number = begin + reader.line_num
                if cells and not self._is_damaged:
                    ends = reader.line_num < len(texts) or lines[-1].endswith((b"\n", b"\r"))
                    self._read_cells(cells, ends)
        except csv.Error as error:
            location = f"{self._path}:{begin + reader.line_num}"
            self.warnings.append(DamageWarning(f"{location}: {error}; read as far as that"))
            self._is_damaged = True

    def _read_cells(self, cells: list[str], has_newline: bool) -> None:
        if not cells[0][:1].isdigit() and (header := _new_header(cells, self._names)):
            self._names = header
            return
        if len(cells) < len(self._names):
            self._short.append(self._number)
            return
        if any(cell.strip() for cell in cells[len(self._names) :]):
            self._wide.append(self._number)
            return
        length = len(cells[-1].rstrip())
        is_shorter = self._shortest is not None and length < self._shortest
        if is_shorter and not has_newline:
            self.warnings.append(
                f"{self._path}:{self._number}: skipped the last line, which is probably truncated: "
                f"it has no newline, and its last value, {cells[-1]!r:.40}, is shorter than all "
                "others of the column"
            )
            return
        if is_shorter or self._shortest is None:
            self._shortest = length
        numbers, texts = read_cells(self._names, cells)
        self.rows.add(numbers, self._number, texts)

    def log(self, path: Path, tags: Tags) -> Log:
        if not self._names:
            column_names("", path, tags)  # raises RunError
        if self._short == [self._number]:
            self.warnings.append(f"{path}:{self._number}: skipped the truncated last line")
            self._short = []
        for lines, how in ((self._short, "fewer"), (self._wide, "more")):
            if lines:
                self.warnings.append(
                    DamageWarning(
                        f"{path}:{lines[0]}: skipped {format_plural(len(lines), 'row')} with {how} "
                        f"than the header's {len(self._names)} columns",
                        lines,
                    )
                )
        return super().log(path, tags)


def read_cells(
    names: Sequence[str], cells: Sequence[str]
) -> tuple[list[tuple[str, float]], list[tuple[str, str]]]:
    numbers = []
    texts = []
    for name, cell in zip(names, cells, strict=False):
        if not cell or not name or name.endswith(_WANDB_RANGE):
            continue
        if (number := _parse_cell(name, cell)) is not None:
            numbers.append((name, number))
        elif cell.strip().lower() not in MISSING:
            texts.append((name, cell.strip()))
    return numbers, texts


def _parse_cell(name: str, cell: str) -> float | None:
    if len(cell) <= LONGEST_NUMBER:
        with suppress(ValueError):
            return float(cell)
    return parse_value(name, cell)


def _new_header(cells: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return the names of a header within a table, as a restart writes it; empty if it is none."""
    header = [cell.strip() for cell in cells]
    shared = len(set(header) & set(names) - {""})
    is_header = 2 * shared >= min(len(header), len(names)) and shared > 1
    return header if is_header and not any(_parse_cell("", cell) for cell in header) else []


def column_names(header_line: str, path: Path, tags: Tags) -> tuple[str, list[str]]:
    """Return the delimiter of a table and the names of its columns; raise RunError without any.

    W&B's table of a chart has columns `<run> - <metric>`: the run's name is cut off if all are of
    one, unless the user names such a column.
    """
    delimiter = "\t" if log_suffix(path) == ".tsv" else max(",;\t", key=header_line.count)
    header = []
    with suppress(csv.Error):  # a line of 128 KiB without a separator
        header = [name.strip() for name in next(csv.reader([header_line], delimiter=delimiter), [])]
    if not any(header):
        raise RunError(f"no metrics in {path}: it has no header; a table of metrics has one")
    tag_file = TAG_CSV.fullmatch(path.name)
    if header == _TAG_TABLE and tag_file is not None and "Value" not in tags.values():
        # TensorBoard replaces the slash of train/loss.
        header[-1] = re.sub("^(train|eval|val)_", r"\1/", tag_file["tag"])
    pieces = [name.partition(" - ") for name in header]
    metrics = [metric or name for name, _, metric in pieces]
    without_run = [name for name, _, metric in pieces if name and not metric]
    one_run = len({run for run, _, metric in pieces if metric}) == 1
    only_steps = all(step_keys([name], {}) for name in without_run)
    named = set(tags.values()) & (set(header) - set(metrics))
    return delimiter, metrics if one_run and only_steps and not named else header


class JsonReader(LineReader):
    """Reads JSON lines, or a document that holds rows; lines of something else are skipped."""

    kind: SourceKind = "jsonl"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.is_document = log_suffix(path) == ".json"
        self._document = bytearray()
        self._broken: list[int] = []
        self._last = 0  # line that is not blank

    def feed(self, data: bytes) -> None:
        if self.is_document:
            self._document += data
            if len(self._document) > _LARGEST_JSON:
                raise RunError(
                    f"{self._path} is a JSON document of more than {_LARGEST_JSON >> 20} MiB; give "
                    f"JSON lines (jq -c '.log_history[]' {self._path} > {self._path.stem}.jsonl)"
                )
            return
        super().feed(data)
        if self.is_document:
            self._document += self._rest
            self._rest = b""

    def flush(self, last: bool = False) -> None:
        if last and self.is_document:
            document = bytes(self._document)
            self._document.clear()
            self._read_document(document)
        else:
            super().flush(last)

    def _read_lines(self, lines: Sequence[bytes]) -> None:
        for index, line in enumerate(lines):
            self._number += 1
            if not line.strip():
                continue
            row = parse_row(line)
            if row is None and not self._last and line.lstrip().startswith(b"["):
                self.is_document = True  # an array of many lines
                self.feed(b"".join(lines[index:]))
                return
            self._last = self._number
            if isinstance(row, dict):
                self._add(row)
            elif isinstance(row, list) and any(isinstance(item, dict) for item in row):
                for item in _document_rows(row):
                    self._add(item)
            else:
                self._broken.append(self._number)

    def _add(self, row: Values) -> None:
        self.rows.add(json_numbers(row), self._number, json_texts(row))

    def _read_document(self, content: bytes) -> None:
        try:
            document = json.loads(content)
        except (ValueError, RecursionError) as error:
            # JSON lines in a file that is called .json
            if content.lstrip().startswith(b"{") and content.strip().count(b"\n"):
                self._read_lines(content.splitlines(keepends=True))
                return
            raise RunError(
                f"{self._path} is not complete JSON: {error!s:.100}; restore it, or give another "
                "log"
            ) from error
        self._number = 0
        for row in _document_rows(document):
            self._add(row)

    def log(self, path: Path, tags: Tags) -> Log:
        if self._broken and not len(self.rows):
            raise RunError(
                f"{path}:{self._broken[0]}: not a JSON object, and no other line is one; give JSON "
                f"lines, or name a text log {path.stem}.log"
            )
        if self._broken == [self._last]:
            self.warnings.append(f"{path}:{self._last}: skipped the truncated last line")
        elif self._broken:
            message = (
                f"{path}:{self._broken[0]}: not a JSON object; skipped "
                f"{format_plural(len(self._broken), 'line')}"
            )
            self.warnings.append(DamageWarning(message, self._broken))
        return super().log(path, tags)


def _document_rows(document: Any) -> list[Json]:
    """Return the rows of a JSON document; none if it has another form."""
    if isinstance(document, list):
        return [row for row in document if isinstance(row, dict)]
    if not isinstance(document, dict):
        return []
    lists = {key: value for key, value in document.items() if isinstance(value, list)}
    for key in _ROW_KEYS:
        if any(isinstance(row, dict) for row in lists.get(key, ())):
            return [row for row in lists[key] if isinstance(row, dict)]
    golden = {
        key: series
        for key, series in document.items()
        if isinstance(series, dict) and isinstance(series.get("values"), dict | list)
    }
    if golden:
        return [row for key, series in golden.items() for row in _golden_rows(key, series)]
    by_step = {key: row for key, row in document.items() if key.isdigit()}
    if by_step and all(isinstance(row, dict) for row in by_step.values()):
        return [{"step": step} | row for step, row in by_step.items()]
    columns = {key: values for key, values in lists.items() if values}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=False)]


def _golden_rows(key: str, series: Values) -> list[Json]:
    """Return the rows of a metric in Megatron-LM's golden values: by step, or from start_step."""
    values = series["values"]
    if not isinstance(values, dict):
        start = series.get("start_step") or 0
        interval = series.get("step_interval") or 1
        values = {start + interval * index: value for index, value in enumerate(values)}
    return [{"step": str(step), key: value} for step, value in values.items()]


def json_numbers(row: Values, prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield the numbers of a row by dotted path; null counts as absent."""
    for key, value in row.items():
        if isinstance(value, dict):
            yield from json_numbers(value, f"{prefix}{key}.")
        elif value is not None:
            number = parse_value(key, value) if isinstance(value, str) else json_number(value)
            if number is not None:
                yield prefix + key, number


def json_texts(row: Values) -> Iterator[tuple[str, str]]:
    """Yield the texts and truth values of a row, which may name its split."""
    for key, value in row.items():
        if isinstance(value, bool):
            yield key, str(value).lower()
        elif (
            isinstance(value, str)
            and len(value) <= LONGEST_NUMBER
            and parse_value(key, value) is None
        ):
            yield key, value
