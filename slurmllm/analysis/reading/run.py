"""A run's own metrics, or a single file of them, as a curve.

A run writes one metrics file an attempt. An attempt that resumes from a checkpoint makes the
steps after it a second time; of a step's rows the one of the latest attempt stands, since that
attempt's weights are the ones the run went on with. The rows that it replaces are counted, and
compared with those that stand: a resume is exact when they are bit-identical.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np

from slurmllm.analysis.curves import (
    COLUMNS,
    REPRODUCED,
    Curve,
    Flags,
    Ints,
    Range,
    bit_identical,
    relative_difference,
)
from slurmllm.analysis.reading.rows import MetricsFile, Row
from slurmllm.errors import RunError, StorageError
from slurmllm.records import DataRecord, SkippedBatches, SkipsRecord
from slurmllm.rundir import RunDir

_SPELT = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def read_run(source: Path) -> Curve:
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
