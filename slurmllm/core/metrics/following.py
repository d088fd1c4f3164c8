"""Logs of other frameworks that grow: the rows that are new since the last look.

Their readers are those of whole logs, so that a run that was followed has the curve of its log.
What a file holds at the first look is of earlier attempts, and is skipped. A `*` in a path stands
for a part of a name that each attempt may have anew (`version_*`).
"""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from slurmllm.core.errors import RunError
from slurmllm.core.format import format_names
from slurmllm.core.metrics.event_files import training_files
from slurmllm.core.metrics.log_files import LogFile
from slurmllm.core.metrics.log_series import Numbers, Rows
from slurmllm.core.metrics.tags import (
    FILES,
    LogFormat,
    TagChoice,
    choose_step_key,
    choose_tags,
    find_format,
    per_device,
)
from slurmllm.core.metrics.text_logs import TextReader

_POLL_S = 1.0
_PAUSE_S = 2.0  # without output, after which a row of several lines counts as complete
# What can only be read as a whole: the time between two readings, and their share of it.
_REREAD_S = 10.0
_REREAD_SHARE = 0.05
_SHOWN = 5  # names of files in a message
_MAX_WAITING = 10_000  # rows before the first with a loss


class FollowedOutput:
    """The output of a process."""

    def __init__(self, reader: TextReader) -> None:
        self.reader = reader
        self._fed_at = math.inf

    @property
    def format(self) -> LogFormat | None:
        return self.reader.format

    def feed(self, output: bytes) -> None:
        self._fed_at = time.monotonic()
        self.reader.feed(output)

    def read(self, last: bool = False) -> Rows:
        if last or time.monotonic() - self._fed_at > _PAUSE_S:
            self.reader.flush(last)
            self._fed_at = math.inf
        return self.reader.take()


class FollowedPath:
    """A file, or a folder of event files, which may not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._files: dict[Path, LogFile] = {}  # the newest last
        self._next = 0.0
        with suppress(OSError, RunError):
            self.read()

    @property
    def format(self) -> LogFormat | None:
        file = next(reversed(self._files.values()), None)
        return None if file is None else file.reader.format

    def read(self, last: bool = False) -> Rows:
        """Return the new rows; raise OSError or RunError if they cannot be read now."""
        begin = time.monotonic()
        path = newest(self._path)
        if path is None or (begin < self._next and not last):
            return []
        rows = []
        self._next = begin + _POLL_S
        for source in training_files(path):
            if source not in self._files:
                self._files[source] = LogFile(source, {})
            file = self._files[source]
            rows += file.take_new(last)
            if file.reader.is_document:
                self._next = begin + _REREAD_S + (time.monotonic() - begin) / _REREAD_SHARE
        return rows


def newest(path: Path) -> Path | None:
    """Return a path if it exists; of those that a path with `*` matches, the newest."""
    if "*" not in str(path):
        return path if path.exists() else None
    parts = path.parts
    first = next(number for number, piece in enumerate(parts) if "*" in piece)
    paths = Path(*parts[:first]).glob("/".join(parts[first:]))
    return max(paths, key=lambda each: each.stat().st_mtime_ns, default=None)


def no_match(pattern: Path) -> str:
    """Return that no file matches a pattern, and what its folder has instead."""
    folder = next(path for path in pattern.parents if not re.search(r"\*|\{step\}", str(path)))
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    return f"no such file: {pattern}; {folder} has {format_names(names, _SHOWN) or 'no files'}"


def follow(progress: str | None) -> FollowedOutput | FollowedPath:
    """Return the source of `progress`: the output (by a format or pattern), or a path."""
    if progress is None or "(?P<" in progress:
        return FollowedOutput(TextReader(progress))
    if not is_path(progress):
        return FollowedOutput(TextReader(log_format=find_format(progress)))
    return FollowedPath(Path(progress))


def printing_rank(progress: str | None, world_size: int) -> int:
    """Return the rank whose output `progress` is of: the first, or for some formats the last."""
    if progress is None or "(?P<" in progress or is_path(progress):
        return 0
    return world_size - 1 if find_format(progress).printed_by == "last" else 0


def is_path(name: str) -> bool:
    path = Path(name)
    return "/" in name or path.suffix in FILES or "tfevents" in path.name


class MetricNames:
    """The metrics that the names in a log's rows stand for, inferred from the rows so far.

    Attributes:
        problem: Why no row has a metric; empty if one has.
        format: The framework, once recognized.
    """

    def __init__(self, source: Path, devices: int) -> None:
        self.problem = ""
        self.format: LogFormat | None = None
        self._source = source
        self._devices = devices
        self._counts: Counter[str] = Counter()
        self._total = 0
        self._chosen_at = 0
        self._names = 0
        self._choice: TagChoice | None = None
        self._step = ""
        self._waiting: Rows = []  # rows from before a loss was there

    def convert(self, rows: Rows, log_format: LogFormat | None) -> Iterator[tuple[int, Numbers]]:
        """Yield the step of each row, from 1, and its metrics."""
        for row in rows:
            self._counts.update(row.keys())
        self._total += len(rows)
        if self._total >= 2 * self._chosen_at or len(self._counts) > self._names:
            self._choose(log_format)
        if self._choice is None:
            self._waiting = (self._waiting + rows)[-_MAX_WAITING:]
            return
        rows = self._waiting + rows
        self._waiting = []
        first = self.format.steps_from if self.format and self.format.counts == "steps" else 1
        for row in rows:
            step = row.get(self._step, -1.0)
            if not 0 <= step < 2**53 or step != int(step):
                continue
            metrics = Numbers()
            if self.format is not None and self.format.counts == "samples":
                metrics["samples"] = step
            for metric, tag in self._choice.tags.items():
                if tag not in row:
                    continue
                metrics[metric] = row[tag]
                if metric == "step_time_s" and tag.endswith(("_ms", "(ms)")):
                    metrics[metric] /= 1e3
                if metric in ("seq_per_s", "tokens_per_s") and per_device(tag):
                    metrics[metric] *= self._devices
            yield int(step) + (first == 0), metrics

    def _choose(self, log_format: LogFormat | None) -> None:
        self._chosen_at = self._total
        self._names = len(self._counts)
        step = choose_step_key(self._counts, {})
        if step is None:
            self.problem = "its rows have no step"
            return
        counts = {tag: count for tag, count in self._counts.items() if tag != step}
        try:
            self._choice = choose_tags(counts, {}, self._source, log_format)
        except RunError as error:
            self.problem = str(error) if self._total else ""
            return
        self._step = step
        self.problem = ""
        self.format = self._choice.format
