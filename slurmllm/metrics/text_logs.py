"""Logs of other frameworks in text files: tables, JSON, and the lines of a training's output.

A log may have gigabytes and is streamed. Bytes that are not UTF-8 are replaced; in a text log
terminal colours are removed, and a carriage return, with which a progress bar overwrites itself,
ends a line too.
"""

from __future__ import annotations

import calendar
import csv
import io
import json
import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, BinaryIO

from slurmllm.errors import RunError, UserError
from slurmllm.format import format_plural
from slurmllm.metrics.log_series import Log, RowCollector, log_suffix, open_log
from slurmllm.metrics.row_reader import parse_row
from slurmllm.metrics.tags import LineFormat, LogFormat, check_metric, log_formats, step_keys

Numbers = dict[str, float]

_CHUNK_BYTES = 1 << 20
# A line without an end (a core dump in a log) is cut here.
_MAX_LINE_BYTES = 1 << 16
_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_NUMBER = r"[-+]?(?:\d[\d,]*\.?\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|nan|inf(?:inity)?)"
_VALUE = rf"(?:tensor\(\[?)?(?P<%s>{_NUMBER})"
_THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d*)?")
_UNITS = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
# What a line of one of the formats holds; all other lines are skipped without decoding them.
_HINT = re.compile(rb"loss|trl:|tel:|step=|batch=|\d/\d+ \[|['\"]")
_TIMESTAMP = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)([.,]\d+)?")
_BAR = re.compile(r"\|\s*(\d+)/(\d+|\?) \[(.*)\]?")
_PAIR = re.compile(rf"([A-Za-z][\w./ -]*)=({_NUMBER})(?=[,\]\s]|$)", re.IGNORECASE)
_DICT_ITEM = re.compile(
    rf"['\"]([\w./ -]+)['\"]: ['\"]?({_NUMBER})['\"]?(?=[,}}\s]|$)", re.IGNORECASE
)


def read_text(path: Path, tags: Mapping[str, str], pattern: str | None = None) -> Log:
    """Read a text log; `pattern` is the user's, with a named group for each metric.

    Raises:
        RunError: no line has a known format, or none matches the pattern.
        OSError: the file cannot be read.
    """
    readers = _format_readers()
    if pattern is not None:
        check_pattern(pattern)
        readers = [_LineReader(None, [LineFormat(head=pattern)])]
    warnings: list[str] = []
    latest = readers[0]
    with open_log(path, warnings) as stream:
        for line in _text_lines(stream, readers, all_lines=pattern is not None):
            for reader in (latest, *readers):
                if reader.read(line):
                    latest = reader
                    break
    for reader in readers:
        reader.finish(path, warnings)
        if len(reader.rows):
            return reader.rows.log(path, "text", tags, warnings, reader.format)
    if pattern is not None:
        raise RunError(
            f"no line of {path} matches --pattern {pattern!r}; compare it with a line of the log, "
            "and mind spaces, which must be the same"
        )
    names = ", ".join(name for name, found in log_formats().items() if found.lines or found.reader)
    raise RunError(
        f"no metrics in {path}: no line is one of {names}; give such a log, or a table (.csv, "
        ".jsonl) of the metrics, or describe its lines with --pattern, such as "
        "--pattern 'step (?P<step>\\d+).*loss (?P<loss>\\S+)'"
    )


def _text_lines(stream: BinaryIO, readers: Sequence[_Reader], all_lines: bool) -> Iterator[str]:
    rest = b""
    while True:
        chunk = stream.read(_CHUNK_BYTES)
        *lines, rest = re.split(rb"[\r\n]+", rest + chunk)
        if not chunk:
            lines, rest = [*lines, rest], b""
        rest = rest[-_MAX_LINE_BYTES:]
        for line in lines:
            if _HINT.search(line) or all_lines or any(reader.expects_more for reader in readers):
                yield _COLOURS.sub("", line.decode("utf-8-sig", errors="replace"))
        if not chunk:
            return


def _to_float(text: str) -> float:
    """Parse a number: `1,234.5` and `2,504` (thousands), `2,5` (a decimal comma), `1.2K`."""
    if "," in text:
        text = text.rstrip(",")
        text = text.replace(",", "" if _THOUSANDS.fullmatch(text) else ".")
    if text[-1] in _UNITS:
        return float(text[:-1]) * _UNITS[text[-1]]
    return float(text)


class _Reader:
    """Collects the rows of one format."""

    expects_more = False  # the next line may belong to this one

    def __init__(self, known: LogFormat | None, line: LineFormat | None = None) -> None:
        self.rows = RowCollector()
        self.format = None if known is None else (known, line)

    def read(self, line: str) -> bool:
        """Reads a line; returns False if it is of another format."""
        raise NotImplementedError

    def finish(self, path: Path, warnings: list[str]) -> None:
        """Adds rows that depend on lines after them."""


class _LineReader(_Reader):
    """Lines that patterns describe."""

    def __init__(self, known: LogFormat | None, lines: Sequence[LineFormat]) -> None:
        super().__init__(known, lines[0])
        self._patterns = [
            (_compile(line.head), _compile(line.pair) if line.pair else None) for line in lines
        ]
        self._following = lines[0].following
        self._step = 0.0

    def read(self, line: str) -> bool:
        for head, pair in self._patterns:
            found = head.search(line)
            row = None if found is None else self._values(found)
            if row is not None:
                if pair is not None and not self._following:
                    names = pair.findall(line)
                    row = {name.strip().lower(): _to_float(value) for name, value in names} | row
                self._step, self.expects_more = row["step"], self._following
                self.rows.add(row.items())
                return True
            if self.expects_more and pair is not None and (one := pair.match(line)):
                self.rows.add([("step", self._step), (one[1], _to_float(one[2]))])
                return True
        self.expects_more &= line[:1].isspace()
        return False

    @staticmethod
    def _values(found: re.Match[str]) -> Numbers | None:
        groups = {name: text for name, text in found.groupdict().items() if text is not None}
        asctime, row = groups.pop("asctime", None), Numbers()
        for name, text in groups.items():
            with suppress(ValueError, IndexError):  # the user's group may be no number
                row[name] = _to_float(text.strip())
        if "step" not in row:
            return None
        if "ms_per_step" in row:
            row["step_time_s"] = row.pop("ms_per_step") / 1e3
        row.pop("iter", None)
        row["step"] += (row.pop("epoch", 1.0) - 1) * row.pop("total", 0.0)
        with suppress(ValueError):
            if asctime is not None:
                row["time"] = float(calendar.timegm(time.strptime(asctime)))
            elif stamp := _TIMESTAMP.search(found.string[:100]):
                moment = time.strptime(f"{stamp[1]} {stamp[2]}", "%Y-%m-%d %H:%M:%S")
                row["time"] = calendar.timegm(moment) + float(
                    f"0{stamp[3] or ''}".replace(",", ".")
                )
        return row


class _BarReader(_Reader):
    """`Epoch 0:  22%|██▏ | 4499/20101 [22:26:14<77:48:37, …, loss=2.43, global_step=4512.0]`.

    The bar prints three digits of a large number: from 100,000 the step is its own count, plus the
    steps before the bar's first, which a restart begins with.
    """

    _before = 0.0

    def read(self, line: str) -> bool:
        bar = _BAR.search(line)
        if bar is None or "loss" not in bar[3]:
            return False
        row = {name.strip(): _to_float(value) for name, value in _PAIR.findall(bar[3])}
        step = row.pop("global_step", row.pop("step", None))
        if step is not None and step < 1e5:
            self._before = step - float(bar[1])
        row["step"] = float(bar[1]) + self._before
        self.rows.add(row.items())
        return True


class _DictReader(_Reader):
    """`{'loss': 3.21, 'grad_norm': 1.5, 'learning_rate': 1e-4, 'epoch': 0.1}`, maybe of many lines.

    The Hugging Face Trainer prints no step, but draws its progress bar again after each such line.
    """

    def __init__(self, known: LogFormat | None) -> None:
        super().__init__(known)
        self._text = ""
        self._total = ""  # of the training's bar; those of evaluations come and go
        self._count: float | None = None
        self._found: list[tuple[Numbers, float | None]] = []  # row, count of the bar before it
        self._open = 0  # rows whose bar has not come yet

    def read(self, line: str) -> bool:
        if bar := _BAR.search(line):
            self._total = self._total or bar[2]
            if bar[2] == self._total:
                self._count = float(bar[1])
                for place in range(len(self._found) - self._open, len(self._found)):
                    self._found[place] = (self._found[place][0], self._count)
                self._open = 0
        if not self._text and not line.lstrip().startswith(("{'", '{"')):
            return False
        self._text += line
        self.expects_more = "}" not in line and len(self._text) < _MAX_LINE_BYTES
        if self.expects_more:
            return True
        row = {name: _to_float(value) for name, value in _DICT_ITEM.findall(self._text)}
        self._text = ""
        if "train_runtime" in row or not any("loss" in name for name in row):
            return False
        if self._open and any("loss" in name for name in self._found[-1][0]):
            self._open = 0  # two rows without a bar between them
        self._found.append((row, self._count))
        self._open += 1
        return True

    def finish(self, path: Path, warnings: list[str]) -> None:
        if any(step_keys(row, {}) for row, _ in self._found):
            self.format = None  # a row holds its step: another framework's
            for row, _ in self._found:
                self.rows.add(row.items())
            return
        counts = [count for row, count in self._found if "loss" in row]
        by_bar = None not in counts and all(a != b for a, b in pairwise(counts))
        number = 0
        for row, count in self._found:
            number += "loss" in row
            step = count if by_bar and count is not None else float(number)
            self.rows.add({**row, "step": step}.items())
        if self._found and not by_bar:
            warnings.append(
                f"{path}: no progress bar between its lines shows the step; they are numbered 1, "
                "2, …: give the run's trainer_state.json instead"
            )


def _compile(pattern: str) -> re.Pattern[str]:
    """Returns a pattern in which `%name` matches a number; `%value` is not a group."""
    names = r"step_time_s|seq_per_s|tokens_per_s|ms_per_step|grad_norm|val_loss|step|loss|lr"
    pattern = pattern.replace("%value", _NUMBER)
    expression = re.sub(rf"%({names}|epoch|total|iter)", lambda found: _VALUE % found[1], pattern)
    return re.compile(expression, re.IGNORECASE)


def _format_readers() -> list[_Reader]:
    readers: list[_Reader] = []
    for known in log_formats().values():
        # Lines that count steps otherwise have a reader of their own.
        for _, lines in groupby(known.lines, lambda line: (line.steps_from, line.following)):
            readers.append(_LineReader(known, list(lines)))
        if known.reader == "dicts":
            readers.append(_DictReader(known))
    return [*readers, _BarReader(None)]


def check_pattern(pattern: str) -> re.Pattern[str]:
    """Compile the user's pattern of a line.

    Raises:
        UserError: it does not compile, has no group `step`, or one that is no metric.
    """
    example = "such as 'step (?P<step>\\d+).*loss (?P<loss>\\S+)'"
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise UserError(
            f"--pattern {pattern!r} is not a regular expression: {error}; give one {example}"
        ) from error
    for name in compiled.groupindex:
        check_metric(name, f"--pattern {pattern!r}")
    for needed in ("step", "loss"):
        if needed not in compiled.groupindex:
            raise UserError(
                f"--pattern {pattern!r} has no group (?P<{needed}>…); give one {example}"
            )
    return compiled


# wandb's table of a chart: `<run> - <metric>`, and the range over the runs that were averaged
_WANDB_COLUMN = re.compile(r"(?P<run>.+?) - (?P<metric>.+)")
_WANDB_RANGE = ("__MIN", "__MAX")
# Keys of a JSON document that may hold the rows, preferred first
_ROW_KEYS = ("log_history", "history", "metrics", "logs", "rows", "data")
_NAMED_NUMBERS = {"NaN": math.nan, "nan": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def read_table(path: Path, tags: Mapping[str, str]) -> Log:
    """Read a table; a cell that is blank or not a number is a missing value.

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
        with suppress(csv.Error):  # a line of 128 KiB without a separator
            cells = next(csv.reader([header_line], delimiter=delimiter), [])
            header = [name.strip() for name in cells]
        if not any(header):
            raise RunError(f"no metrics in {path}: it has no header; a table of metrics has one")
        # The columns' names, without the run's name if all are of one run
        names = header
        matches = [_WANDB_COLUMN.fullmatch(name) for name in header]
        known = all(
            match or not name or step_keys([name], {})
            for name, match in zip(header, matches, strict=True)
        )
        if known and len({match["run"] for match in matches if match}) == 1:
            names = [m["metric"] if m else name for name, m in zip(header, matches, strict=True)]
        if any(tag in header and tag not in names for tag in tags.values()):
            names = header
        reader = csv.reader(lines, delimiter=delimiter)
        short: list[int] = []  # line numbers; the header is line 1
        last = commas = 0
        try:
            for cells in reader:
                if not cells:
                    continue
                last = reader.line_num + 1
                if len(cells) < len(names):
                    short.append(last)
                else:
                    numbers: list[tuple[str, float]] = []
                    for name, cell in zip(names, cells, strict=False):
                        if cell and name and not name.endswith(_WANDB_RANGE):
                            with suppress(ValueError):
                                if "," in cell and delimiter != ",":
                                    numbers.append((name, _to_float(cell)))
                                    commas = commas or reader.line_num + 1
                                else:
                                    numbers.append((name, float(cell)))
                    rows.add(numbers)
        except csv.Error as error:
            warnings.append(f"{path}:{reader.line_num + 1}: {error}; read as far as that")
    if commas:
        warnings.append(f"{path}:{commas}: numbers have decimal commas; read 2,5 as 2.5")
    if short == [last]:
        warnings.append(f"{path}:{last}: skipped the truncated last line")
    elif short:
        warnings.append(
            f"{path}:{short[0]}: {len(short)} rows have fewer than the header's {len(names)} "
            "columns; skipped them"
        )
    return rows.log(path, "csv", tags, warnings)


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
                rows.add(json_numbers(row))
            else:
                broken.append(number)
    if broken == [last]:
        warnings.append(f"{path}:{last}: skipped the truncated last line")
    elif broken:
        lines = format_plural(len(broken), "line")
        warnings.append(f"{path}:{broken[0]}: not a JSON object; skipped {lines}")
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
            f"{path} is not complete JSON: {error!s:.100}; restore it, or give another log"
        ) from error
    rows = RowCollector()
    for row in _document_rows(document):
        rows.add(json_numbers(row))
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


def json_numbers(row: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield the numbers of a row by dotted path; null counts as absent."""
    for key, value in row.items():
        kind = type(value)
        if kind is float:
            yield prefix + key, value
        elif kind is int:
            yield prefix + key, float(value) if abs(value) < 2**1023 else math.inf
        elif kind is dict:
            yield from json_numbers(value, f"{prefix}{key}.")
        elif kind is str and value in _NAMED_NUMBERS:
            yield prefix + key, _NAMED_NUMBERS[value]
