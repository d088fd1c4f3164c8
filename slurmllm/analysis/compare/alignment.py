"""Alignment of two curves: their steps counted alike, then at common or interpolated points."""

from __future__ import annotations

from dataclasses import dataclass, replace
from decimal import Decimal, DecimalTuple
from typing import Literal

import numpy as np

from slurmllm.core.errors import RunError
from slurmllm.core.metrics.curves import (
    Axis,
    Curve,
    Flags,
    Floats,
    Ints,
    Ranges,
    SourceKind,
    argmax,
    bit_identical,
    describe_ranges,
    median,
)

Method = Literal["exact", "interpolated"]
# Share of the sparser curve's points that must be common; else the denser one is interpolated.
_MIN_COMMON = 0.5
_MAX_GAP = 3.0  # longest gap, in median intervals, that is interpolated
# A shift, or a mean, must bring the values closer than this share of the scatter of single steps …
_CLOSE = 0.2
# … and without it they must be further apart than this one.
_FAR = 0.5
_MIN_POINTS = 8
_MAX_OFFSET = 16  # steps by which logs are shifted to try whether their values coincide
_MAX_ROWS = 4096  # suffice to judge
_MAX_BEGINS = 64  # points that have the other curve's first loss
_DIGITS_SAMPLE = 512  # values that show how many digits a log prints
_SAME_AT_FIRST = 3  # points
ALL_DIGITS = 7  # of fp32; fewer do not prove the same bits
_PRINTED_DIGITS = range(3, 10)  # fewer are no precision of a log, more are not printed


@dataclass(frozen=True)
class Points:
    """One metric of both curves at the same positions, ascending."""

    steps: Ints  # A's; on the step axis those of the curve whose points they are [points]
    positions: Floats  # on the axis [points]
    a: Floats  # [points]
    b: Floats  # [points]
    # Of the last digit printed in the log of fewer digits; 0: all digits. [points, or all alike]
    unit: Floats | float = 0.0

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def units(self) -> Floats:
        """`unit` of each point. [points]"""
        return np.broadcast_to(self.unit, self.a.shape)

    @property
    def same(self) -> Flags:
        """Whether both values have the same bits. [points]"""
        return bit_identical(self.a, self.b)

    def as_printed(self, a: Curve, b: Curve) -> Points:
        """Replace values of B by those of A if the printed digits do not tell them apart."""
        unit = np.maximum(_printed_unit(self.a, a.kind), _printed_unit(self.b, b.kind))
        same = np.isfinite(unit) & (abs(self.a - self.b) <= 0.5000001 * unit)
        by_kind = {"text", "tensorboard"} & {a.kind, b.kind}
        if not by_kind and not same[:_SAME_AT_FIRST].all():
            return self  # what looks like few digits may be chance
        return replace(self, b=np.where(same, self.a, self.b), unit=unit)


@dataclass(frozen=True)
class StepMatch:
    """A curve with its steps counted as those of the other one."""

    read: Curve  # the curve, shifted
    used: Curve  # the same, its loss averaged as the other log averages it
    shift: int  # what was added to its steps
    reason: str  # why it was shifted
    averaged: int | None = None  # steps over which the loss was averaged; None: not averaged


def match_steps(
    a: Curve, b: Curve, requested: tuple[int | None, int | None], *, by_step: bool
) -> tuple[StepMatch, StepMatch]:
    """Shift steps that are counted from 0, and average the loss as the coarser log does.

    `requested` are the user's shifts. Without any, logs of known frameworks are shifted by their
    convention, others if that makes their values coincide. On another axis than steps (not
    `by_step`) nothing is changed unless the user asks for it.
    """
    shifts, reason = (requested[0] or 0, requested[1] or 0), "--shift"
    if requested == (None, None) and by_step:
        shifts, reason = _choose_shifts(a, b)
    curves = [shift_steps(curve, by) for curve, by in zip((a, b), shifts, strict=True)]
    matches = [
        StepMatch(curve, curve, by, reason) for curve, by in zip(curves, shifts, strict=True)
    ]
    intervals = [np.median(np.diff(curve.steps)) if len(curve.steps) > 1 else 1 for curve in curves]
    finer = int(np.argmin(intervals))
    ratio = int(intervals[1 - finer] // intervals[finer])
    if by_step and ratio > 1 and (mean := _average_loss(curves[finer], curves[1 - finer], ratio)):
        matches[finer] = replace(matches[finer], used=mean, averaged=ratio)
    return matches[0], matches[1]


def shift_steps(curve: Curve, by: int) -> Curve:
    if not by:
        return curve
    gaps = tuple((first + by, last + by) for first, last in curve.gaps)
    return replace(curve, steps=curve.steps + by, gaps=gaps)


def _choose_shifts(a: Curve, b: Curve) -> tuple[tuple[int, int], str]:
    firsts = list[int]()  # number of the first step: that of the log, else that of its format
    for curve in (a, b):
        if curve.convention and curve.convention.counts == "steps":
            first: int | None = int(curve.series("loss")[0][0])  # a validation may come before
            if first not in (0, 1):
                first = curve.convention.steps_from
            if first is not None:
                firsts.append(first)
    usual, candidates = 0, set[int]()
    if len(firsts) == 2:
        usual = firsts[0] - firsts[1]  # of B relative to A
        candidates = {0} if usual else candidates
    else:  # small shifts, and those that align first or last steps
        ends = {int(a.steps[end] - b.steps[end]) for end in (0, -1)}
        candidates = {*range(-_MAX_OFFSET, _MAX_OFFSET + 1), *ends} - {0}
    shift, scatter = usual, _scatter(a, b) if candidates else 0.0
    if scatter and not _coincide(a, b, usual, scatter):
        matching = [
            other
            for other in candidates
            if _coincide(a, b, other, scatter, far_from=usual)
            and (abs(other) <= 1 or _same_values(a, b, other))
        ]
        shift = matching[0] if len(matching) == 1 else usual
    lower = b if shift > 0 else a  # the one whose steps are counted from 0
    reason = "so that the values of both coincide"
    if shift == usual and lower.convention:
        reason = f"{lower.convention.name} counts steps from 0"
    return (max(-shift, 0), max(shift, 0)), reason


def _scatter(a: Curve, b: Curve) -> float:
    """Return the scatter of the loss from step to step; 0 if the curves are smooth.

    The neighbours' mean is as far from a smooth curve all along on one side; the scatter of noise
    changes sides, and exceeds the last digit logged. A shift of smooth curves looks like a
    difference of their values, and nothing distinguishes the two.
    """
    finer = max((a, b), key=lambda curve: len(curve.steps))
    values = finer.series("loss")[1][:_MAX_ROWS]
    values = values[np.isfinite(values)]
    if len(values) < _MIN_POINTS:
        return 0.0
    deviations = values[1:-1] - (values[2:] + values[:-2]) / 2
    turns = (np.sign(deviations[1:]) != np.sign(deviations[:-1])).mean()
    size = median(abs(deviations))
    digit = np.diff(np.unique(values)).min(initial=np.inf)  # rounding scatters too
    level = median(abs(values))
    return size if turns > 0.4 and size > max(2 * digit, 1e-6 * level) else 0.0


def _coincide(
    a: Curve, b: Curve, shift: int, scatter: float, *, far_from: int | None = None
) -> bool:
    """Return whether the loss of B, shifted, is that of A, and is not if shifted by `far_from`."""

    def distance(metric: str, by: int) -> float:
        (steps_a, values_a), (steps_b, values_b) = (c.series(metric) for c in (a, b))
        first = max(steps_a[0], steps_b[0] + by)
        _, at_a, at_b = np.intersect1d(steps_a, steps_b + by, True, True)[:3]
        keep = steps_a[at_a] < first + _MAX_ROWS
        difference = abs(values_a[at_a[keep]] - values_b[at_b[keep]])
        difference = difference[np.isfinite(difference)]
        return median(difference) if len(difference) >= _MIN_POINTS else np.inf

    near = distance("loss", shift)
    if far_from is None or not near < _CLOSE * scatter:
        return near < _CLOSE * scatter
    for metric in ("grad_norm", "lr"):  # with batches one step ahead, learning rates coincide as is
        both = all(metric in curve.columns for curve in (a, b))
        if both and distance(metric, shift) > distance(metric, far_from):
            return False
    return distance("loss", far_from) > _FAR * scatter


def _same_values(a: Curve, b: Curve, shift: int) -> bool:
    """Return whether the losses of B, shifted, are those of A as far as both logs print them.

    Of data that are shifted they are only alike: an offset of the batches is no count of steps.
    """
    (steps_a, losses_a), (steps_b, losses_b) = a.series("loss"), b.series("loss")
    _, at_a, at_b = np.intersect1d(steps_a, steps_b + shift, True, True)[:3]
    digits = _digits(losses_a[at_a], losses_b[at_b], a.kind, b.kind)
    return median(abs(losses_a[at_a] - losses_b[at_b]) <= digits) == 1.0


def _digits(a: Floats, b: Floats, kind_a: SourceKind, kind_b: SourceKind) -> Floats:
    """Return what the logs' last digits leave open of each pair of values; 0 if not finite."""
    digits = np.maximum(_printed_unit(a, kind_a), _printed_unit(b, kind_b))
    digits = np.maximum(digits, 1e-7 * abs(a))
    return np.where(np.isfinite(digits), digits, 0.0)


def counted_apart(a: Curve, b: Curve) -> tuple[int, int] | None:
    """Return a step of A, and of B the one with its loss, if only the count of steps differs.

    The losses are the same in their order, from the first point of one of the curves on, and
    neither a shift nor a factor of the steps was found before.
    """
    (steps_a, losses_a), (steps_b, losses_b) = a.series("loss"), b.series("loss")
    common = min(len(steps_a), len(steps_b))
    differ = np.flatnonzero(losses_a[:common] != losses_b[:common])
    # From the first point on, or from where the curves part: a resume may count a step twice.
    for since in dict.fromkeys([0, *differ[:1].tolist()]):
        rows = _same_rows(losses_a[since:], losses_b[since:], a.kind, b.kind)
        if rows:
            row_a, row_b = (since + row for row in rows)
            count = min(len(steps_a) - row_a, len(steps_b) - row_b)
            apart = steps_a[row_a : row_a + count] != steps_b[row_b : row_b + count]
            if apart.any():
                row = argmax(apart)
                return int(steps_a[row_a + row]), int(steps_b[row_b + row])
    return None


def _same_rows(a: Floats, b: Floats, *kinds: SourceKind) -> tuple[int, int] | None:
    """Return rows of A and B, one of them the first, from which on all values are the same."""
    begins = [(int(row), 0) for row in np.flatnonzero(np.isclose(a, b[0], 1e-2))]
    begins += [(0, int(row)) for row in np.flatnonzero(np.isclose(b, a[0], 1e-2))]
    for row_a, row_b in begins[:_MAX_BEGINS]:
        count = min(len(a) - row_a, len(b) - row_b)
        values, compared = a[row_a : row_a + count], b[row_b : row_b + count]
        digits = _digits(values, compared, *kinds)
        same = np.isfinite(values) & (abs(values - compared) <= digits)
        if same.all() and len(np.unique(values)) >= _MIN_POINTS:
            return row_a, row_b
    return None


def _average_loss(fine: Curve, coarse: Curve, ratio: int) -> Curve | None:
    """Return the finer curve at the coarser's steps, its loss averaged; None if single steps fit.

    The loss is a mean by the coarser's format, or if that fits by far better.
    """
    steps, values = coarse.series("loss")
    fine_steps, losses = fine.series("loss")
    ends = fine_steps.searchsorted(steps, side="right")
    begins = np.append(fine_steps.searchsorted(steps[:1] - ratio, side="right"), ends[:-1])
    logged = (ends > begins) & (fine_steps[np.maximum(ends - 1, 0)] == steps)
    # The first mean may lack steps before the finer log begins, unless the training began there.
    first = argmax(logged)
    logged[first] &= bool(ends[first] - begins[first] == ratio or fine_steps[0] <= 1)
    if np.count_nonzero(logged) < 2:
        return None
    ends, begins, values = ends[logged], begins[logged], values[logged]
    total = np.append(0.0, losses.cumsum())  # NaN from the first NaN on: compared as not finite
    mean = (total[ends] - total[begins]) / (ends - begins)
    apart = abs(np.stack((mean, losses[ends - 1])) - values)
    apart = apart[:, np.isfinite(apart).all(axis=0)]
    if not apart.size:
        return None
    to_mean, to_point = np.median(apart, axis=1).tolist()
    by_format = coarse.convention is not None and coarse.convention.loss_is_mean
    if by_format and to_point < _CLOSE * to_mean:
        return None
    scatter = _scatter(fine, fine)
    clear = len(mean) >= _MIN_POINTS and to_mean < _CLOSE * to_point and to_point > _CLOSE * scatter
    if not (by_format or (clear and scatter)):
        return None
    rows = fine.steps.searchsorted(fine_steps[ends - 1])
    taken = fine.take(rows)
    return replace(taken, columns={**taken.columns, "loss": mean})


class Alignment:
    """The points at which two curves are compared.

    Attributes:
        curves: A and B.
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
        self.axis: Axis = axis
        self.letter = letter
        self.curves = a, b
        self.one_sided = set[str]()  # metrics read by `points_of` that one curve lacks at a step
        for label, curve in (("A", a), (letter, b)):
            if not np.isfinite(curve.positions(axis)).any():
                needed = "tokens" if axis == "tokens" else "samples, or tokens and model.seq_len,"
                raise RunError(
                    f"{label} ({curve.path}) has no number of {axis} for its steps: its rows "
                    f"hold no {needed} and no config.yaml gives train.global_batch; name the "
                    f"column with --tag {axis}=…, or align by step"
                )
        # By tokens or samples the range is of A's steps; those of B differ.
        of_b = (from_step, to_step) if axis == "step" else (None, None)
        self._rows = _rows(a, axis, from_step, to_step), _rows(b, axis, *of_b)
        steps = a.steps[self._rows[0]], b.steps[self._rows[1]]
        places = a.positions(axis)[self._rows[0]], b.positions(axis)[self._rows[1]]
        self._steps, self._positions = steps, places
        common, *common_rows = np.intersect1d(
            places[0], places[1], assume_unique=True, return_indices=True
        )
        first = max(side[0] if len(side) else np.inf for side in places)
        last = min(side[-1] if len(side) else -np.inf for side in places)
        overlap = [np.flatnonzero((side >= first) & (side <= last)) for side in places]
        self._sparser = int(len(overlap[1]) < len(overlap[0]))
        sparser = overlap[self._sparser]
        suffice = len(common) >= _MIN_COMMON * len(sparser) or len(sparser) < 2
        self.method: Method = "exact" if suffice else "interpolated"
        # Of the rows of each curve, those that are compared or interpolated between
        self._used = common_rows if suffice else overlap
        if self.method == "exact":
            self.steps, self.positions = steps[0][common_rows[0]], common
            return
        self.steps, self.positions = steps[self._sparser][sparser], places[self._sparser][sparser]
        if axis != "step" and self._sparser == 1:
            # A's step during which it reached that position
            reached = places[0].searchsorted(self.positions)
            self.steps = steps[0][np.minimum(reached, len(steps[0]) - 1)]

    @property
    def only(self) -> tuple[Ranges, Ranges]:
        of_a, of_b = (
            ranges(np.delete(steps, used), steps)
            for steps, used in zip(self._steps, self._used, strict=True)
        )
        return of_a, of_b

    def points_of(self, metric: str) -> Points:
        """Return a metric of both curves; without points if one of them lacks it."""
        if not all(metric in curve.columns for curve in self.curves):
            return Points(self.steps[:0], self.positions[:0], np.empty(0), np.empty(0))
        if self.method == "interpolated":
            return self._interpolated(metric)
        rows = [rows[used] for rows, used in zip(self._rows, self._used, strict=True)]
        present = [c.present(metric)[indices] for c, indices in zip(self.curves, rows, strict=True)]
        both = np.logical_and(*present)
        if np.logical_xor(*present).any():
            self.one_sided.add(metric)
        shared = slice(None) if both.all() else both
        a, b = (
            c.columns[metric][indices[shared]] for c, indices in zip(self.curves, rows, strict=True)
        )
        return Points(self.steps[shared], self.positions[shared], a, b)

    def _interpolated(self, metric: str) -> Points:
        curve, denser = self.curves[self._sparser], self.curves[1 - self._sparser]
        rows = self._rows[self._sparser][self._used[self._sparser]]
        usable, values = curve.present(metric)[rows], curve.columns[metric][rows]
        rows = self._rows[1 - self._sparser]
        present = denser.present(metric)[rows]
        places = self._positions[1 - self._sparser][present]
        if len(places) < 2:
            return Points(self.steps[:0], self.positions[:0], np.empty(0), np.empty(0))
        usable &= (self.positions >= places[0]) & (self.positions <= places[-1])
        right = places.searchsorted(self.positions).clip(1, len(places) - 1)
        widths = places[right] - places[right - 1]
        usable &= widths <= _MAX_GAP * np.median(np.diff(places))
        other = np.interp(self.positions, places, denser.columns[metric][rows[present]])
        a, b = (other, values) if self._sparser else (values, other)
        return Points(self.steps[usable], self.positions[usable], a[usable], b[usable])


def _rows(curve: Curve, axis: Axis, first: int | None, last: int | None) -> Ints:
    """Return the rows of a range of steps whose positions ascend: no counter that is set back."""
    positions = curve.positions(axis)
    usable = np.isfinite(positions)
    if axis != "step":
        highest = np.maximum.accumulate(np.where(usable, positions, -np.inf))
        usable[1:] &= positions[1:] > highest[:-1]
    if first is not None:
        usable &= curve.steps >= first
    if last is not None:
        usable &= curve.steps <= last
    return np.flatnonzero(usable)


def _printed_unit(values: Floats, kind: SourceKind) -> Floats:
    """Return the place value of the last digit that a log prints of each value. [points]

    It prints as many decimals or as many significant digits of all: whichever of both is coarser.
    """
    if kind == "tensorboard":
        return np.spacing(abs(values).astype(np.float32)).astype(np.float64)
    printed = decimals(values)
    digits = max((len(number.digits) for number in printed), default=0)
    # Values that are constant, or few, may end in zeros that are printed.
    if (kind != "text" and not (digits in _PRINTED_DIGITS and len(printed) > 3)) or not printed:
        return np.zeros(len(values))
    last = min(int(number.exponent) for number in printed)
    magnitude = np.floor(np.log10(abs(values)))
    unit: Floats = np.maximum(10.0**last, 10.0 ** (magnitude + 1 - digits))
    return unit


def decimals(values: Floats) -> list[DecimalTuple]:
    """Return the shortest decimals of some values, each once, without zeros."""
    finite = values[np.isfinite(values) & (values != 0)]
    sample = np.unique(finite[:: len(finite) // _DIGITS_SAMPLE + 1]).tolist()
    return [Decimal(repr(value)).normalize().as_tuple() for value in sample]


def num_digits(values: Floats) -> int:
    """Return the most significant digits that values need."""
    return max((len(number.digits) for number in decimals(values)), default=0)


def printed_digits(curve: Curve, values: Floats) -> int:
    """Return how many significant digits a log prints of values of a column."""
    if curve.kind == "tensorboard" or (curve.kind == "run" and "command.run" not in curve.settings):
        return ALL_DIGITS
    return num_digits(values)


def ranges(picked: Ints, among: Ints) -> Ranges:
    """Return steps as ranges; steps are neighbours if no step of `among` is between them."""
    if not picked.size:
        return ()
    places = among.searchsorted(picked)
    ends = np.flatnonzero(np.append(np.diff(places) != 1, True))
    begins = np.append(0, ends[:-1] + 1)
    return tuple((int(picked[i]), int(picked[j])) for i, j in zip(begins, ends, strict=True))


def no_common_step(a: Curve, b: Curve, from_step: int | None, to_step: int | None) -> str:
    held = ", ".join(f"{c.name} has {describe_ranges(ranges(c.steps, c.steps))}" for c in (a, b))
    if from_step is None and to_step is None:
        return f"no step in common: {held}; compare runs that logged the same steps"
    begin = "the first" if from_step is None else from_step
    end = "the last" if to_step is None else to_step
    return (
        f"no common step from {begin} to {end}: {held}; choose --from-step and --to-step "
        "so that both have steps between them"
    )
