"""Readers of lines that come in pieces: the rows of a text, of JSON lines and of a table."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from slurmllm.metrics.log_series import RowCollector, log_suffix
from slurmllm.metrics.row_logs import column_names, json_numbers, parse_cell
from slurmllm.metrics.row_reader import parse_row
from slurmllm.metrics.tags import LogFormat
from slurmllm.metrics.text_logs import Numbers, TextReader
from slurmllm.run.safe_files import LONGEST_LINE

_MAX_WAITING = 1000  # rows of a format that is not the one with most rows


class Lines(Protocol):
    """The reader of a file's lines."""

    format: LogFormat | None  # if the lines have shown it

    def read(self, chunk: bytes, last: bool = False) -> list[Numbers]: ...


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
        if rank != self._rank:
            return
        values = dict(row)
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
            reader.settle()
        return self.settle(last) if last else self._take()

    def settle(self, last: bool = False) -> list[Numbers]:
        """Return rows that only more lines could complete: none have come for a while."""
        self._text.settle(last)
        return self._take()

    def _take(self) -> list[Numbers]:
        """Return the rows of the format that has most, as of a whole log."""
        queue = max(self._queues, key=lambda queue: queue.sizes)
        rows, queue.waiting = queue.waiting, []
        for other in self._queues:
            other.waiting = other.waiting[-_MAX_WAITING:]
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
        lines, self._rest = _split(self._rest + chunk, last)
        rows = (parse_row(line) for line in lines if line.strip())
        return [dict(json_numbers(row)) for row in rows if isinstance(row, dict)]


class TableRows:
    """The rows of a table; a cell that is not a number is a missing value."""

    format: LogFormat | None = None

    def __init__(self, path: Path, tags: Mapping[str, str]) -> None:
        self._path, self._tags = path, tags
        self._rest, self._columns = b"", list[str]()
        self._delimiter = ","

    def read(self, chunk: bytes, last: bool = False) -> list[Numbers]:
        lines, self._rest = _split(self._rest + chunk, last)
        rows: list[Numbers] = []
        for line in lines:
            text = line.decode("utf-8-sig", "replace").replace("\0", "")
            if not self._columns:
                tabs = log_suffix(self._path) == ".tsv"
                self._delimiter = "\t" if tabs else max(",;\t", key=text.count)
                self._columns = column_names(text, self._delimiter, self._path, self._tags)
                continue
            cells: list[str] = []
            with suppress(csv.Error):
                cells = next(csv.reader([text], delimiter=self._delimiter), [])
            row = Numbers()
            for name, cell in zip(self._columns, cells, strict=False):
                if cell and (number := parse_cell(name, cell)) is not None:
                    row[name] = number
            if row and len(cells) >= len(self._columns):
                rows.append(row)
        return rows


def _split(text: bytes, last: bool) -> tuple[list[bytes], bytes]:
    """Split a text to its whole lines, at its end all of them, and the rest."""
    *lines, rest = text.split(b"\n")
    return ([*lines, rest], b"") if last else (lines, rest[-LONGEST_LINE:])
