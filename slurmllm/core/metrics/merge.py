"""The merge of several attempts' rows into one curve with one row per step.

An attempt that resumes from a checkpoint recomputes the steps after it. Of a step's rows that of
the latest attempt is used, since the run continued with that attempt's weights. The rows that it
replaces are counted, and compared with those that replaced them: a resume is exact if they are
bit-identical. Logs of other frameworks, which name no attempts, are merged by the same functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from slurmllm.core.metrics.curves import (
    COLUMNS,
    LR_TOLERANCE,
    REPRODUCED,
    VAL_LOSS,
    Curve,
    Flags,
    Floats,
    Ints,
    NewSchedule,
    Range,
    SourceKind,
    bit_identical,
    relative_difference,
)
from slurmllm.core.run.records import Event, SkippedBatches


@dataclass(frozen=True)
class RowBlock:
    """Rows as columns, in the order in which they were read."""

    steps: Ints  # [rows]
    attempts: Ints  # [rows]
    columns: Mapping[str, Floats]  # metrics that at least one of the rows has [rows]
    absent: Mapping[str, Flags] = field(default_factory=dict)  # rows that lack a metric [rows]


def number_attempts(blocks: list[RowBlock]) -> list[RowBlock]:
    """Number the attempts of rows that name none: one begins where the step goes back."""
    steps = np.concatenate([block.steps for block in blocks])
    back = np.diff(steps, prepend=steps[:1]) < 0
    if any(block.attempts.any() for block in blocks) or np.count_nonzero(back) > len(steps) / 3:
        return blocks  # steps that go back often are in no order
    parts = np.split(
        np.cumsum(back, dtype=np.int64), np.cumsum([len(block.steps) for block in blocks])[:-1]
    )
    return [
        replace(block, attempts=attempts) for block, attempts in zip(blocks, parts, strict=True)
    ]


FileContent = tuple[list[RowBlock], list[str]]  # rows and warnings
FileRows = dict[Path, FileContent]


def merge_rows(
    blocks: Sequence[RowBlock],
    *,
    name: str,
    path: Path,
    kind: SourceKind,
    warnings: Iterable[str] = (),
    skips: tuple[SkippedBatches, ...] = (),
) -> Curve:
    """Merge rows to one per step: the last row read of the latest attempt.

    Rows that a roll-back (`skips`) undid are no overlap, nor those with another schedule. Warnings
    about the rows are added.
    """
    columns, absent = join_columns(blocks)
    all_steps = np.concatenate([block.steps for block in blocks])
    all_attempts = np.concatenate([block.attempts for block in blocks])
    used, replaced, winners = select_latest(all_steps, all_attempts)
    steps = all_steps[used]
    attempts = all_attempts[used]
    # A row that is written again, with more of the step, is no overlap.
    after = (replaced + 1) % len(all_steps)
    no_overlap = all_steps[after] == all_steps[replaced]
    no_overlap &= all_attempts[after] == all_attempts[replaced]
    # Steps that were undone by a roll-back are computed again with other data: they must differ.
    for skip in skips:
        undone = all_steps[replaced] > (skip.roll_back_to or 0)
        undone &= all_attempts[replaced] <= skip.attempt
        no_overlap |= undone & (all_attempts[winners] > skip.attempt)
    replaced = replaced[~no_overlap]
    winners = winners[~no_overlap]
    schedules = _new_schedules(columns.get("lr"), all_steps, all_attempts, replaced, winners)
    for schedule in schedules:
        other = all_attempts[winners] == schedule.attempts[1]
        other &= all_steps[winners] >= schedule.step
        replaced = replaced[~other]
        winners = winners[~other]
    identical, largest = compare_overlap(columns, replaced, winners)
    # Without a copy if no row was replaced or out of order: columns of long runs are 100 MB.
    in_order = len(used) == len(all_steps) and bool(np.all(used[1:] > used[:-1]))
    absent = {key: flags[used] for key, flags in absent.items()}
    return Curve(
        name=name,
        path=path,
        steps=steps,
        attempts=attempts,
        columns={key: c if in_order else c[used] for key, c in columns.items()},
        absent={key: flags for key, flags in absent.items() if flags.any()},
        overlap_rows=int(replaced.size),
        overlap_identical=identical if replaced.size else None,
        overlap_max_rel_diff=largest if replaced.size else None,
        gaps=_find_gaps(steps),
        warnings=(*warnings, *_fallback_warning(steps, attempts)),
        kind=kind,
        skips=skips,
        schedules=schedules,
    )


def join_columns(blocks: Sequence[RowBlock]) -> tuple[dict[str, Floats], dict[str, Flags]]:
    """Join the columns of all blocks; also return which rows lack a metric that others have."""
    columns = {}
    absent = {}
    for key in COLUMNS:
        if not any(key in block.columns for block in blocks):
            continue
        columns[key] = np.concatenate(
            [block.columns.get(key, np.full(len(block.steps), np.nan)) for block in blocks]
        )
        if any(key not in block.columns or key in block.absent for block in blocks):
            lacking = [
                block.absent.get(key, np.full(len(block.steps), key not in block.columns))
                for block in blocks
            ]
            absent[key] = np.concatenate(lacking)
    return columns, absent


def _fallback_warning(steps: Ints, attempts: Ints) -> Iterator[str]:
    """Warn of a run that fell back to an old checkpoint and has not caught up again."""
    back = np.flatnonzero(np.diff(attempts) < 0)
    if back.size:
        i = int(back[-1])
        yield (
            f"steps from {steps[i + 1]} are of attempt {attempts[i + 1]}; the later attempt "
            f"{attempts[i]} has only reached step {steps[i]}"
        )


def select_latest(steps: Ints, attempts: Ints) -> tuple[Ints, Ints, Ints]:
    """Return the rows that are used, by step; the replaced ones; and what replaced these."""
    if np.all(steps[1:] > steps[:-1]):
        none = np.empty(0, np.int64)
        return np.arange(len(steps)), none, none
    # Stable, so that rows of one step and attempt stay in the order in which they were read.
    order = np.lexsort((attempts, steps))
    is_last = np.append(np.diff(steps[order]) != 0, True)
    used = order[is_last]
    replaced = order[~is_last]
    return used, replaced, used[np.searchsorted(steps[used], steps[replaced])]


def _new_schedules(
    lr: Floats | None, steps: Ints, attempts: Ints, replaced: Ints, winners: Ints
) -> tuple[NewSchedule, ...]:
    if lr is None or not replaced.size:
        return ()
    differ = relative_difference(lr[replaced], lr[winners]) > LR_TOLERANCE
    rows = np.flatnonzero(differ & (attempts[replaced] != attempts[winners]))
    # The first step of each attempt; of the rows replaced there, that of the latest attempt.
    rows = rows[np.lexsort((-attempts[replaced[rows]], steps[replaced[rows]]))]
    _, firsts = np.unique(attempts[winners[rows]], return_index=True)
    return tuple(
        NewSchedule(
            int(steps[old]),
            (int(attempts[old]), int(attempts[new])),
            (float(lr[old]), float(lr[new])),
        )
        for old, new in [(int(replaced[i]), int(winners[i])) for i in rows[firsts]]
    )


def compare_overlap(columns: Mapping[str, Floats], old: Ints, new: Ints) -> tuple[bool, float]:
    """Return whether rows have the bits of those that replaced them, and the largest difference."""
    identical = True
    largest = 0.0
    for key in REPRODUCED if old.size else ():
        if key in columns:
            before = columns[key][old]
            after = columns[key][new]
            identical &= bool(np.all(bit_identical(before, after)))
            difference = relative_difference(before, after)
            largest = max(largest, float(np.max(difference[np.isfinite(difference)], initial=0.0)))
    return identical, largest


def with_evaluations(
    curve: Curve, evaluations: Mapping[int, Event], add_rows: bool = False
) -> Curve:
    """Add the losses on the texts of `eval` to a curve.

    The first text is the metric `val_loss`, as in logs of other frameworks; others are
    `val_loss/NAME`. Those of steps without a row are left out, or get a row: another trainer may
    not log the steps at which it evaluates.
    """
    if add_rows and (extra := sorted(evaluations.keys() - set(curve.steps.tolist()))):
        curve = _with_rows(curve, extra)
    names = dict.fromkeys(name for event in evaluations.values() for name in event.values)
    columns = dict(curve.columns)
    absent = dict(curve.absent)
    for name in names:
        metric = f"{VAL_LOSS}/{name}" if VAL_LOSS in columns else VAL_LOSS
        by_step = {step: e.values[name] for step, e in evaluations.items() if name in e.values}
        columns[metric] = np.array([by_step.get(step, np.nan) for step in curve.steps.tolist()])
        absent[metric] = np.isnan(columns[metric])
    return replace(curve, columns=columns, absent=absent, texts=tuple(names))


def _with_rows(curve: Curve, steps: Sequence[int]) -> Curve:
    """Return a curve with rows without metrics at further steps."""
    places = np.searchsorted(curve.steps, np.array(steps, np.int64))
    present = np.zeros(len(curve.steps), bool)
    absent = {name: curve.absent.get(name, present) for name in curve.columns}
    return replace(
        curve,
        steps=np.insert(curve.steps, places, steps),
        attempts=np.insert(
            curve.attempts, places, curve.attempts[np.minimum(places, len(curve.steps) - 1)]
        ),
        columns={name: np.insert(c, places, np.nan) for name, c in curve.columns.items()},
        absent={name: np.insert(flags, places, True) for name, flags in absent.items()},
    )


def _find_gaps(steps: Ints) -> tuple[Range, ...]:
    """Find missing ranges; the most frequent interval between rows is the regular one."""
    if len(steps) < 3:
        return ()
    intervals = np.diff(steps)
    values, counts = np.unique(intervals, return_counts=True)
    regular = int(values[np.argmax(counts)])
    return tuple(
        (int(steps[i]) + regular, max(int(steps[i + 1]) - regular, int(steps[i]) + regular))
        for i in np.flatnonzero(intervals > regular)
    )
