"""Logs that hold rows of numbers: tables, JSON and TensorBoard's tables.

The readers raise RunError for a file without rows or steps, OSError for one that cannot be read.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from slurmllm.errors import RunError
from slurmllm.format import format_plural
from slurmllm.metrics.curves import DamageWarning
from slurmllm.metrics.log_series import (
    MISSING,
    Log,
    RowCollector,
    TagSeries,
    log_suffix,
    open_log,
)
from slurmllm.metrics.numbers import LONGEST_NUMBER, parse_value
from slurmllm.metrics.row_reader import json_number, parse_row
from slurmllm.metrics.tags import step_keys
from slurmllm.run.safe_files import LARGEST_RECORD, open_regular, read_limited, read_lines

_LARGEST_JSON = 256 << 20  # parsed, a document takes ten times that
_WANDB_RANGE = ("__MIN", "__MAX")  # W&B's range over the runs that were averaged
# Keys of a JSON document that may hold the rows, preferred first
_ROW_KEYS = ("log_history", "history", "metrics", "logs", "rows", "data")
# TensorBoard's "Download as CSV" (one file per tag), OLMo-core's metric_saver.py (one per step)
_TAG_CSV = re.compile(r".*-tag-(?P<tag>.+)\.csv")
_STEP_JSON = re.compile(r"metrics_step(?P<step>\d+)\.json")


def read_table(path: Path, tags: Mapping[str, str]) -> Log:
    """Read a table; a cell that is blank or not a number is a missing value.

    A last line without a newline is skipped if its last value is shorter than all others of that
    column: it is probably truncated within a number.
    """
    rows, warnings = RowCollector(), list[str]()
    short, wide = list[int](), list[int]()  # lines, the header is 1
    last = 0
    with open_log(path, warnings) as stream:
        lines = _table_lines(stream, path, warnings)
        delimiter, names = column_names(next(lines, ""), path, tags)
        reader = csv.reader(lines, delimiter=delimiter)
        try:
            for cells in reader:
                if not cells:
                    continue
                last = reader.line_num + 1
                if not cells[0][:1].isdigit() and (header_cells := _new_header(cells, names)):
                    names = header_cells
                    continue
                if len(cells) < len(names):
                    short.append(last)
                    continue
                if any(cell.strip() for cell in cells[len(names) :]):
                    wide.append(last)
                    continue
                numbers, labels = read_cells(names, cells)
                rows.add(numbers, last, labels)
        except csv.Error as error:
            line = reader.line_num + 1
            warnings.append(DamageWarning(f"{path}:{line}: {error}; read as far as that"))
    if short == [last]:
        warnings.append(f"{path}:{last}: skipped the truncated last line")
        short = []
    for skipped, how in ((short, "fewer"), (wide, "more")):
        if skipped:
            text = f"{path}:{skipped[0]}: skipped {format_plural(len(skipped), 'row')} with {how} "
            warnings.append(DamageWarning(f"{text}than the header's {len(names)} columns", skipped))
    return rows.log(path, "csv", tags, warnings)


def read_cells(
    names: Sequence[str], cells: Sequence[str]
) -> tuple[list[tuple[str, float]], list[tuple[str, str]]]:
    """Return the numbers and the texts of a table's row, by column."""
    numbers, texts = list[tuple[str, float]](), list[tuple[str, str]]()
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


def column_names(header_line: str, path: Path, tags: Mapping[str, str]) -> tuple[str, list[str]]:
    """Return the delimiter of a table and the names of its columns; raise RunError without any.

    W&B's table of a chart has columns `<run> - <metric>`: the run's name is cut off if all are of
    one, unless the user names such a column.
    """
    delimiter = "\t" if log_suffix(path) == ".tsv" else max(",;\t", key=header_line.count)
    header: list[str] = []
    with suppress(csv.Error):  # a line of 128 KiB without a separator
        cells = next(csv.reader([header_line], delimiter=delimiter), [])
        header = [name.strip() for name in cells]
    if not any(header):
        raise RunError(f"no metrics in {path}: it has no header; a table of metrics has one")
    parts = [name.partition(" - ") for name in header]
    metrics = [metric or name for name, _, metric in parts]
    others = [name for name, _, metric in parts if name and not metric]
    one_run = len({run for run, _, metric in parts if metric}) == 1
    only_steps = all(step_keys([name], {}) for name in others)
    named = set(tags.values()) & (set(header) - set(metrics))
    return delimiter, metrics if one_run and only_steps and not named else header


def _table_lines(stream: BinaryIO, path: Path, warnings: list[str]) -> Iterator[str]:
    """Yield the lines of a table, without a last one that is probably truncated within a number."""
    shortest: int | None = None  # last cell, bytes
    blocks = read_lines(stream, LARGEST_RECORD)
    lines = (line for block in blocks for line in block.splitlines(keepends=True))
    for number, line in enumerate(lines, start=1):
        if number > 1:
            cell = line[1 + max(line.rfind(b","), line.rfind(b";"), line.rfind(b"\t")) :].rstrip()
            whole = shortest is None or len(cell) >= shortest
            if not whole and not line.endswith((b"\n", b"\r")):
                text = cell.decode(errors="replace")
                warnings.append(
                    f"{path}:{number}: skipped the last line, which is probably truncated: it "
                    f"has no newline, and its last value, {text!r:.40}, is shorter than all others "
                    "of the column"
                )
                return
            shortest = shortest if whole and shortest is not None else len(cell)
        # A node that crashed may leave NUL bytes, which csv refuses.
        text = line.decode("utf-8-sig" if number == 1 else "utf-8", "replace")
        yield text.replace("\0", "")


def read_json_lines(path: Path, tags: Mapping[str, str]) -> Log:
    """Read JSON lines; other lines are skipped with a warning."""
    rows, broken, last = RowCollector(), list[int](), 0
    warnings: list[str] = []
    with open_log(path, warnings) as stream:
        for number, line in enumerate(read_lines(stream, LARGEST_RECORD), start=1):
            if not line.strip():
                continue
            row = parse_row(line)
            if row is None and not last and line.lstrip().startswith(b"["):
                return read_json(path, tags)  # an array of many lines
            last = number
            if isinstance(row, dict):
                rows.add(json_numbers(row), number, json_texts(row))
            elif isinstance(row, list) and any(isinstance(part, dict) for part in row):
                for part in _document_rows(row):
                    rows.add(json_numbers(part), number, json_texts(part))
            else:
                broken.append(number)
    if broken and not len(rows):
        raise RunError(
            f"{path}:{broken[0]}: not a JSON object, and no other line is one; give JSON lines, or "
            f"name a text log {path.stem}.log"
        )
    if broken == [last]:
        warnings.append(f"{path}:{last}: skipped the truncated last line")
    elif broken:
        text = (
            f"{path}:{broken[0]}: not a JSON object; skipped {format_plural(len(broken), 'line')}"
        )
        warnings.append(DamageWarning(text, broken))
    return rows.log(path, "jsonl", tags, warnings)


def read_json(path: Path, tags: Mapping[str, str]) -> Log:
    """Read a JSON document that holds a list of rows, or a list of values for each key."""
    warnings: list[str] = []
    with open_log(path, warnings) as stream:
        text = stream.read(_LARGEST_JSON + 1)
    if len(text) > _LARGEST_JSON:
        raise RunError(
            f"{path} is a JSON document of more than {_LARGEST_JSON >> 20} MiB; give JSON lines "
            f"(jq -c '.log_history[]' {path} > {path.stem}.jsonl)"
        )
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        # JSON lines in a file that is called .json
        if text.lstrip().startswith(b"{") and text.strip().count(b"\n"):
            return read_json_lines(path, tags)
        raise RunError(
            f"{path} is not complete JSON: {error!s:.100}; restore it, or give another log"
        ) from error
    rows = RowCollector()
    for row in _document_rows(document):
        rows.add(json_numbers(row), 0, json_texts(row))
    return rows.log(path, "jsonl", tags, warnings)


def _document_rows(document: Any) -> list[dict[str, Any]]:
    """Return the rows of a JSON document; none if it has another form."""
    if isinstance(document, dict):
        lists = {key: value for key, value in document.items() if isinstance(value, list)}
        for key in _ROW_KEYS:
            if any(isinstance(row, dict) for row in lists.get(key, ())):
                return [row for row in lists[key] if isinstance(row, dict)]
        golden = [(k, v) for k, v in document.items() if isinstance(v, dict) and "values" in v]
        if golden := [pair for pair in golden if isinstance(pair[1]["values"], dict | list)]:
            return [row for key, series in golden for row in _golden_rows(key, series)]
        by_step = {key: row for key, row in document.items() if key.isdigit()}
        if by_step and all(isinstance(row, dict) for row in by_step.values()):
            return [{"step": step} | row for step, row in by_step.items()]
        columns = {key: values for key, values in lists.items() if values}
        return [
            dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=False)
        ]
    return [row for row in document if isinstance(row, dict)] if isinstance(document, list) else []


def _golden_rows(key: str, series: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of a metric in Megatron-LM's golden values: by step, or from start_step."""
    values = series["values"]
    if not isinstance(values, dict):
        start, interval = series.get("start_step") or 0, series.get("step_interval") or 1
        values = {start + interval * place: value for place, value in enumerate(values)}
    return [{"step": str(step), key: value} for step, value in values.items()]


def json_numbers(row: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield the numbers of a row by dotted path; null counts as absent."""
    for key, value in row.items():
        if isinstance(value, dict):
            yield from json_numbers(value, f"{prefix}{key}.")
        elif isinstance(value, str):
            if (number := parse_value(key, value)) is not None:
                yield prefix + key, number
        elif value is not None and (number := json_number(value)) is not None:
            yield prefix + key, number


def json_texts(row: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
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


def is_tag_table(path: Path) -> bool:
    """Return whether a file is TensorBoard's CSV of one tag: `Wall time,Step,Value`."""
    with open_regular(path) as stream:
        return stream.readline(100).strip().lower() == b"wall time,step,value"


def split_log_files(folder: Path) -> list[Path]:
    names = {p: _STEP_JSON.fullmatch(p.name) for p in folder.iterdir()}
    files = (p for p, step in names.items() if step or _TAG_CSV.fullmatch(p.name))
    return sorted(files, key=lambda p: (int(step["step"]) if (step := names[p]) else 0, p))


def read_split_log(path: Path, tags: Mapping[str, str]) -> Log:
    """Read such a file, or a folder of them."""
    files = split_log_files(path) if path.is_dir() else [path]
    rows, series, warnings = RowCollector(), dict[str, TagSeries](), list[str]()
    for file in files:
        if step := _STEP_JSON.fullmatch(file.name):
            row = parse_row(read_limited(file))
            if isinstance(row, dict):
                rows.add([("step", float(step["step"])), *json_numbers(row)])
            else:
                warnings.append(DamageWarning(f"{file} is not complete JSON; skipped it"))
            continue
        log = read_table(file, tags)
        name = None if "Value" in tags.values() else _TAG_CSV.fullmatch(file.name)
        # TensorBoard replaces the slash of train/loss.
        tag = re.sub("^(train|eval|val)_", r"\1/", name["tag"]) if name else "Value"
        times = log.series.get("Wall time")
        if (values := log.series.get("Value")) is not None:
            series[tag] = replace(values, times=None if times is None else times.values)
        warnings += log.warnings
    if len(rows):
        return rows.log(path, "jsonl", tags, warnings)
    return Log(path, "csv", series, warnings=tuple(warnings))
