"""Logs of other frameworks: a series for each tag, collected from rows by a reader of bytes.

Numbers are read as logs print them: `1,234.5`, `1.2K`, `tensor(1.2)`, `10/400`.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from slurmllm.core.errors import RunError
from slurmllm.core.format import Texts
from slurmllm.core.metrics.curves import DamageWarning, Flags, Floats, Ints, SourceKind
from slurmllm.core.metrics.tags import (
    METRICS,
    LogFormat,
    Tags,
    choose_step_key,
    common_names,
    find_tags,
    list_tags,
)

Numbers = dict[str, float]
Rows = list[Numbers]

_FRACTIONAL = 0.1  # share of steps that are not whole numbers
_MOST_TEXTS = 200  # different ones in a column that separates rows
# Cells of a table that are no values, as pandas reads them
MISSING = {"", "na", "n/a", "none", "null", "-", "<na>"}


@dataclass(frozen=True)
class TagSeries:
    """The values of one tag, in the order in which they were written."""

    order: Ints  # position of each value in the log: ascending, counted over all tags [rows]
    steps: Ints  # [rows]
    values: Floats  # [rows]
    times: Floats | None = None  # when written, Unix time in s; None if not logged [rows]

    def take(self, rows: Flags) -> TagSeries:
        """Return the series of some rows."""
        times = None if self.times is None else self.times[rows]
        return TagSeries(self.order[rows], self.steps[rows], self.values[rows], times)


SeriesByTag = dict[str, TagSeries]


@dataclass(frozen=True)
class TextSeries:
    """The texts of a column, such as the split or the rank of its row."""

    order: Ints  # as in `TagSeries` [rows]
    codes: Ints  # index into `texts` [rows]
    texts: Texts


@dataclass(frozen=True)
class Log:
    """A log as it was read."""

    path: Path  # file or folder
    kind: SourceKind
    series: Mapping[str, TagSeries]  # by tag
    starts: Sequence[int] = ()  # positions (`TagSeries.order`) at which a process began to write
    warnings: Texts = ()
    format: LogFormat | None = None  # if its lines have shown it
    lines: Sequence[int] = ()  # number of the line at each position, from 1; 0: unknown
    texts: Mapping[str, TextSeries] = field(default_factory=dict)  # by column
    invented_steps: str = ""  # why its steps are none that the training counted

    def location(self, order: int) -> str:
        return line_location(self.path, self.lines[order] if len(self.lines) else 0)


def line_location(path: Path, line: int) -> str:
    """`FILE:LINE`, without a line of which the number is not known (0)."""
    return f"{path}:{line}" if line else str(path)


def log_suffix(path: Path) -> str:
    """Return the suffix in lower case, without .gz: `.csv` for both `x.CSV` and `x.csv.gz`."""
    return (Path(path.stem) if path.suffix == ".gz" else path).suffix.lower()


class RowCollector:
    """Columns of rows of numbers that each have their own keys."""

    def __init__(self) -> None:
        self._taken = (0, 0)  # `sizes` of the rows that were taken
        self._rank: str | None = None  # whose rows are taken
        self.waiting: Rows = []  # rows that were taken, and not used yet
        self._clear()

    def _clear(self) -> None:
        self._columns: dict[str, tuple[array[int], array[float]]] = defaultdict(
            lambda: (array("q"), array("d"))
        )  # rows, values
        self._texts: dict[str, tuple[array[int], array[int], dict[str, int]]] = {}
        self._lines = array("q")

    def add(
        self,
        row: Iterable[tuple[str, float]],
        line: int = 0,
        texts: Iterable[tuple[str, str]] = (),
    ) -> None:
        """Add a row, the number of its line if it has one, and its columns of text."""
        number = len(self._lines)
        for key, value in row:
            numbers, values = self._columns[key]
            numbers.append(number)
            values.append(value)
        for key, cell in texts:
            rows, codes, codes_of = self._texts.setdefault(key, (array("q"), array("q"), {}))
            if key == "rank" or len(codes_of) < _MOST_TEXTS:
                rows.append(number)
                codes.append(codes_of.setdefault(cell, len(codes_of)))
        self._lines.append(line)

    def set_column(self, key: str, values: Sequence[float]) -> None:
        self._columns[key] = array("q", range(len(values))), array("d", values)

    def take(self) -> Rows:
        """Remove all rows, and return those of the rank that had the first one."""
        self._taken = self.sizes
        rows = [Numbers() for _ in self._lines]
        for key, (numbers, values) in self._columns.items():
            for number, value in zip(numbers, values, strict=True):
                rows[number][key] = value
        ranks = dict(self._cells("rank"))
        if self._rank is None and rows:
            self._rank = ranks.get(0, "")
        self._clear()
        return [
            row for number, row in enumerate(rows) if row and ranks.get(number, "") == self._rank
        ]

    def _cells(self, key: str) -> list[tuple[int, str]]:
        """Return row and text of the cells of a column."""
        rows, codes, codes_of = self._texts.get(key, ((), (), {}))
        texts = list(codes_of)
        return [(row, texts[code]) for row, code in zip(rows, codes, strict=True)]

    def __len__(self) -> int:
        return len(self._lines)

    def __bool__(self) -> bool:
        return bool(self._columns)  # a line of a pattern may hold no number

    @property
    def sizes(self) -> tuple[int, int]:
        """The number of values of the most frequent key that names a loss, and of rows."""
        losses = [len(rows) for key, (rows, _) in self._columns.items() if "loss" in key.lower()]
        return self._taken[0] + max(losses, default=0), self._taken[1] + len(self)

    def series(self, steps: Ints, times: Floats | None = None) -> SeriesByTag:
        """Return the columns of the rows that have a step (0 or more). [rows]"""
        series = {}
        for key, (numbers, values) in self._columns.items():
            rows = np.frombuffer(numbers, np.int64)
            column = TagSeries(
                rows, steps[rows], np.frombuffer(values), None if times is None else times[rows]
            )
            has_step = column.steps >= 0
            if has_step.any():
                series[key] = column.take(has_step)
        return series

    def log(
        self,
        path: Path,
        kind: SourceKind,
        tags: Tags,
        warnings: Sequence[str],
    ) -> Log:
        """Return the rows that have a step as a log; raise RunError if there are none."""
        if not len(self):
            raise RunError(
                f"no metrics in {path}: it has no row of numbers; give the log of a training run"
                + "".join(f" ({warning})" for warning in warnings)
            )
        self._refuse_decimal_commas(path, tags)
        step_key, row_steps, skipped = self._select_steps(path, tags)
        warnings = (*warnings, *self._mixed_columns(path, step_key), *skipped)
        series = self.series(row_steps)
        series.pop(step_key, None)
        return Log(
            path,
            kind,
            series,
            warnings=tuple(warnings),
            lines=self._lines,
            texts={
                key: TextSeries(np.array(rows_of), np.array(codes), tuple(codes_of))
                for key, (rows_of, codes, codes_of) in self._texts.items()
                if key == "rank" or len(codes_of) < _MOST_TEXTS
            },
        )

    def _select_steps(self, path: Path, tags: Tags) -> tuple[str, Ints, Sequence[str]]:
        """Return the key of the step, the step of each row (-1: none), and warnings."""
        step_key = choose_step_key(
            {key: len(rows) for key, (rows, _) in self._columns.items()}, tags
        )
        if step_key is None:
            names = [tags["step"]] if "step" in tags else common_names("step")
            epochs = self._columns.get("epoch", ((), ()))[1]
            key = "epoch" if epochs and all(map(float.is_integer, epochs)) else "KEY"
            raise RunError(
                f"no step in {path}: it has none of the keys {', '.join(names)}; its keys are "
                f"{list_tags(self._columns)}; name the step's key with --tag step={key}"
            )
        numbers, values = self._columns[step_key]
        rows = np.frombuffer(numbers, np.int64)
        steps = np.frombuffer(values)
        with np.errstate(invalid="ignore"):
            # Beyond 2**53 a float64 cannot represent every integer.
            valid = (steps >= 0) & (steps < 2**53) & (steps == np.floor(steps))
        fractional = np.flatnonzero(np.isfinite(steps) & (steps != np.floor(steps)))
        # A few may be damage; the whole ones among many would be another curve.
        if fractional.size > _FRACTIONAL * len(steps):
            index = fractional[0]
            raise RunError(
                f"{line_location(path, self._lines[rows[index]])}: {step_key} is {steps[index]:g}, "
                "not a whole number; name the column of the step with --tag step=KEY"
            )
        lines = [line for row in rows[~valid].tolist() if (line := self._lines[row])]
        warnings = [
            DamageWarning(
                f"{path}: skipped {np.sum(~valid)} of {len(steps)} rows: {step_key} is {step:g}, "
                "not an integer of 0 or more",
                lines,
            )
            for step in steps[~valid][:1].tolist()
        ]
        row_steps = np.full(len(self), -1, np.int64)
        # Of a row with several steps the first: two columns may have the same name.
        row_steps[rows[valid][::-1]] = steps[valid][::-1].astype(np.int64)
        return step_key, row_steps, warnings

    def _mixed_columns(self, path: Path, step_key: str) -> Iterator[str]:
        """Yield warnings of texts in columns of numbers; without a step, the row is left out."""
        for key in self._columns:
            cells = [(row, cell) for row, cell in self._cells(key) if cell.lower() not in MISSING]
            if cells and key != "rank":
                lines = [self._lines[row] for row, _ in cells]
                yield DamageWarning(
                    f"{line_location(path, lines[0])}: {cells[0][1]!r:.40} in column {key!r} is "
                    f"not a number; such cells are missing values: {len(cells)}",
                    lines,
                    "" if key == step_key else key,
                )

    def _refuse_decimal_commas(self, path: Path, tags: Tags) -> None:
        names = (*tags.values(), *(name for metric in METRICS for name in common_names(metric)))
        for key in find_tags(self._texts, names):
            number = next(filter(has_decimal_comma, self._texts[key][2]), None)
            if number is not None:
                raise RunError(
                    f"{path}: {number!r} in column {key!r} has a decimal comma; write decimal "
                    "points: for a table, sed -E 's/([0-9]),([0-9])/\\1.\\2/g'"
                )


class LogReader(ABC):
    """Reads the bytes of a log in order: reading a file is following it to its end."""

    kind: SourceKind
    is_document = False  # whether only the whole file can be read
    format: LogFormat | None = None  # once its lines have shown it

    def __init__(self) -> None:
        self.rows = RowCollector()
        self.warnings: list[str] = []

    @abstractmethod
    def feed(self, data: bytes) -> None:
        """Read the rows that are complete."""

    @abstractmethod
    def flush(self, last: bool = False) -> None:
        """Read rows that only more bytes could complete: the log pauses, or this is the `last`."""

    def take(self) -> Rows:
        """Return the rows since the last call, for one who follows the log."""
        return self.rows.take()

    def log(self, path: Path, tags: Tags) -> Log:
        """Return all rows; raise RunError without any."""
        return self.rows.log(path, self.kind, tags, self.warnings)


# Numbers as logs print them: `1,234.5`, `1.2K`, `tensor(1.2)`, `10/400`.
#
# A comma separates thousands. Of `2,345` it may be a decimal comma: it is a number only of a count.

LONGEST_NUMBER = 40  # characters; what is longer is no metric
# Every repetition is bounded and atomic, so that a search in a long line takes linear time.
NUMBER = (
    r"[-+]?(?:(?>(?:\d{1,40}(?:,\d{1,40}){0,9}(?:\.\d{0,40})?|\.\d{1,40})(?:e[-+]?\d{1,4})?)"
    r"(?!\d)|nan|inf(?:inity)?)"
)
# np.float64(1.2), tensor([1.2], device='cuda:0'), maybe cut by the end of the line
WRAPPER = r"(?:(?:np\.\w{1,20}|\w{0,20}tensor|\w{0,20}array)\(\[?)?"
WRAPPER_END = r"(?:\]?(?:, ?\w{1,20}=[^,()\s]{1,40}){0,3}\))?"
_FIRST_NUMBER = re.compile(NUMBER, re.IGNORECASE)
_STEP_NAME = re.compile(r"step|iter|update|batch", re.IGNORECASE)
_THOUSANDS = re.compile(r"[-+]?[1-9]\d{0,2}(?:,\d{3})+(?:\.\d*)?(?:[eE][-+]?\d+)?")
_DECIMAL_COMMA = re.compile(r"[-+]?[\d.]*,\d+(?:[eE][-+]?\d+)?")
_COUNT_NAME = re.compile(r"step|iter|update|batch|tok|sample|seq|tps|num|count|epoch", re.I)
_UNITS = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}


def parse_number(token: str) -> float | None:
    """Parse a number; None if the text is not one, or has more than 40 characters."""
    token = token.strip().rstrip(",")
    if "(" in token:
        match = _FIRST_NUMBER.match(token[token.index("(") + 1 :].lstrip("["))
        token = "" if match is None else match[0]
    token = token.rstrip(")]")
    if not 0 < len(token) <= LONGEST_NUMBER:
        return None
    if token[-1] in _UNITS:
        number = parse_number(token[:-1])
        return None if number is None else number * _UNITS[token[-1]]
    if "," in token and _THOUSANDS.fullmatch(token):
        token = token.replace(",", "")
    try:
        return float(token)
    except ValueError:
        return None


def parse_value(name: str, token: str) -> float | None:
    """Parse the number of a column or key; of a step's also the first of `10/400`."""
    if has_decimal_comma(token) and not _COUNT_NAME.search(name):
        return None
    if "/" in token and _STEP_NAME.search(name):
        count, _, total = token.partition("/")
        if parse_number(total) is not None:
            return parse_number(count)
    return parse_number(token)


def parse_values(texts: Iterable[tuple[str, str]]) -> Numbers:
    """Return the numbers among named texts."""
    numbers = ((name, parse_value(name, token)) for name, token in texts)
    return {name: number for name, number in numbers if number is not None}


def has_decimal_comma(token: str) -> bool:
    """Return whether the comma of a number is, or may be, a decimal comma."""
    return "," in token and _DECIMAL_COMMA.fullmatch(token.strip()) is not None
