"""Logs of other frameworks that grow: the rows that are new since the last look.

Their readers and names are those of `source.read_curve`, so that a run that was followed has the
curve of its log. What a file holds at the first look is of earlier attempts, and is skipped. A
`*` in a path stands for a part of a name that each attempt may have anew (`version_*`).
"""

from __future__ import annotations

import csv
import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from slurmllm.errors import RunError
from slurmllm.metrics.binary_logs import event_files, event_folders
from slurmllm.metrics.log_series import RowCollector, TagSeries, log_suffix
from slurmllm.metrics.row_logs import column_names, json_numbers, read_cells
from slurmllm.metrics.row_reader import parse_row
from slurmllm.metrics.source import read_log
from slurmllm.metrics.tags import (
    FILES,
    JSON_LINES,
    TABLES,
    TEXTS,
    LogFormat,
    TagChoice,
    choose_tags,
    find_format,
    per_device,
    step_keys,
)
from slurmllm.metrics.text_logs import Numbers, TextReader
from slurmllm.run.safe_files import LONGEST_LINE, open_regular

_CHUNK_BYTES = 1 << 20
_POLL_S = 1.0
_PAUSE_S = 2.0  # without output, after which a row of several lines counts as complete
# What can only be read as a whole: the time between two readings, and their share of it.
_REREAD_S, _REREAD_SHARE = 10.0, 0.05
_MAX_WAITING = 10_000  # rows before the first with a loss
_MAX_OTHERS = 1000  # rows of a format that is not the one with most rows


class _RowQueue(RowCollector):
    """Rows that wait until they are taken, of the rank that had the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[Numbers] = []
        self._losses = self._count = 0
        self._rank: str | None = None

    def add(
        self,
        row: Iterable[tuple[str, float]],
        line: int = 0,
        texts: Iterable[tuple[str, str]] = (),
    ) -> None:
        rank = dict(texts).get("rank", "")
        self._rank = rank if self._rank is None else self._rank
        if rank == self._rank and (values := dict(row)):  # empty if only texts were read
            self.waiting.append(values)
            self._losses += any("loss" in key.lower() for key in values)
            self._count += 1

    @property
    def sizes(self) -> tuple[int, int]:
        return self._losses, self._count


class TextRows:
    """The rows in lines of text."""

    def __init__(self, pattern: str | None = None, log_format: LogFormat | None = None) -> None:
        self._text = TextReader(pattern, None if log_format is None else log_format.name)
        self._queues = [_RowQueue() for _ in self._text.rows]
        self._text.rows = [*self._queues]
        self.format = self._named = log_format
        self.numbered = False  # whether nothing shows the steps: rows are counted

    def read(self, chunk: bytes, last: bool = False) -> list[Numbers]:
        self._text.read(chunk)
        for reader in self._text.readers:
            reader.flush()
        return self.flush(last) if last else self._take()

    def flush(self, last: bool = False) -> list[Numbers]:
        """Return rows that only more lines could complete: none have come for a while."""
        self._text.flush(last)
        return self._take()

    def _take(self) -> list[Numbers]:
        """Return the rows of the format that has most, as of a whole log."""
        queue = max(self._queues, key=lambda queue: queue.sizes)
        rows, queue.waiting = queue.waiting, []
        for other in self._queues:
            other.waiting = other.waiting[-_MAX_OTHERS:]
        for reader in self._text.readers if rows else ():
            if reader.rows is queue:
                self.format = reader.format or self._named
                self.numbered = bool(reader.invented_steps)
                break
        tags = self.format.tags.values() if self.format is not None else ()
        if not any("time" in names for names in tags):  # else Detectron2's time of a step
            for row in rows:
                row.pop("time", None)  # of a time zone that it does not name
        return rows


class JsonRows:
    """The rows of JSON lines; other lines are skipped."""

    format: LogFormat | None = None

    def __init__(self) -> None:
        self._rest = b""

    def read(self, chunk: bytes, last: bool = False) -> list[Numbers]:
        *lines, rest = (self._rest + chunk).split(b"\n")
        self._rest = b"" if last else rest[-LONGEST_LINE:]
        rows = map(self._row, [*lines, rest] if last else lines)
        return [row for row in rows if row is not None]

    def _row(self, line: bytes) -> Numbers | None:
        row = parse_row(line) if line.strip() else None
        return dict(json_numbers(row)) if isinstance(row, dict) else None


class TableRows(JsonRows):
    """The rows of a table; a cell that is not a number is a missing value."""

    def __init__(self, path: Path, tags: Mapping[str, str]) -> None:
        super().__init__()
        self._path, self._tags = path, tags
        self._columns, self._delimiter = list[str](), ","

    def _row(self, line: bytes) -> Numbers | None:
        text = line.decode("utf-8-sig", "replace").replace("\0", "")
        if not self._columns:
            self._delimiter, self._columns = column_names(text, self._path, self._tags)
            return None
        cells: list[str] = []
        with suppress(csv.Error):
            cells = next(csv.reader([text], delimiter=self._delimiter), [])
        row = dict(read_cells(self._columns, cells)[0])
        return row if row and len(cells) >= len(self._columns) else None


class FollowedOutput:
    """The output of a process."""

    def __init__(self, text: TextRows) -> None:
        self._text, self._rows = text, list[Numbers]()
        self._fed_at = math.inf

    @property
    def format(self) -> LogFormat | None:
        return self._text.format

    @property
    def numbered(self) -> bool:
        return self._text.numbered

    def feed(self, output: bytes) -> None:
        self._fed_at = time.monotonic()
        self._rows += self._text.read(output)

    def read(self, last: bool = False) -> list[Numbers]:
        if last or time.monotonic() - self._fed_at > _PAUSE_S:
            self._rows += self._text.flush(last)
            self._fed_at = math.inf
        rows, self._rows = self._rows, []
        return rows


class FollowedFile:
    """A file of lines, which may not exist yet, and may be written again from its beginning."""

    def __init__(self, path: Path, tags: Mapping[str, str]) -> None:
        self._path, self._tags = path, tags
        self._file: tuple[Path, int] | None = None  # its inode
        self._offset = self._rows = 0  # what was read of it
        self._head, self._next = b"", 0.0
        self._lines: TextRows | JsonRows = JsonRows()
        with suppress(OSError):
            self._look(skip=True)

    @property
    def format(self) -> LogFormat | None:
        return self._lines.format

    def read(self, last: bool = False) -> list[Numbers]:
        now = time.monotonic()
        if now < self._next and not last:
            return []
        self._next = now + _POLL_S
        return self._look(last=last)

    def _look(self, last: bool = False, skip: bool = False) -> list[Numbers]:
        path = newest(self._path)
        if path is None:
            return []
        rows: list[Numbers] = []
        with open_regular(path) as stream:
            size = stream.seek(0, 2)
            stream.seek(0)
            head = stream.readline(LONGEST_LINE) if log_suffix(path) in TABLES else b""
            before = 0
            file = (path, path.stat().st_ino)
            if head != self._head and self._head and file == self._file:
                before = self._rows  # Lightning's CSVLogger writes all again with a new column
            if file != self._file or size < self._offset or head != self._head:
                self._file, self._head = file, head if head.endswith(b"\n") else b""
                self._offset = self._rows = 0
                self._lines = self._reader(path)
            stream.seek(self._offset)
            while chunk := stream.read(_CHUNK_BYTES):
                rows += self._lines.read(chunk)
            paused, self._offset = self._offset == size, stream.tell()
        if paused and isinstance(self._lines, TextRows):
            rows += self._lines.flush()
        rows += self._lines.read(b"", last=True) if last else []
        self._rows += len(rows)
        return [] if skip else rows[before:]

    def _reader(self, path: Path) -> TextRows | JsonRows:
        suffix = log_suffix(path)
        if suffix in TEXTS:
            return TextRows()
        return TableRows(path, self._tags) if suffix in TABLES else JsonRows()


class RereadLog:
    """A log that is only readable as a whole, such as a folder of events; read at a low rate."""

    format: LogFormat | None = None

    def __init__(self, path: Path, tags: Mapping[str, str]) -> None:
        self._path, self._tags = path, tags
        self._next = 0.0
        self._seen: object = None
        self._rows: list[Numbers] = []  # as last read
        with suppress(OSError, RunError):
            self.read()

    def read(self, last: bool = False) -> list[Numbers]:
        now, path = time.monotonic(), newest(self._path)
        if path is None or (now < self._next and not last):
            return []
        self._next = now + _REREAD_S
        folders = [] if path.is_file() else [path, *event_folders(path)]
        files = [path, *(file for folder in folders for file in event_files(folder))]
        seen = {(file, (info := file.stat()).st_size, info.st_mtime_ns) for file in files}
        if seen == self._seen and (path.is_file() or len(files) > 1):
            return []
        log = read_log(path, self._tags)
        if log is None:
            raise RunError(f"{path} holds the metrics of slurmllm itself; give the trainer's log")
        self._next += (time.monotonic() - now) / _REREAD_SHARE
        before, self._rows, self._seen = self._rows, _rows_of(log.series), seen
        # A resume may have cut what a document held, and its files count anew.
        pairs = zip(before, self._rows, strict=False)
        same = next((n for n, (a, b) in enumerate(pairs) if a != b), len(before))
        return self._rows[same:]


def _rows_of(log: Mapping[str, TagSeries]) -> list[Numbers]:
    rows: dict[int, Numbers] = {}  # by position
    for tag, series in log.items():
        times = series.values if series.times is None else series.times
        columns = (series.order, series.steps, series.values, times)
        for order, step, value, moment in zip(*(c.tolist() for c in columns), strict=True):
            row = rows.setdefault(order, {"step": step})
            row[tag] = value
            if series.times is not None:
                row["time"] = moment
    return [rows[order] for order in sorted(rows)]


def newest(path: Path) -> Path | None:
    """Return a path if it exists; of those that a path with `*` matches, the newest."""
    if "*" not in str(path):
        return path if path.exists() else None
    parts = path.parts
    first = next(number for number, part in enumerate(parts) if "*" in part)
    paths = Path(*parts[:first]).glob("/".join(parts[first:]))
    return max(paths, key=lambda each: each.stat().st_mtime_ns, default=None)


MetricsSource = FollowedOutput | FollowedFile | RereadLog


def follow(progress: str | None, tags: Mapping[str, str]) -> MetricsSource:
    """Return the source of `progress`: the output (by a format or pattern), or a path."""
    if progress is None or "(?P<" in progress:
        return FollowedOutput(TextRows(progress))
    if not is_path(progress):
        return FollowedOutput(TextRows(log_format=find_format(progress)))
    path = Path(progress)
    lines = log_suffix(path) in (*TEXTS, *TABLES, *JSON_LINES)
    return FollowedFile(path, tags) if lines else RereadLog(path, tags)


def printing_rank(progress: str | None, world_size: int) -> int:
    """Return the rank whose output `progress` is of: the first, or for some formats the last."""
    if progress is None or "(?P<" in progress or is_path(progress):
        return 0
    return world_size - 1 if find_format(progress).printed_by == "last" else 0


def is_path(text: str) -> bool:
    path = Path(text)
    return "/" in text or path.suffix in FILES or "tfevents" in path.name


class MetricNames:
    """The metrics that the names in a log's rows stand for, inferred from the rows so far.

    Attributes:
        problem: Why no row has a metric; empty if one has.
        format: The framework, once recognized.
    """

    def __init__(self, tags: Mapping[str, str], source: Path, devices: int) -> None:
        self.problem = ""
        self.format: LogFormat | None = None
        self._tags, self._source, self._devices = tags, source, devices
        self._counts: Counter[str] = Counter()
        self._total, self._chosen_at, self._names = 0, 0, 0
        self._choice: TagChoice | None = None
        self._step = ""
        self._waiting: list[Numbers] = []  # rows from before a loss was there

    def convert(
        self, rows: list[Numbers], log_format: LogFormat | None
    ) -> Iterator[tuple[int, Numbers]]:
        """Yield the step of each row, from 1, and its metrics."""
        for row in rows:
            self._counts.update(row.keys())
        self._total += len(rows)
        if self._total >= 2 * self._chosen_at or len(self._counts) > self._names:
            self._choose(log_format)
        if self._choice is None:
            self._waiting = (self._waiting + rows)[-_MAX_WAITING:]
            return
        rows, self._waiting = self._waiting + rows, []
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
        self._chosen_at, self._names = self._total, len(self._counts)
        candidates = step_keys(self._counts, self._tags)
        most = max((self._counts[key] for key in candidates), default=0)
        steps = [key for key in candidates if 2 * self._counts[key] >= most]
        if not steps:
            self.problem = "its rows have no step"
            return
        counts = {tag: count for tag, count in self._counts.items() if tag != steps[0]}
        try:
            self._choice = choose_tags(counts, self._tags, self._source, log_format)
        except RunError as error:
            self.problem = str(error) if self._total else ""
            return
        self._step, self.problem, self.format = steps[0], "", self._choice.format
