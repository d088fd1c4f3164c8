"""Alignment of two curves: their steps counted alike, then at common or interpolated points."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np

from slurmllm.errors import RunError
from slurmllm.metrics.curves import Axis, Curve, Flags, Floats, Ints, Range, describe_ranges

Method = Literal["exact", "interpolated"]
# Share of the sparser curve's points that must be common; else the denser one is interpolated.
_MIN_COMMON = 0.5
# Longest gap, in median intervals, that is interpolated
_MAX_GAP = 3.0
# A shift, or a mean, must bring the values closer than this share of the scatter of single steps …
_CLOSE = 0.2
# … and without it they must be further apart than this one.
_FAR = 0.5
_MIN_POINTS = 8
_MAX_ROWS = 4096  # suffice to judge


@dataclass(frozen=True)
class Points:
    """One metric of both curves at the same positions, ascending."""

    steps: Ints  # A's; on the step axis those of the curve whose points they are [points]
    positions: Floats  # on the axis [points]
    a: Floats  # [points]
    b: Floats  # [points]

    def __len__(self) -> int:
        return len(self.steps)


@dataclass(frozen=True)
class StepMatch:
    """Two curves with steps counted alike.

    Attributes:
        read: The curves, shifted.
        used: The same, the finer with its loss averaged as the coarser averages it.
        shifts: What was added to the steps of each.
        reasons: Why each was shifted.
        averaged: Number of steps over which the loss of each was averaged; None: not averaged.
    """

    read: tuple[Curve, Curve]
    used: tuple[Curve, Curve]
    shifts: tuple[int, int]
    reasons: tuple[str, str]
    averaged: tuple[int | None, int | None]


def match_steps(
    a: Curve, b: Curve, given: tuple[int | None, int | None], *, by_step: bool
) -> StepMatch:
    """Shift steps that are counted from 0, and average the loss as the coarser log does.

    `given` are the user's shifts. Without any, logs of known frameworks are shifted by their
    convention, others by 1 if that makes their values coincide. On another axis than steps
    (not `by_step`) nothing is changed unless the user says so.
    """
    shifts, reasons = (0, 0), ("--shift", "--shift")
    if given != (None, None):
        shifts = given[0] or 0, given[1] or 0
    elif by_step:
        shifts, reasons = _choose_shifts(a, b)
    read = shift_steps(a, shifts[0]), shift_steps(b, shifts[1])
    used: list[Curve] = [*read]
    averaged: list[int | None] = [None, None]
    intervals = [np.median(np.diff(curve.steps)) if len(curve.steps) > 1 else 1 for curve in read]
    fine = int(np.argmin(intervals))
    ratio = int(intervals[1 - fine] // intervals[fine])
    if by_step and ratio >= 2 and (mean := _average_loss(read[fine], read[1 - fine], ratio)):
        used[fine], averaged[fine] = mean, ratio
    return StepMatch(read, (used[0], used[1]), shifts, reasons, (averaged[0], averaged[1]))


def shift_steps(curve: Curve, by: int) -> Curve:
    """Returns a curve with its steps counted from another number."""
    if not by:
        return curve
    gaps = tuple((first + by, last + by) for first, last in curve.gaps)
    return replace(curve, steps=curve.steps + by, gaps=gaps)


def _choose_shifts(a: Curve, b: Curve) -> tuple[tuple[int, int], tuple[str, str]]:
    firsts = [
        one.steps_from if one is not None and one.counts == "steps" else None
        for one in (a.convention, b.convention)
    ]
    unknown = None in firsts
    usual = 0 if unknown else (firsts[0] or 0) - (firsts[1] or 0)  # of B relative to A
    others = (1, -1) if unknown else (0,) if usual else ()
    found, scatter = usual, _scatter(a, b) if others else 0.0
    if scatter and not _coincide(a, b, usual, scatter):
        matching = [one for one in others if _coincide(a, b, one, scatter, far_from=usual)]
        found = matching[0] if len(matching) == 1 else usual
    lower = b if found > 0 else a  # the one whose steps are counted from 0
    reason = "so that the values of both coincide"
    if found == usual and lower.convention is not None:
        reason = f"{lower.convention.format} counts steps from 0"
    return (max(-found, 0), max(found, 0)), (reason, reason)


def _scatter(a: Curve, b: Curve) -> float:
    """Returns the scatter of the loss from step to step; 0 if the curves are smooth.

    The neighbours' mean is as far from a smooth curve all along on one side; the scatter of noise
    changes sides, and exceeds the last digit logged. A shift of smooth curves looks like a
    difference of their values, and nothing distinguishes the two.
    """
    finer = max((a, b), key=lambda curve: len(curve.steps))
    values = finer.series("loss")[1][:_MAX_ROWS]
    values = values[np.isfinite(values)]
    if len(values) < _MIN_POINTS:
        return 0.0
    rest = values[1:-1] - (values[2:] + values[:-2]) / 2
    turns = np.mean(np.sign(rest[1:]) != np.sign(rest[:-1]))
    size = float(np.median(np.abs(rest)))
    digit = np.min(np.diff(np.unique(values)), initial=np.inf)  # rounding scatters too
    level = float(np.median(np.abs(values)))
    return size if turns > 0.4 and size > max(2 * digit, 1e-6 * level) else 0.0


def _coincide(
    a: Curve, b: Curve, shift: int, scatter: float, *, far_from: int | None = None
) -> bool:
    """Whether the loss of B, shifted, is that of A; and clearly not with the shift `far_from`."""

    def distance(metric: str, by: int) -> float:
        (steps_a, values_a), (steps_b, values_b) = (c.series(metric) for c in (a, b))
        first = max(steps_a[0], steps_b[0] + by)
        _, at_a, at_b = np.intersect1d(steps_a, steps_b + by, True, True)[:3]
        keep = steps_a[at_a] < first + _MAX_ROWS
        difference = np.abs(values_a[at_a[keep]] - values_b[at_b[keep]])
        difference = difference[np.isfinite(difference)]
        return float(np.median(difference)) if len(difference) >= _MIN_POINTS else np.inf

    near = distance("loss", shift)
    if far_from is None or not near < _CLOSE * scatter:
        return near < _CLOSE * scatter
    for metric in ("grad_norm", "lr"):  # with batches one step ahead, learning rates coincide as is
        both = all(metric in curve.columns for curve in (a, b))
        if both and distance(metric, shift) > distance(metric, far_from):
            return False
    return distance("loss", far_from) > _FAR * scatter


def _average_loss(fine: Curve, coarse: Curve, ratio: int) -> Curve | None:
    """Returns the finer curve at the coarser's steps, its loss averaged; None if single steps fit.

    The loss is a mean if the coarser's format says so or if that fits by far better.
    """
    if "loss" not in fine.columns or "loss" not in coarse.columns:
        return None
    steps, values = coarse.series("loss")
    fine_steps, losses = fine.series("loss")
    ends = np.searchsorted(fine_steps, steps, side="right")
    begins = np.append(np.searchsorted(fine_steps, steps[:1] - ratio, side="right"), ends[:-1])
    there = (ends > begins) & (fine_steps[np.maximum(ends - 1, 0)] == steps)
    # The first mean may lack steps before the finer log begins, unless the training began there.
    there[0] &= bool(ends[0] - begins[0] == ratio or fine_steps[0] <= 1)
    if np.count_nonzero(there) < 2:
        return None
    ends, begins, values = ends[there], begins[there], values[there]
    total = np.append(0.0, np.cumsum(losses))  # NaN from the first NaN on: compared as not finite
    mean = (total[ends] - total[begins]) / (ends - begins)
    to_mean = float(np.nanmedian(np.abs(mean - values)))
    to_point = float(np.nanmedian(np.abs(losses[ends - 1] - values)))
    by_format = coarse.convention is not None and coarse.convention.loss_is_mean
    if by_format and to_point < _CLOSE * to_mean:
        return None
    scatter = _scatter(fine, fine)
    clear = len(mean) >= _MIN_POINTS and to_mean < _CLOSE * to_point and to_point > _CLOSE * scatter
    if not (by_format or (clear and scatter)):
        return None
    rows = np.searchsorted(fine.steps, fine_steps[ends - 1])
    columns = {name: column[rows] for name, column in fine.columns.items()} | {"loss": mean}
    absent = {name: flags[rows] for name, flags in fine.absent.items() if flags[rows].any()}
    steps, attempts = fine.steps[rows], fine.attempts[rows]
    return replace(fine, steps=steps, attempts=attempts, columns=columns, absent=absent)


class _Side:
    """The rows of a curve that are compared."""

    def __init__(self, curve: Curve, axis: Axis, inside: Flags) -> None:
        self.curve = curve
        positions = curve.positions(axis)
        # Positions must ascend: rows of a counter that was set back are ignored.
        rising = np.isfinite(positions)
        if axis != "step":
            highest = np.maximum.accumulate(np.where(rising, positions, -np.inf))
            rising[1:] &= positions[1:] > highest[:-1]
        self.rows = np.flatnonzero(rising & inside)
        self.steps = curve.steps[self.rows]
        self.positions = positions[self.rows]

    def lacks(self, metric: str) -> Flags | None:
        """Returns which of the rows lack a metric; None if none does."""
        absent = self.curve.absent.get(metric)
        return None if absent is None else absent[self.rows]


class Alignment:
    """The points at which two curves are compared.

    Attributes:
        axis: Axis of the alignment.
        method: "exact": at common points. "interpolated": at the sparser curve's points, the other
            one linear between its own.
        steps: Steps of the compared points. [points]
        positions: Their positions on the axis. [points]
        letter: Name of B in texts.
    """

    def __init__(
        self,
        a: Curve,
        b: Curve,
        axis: Axis,
        from_step: int | None,
        to_step: int | None,
        letter: str = "B",
    ) -> None:
        self.letter = letter
        for label, curve in (("A", a), (letter, b)):
            if not np.isfinite(curve.positions(axis)).any():
                needed = "tokens" if axis == "tokens" else "samples, or tokens and model.seq_len,"
                raise RunError(
                    f"{label} ({curve.path}) has no number of {axis} for its steps: its rows "
                    f"hold no {needed} and no config.yaml gives train.global_batch; name the "
                    f"column with --tag {axis}=…, or align by step"
                )
        self.axis: Axis = axis
        self._a = _Side(a, axis, _within(a.steps, from_step, to_step))
        # By tokens or samples the range is of A's steps; those of B differ.
        own = axis == "step"
        everything = np.ones(len(b.steps), dtype=bool)
        self._b = _Side(b, axis, _within(b.steps, from_step, to_step) if own else everything)
        both = self._a.positions, self._b.positions
        common, self._at_a, self._at_b = both[0], np.arange(len(both[0])), np.arange(len(both[0]))
        if not np.array_equal(*both):
            common, self._at_a, self._at_b = np.intersect1d(
                *both, assume_unique=True, return_indices=True
            )
        sparser = min(self._overlap(side).sum() for side in (self._a, self._b))
        suffice = len(common) >= _MIN_COMMON * sparser or sparser < 2
        self.method: Method = "exact" if suffice else "interpolated"
        if self.method == "exact":
            self.steps, self.positions = self._a.steps[self._at_a], common
            return
        side = self._a if self._a_is_sparser else self._b
        keep = self._overlap(side)
        self.steps, self.positions = side.steps[keep], side.positions[keep]
        if axis != "step" and side is self._b:
            # A's step during which it reached that position
            places = np.searchsorted(self._a.positions, self.positions)
            self.steps = self._a.steps[np.minimum(places, len(self._a.rows) - 1)]

    def _overlap(self, side: _Side) -> Flags:
        """Returns which rows of a curve are in the common range of positions."""
        if not len(self._a.rows) or not len(self._b.rows):
            return np.zeros(len(side.rows), dtype=bool)
        first = max(self._a.positions[0], self._b.positions[0])
        last = min(self._a.positions[-1], self._b.positions[-1])
        found: Flags = (side.positions >= first) & (side.positions <= last)
        return found

    @cached_property
    def _a_is_sparser(self) -> bool:
        return bool(self._overlap(self._a).sum() <= self._overlap(self._b).sum())

    @property
    def only(self) -> tuple[tuple[Range, ...], tuple[Range, ...]]:
        """The steps of A, and those of B, that are not compared."""
        found = []
        for side, at in ((self._a, self._at_a), (self._b, self._at_b)):
            left = ~self._overlap(side)
            if self.method == "exact":
                left = np.ones(len(side.rows), dtype=bool)
                left[at] = False
            found.append(ranges(side.steps[left], side.steps))
        return found[0], found[1]

    def of(self, metric: str) -> Points:
        """Returns a metric of both curves; without points if one of them lacks it."""
        curves = self._a.curve, self._b.curve
        columns = [curve.columns[metric] for curve in curves if metric in curve.columns]
        if len(columns) < 2:
            return Points(self.steps[:0], self.positions[:0], np.empty(0), np.empty(0))
        if self.method == "interpolated":
            return self._interpolated(metric)
        rows = [side.rows[at] for side, at in ((self._a, self._at_a), (self._b, self._at_b))]
        steps, positions = self.steps, self.positions
        lacking = [
            side.curve.absent[metric][at]
            for side, at in zip((self._a, self._b), rows, strict=True)
            if metric in side.curve.absent
        ]
        if lacking:
            there = ~np.logical_or.reduce(lacking)
            rows = [at[there] for at in rows]
            steps, positions = steps[there], positions[there]
        elif {len(curve.steps) for curve in curves} == {len(self.steps)}:
            return Points(steps, positions, *columns)
        a, b = (column[at] for column, at in zip(columns, rows, strict=True))
        return Points(steps, positions, a, b)

    def _interpolated(self, metric: str) -> Points:
        sparse, dense = (self._a, self._b) if self._a_is_sparser else (self._b, self._a)
        keep = self._overlap(sparse)
        lacks, lacks_dense = sparse.lacks(metric), dense.lacks(metric)
        there = np.ones(len(self.steps), dtype=bool) if lacks is None else ~lacks[keep]
        own = sparse.curve.columns[metric][sparse.rows[keep]]
        grid = np.ones(len(dense.rows), dtype=bool) if lacks_dense is None else ~lacks_dense
        places = dense.positions[grid]
        values = dense.curve.columns[metric][dense.rows[grid]]
        if len(places) < 2:
            return Points(self.steps[:0], self.positions[:0], np.empty(0), np.empty(0))
        there &= (self.positions >= places[0]) & (self.positions <= places[-1])
        right = np.clip(np.searchsorted(places, self.positions), 1, len(places) - 1)
        widths = places[right] - places[right - 1]
        there &= widths <= _MAX_GAP * np.median(np.diff(places))
        other = np.interp(self.positions, places, values)
        a, b = (own, other) if self._a_is_sparser else (other, own)
        return Points(self.steps[there], self.positions[there], a[there], b[there])


def _within(steps: Ints, first: int | None, last: int | None) -> Flags:
    inside: Flags = np.ones(len(steps), dtype=bool)
    if first is not None:
        inside &= steps >= first
    if last is not None:
        inside &= steps <= last
    return inside


def ranges(picked: Ints, among: Ints) -> tuple[Range, ...]:
    """Returns steps as ranges; steps are neighbours if no step of `among` is between them."""
    if not picked.size:
        return ()
    places = np.searchsorted(among, picked)
    ends = np.flatnonzero(np.append(np.diff(places) != 1, True))
    begins = np.append(0, ends[:-1] + 1)
    return tuple((int(picked[i]), int(picked[j])) for i, j in zip(begins, ends, strict=True))


def no_common_step(a: Curve, b: Curve, from_step: int | None, to_step: int | None) -> str:
    """Returns the error text for two curves without a common point."""
    held = ", ".join(f"{c.name} has {describe_ranges(ranges(c.steps, c.steps))}" for c in (a, b))
    if from_step is None and to_step is None:
        return f"no step in common: {held}; compare runs that logged the same steps"
    begin = "the first" if from_step is None else from_step
    end = "the last" if to_step is None else to_step
    return (
        f"no common step from {begin} to {end}: {held}; choose --from-step and --to-step "
        "so that both have steps between them"
    )
