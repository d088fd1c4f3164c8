"""A run's metrics as curves: one row a step, whatever restarts there were.

A run writes one metrics file an attempt. An attempt that resumes from a checkpoint makes the
steps after it a second time; of a step's rows the one of the latest attempt stands, since that
attempt's weights are the ones the run went on with. The rows that it replaces are counted, and
compared with those that stand: a resume is exact when they are bit-identical.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from slurmllm.analysis.rows import MetricsFile, Row
from slurmllm.errors import RunError, StorageError
from slurmllm.records import DataRecord, MetricsRow, SkippedBatches, SkipsRecord
from slurmllm.rundir import RunDir

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Range = tuple[int, int]  # first and last step, both included

COLUMNS = tuple(name for name in MetricsRow.model_fields if name not in ("step", "attempt"))
REPRODUCED = ("loss", "grad_norm", "param_norm", "lr", "tokens")  # the rest are times and rates

_SPELT = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@dataclass(frozen=True)
class Curve:
    """The metrics of a run, by step.

    Attributes:
        name: What to call it: the run's name, or the file's.
        path: What was read.
        steps: The steps, ascending, each once. [rows]
        attempts: The attempt that each row is of. [rows]
        columns: Values by metric name; only metrics that at least one row has. [rows]
        absent: For a metric that some rows lack, which rows those are. [rows]
        overlap_rows: Rows that a later attempt replaced.
        overlap_identical: Whether these were bit-identical to the rows that replaced them;
            None without overlap.
        overlap_max_rel_diff: Largest relative difference between them; None without overlap.
        gaps: Ranges of steps that are missing between the first and the last.
        warnings: What a reader of the curve should know.
        data: What the run read; None where that is not known.
        skips: Its roll-backs; rows that one of them undid are no overlap.
    """

    name: str
    path: Path
    steps: Ints
    attempts: Ints
    columns: Mapping[str, Floats]
    absent: Mapping[str, Flags]
    overlap_rows: int
    overlap_identical: bool | None
    overlap_max_rel_diff: float | None
    gaps: tuple[Range, ...]
    warnings: tuple[str, ...]
    data: DataRecord | None = None
    skips: tuple[SkippedBatches, ...] = ()

    def series(self, metric: str) -> tuple[Ints, Floats]:
        """The steps that have a metric, and its values there; both empty where none has it."""
        if metric not in self.columns:
            return self.steps[:0], np.empty(0)
        if metric not in self.absent:
            return self.steps, self.columns[metric]
        there = ~self.absent[metric]
        return self.steps[there], self.columns[metric][there]

    @property
    def restarts(self) -> Ints:
        """The steps at which another attempt takes over."""
        steps: Ints = self.steps[1:][np.diff(self.attempts) != 0]
        return steps


def relative_difference(a: Floats, b: Floats) -> Floats:
    """|a - b| / max(|a|, |b|), elementwise; 0 where both are 0, never more than 2.

    NaN where either is not a finite number.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        scale = np.maximum(np.maximum(np.abs(a), np.abs(b)), np.finfo(np.float64).tiny)
        difference = np.minimum(np.abs(a - b) / scale, 2.0)
    return np.where(np.isfinite(a) & np.isfinite(b), difference, np.nan)


def bit_identical(a: Floats, b: Floats) -> Flags:
    """Where two columns hold the same 64 bits; 0.0 and -0.0 are not the same, NaN and NaN are."""
    same: Flags = a.view(np.int64) == b.view(np.int64)
    return same


def align(a: Curve, b: Curve, metric: str, first: int, last: int) -> tuple[Ints, Floats, Floats]:
    """The steps from `first` to `last` that both curves have a metric at, and its values."""
    steps_a, values_a = a.series(metric)
    steps_b, values_b = b.series(metric)
    steps, at_a, at_b = np.intersect1d(steps_a, steps_b, assume_unique=True, return_indices=True)
    inside = (steps >= first) & (steps <= last)
    return steps[inside], values_a[at_a][inside], values_b[at_b][inside]


def describe_ranges(ranges: tuple[Range, ...], most: int = 3) -> str:
    """Ranges of steps in words: "12, 40–43, 50–60 and 7 more ranges"."""
    shown = [f"{first}–{last}" if first < last else f"{first}" for first, last in ranges[:most]]
    more = len(ranges) - most
    return ", ".join(shown) + (f" and {more} more ranges" if more > 0 else "")


def read_curve(source: Path) -> Curve:
    """Read a run directory's metrics, or a single .jsonl file.

    Raises:
        RunError: there are no metrics, a line before the last is broken, or a file cannot be
            read.
    """
    try:
        is_file = source.is_file()
        files = [source] if is_file else RunDir(source).metrics_files()
    except OSError as error:
        raise RunError(
            f"cannot read {error.filename or source}: {error.strerror or error}; the metrics "
            "must be readable: check the permissions and the file system"
        ) from error
    name = _name(source, is_file)
    if not files:
        raise RunError(
            f"no metrics of {name}: {source / 'metrics'} holds no attempt_NNN.jsonl; they begin "
            f"with the run's first step: see `slurmllm status {name}` and its logs"
        )
    table = _Table()
    for order, path in enumerate(files):
        table.read(MetricsFile(path), order)
    if not table.steps:
        raise RunError(
            f"no metrics of {name}: {', '.join(str(path) for path in files)} without one whole "
            f"row; they begin with the run's first step: see `slurmllm status {name}` and its logs"
        )
    run = RunDir(source.absolute().parent.parent if is_file else source)
    data, skips = None, SkipsRecord()
    try:
        data = DataRecord.load(run.data) if run.data.is_file() else None
        skips = SkipsRecord.load(run.skips) if run.skips.is_file() else skips
    except StorageError as error:
        table.warnings.append(str(error))
    return replace(table.curve(name, source, skips.skips), data=data)


def _name(source: Path, is_file: bool) -> str:
    """A run's name, or a file's; the run's before it where the file is one of a run's attempts."""
    path = source.absolute() if source.name not in ("", "..") else source.resolve()
    if is_file and path.parent.name == "metrics":
        return f"{path.parent.parent.name}.{path.stem}"
    return path.stem if is_file else path.name


class _Table:
    """Rows in the order in which they were read, column by column."""

    def __init__(self) -> None:
        self.steps = array("q")
        self.attempts = array("q")
        self.columns = {name: array("d") for name in COLUMNS}
        self.absent: dict[str, list[int]] = {name: [] for name in COLUMNS}
        self.warnings: list[str] = []

    def read(self, source: MetricsFile, order: int) -> None:
        """Append a file's rows.

        Args:
            source: The file.
            order: The attempt of rows that do not name theirs.
        """
        for row in source.rows():
            self._append(row, source, order)
        if source.cut_line is not None:
            self.warnings.append(
                f"{source.path}:{source.cut_line}: the last line is cut and left out"
            )

    def _append(self, row: Row, source: MetricsFile, order: int) -> None:
        attempt = row.get("attempt", order)
        if type(attempt) is not int or not 0 <= attempt < 2**53:
            raise source.fault(f"attempt is {attempt!r:.40}, not a whole number from 0")
        for name, column in self.columns.items():
            if name not in row:
                self.absent[name].append(len(self.steps))
                column.append(math.nan)
                continue
            value = row[name]
            column.append(value if type(value) is float else _number(value, name, source))
        self.steps.append(row["step"])
        self.attempts.append(attempt)

    def curve(self, name: str, path: Path, skips: tuple[SkippedBatches, ...]) -> Curve:
        """One row a step: of a step's rows that of the latest attempt, read last."""
        steps, attempts = _ints(self.steps), _ints(self.attempts)
        order = np.lexsort((attempts, steps))  # stable: equal keys stay in the order read
        last = np.flatnonzero(np.append(np.diff(steps[order]) != 0, True))
        stands, replaced = order[last], np.delete(order, last)
        standing_steps = steps[stands]

        present = [key for key in COLUMNS if len(self.absent[key]) < len(steps)]
        raw = {key: np.frombuffer(self.columns[key], dtype=np.float64) for key in present}
        absent = {key: np.zeros(len(steps), dtype=bool) for key in present if self.absent[key]}
        for key, flags in absent.items():
            flags[self.absent[key]] = True

        winners = stands[np.searchsorted(standing_steps, steps[replaced])]
        again = ~_undone(steps[replaced], attempts[replaced], attempts[winners], skips)
        replaced, winners = replaced[again], winners[again]
        identical, largest = True, 0.0
        for key in REPRODUCED if replaced.size else ():
            if key in raw:
                old, new = raw[key][replaced], raw[key][winners]
                identical &= bool(np.all(bit_identical(old, new)))
                difference = relative_difference(old, new)
                finite = difference[np.isfinite(difference)]
                largest = max(largest, float(np.max(finite, initial=0.0)))
        return Curve(
            name=name,
            path=path,
            steps=standing_steps,
            attempts=attempts[stands],
            columns={key: column[stands] for key, column in raw.items()},
            absent={key: flags[stands] for key, flags in absent.items() if flags[stands].any()},
            overlap_rows=int(replaced.size),
            overlap_identical=identical if replaced.size else None,
            overlap_max_rel_diff=largest if replaced.size else None,
            gaps=_gaps(standing_steps),
            warnings=(*self.warnings, *_stale(standing_steps, attempts[stands])),
            skips=skips,
        )


def _undone(steps: Ints, attempts: Ints, later: Ints, skips: Iterable[SkippedBatches]) -> Flags:
    """Rows of steps that were made again with other data, after a roll-back.

    Args:
        steps: Of the replaced rows. [rows]
        attempts: Likewise. [rows]
        later: The attempts whose rows replaced them. [rows]
        skips: The roll-backs.
    """
    undone: Flags = np.zeros(len(steps), dtype=bool)
    for skip in skips:
        after = steps > (skip.roll_back_to or 0)
        undone |= after & (attempts <= skip.attempt) & (later > skip.attempt)
    return undone


def _number(value: object, name: str, source: MetricsFile) -> float:
    """A value as a float; pydantic writes NaN as null or as its name."""
    if value is None:
        return math.nan
    if isinstance(value, str) and value in _SPELT:
        return _SPELT[value]
    if isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            return math.inf if value > 0 else -math.inf
    raise source.fault(f"{name} is {value!r:.40}, not a number")


def _ints(values: array[int]) -> Ints:
    return np.frombuffer(values, dtype=np.int64)


def _gaps(steps: Ints) -> tuple[Range, ...]:
    """Missing ranges; the interval between rows is the most frequent one."""
    if len(steps) < 3:
        return ()
    intervals = np.diff(steps)
    values, counts = np.unique(intervals, return_counts=True)
    usual = int(values[np.argmax(counts)])
    return tuple(
        (int(steps[i]) + usual, max(int(steps[i + 1]) - usual, int(steps[i]) + usual))
        for i in np.flatnonzero(intervals > usual)
    )


def _stale(steps: Ints, attempts: Ints) -> list[str]:
    """A warning where rows of an attempt follow on rows of a later one.

    This is how a run looks that fell back to an old checkpoint and has not caught up again.
    """
    back = np.flatnonzero(np.diff(attempts) < 0)
    if not back.size:
        return []
    i = int(back[-1])
    return [
        f"steps from {steps[i + 1]} are of attempt {attempts[i + 1]}; the later attempt "
        f"{attempts[i]} has come to step {steps[i]} only"
    ]
