"""Logs of other frameworks in text files: the lines of a training's output.

A log may have gigabytes and is streamed. Bytes that are not UTF-8 are replaced, terminal colours
are removed, and a carriage return, with which a progress bar overwrites itself, ends a line too.
"""

from __future__ import annotations

import calendar
import math
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache, lru_cache
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from slurmllm.core.errors import RunError
from slurmllm.core.format import Texts, printable
from slurmllm.core.metrics.curves import SourceKind
from slurmllm.core.metrics.log_series import (
    NUMBER,
    WRAPPER,
    WRAPPER_END,
    Log,
    LogReader,
    Numbers,
    RowCollector,
    Rows,
    parse_values,
)
from slurmllm.core.metrics.tags import (
    ANY_FRAMEWORK,
    METRICS,
    PATTERN_EXAMPLE,
    LineFormat,
    LogFormat,
    Tags,
    all_formats,
    check_pattern,
    step_keys,
)

_MAX_WAITING = 1000  # rows of a format that is not the one with most rows
_LONGEST_LINE = 1 << 16  # bytes; a longer line, such as a core dump, holds no metrics
_LONGEST_SEARCHED = 1 << 13  # characters of a line, by a user's expression
_LONG_NUMBER = re.compile(r"(\d{400})\d+")  # no float has so many digits
_VALUE = rf"{WRAPPER}(?P<%s>{NUMBER}){WRAPPER_END}"
# %name of formats.yaml, longer names first
_NAMES = sorted((*METRICS, "step_time_ms", "epoch", "total", "bar"), key=len, reverse=True)
_NAME = re.compile(f"%({'|'.join(_NAMES)})")
# Before the number of a step: not 1k, 1_000, 1e3, 1.5
_WHOLE = r"(?=[\d,]{1,15}(?![\w']|[,.]\d))"
# What a line of one of the formats holds; all other lines are skipped without decoding them.
_HINT = re.compile(
    rb"[Ll]oss|LOSS|xent|Cost|Ep\. |trl:|tel:|step=|batch=|\d/\d+ \[|['\"]|\d (?:train|val) "
)
_TIMESTAMP = re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d+)?")
_BAR = re.compile(r"\|\s*(\d{1,15})/(\d{1,15}|\?) \[")
# The step next to a row of names and values: `step 10/400`, `iteration: 10`, else `[10/400]`
_STEPS = (
    re.compile(r"(?i)(?:\b|_)(?:step|iter(?:ation)?|update)s?[ =:\[]{1,3}(\d{1,15})\b(?!,\d)"),
    re.compile(r"(?i)(?<!epoch )(?<!epoch: )[\[(](\d{1,15})/\d{1,15}[\])]"),
)
# A bar of something else: `Loading weights: 5%|`, `Map (num_proc=2): 5%|`, `[01:02, 3 examples/s]`
_DESCRIBED = re.compile(r"[A-Za-z)]:\s{1,3}\d{1,3}%\||\bexamples/s\]")
# Fields that locate a line in the training, and report no measured value
_LOCATING = {"step", "epoch", "total", "bar", "time"}
_NUMBERED = "its lines show no step and are numbered 1, 2, …: give the run's trainer_state.json"
# What launchers and log collectors write before each line: the rank, the host, the time
_TIME = r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[-+]\d\d:?\d\d)?"
_METRIC = "step|iter|epoch|batch|update|loss|train|val"  # no name of a host
_PREFIXES = (
    r" {0,6}(\d{1,6}):(?: |(?=\D|$))",  # srun --label, which pads the task's number
    r"\[[A-Za-z_]{1,20}(\d{1,6})\]: ?",  # torchrun --tee
    r"\[(?:rank|gpu|device|worker)[ _=:]?(\d{1,6})\]:? ?",
    r"rank[ =:]?(\d{1,6})\]?: ?",
    r"\[\d{1,6},(\d{1,6})\]<std(?:out|err)>: ?",  # mpirun --tag-output
    r"\(\w{1,80} pid=(\d{1,10})(?:, ip=[\d.]{7,15})?\) ?",  # Ray
    rf"(?!{_METRIC})([a-z][\w.-]{{0,62}}\d[\w.-]{{0,62}}): ",  # pdsh
    # kubectl logs --timestamps, CI, containerd; not a time that the framework's own fields follow
    rf"\[?{_TIME}\]? (?:std(?:out|err) F )?(?!-|\| |,)",
)
_PREFIX = re.compile("|".join(_PREFIXES), re.IGNORECASE)


class TextReader(LogReader):
    """Reads lines of text, by each rank and format; by the user's `pattern`, or of one framework.

    Attributes:
        numbered: Why the steps are invented; empty if the lines show them.
    """

    kind: SourceKind = "text"

    def __init__(self, pattern: str | None = None, log_format: LogFormat | None = None) -> None:
        super().__init__()
        if pattern is not None:
            check_pattern(pattern)
        formats = _line_formats() if pattern is None else [(None, [LineFormat(head=pattern)])]
        named = [pair for pair in formats if pair[0] is not None and pair[0] == log_format]
        self.format = log_format
        self.numbered = ""
        self._pattern = pattern
        self._formats = named or formats
        self._collectors = [RowCollector() for _ in self._formats]  # by format, of all ranks
        self._by_rank: dict[str, list[_LineReader]] = {}
        self._latest: dict[str, _LineReader] = {}  # of each rank, the one that read a line
        self._number = 1
        self._rest = b""
        self._rank = ""
        self._continued = False  # a progress bar that overwrites itself has its rank once

    @property
    def readers(self) -> list[_LineReader]:
        return [reader for readers in self._by_rank.values() for reader in readers]

    def feed(self, data: bytes, last: bool = False) -> None:
        lines = (self._rest + data).splitlines(keepends=True)
        # A newline may follow a carriage return.
        whole = last or not lines or lines[-1].endswith(b"\n")
        self._rest = b"" if whole else lines.pop()[: _LONGEST_LINE + 1]
        for line in lines:
            is_read = (
                self._pattern is not None
                or _HINT.search(line)
                or any(reader.row for reader in self._latest.values())
            )
            if is_read and len(line) <= _LONGEST_LINE:
                self._read_line(printable(line.decode("utf-8-sig", "replace").rstrip("\r\n")))
            self._continued = not line.endswith(b"\n")
            self._number += not self._continued

    def _read_line(self, content: str) -> None:
        stamp = content
        if self._pattern is not None:
            rank = ""
            # A user's expression may need the square of a line's length, or of its digits.
            line = _LONG_NUMBER.sub(r"\1", content[:_LONGEST_SEARCHED])
        else:
            name, line = split_prefix(content)
            rank = self._rank = name or (self._rank if self._continued else "")
            stamp = content[:100]
        if rank not in self._by_rank:
            self._by_rank[rank] = [
                (_TrainerReader if lines[0].step_of_bar else _LineReader)(
                    log_format, lines, rows, rank
                )
                for (log_format, lines), rows in zip(self._formats, self._collectors, strict=True)
            ]
        readers = self._by_rank[rank]
        latest = self._latest.get(rank)
        if latest is not None and not latest.is_general:
            readers = [latest, *readers]
        for reader in readers:
            if reader.read(line, self._number, stamp):
                self._latest[rank] = reader
                break

    def flush(self, last: bool = False) -> None:
        # A progress bar is drawn without an end of its line.
        if last or self._rest.rstrip().endswith(b"]"):
            self.feed(b"", last=True)
        for reader in self.readers:
            reader.end_row()
            reader.flush(last)

    def take(self) -> Rows:
        """Return the new rows of the format that has most, as of a whole log."""
        for reader in self.readers:
            reader.flush()
        best = self._choose_reader()
        if best is None:
            return []
        taken = best.rows.waiting + best.rows.take()
        for collector in self._collectors:
            collector.waiting = (collector.waiting + collector.take())[-_MAX_WAITING:]
        best.rows.waiting = []
        tags = self.format.tags.values() if self.format is not None else ()
        if not any("time" in names for names in tags):  # else Detectron2's time of a step
            for row in taken:
                row.pop("time", None)  # of a time zone that it does not name
        return taken

    def _choose_reader(self) -> _LineReader | None:
        """Choose the format with most losses and rows; None if no line has a number."""
        readers = [reader for reader in self.readers if any(reader.rows.sizes)]
        best = max(readers, key=lambda reader: reader.rows.sizes, default=None)
        if best is not None:
            self.format = best.format or (self.format if len(self._formats) == 1 else None)
            self.numbered = best.invented_steps
        return best

    def log(self, path: Path, tags: Tags) -> Log:
        best = self._choose_reader()
        if best is not None and best.rows:
            log = best.rows.log(path, self.kind, tags, self.warnings)
            return replace(log, format=best.format, invented_steps=self.numbered)
        if self._pattern is not None:
            raise RunError(
                f"no line of {path} matches --pattern '{self._pattern}'; check it against a line "
                "of the log (spaces must match exactly)"
            )
        raise RunError(
            f"no metrics in {path}: no line is of a known format (docs/compare.md names them), or "
            "a progress bar with a loss; give such a log, or a table (.csv, .jsonl) of the "
            f"metrics, or describe its lines with --pattern, such as --pattern {PATTERN_EXAMPLE}"
        )


class _LineReader:
    """The rows of one format and rank: of a line each, or of a line and those that follow it.

    A step that is not in the head is among the names and values, or that of a progress bar.
    """

    def __init__(
        self,
        log_format: LogFormat | None,
        lines: Sequence[LineFormat],
        rows: RowCollector,
        rank: str,
    ) -> None:
        self.rows = rows
        self.format = log_format
        # Lines of other formats may match too
        self.is_general = log_format is None or lines[0].step_of_bar
        if log_format is not None:
            first = log_format.steps_from if lines[0].steps_from is None else lines[0].steps_from
            self.format = log_format.model_copy(
                update={"counts": lines[0].counts, "steps_from": first}
            )
        self.row = Numbers()  # the next line may belong to it
        self.invented_steps = ""
        self._rank = [("rank", rank)] if rank else []
        self._texts = self._rank
        self._number = 0  # of its first line
        self._patterns = [
            (_compile(line.head), _compile(line.pair) if line.pair else None, line.epochs_from)
            for line in lines
        ]
        self._following = lines[0].following
        self._before = 0.0  # steps before a progress bar's first, which a restart begins with
        # Epoch and count of the bar before, and how far it was from that before it
        self._bar = (math.inf, 0.0, 0.0)
        self._first_epoch = math.inf

    def read(self, line: str, number: int, stamp: str) -> bool:
        """Read a line; return False if it is of another format."""
        for head, pair, epochs_from in self._patterns:
            match = head.search(line)
            values, unread = _read_head(match, stamp, epochs_from) if match else (None, [])
            if unread and values is None:
                self.rows.add((), number, unread)
            if values is None and not self.row:
                continue
            texts = [] if pair is None else pair.findall(line)
            pairs = parse_values((name.strip(), value) for name, value in texts)
            if values is not None:
                if not (pairs or unread or self._following or values.keys() - _LOCATING):
                    continue  # a line of another format, which has the values
                self.end_row()
                self.row = pairs | values
                self._number = number
                self._texts = [*self._rank, *unread]
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
        row = self.row
        self.row = Numbers()
        if "bar" in row:
            row["step"] = self._step_of_bar(row)
        if row:
            self.rows.add(row.items(), self._number, self._texts)

    def _step_of_bar(self, row: Numbers) -> float:
        """Return the step that a bar with a loss is at, which may begin anew with each epoch."""
        last_epoch, last_count, last_distance = self._bar
        count = row.pop("bar")
        epoch = row.pop("epoch", None)
        total = row.pop("total", math.inf)
        step = row.pop("global_step", row.pop("step", None))
        if step is not None:
            # The bar prints three digits of a large number: from 100,000 its own count is exact.
            if step < 1e5:
                self._before = step - count
        elif epoch is not None and math.isfinite(total):
            # Lightning, which shows v_num, counts epochs from 0, others maybe from 1.
            self._first_epoch = min(self._first_epoch, epoch, 0.0 if "v_num" in row else 1.0)
            if epoch > last_epoch and count - last_count == last_distance:
                self._first_epoch = math.nan  # the steps are those of the training
            if not math.isnan(self._first_epoch):
                self._before = (epoch - self._first_epoch) * total
        elif epoch is not None and epoch > last_epoch and count <= last_count:
            self._before += last_count
        self._bar = (epoch or 0.0, count, count - last_count)
        return count + self._before

    def flush(self, last: bool = False) -> None:
        """Add rows that later lines do not change; the `last` time all of them."""


class _TrainerReader(_LineReader):
    """Rows such as `{'loss': 3.21, 'learning_rate': 1e-4, 'epoch': 0.1}`, maybe of many lines.

    The Hugging Face Trainer prints no step, but draws its progress bar again after each such line,
    and first at step 0. A script that prints a bar before each row does neither.
    """

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._total = ""  # of the training's bar; those of evaluations come and go
        self._count = math.nan
        self._redraws = False
        self._pending: list[tuple[Numbers, int]] = []  # rows, and the number of the line
        self._open = False  # the last row's bar has not come yet
        self._logged = 0.0  # rows with a loss that have been added

    def read(self, line: str, number: int, stamp: str) -> bool:
        if (bar := _BAR.search(line)) and not _DESCRIBED.search(line):
            self.end_row()
            self._total = self._total or bar[2]
            if bar[2] == self._total:
                before = self._count
                self._count = float(bar[1])
                self._redraws |= self._count in (0, before if self._open else 0)
                if self._open and (self._redraws or math.isnan(before)):
                    self._pending[-1][0]["bar"] = self._count
                self._open = False
        matches = super().read(line, number, stamp)
        if self._number == number and self.row and not _has_step(tuple(self.row)):
            outside = f"{line.partition('{')[0]} {line.rpartition('}')[2]}"
            if step := next(filter(None, (step.search(outside) for step in _STEPS)), None):
                self.row["step"] = float(step[1])
        return matches

    def end_row(self) -> None:
        row = self.row
        self.row = Numbers()
        if "train_runtime" not in row and any("loss" in name for name in row):
            self._pending.append(({**row, "bar": self._count}, self._number))
            self._open = True

    def flush(self, last: bool = False) -> None:
        # The last row may get its step from a bar that follows.
        count = len(self._pending) - (not last and self._open and self._total != "")
        ready = self._pending[:count]
        self._pending = self._pending[count:]
        self._open = self._open and bool(self._pending)
        have_steps = any(_has_step(tuple(row)) for row, _ in ready)
        if have_steps:
            self.format = None  # another framework's
        counts = [row["bar"] for row, _ in ready if "loss" in row]
        by_bar = not any(map(math.isnan, counts)) and all(a != b for a, b in pairwise(counts))
        for row, number in ready:
            bar_count = row.pop("bar")
            self._logged += "loss" in row
            if not have_steps:
                row["step"] = bar_count if by_bar and not math.isnan(bar_count) else self._logged
            self.rows.add(row.items(), number, self._texts)
        if ready and not have_steps:
            self.invented_steps = "" if by_bar else _NUMBERED


@lru_cache
def _has_step(names: Texts) -> bool:
    return bool(step_keys(names, {}))


def _read_head(
    match: re.Match[str], stamp: str, epochs_from: int
) -> tuple[Numbers | None, list[tuple[str, str]]]:
    r"""Return the values of a line's head, with its time; None if the step is not a number.

    Also what a group such as `\S+` of a user's pattern holds instead of a number: it is damage.
    """
    groups = {name: value for name, value in match.groupdict().items() if value}
    values = parse_values(groups.items())
    unread = [item for item in groups.items() if item[0] in METRICS and item[0] not in values]
    if "step" in match.re.groupindex:
        if "step" not in values:
            return None, unread
        epochs = values.pop("epoch", epochs_from) - epochs_from
        values["step"] += epochs * values.pop("total", 0.0)
    with suppress(ValueError):
        if "asctime" in groups:
            values["time"] = float(calendar.timegm(time.strptime(groups["asctime"])))
        elif stamp_match := _TIMESTAMP.search(stamp):
            values["time"] = datetime.fromisoformat(stamp_match[0]).replace(tzinfo=UTC).timestamp()
    return values, unread


@cache
def _compile(pattern: str) -> re.Pattern[str]:
    """Return a pattern in which `%name` matches a number; `%value` is not a group."""
    pattern = pattern.replace("%value", WRAPPER + NUMBER + WRAPPER_END).replace("%whole", _WHOLE)
    return re.compile(_NAME.sub(lambda match: _VALUE % match[1], pattern), re.IGNORECASE)


@cache
def _line_formats() -> list[tuple[LogFormat | None, list[LineFormat]]]:
    """Return the lines of each format; those that count steps otherwise are apart."""
    return [
        (None if log_format.name == ANY_FRAMEWORK else log_format, list(lines))
        for log_format in all_formats().values()
        for _, lines in groupby(
            log_format.lines, lambda line: (line.steps_from, line.following, line.counts)
        )
    ]


def split_prefix(line: str) -> tuple[str, str]:
    """Return the rank or host that the prefixes of a line name, and the line without them."""
    ranks = dict[str, None]()
    start = 0
    while match := _PREFIX.match(line, start):
        ranks |= dict.fromkeys(rank for rank in match.groups() if rank is not None)
        start = match.end()
    return ".".join(ranks), line[start:]
