"""Logs of other frameworks in text files: the lines of a training's output.

A log may have gigabytes and is streamed. Bytes that are not UTF-8 are replaced, terminal colours
are removed, and a carriage return, with which a progress bar overwrites itself, ends a line too.
"""

from __future__ import annotations

import calendar
import math
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from itertools import groupby, pairwise
from pathlib import Path

from slurmllm.errors import RunError, UserError
from slurmllm.format import printable
from slurmllm.metrics.log_series import Log, RowCollector, open_log
from slurmllm.metrics.tags import (
    ANY_FRAMEWORK,
    METRICS,
    LineFormat,
    LogFormat,
    all_formats,
    check_metric,
    log_formats,
    step_keys,
)

Numbers = dict[str, float]

_CHUNK_BYTES = 1 << 20
# A line without an end (a core dump in a log) is cut here.
_MAX_LINE_BYTES = 1 << 16
_NUMBER = r"[-+]?(?:\d[\d,]*\.?\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|nan|inf(?:inity)?)"
_VALUE = rf"(?:tensor\(\[?)?(?P<%s>{_NUMBER})"
# %name of formats.yaml, longer names first
_NAMES = sorted((*METRICS, "step_time_ms", "epoch", "total", "bar"), key=len, reverse=True)
_NAME = re.compile(f"%({'|'.join(_NAMES)})")
_THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d*)?")
_UNITS = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
# What a line of one of the formats holds; all other lines are skipped without decoding them.
_HINT = re.compile(rb"loss|trl:|tel:|step=|batch=|\d/\d+ \[|['\"]")
_TIMESTAMP = re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d+)?")
_BAR = re.compile(r"\|\s*(\d+)/(\d+|\?) \[")
_DESCRIBED = re.compile(r"[A-Za-z]:\s+\d+%\|")  # a bar of something else: `Loading weights: 5%|`
_EXAMPLE = r"'step (?P<step>\d+).*loss (?P<loss>\S+)'"


def read_text(path: Path, tags: Mapping[str, str], pattern: str | None = None) -> Log:
    """Read a text log; `pattern` is the user's, with a named group for each metric.

    Raises:
        RunError: no line has a known format, or none matches the pattern.
        OSError: the file cannot be read.
    """
    text = TextReader(pattern)
    readers = text.readers
    warnings: list[str] = []
    with open_log(path, warnings) as stream:
        for chunk in iter(partial(stream.read, _CHUNK_BYTES), b""):
            text.read(chunk)
        text.read(b"", last=True)
    for reader in readers:
        reader.finish(path, warnings)
        if len(reader.rows):
            return reader.rows.log(path, "text", tags, warnings, reader.format)
    if pattern is not None:
        raise RunError(
            f"no line of {path} matches --pattern '{pattern}'; check it against a line of the log "
            "(spaces must match exactly)"
        )
    names = ", ".join(name for name, log_format in log_formats().items() if log_format.lines)
    raise RunError(
        f"no metrics in {path}: no line is one of {names}, or a progress bar with a loss; give "
        "such a log, or a table (.csv, .jsonl) of the metrics, or describe its lines with "
        f"--pattern, such as --pattern {_EXAMPLE}"
    )


class TextReader:
    """The readers of a text, which comes in pieces; the first one that has rows is used.

    Args:
        pattern: The user's, with a named group for each metric.
        framework: Only this one's lines, if it has lines of its own.
    """

    def __init__(self, pattern: str | None = None, framework: str | None = None) -> None:
        if pattern is None:
            self.readers = _format_readers()
        else:
            check_pattern(pattern)
            self.readers = [_LineReader(None, [LineFormat(head=pattern)])]
        if framework is not None:
            fitting = [r for r in self.readers if r.format and r.format.name == framework]
            self.readers = fitting or self.readers
        self._latest = self.readers[0]
        self._all_lines = pattern is not None
        self._number, self._rest = 1, b""

    def read(self, chunk: bytes, last: bool = False) -> None:
        """Read the lines that are complete, at the `last` call also one without an end."""
        lines = (self._rest + chunk).splitlines(keepends=True)
        # A newline may follow a carriage return.
        whole = last or not lines or lines[-1].endswith(b"\n")
        self._rest = b"" if whole else lines.pop()[-_MAX_LINE_BYTES:]
        for line in lines:
            if _HINT.search(line) or self._all_lines or any(reader.row for reader in self.readers):
                text = printable(line.decode("utf-8-sig", errors="replace").rstrip("\r\n"))
                for reader in (self._latest, *self.readers):
                    if reader.read(text, self._number):
                        self._latest = reader
                        break
            self._number += line.endswith(b"\n")

    def settle(self, last: bool = False) -> None:
        """Add rows that more lines could complete: the output pauses, or this is the `last`."""
        # A progress bar is drawn without an end of its line.
        if last or self._rest.rstrip().endswith(b"]"):
            self.read(b"", last=True)
        for reader in self.readers:
            reader.end_row()
            reader.settle(last)


def to_float(text: str) -> float:
    """Parse a number: `1,234.5` and `2,504` (thousands), `2,5` (a decimal comma), `1.2K`."""
    if "," in text:
        text = text.rstrip(",")
        text = text.replace(",", "" if _THOUSANDS.fullmatch(text) else ".")
    if text[-1] in _UNITS:
        return float(text[:-1]) * _UNITS[text[-1]]
    return float(text)


class _LineReader:
    """The rows of one format: of a line each, or of a line and those that follow it.

    A step that is not in the head is among the names and values, or that of a progress bar.
    """

    numbered = False  # whether nothing shows the steps: rows are counted

    def __init__(self, log_format: LogFormat | None, lines: Sequence[LineFormat]) -> None:
        self.rows = RowCollector()
        self.format = log_format
        if log_format is not None:
            first = log_format.steps_from if lines[0].steps_from is None else lines[0].steps_from
            self.format = log_format.model_copy(update={"counts": "steps", "steps_from": first})
        self.row = Numbers()  # the next line may belong to it
        self._number = 0  # of its first line
        self._patterns = [
            (_compile(line.head), _compile(line.pair) if line.pair else None) for line in lines
        ]
        self._following = lines[0].following
        self._before = 0.0  # steps before a progress bar's first, which a restart begins with

    def read(self, line: str, number: int) -> bool:
        """Read a line; return False if it is of another format."""
        for head, pair in self._patterns:
            match = head.search(line)
            values = None if match is None else _head_values(match)
            if values is None and not self.row:
                continue
            texts = [] if pair is None else pair.findall(line)
            pairs = {name.strip(): to_float(value) for name, value in texts}
            if values is not None:
                self.end_row()
                self.row, self._number = pairs | values, number
                if not self._following:
                    self.end_row()
                return True
            if pairs:
                self.row = pairs | self.row
                return True
        if self.row and not line[:1].isspace():
            self.end_row()
        return False

    def end_row(self) -> None:
        row, self.row = self.row, Numbers()
        if "bar" in row:
            # The bar prints three digits of a large number: from 100,000 its own count is exact.
            count, step = row.pop("bar"), row.pop("global_step", row.pop("step", None))
            if step is not None and step < 1e5:
                self._before = step - count
            row["step"] = count + self._before
        if row:
            self.rows.add(row.items(), self._number)

    def settle(self, last: bool = False) -> None:
        """Add rows that later lines do not change, while the log grows; `last`: all of them."""
        if last:
            self.end_row()

    def finish(self, path: Path, warnings: list[str]) -> None:
        """Add rows that depend on lines after them."""
        self.end_row()


class _TrainerReader(_LineReader):
    """Rows such as `{'loss': 3.21, 'learning_rate': 1e-4, 'epoch': 0.1}`, maybe of many lines.

    The Hugging Face Trainer prints no step, but draws its progress bar again after each such line.
    """

    def __init__(self, log_format: LogFormat | None, lines: Sequence[LineFormat]) -> None:
        super().__init__(log_format, lines)
        self._total = ""  # of the training's bar; those of evaluations come and go
        self._count = math.nan
        self._found: list[tuple[Numbers, int]] = []  # rows, and the number of the line
        self._open = False  # the last row's bar has not come yet
        self._logged = 0.0  # rows with a loss that have been settled

    def read(self, line: str, number: int) -> bool:
        if (bar := _BAR.search(line)) and not _DESCRIBED.search(line):
            self.end_row()
            self._total = self._total or bar[2]
            if bar[2] == self._total:
                self._count = float(bar[1])
                if self._open:
                    self._found[-1][0]["bar"] = self._count
                self._open = False
        return super().read(line, number)

    def end_row(self) -> None:
        row, self.row = self.row, Numbers()
        if "train_runtime" not in row and any("loss" in name for name in row):
            self._found.append(({**row, "bar": self._count}, self._number))
            self._open = True

    def settle(self, last: bool = False) -> None:
        super().settle(last)
        while self._found and (last or not (self._open and self._total) or len(self._found) > 1):
            row, number = self._found.pop(0)
            count = row.pop("bar")
            self._logged += "loss" in row
            if step_keys(row, {}):
                self.format = None  # another framework's
            else:
                self.numbered = math.isnan(count)
                row["step"] = self._logged if self.numbered else count
            self.rows.add(row.items(), number)
        self._open = self._open and bool(self._found)

    def finish(self, path: Path, warnings: list[str]) -> None:
        self.end_row()
        have_steps = any(step_keys(row, {}) for row, _ in self._found)
        self.format = None if have_steps else self.format  # another framework's
        counts = [row["bar"] for row, _ in self._found if "loss" in row]
        by_bar = not any(map(math.isnan, counts)) and all(a != b for a, b in pairwise(counts))
        logged = 0.0
        for row, number in self._found:
            count = row.pop("bar")
            logged += "loss" in row
            if not have_steps:
                row["step"] = count if by_bar and not math.isnan(count) else logged
            self.rows.add(row.items(), number)
        if self._found and not (have_steps or by_bar):
            warnings.append(
                f"{path}: no progress bar between its lines shows the step; they are numbered 1, "
                "2, …: give the run's trainer_state.json instead"
            )


def _head_values(match: re.Match[str]) -> Numbers | None:
    """Return the values of a line's head, and its time; None if the step is not a number."""
    groups = {name: text for name, text in match.groupdict().items() if text is not None}
    values = Numbers()
    for name, text in groups.items():
        with suppress(ValueError, IndexError):  # the user's group may be no number
            values[name] = to_float(text.strip())
    if "step" in match.re.groupindex:
        if "step" not in values:
            return None
        values["step"] += (values.pop("epoch", 1.0) - 1) * values.pop("total", 0.0)
    with suppress(ValueError):
        if "asctime" in groups:
            values["time"] = float(calendar.timegm(time.strptime(groups["asctime"])))
        elif stamp := _TIMESTAMP.search(match.string[:100]):
            values["time"] = datetime.fromisoformat(stamp[0]).replace(tzinfo=UTC).timestamp()
    return values


def _compile(pattern: str) -> re.Pattern[str]:
    """Return a pattern in which `%name` matches a number; `%value` is not a group."""
    pattern = pattern.replace("%value", _NUMBER)
    return re.compile(_NAME.sub(lambda match: _VALUE % match[1], pattern), re.IGNORECASE)


def _format_readers() -> list[_LineReader]:
    readers: list[_LineReader] = []
    for log_format in all_formats().values():
        # Lines that count steps otherwise have a reader of their own.
        for _, lines in groupby(log_format.lines, lambda line: (line.steps_from, line.following)):
            group = list(lines)
            kind = _TrainerReader if group[0].step_of_bar else _LineReader
            readers.append(kind(None if log_format.name == ANY_FRAMEWORK else log_format, group))
    return readers


def check_pattern(pattern: str, option: str = "--pattern") -> None:
    """Validate the pattern of an option.

    Raises:
        UserError: it does not compile, lacks the group `step` or `loss`, or has a group whose name
            is not a metric.
    """
    try:
        groups = re.compile(pattern).groupindex
    except re.error as error:
        raise UserError(
            f"{option} '{pattern}' is not a regular expression: {error}; give one such as "
            f"{_EXAMPLE}"
        ) from error
    for name in groups:
        check_metric(name, f"{option} '{pattern}'")
    for needed in ("step", "loss"):
        if needed not in groups:
            raise UserError(
                f"{option} '{pattern}' has no group (?P<{needed}>…); give one such as {_EXAMPLE}"
            )
