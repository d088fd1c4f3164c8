"""Alignment of two curves: their steps counted alike, then at common or interpolated points."""

from __future__ import annotations

from collections.abc import Sequence
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
    shifts = (requested[0] or 0, requested[1] or 0)
    reason = "--shift"
    if requested == (None, None) and by_step:
        shifts, reason = _choose_shifts(a, b)
    curves = shift_steps(a, shifts[0]), shift_steps(b, shifts[1])
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
    gaps = tuple((first + by, last + by) for first, last in curve.gaps)
    return replace(curve, steps=curve.steps + by, gaps=gaps)


def _choose_shifts(a: Curve, b: Curve) -> tuple[tuple[int, int], str]:
    firsts = list[int]()  # number of the first step: that of the log, else that of its format
    for curve in (a, b):
        if curve.convention and curve.convention.counts == "steps":
            first = curve.series("loss")[0][0]  # a validation may come before
            first = first if first in (0, 1) else curve.convention.steps_from
            if first is not None:
                firsts.append(int(first))
    # Small shifts, and those that align first or last steps
    ends = [int(a.steps[end] - b.steps[end]) for end in (0, -1)]
    usual = 0
    candidates = {*range(-_MAX_OFFSET, _MAX_OFFSET + 1), *ends}
    if len(firsts) == 2:
        usual = firsts[0] - firsts[1]  # of B relative to A
        candidates = {0}
    candidates -= {usual}
    shift = usual
    scatter = _scatter(max((a, b), key=lambda curve: len(curve.steps))) if candidates else 0.0
    if scatter and _distance(a, b, "loss", usual) > _FAR * scatter:
        matching = [shift for shift in candidates if _coincide(a, b, shift, usual, scatter)]
        shift = matching[0] if len(matching) == 1 else usual
    lower = b if shift > 0 else a  # the one whose steps are counted from 0
    reason = "so that the values of both coincide"
    if shift == usual and lower.convention:
        reason = f"{lower.convention.name} counts steps from 0"
    return (max(-shift, 0), max(shift, 0)), reason


def _scatter(curve: Curve) -> float:
    """Return the scatter of the loss from step to step; 0 if the curve is smooth.

    The neighbours' mean is as far from a smooth curve all along on one side; the scatter of noise
    changes sides, and exceeds the last digit logged. A shift of smooth curves looks like a
    difference of their values, and nothing distinguishes the two.
    """
    values = curve.series("loss")[1][:_MAX_ROWS]
    values = values[np.isfinite(values)]
    if len(values) < _MIN_POINTS:
        return 0.0
    deviations = values[1:-1] - (values[2:] + values[:-2]) / 2
    turns = (np.sign(deviations[1:]) != np.sign(deviations[:-1])).mean()
    size = median(abs(deviations))
    digit = np.diff(np.unique(values)).min(initial=np.inf)  # rounding scatters too
    level = median(abs(values))
    return size if turns > 0.4 and size > max(2 * digit, 1e-6 * level) else 0.0


def _distance(a: Curve, b: Curve, metric: str, shift: int) -> float:
    """Return the median distance of A's values from those of B, shifted; infinite of few."""
    steps, values_a, values_b = _common_values(a, b, metric, shift)
    first = max(a.series(metric)[0][0], b.series(metric)[0][0] + shift)
    difference = abs(values_a - values_b)[steps < first + _MAX_ROWS]
    difference = difference[np.isfinite(difference)]
    return median(difference) if len(difference) >= _MIN_POINTS else np.inf


def _common_values(a: Curve, b: Curve, metric: str, shift: int) -> tuple[Ints, Floats, Floats]:
    """Return the common steps if those of B are shifted, and the values of both. [points] each"""
    steps_a, values_a = a.series(metric)
    steps_b, values_b = b.series(metric)
    steps, at_a, at_b = np.intersect1d(steps_a, steps_b + shift, True, True)
    return steps, values_a[at_a], values_b[at_b]


def _coincide(a: Curve, b: Curve, shift: int, usual: int, scatter: float) -> bool:
    """Return whether the values of B, shifted so, are those of A, and no other column objects.

    Of data that are shifted the losses are only alike: an offset of the batches is no count of
    steps. With batches one step ahead, learning rates coincide without the shift.
    """
    if not _distance(a, b, "loss", shift) < _CLOSE * scatter:
        return False
    for metric in {"grad_norm", "lr"} & a.columns.keys() & b.columns.keys():
        if _distance(a, b, metric, shift) > _distance(a, b, metric, usual):
            return False
    _, losses_a, losses_b = _common_values(a, b, "loss", shift)
    digits = _digits(losses_a, losses_b, a.kind, b.kind)
    return abs(shift) <= 1 or median(abs(losses_a - losses_b) <= digits) == 1.0


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
    steps_a, losses_a = a.series("loss")
    steps_b, losses_b = b.series("loss")
    common = min(len(steps_a), len(steps_b))
    differ = np.flatnonzero(losses_a[:common] != losses_b[:common])
    # From the first point on, or from where the curves part: a resume may count a step twice.
    for since in dict.fromkeys([0, *differ[:1].tolist()]):
        # Rows of A and B, one of them the first, of about the same loss
        begins = [(row, since) for row in _rows_near(losses_a, losses_b, since)]
        begins += [(since, row) for row in _rows_near(losses_b, losses_a, since)]
        for row_a, row_b in begins[:_MAX_BEGINS]:
            count = min(len(steps_a) - row_a, len(steps_b) - row_b)
            rows_a = slice(row_a, row_a + count)
            rows_b = slice(row_b, row_b + count)
            values = losses_a[rows_a]
            compared = losses_b[rows_b]
            digits = _digits(values, compared, a.kind, b.kind)
            same = np.isfinite(values) & (abs(values - compared) <= digits)
            if same.all() and len(np.unique(values)) >= _MIN_POINTS:
                apart = np.flatnonzero(steps_a[rows_a] != steps_b[rows_b])
                if len(apart):
                    return steps_a[row_a + apart[0]], steps_b[row_b + apart[0]]
                break
    return None


def _rows_near(values: Floats, other: Floats, since: int) -> Ints:
    """Return the rows, from `since` on, whose value is near the other's in that row."""
    return since + np.flatnonzero(np.isclose(values[since:], other[since], 1e-2))


def _average_loss(fine: Curve, coarse: Curve, ratio: int) -> Curve | None:
    """Return the finer curve at the coarser's steps, its loss averaged; None if single steps fit.

    The loss is a mean by the coarser's format, or if that fits by far better.
    """
    steps, values = coarse.series("loss")
    fine_steps, losses = fine.series("loss")
    ends = fine_steps.searchsorted(steps, side="right")
    begins = np.append(fine_steps.searchsorted(steps[:1] - ratio, side="right"), ends[:-1])
    logged = np.isin(steps, fine_steps)
    # The first mean may lack steps before the finer log begins, unless the training began there.
    first = argmax(logged)
    logged[first] &= ends[first] - begins[first] == ratio or fine_steps[0] <= 1
    if np.count_nonzero(logged) < 2:
        return None
    steps, values, begins, ends = steps[logged], values[logged], begins[logged], ends[logged]
    total = np.append(0.0, losses.cumsum())  # NaN from the first NaN on: compared as not finite
    mean = (total[ends] - total[begins]) / (ends - begins)
    apart = abs(np.stack((mean, losses[ends - 1])) - values)
    apart = apart[:, np.isfinite(apart).all(axis=0)]
    if not apart.size:
        return None
    to_mean, to_point = np.median(apart, axis=1).tolist()
    if coarse.convention and coarse.convention.loss_is_mean:
        fits = not to_point < _CLOSE * to_mean
    else:
        fits = len(mean) >= _MIN_POINTS and to_mean < _CLOSE * to_point
        fits = fits and to_point > _CLOSE * _scatter(fine) > 0
    if not fits:
        return None
    taken = fine.take(fine.steps.searchsorted(steps))
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
        self._empty = Points(a.steps[:0], np.empty(0), np.empty(0), np.empty(0))
        # By tokens or samples the range is of A's steps; those of B differ.
        of_b = (from_step, to_step) if axis == "step" else (None, None)
        self._whole = _select(a, axis, from_step, to_step), _select(b, axis, *of_b)
        places = [curve.positions(axis) for curve in self._whole]
        common, *used = np.intersect1d(places[0], places[1], True, True)
        first = max(side.min(initial=np.inf) for side in places)
        last = min(side.max(initial=-np.inf) for side in places)
        overlap = [np.flatnonzero((side >= first) & (side <= last)) for side in places]
        self._sparser = int(len(overlap[1]) < len(overlap[0]))
        num_points = len(overlap[self._sparser])
        self.method: Method = "exact"
        if len(common) < _MIN_COMMON * num_points and num_points > 1:
            self.method = "interpolated"
            used = overlap
        # Of the rows of each curve, those that are compared or interpolated between
        self._used = [curve.take(rows) for curve, rows in zip(self._whole, used, strict=True)]
        self.steps = self._used[0].steps
        self.positions = common
        if self.method == "interpolated":
            self.steps = self._used[self._sparser].steps
            self.positions = self._used[self._sparser].positions(axis)
            if axis != "step" and self._sparser == 1:
                # A's step during which it reached that position
                reached = places[0].searchsorted(self.positions)
                self.steps = self._whole[0].steps[np.minimum(reached, len(places[0]) - 1)]

    @property
    def only(self) -> list[Ranges]:
        return [
            ranges(np.setdiff1d(whole.steps, used.steps, True), whole.steps)
            for whole, used in zip(self._whole, self._used, strict=True)
        ]

    def points_of(self, metric: str) -> Points:
        """Return a metric of both curves; without points if one of them lacks it."""
        if not all(metric in curve.columns for curve in self.curves):
            return self._empty
        if self.method == "interpolated":
            return self._interpolated(metric)
        present = [curve.present(metric) for curve in self._used]
        both = np.logical_and(*present)
        if np.logical_xor(*present).any():
            self.one_sided.add(metric)
        a, b = (curve.columns[metric][both] for curve in self._used)
        return Points(self.steps[both], self.positions[both], a, b)

    def _interpolated(self, metric: str) -> Points:
        sparser = self._used[self._sparser]
        denser = self._whole[1 - self._sparser]
        usable = sparser.present(metric)
        values = sparser.columns[metric]
        present = denser.present(metric)
        places = denser.positions(self.axis)[present]
        if len(places) < 2:
            return self._empty
        usable &= (self.positions >= places[0]) & (self.positions <= places[-1])
        right = places.searchsorted(self.positions).clip(1, len(places) - 1)
        widths = places[right] - places[right - 1]
        usable &= widths <= _MAX_GAP * np.median(np.diff(places))
        other = np.interp(self.positions, places, denser.columns[metric][present])
        a, b = (other, values) if self._sparser else (values, other)
        return Points(self.steps[usable], self.positions[usable], a[usable], b[usable])


def _select(curve: Curve, axis: Axis, first: int | None, last: int | None) -> Curve:
    """Select the rows of a range of steps whose positions ascend: no counter that is set back."""
    positions = curve.positions(axis)
    usable = np.isfinite(positions)
    if axis != "step":
        highest = np.maximum.accumulate(np.where(usable, positions, -np.inf))
        usable[1:] &= positions[1:] > highest[:-1]
    if first is not None:
        usable &= curve.steps >= first
    if last is not None:
        usable &= curve.steps <= last
    return curve.take(usable)


def _printed_unit(values: Floats, kind: SourceKind) -> Floats:
    """Return the place value of the last digit that a log prints of each value. [points]

    It prints as many decimals or as many significant digits of all: whichever of both is coarser.
    """
    if kind == "tensorboard":
        return np.spacing(abs(values).astype(np.float32)).astype(np.float64)
    printed = decimals(values)
    digits = num_digits(printed)
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


def num_digits(numbers: Sequence[DecimalTuple]) -> int:
    """Return the most significant digits that a number has."""
    return max((len(number.digits) for number in numbers), default=0)


def printed_digits(curve: Curve, values: Floats) -> int:
    """Return how many significant digits a log prints of values of a column."""
    if curve.kind == "tensorboard" or (curve.kind == "run" and "command.run" not in curve.settings):
        return ALL_DIGITS
    return num_digits(decimals(values))


def ranges(picked: Ints, among: Ints) -> Ranges:
    """Return steps as ranges; steps are neighbours if no step of `among` is between them."""
    breaks = np.flatnonzero(np.diff(among.searchsorted(picked)) != 1)
    firsts = np.append(picked[:1], picked[breaks + 1]).tolist()
    lasts = np.append(picked[breaks], picked[-1:]).tolist()
    return tuple(zip(firsts, lasts, strict=True))


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
