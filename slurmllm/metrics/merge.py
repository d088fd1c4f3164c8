"""Rows of several attempts, put together into one curve with one row a step.

An attempt that resumes from a checkpoint makes the steps after it a second time; of a step's rows
the one of the latest attempt stands, since that attempt's weights are the ones the run went on
with. The rows that it replaces are counted, and compared with those that stand: a resume is exact
when they are bit-identical.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from slurmllm.metrics.curves import (
    COLUMNS,
    REPRODUCED,
    Curve,
    Flags,
    Floats,
    Ints,
    Range,
    SourceKind,
    bit_identical,
    relative_difference,
)
from slurmllm.records import SkippedBatches


@dataclass(frozen=True)
class RowBlock:
    """Some rows, in the order in which they were read.

    Attributes:
        steps: Of each row. [rows]
        attempts: Of each row. [rows]
        columns: Values of the metrics that at least one of the rows has. [rows]
        absent: For a metric that some of them lack, which rows those are. [rows]
    """

    steps: Ints
    attempts: Ints
    columns: Mapping[str, Floats]
    absent: Mapping[str, Flags] = field(default_factory=dict)


def merge_rows(
    parts: Iterable[RowBlock],
    *,
    name: str,
    path: Path,
    kind: SourceKind,
    warnings: Iterable[str] = (),
    skips: tuple[SkippedBatches, ...] = (),
) -> Curve:
    """One row a step: of a step's rows that of the latest attempt, read last.

    Args:
        parts: The rows; at least one.
        name: What to call the curve.
        path: What was read.
        kind: What it was read from.
        warnings: What a reader of the curve should know already.
        skips: Roll-backs; rows that one of them undid are no overlap.
    """
    rows = _joined(list(parts))
    stands, replaced, winners = select_latest(rows.steps, rows.attempts)
    steps, attempts = rows.steps[stands], rows.attempts[stands]
    if replaced.size:
        later = rows.attempts[winners]
        again = ~_undone(rows.steps[replaced], rows.attempts[replaced], later, skips)
        replaced, winners = replaced[again], winners[again]
    identical, largest = compare_overlap(rows.columns, replaced, winners)
    whole = len(stands) == len(rows.steps) and bool(np.all(stands[1:] > stands[:-1]))
    absent = {key: flags[stands] for key, flags in rows.absent.items()}
    return Curve(
        name=name,
        path=path,
        steps=steps,
        attempts=attempts,
        columns={key: c if whole else c[stands] for key, c in rows.columns.items()},
        absent={key: flags for key, flags in absent.items() if flags.any()},
        overlap_rows=int(replaced.size),
        overlap_identical=identical if replaced.size else None,
        overlap_max_rel_diff=largest if replaced.size else None,
        gaps=_gaps(steps),
        warnings=(*warnings, *_stale(steps, attempts)),
        kind=kind,
        skips=skips,
    )


def select_latest(steps: Ints, attempts: Ints) -> tuple[Ints, Ints, Ints]:
    """Which row of each step stands.

    Returns:
        Indices of the rows that stand, by step; of the rows that were replaced; and of the rows
        that replaced these.
    """
    if np.all(steps[1:] > steps[:-1]):
        none: Ints = np.empty(0, dtype=np.int64)
        return np.arange(len(steps)), none, none
    # Stable, so that equal keys stay in the order read; by attempt first where that is not in order
    order: Ints = np.arange(len(steps))
    if np.any(attempts[1:] < attempts[:-1]):
        order = np.argsort(attempts, kind="stable")
    order = order[np.argsort(steps[order], kind="stable")]
    is_last = np.append(np.diff(steps[order]) != 0, True)
    stands, replaced = order[is_last], order[~is_last]
    return stands, replaced, stands[np.searchsorted(steps[stands], steps[replaced])]


def compare_overlap(columns: Mapping[str, Floats], old: Ints, new: Ints) -> tuple[bool, float]:
    """Whether rows equal those that replaced them bit for bit, and how far they differ at most.

    Args:
        columns: Values by metric. [rows]
        old: Indices of the rows that were replaced.
        new: Indices of the rows that replaced them.
    """
    identical, largest = True, 0.0
    for key in REPRODUCED if old.size else ():
        if key in columns:
            before, after = columns[key][old], columns[key][new]
            identical &= bool(np.all(bit_identical(before, after)))
            difference = relative_difference(before, after)
            finite = difference[np.isfinite(difference)]
            largest = max(largest, float(np.max(finite, initial=0.0)))
    return identical, largest


def _joined(parts: list[RowBlock]) -> RowBlock:
    """All rows as one part."""
    columns: dict[str, Floats] = {}
    absent: dict[str, Flags] = {}
    for key in COLUMNS:
        if not any(key in part.columns for part in parts):
            continue
        columns[key] = np.concatenate([_column(part, key) for part in parts])
        if any(key not in part.columns or key in part.absent for part in parts):
            absent[key] = np.concatenate([_absent(part, key) for part in parts])
    return RowBlock(
        steps=np.concatenate([part.steps for part in parts]),
        attempts=np.concatenate([part.attempts for part in parts]),
        columns=columns,
        absent=absent,
    )


def _column(part: RowBlock, key: str) -> Floats:
    return part.columns[key] if key in part.columns else np.full(len(part.steps), np.nan)


def _absent(part: RowBlock, key: str) -> Flags:
    if key not in part.columns:
        return np.ones(len(part.steps), dtype=bool)
    return part.absent.get(key, np.zeros(len(part.steps), dtype=bool))


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


def _gaps(steps: Ints) -> tuple[Range, ...]:
    """Missing ranges; the interval between rows is the most frequent one."""
    if len(steps) < 3:
        return ()
    intervals = np.diff(steps)
    if np.all(intervals == intervals[0]):
        return ()
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
