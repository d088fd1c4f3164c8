"""Whether two curves are of the same training: aligned by step, held against a tolerance."""

from __future__ import annotations

import numpy as np

from slurmllm.analysis.comparing import verdict
from slurmllm.analysis.comparing.comparison import (
    Comparison,
    DataComparison,
    MetricComparison,
    Overlap,
    Side,
    Tolerances,
)
from slurmllm.analysis.curves import (
    Curve,
    Flags,
    Floats,
    Ints,
    Range,
    align,
    bit_identical,
    describe_ranges,
    relative_difference,
)
from slurmllm.errors import RunError

METRICS = ("loss", "grad_norm")


def compare(
    a: Curve,
    b: Curve,
    tolerances: Tolerances | None = None,
    *,
    from_step: int | None = None,
    to_step: int | None = None,
) -> Comparison:
    """Compare two curves at their common steps.

    Args:
        a: One curve.
        b: The other.
        tolerances: How far they may lie apart.
        from_step: First step to look at; None: the first there is.
        to_step: Last step to look at, included; None: the last there is.

    Raises:
        RunError: no step in common, or no loss.
    """
    tolerances = tolerances or Tolerances()
    for curve in (a, b):
        if "loss" not in curve.columns:
            raise RunError(
                f"no loss in {curve.path}: its rows must hold 'loss' (records.MetricsRow)"
            )
    first = int(min(a.steps[0], b.steps[0])) if from_step is None else from_step
    last = int(max(a.steps[-1], b.steps[-1])) if to_step is None else to_step
    steps_a, steps_b = _within(a.steps, first, last), _within(b.steps, first, last)
    steps = np.intersect1d(steps_a, steps_b, assume_unique=True)
    if not steps.size:
        raise RunError(_nothing_in_common(a, b, from_step, to_step))
    metrics = {}
    for metric in METRICS:
        common, values_a, values_b = align(a, b, metric, first, last)
        if common.size:
            metrics[metric] = _compare_metric(common, values_a, values_b, tolerances, metric)
    if "loss" not in metrics:
        raise RunError(
            f"{a.name} and {b.name} have a loss at different steps only; log it at the same steps"
        )

    only_in_a = _ranges(np.setdiff1d(steps_a, steps_b, assume_unique=True), steps_a)
    only_in_b = _ranges(np.setdiff1d(steps_b, steps_a, assume_unique=True), steps_b)
    causes = verdict.causes(a, b, first, last)
    match = all(metric.first_departure_step is None for metric in metrics.values())
    warnings = verdict.warnings_of("A", a, only_in_a) + verdict.warnings_of("B", b, only_in_b)
    warnings += verdict.warnings_of_both(a, b, METRICS, metrics, len(steps))
    if match:
        warnings += [f"the curves match although {cause}" for _, cause in causes]
    return Comparison(
        verdict="match" if match else "differ",
        match=match,
        reason=verdict.reason(metrics, tolerances, causes),
        causes=tuple(cause for _, cause in causes),
        data=_data(a, b),
        tolerance=tolerances,
        a=_side(a),
        b=_side(b),
        steps_compared=len(steps),
        first_step=int(steps[0]),
        last_step=int(steps[-1]),
        only_in_a=only_in_a,
        only_in_b=only_in_b,
        metrics=metrics,
        overlaps={"a": _overlap(a), "b": _overlap(b)},
        warnings=tuple(warnings),
    )


def _compare_metric(
    steps: Ints, a: Floats, b: Floats, tolerances: Tolerances, metric: str
) -> MetricComparison:
    difference = relative_difference(a, b)
    finite = np.isfinite(difference)
    same = bit_identical(a, b)
    tolerance = tolerances.of(metric)
    # Two NaNs have the same bits and yet are no match: neither run has a value there.
    apart: Flags = ~finite | (~same if tolerances.exact else difference > tolerance)
    largest = int(np.nanargmax(difference)) if finite.any() else None
    departure = _first(apart)
    return MetricComparison(
        tolerance=tolerance,
        steps_compared=len(steps),
        max_rel_diff=None if largest is None else float(difference[largest]),
        max_rel_diff_step=None if largest is None else int(steps[largest]),
        mean_rel_diff=None if largest is None else float(np.mean(difference[finite])),
        first_departure_step=None if departure is None else int(steps[departure]),
        first_departure_rel_diff=(
            float(difference[departure]) if departure is not None and finite[departure] else None
        ),
        departures=int(np.count_nonzero(apart)),
        bit_identical=bool(np.all(same)),
        non_finite_a=int(np.count_nonzero(~np.isfinite(a))),
        non_finite_b=int(np.count_nonzero(~np.isfinite(b))),
        first_non_finite_step_a=_first_step(steps, ~np.isfinite(a)),
        first_non_finite_step_b=_first_step(steps, ~np.isfinite(b)),
    )


def _first(flags: Flags) -> int | None:
    return int(np.argmax(flags)) if flags.any() else None


def _first_step(steps: Ints, flags: Flags) -> int | None:
    place = _first(flags)
    return None if place is None else int(steps[place])


def _within(steps: Ints, first: int, last: int) -> Ints:
    return steps[(steps >= first) & (steps <= last)]


def _ranges(picked: Ints, among: Ints) -> tuple[Range, ...]:
    """Steps as ranges; steps are neighbours when nothing of `among` lies between them."""
    if not picked.size:
        return ()
    places = np.searchsorted(among, picked)
    ends = np.flatnonzero(np.append(np.diff(places) != 1, True))
    begins = np.append(0, ends[:-1] + 1)
    return tuple((int(picked[i]), int(picked[j])) for i, j in zip(begins, ends, strict=True))


def _nothing_in_common(a: Curve, b: Curve, from_step: int | None, to_step: int | None) -> str:
    """Value, rule and remedy for two curves without a common step."""
    held = ", ".join(f"{c.name} has {describe_ranges(_ranges(c.steps, c.steps))}" for c in (a, b))
    if from_step is None and to_step is None:
        return f"no step in common: {held}; compare runs that logged the same steps"
    begin = "the first" if from_step is None else from_step
    end = "the last" if to_step is None else to_step
    return (
        f"no common step from {begin} to {end}: {held}; choose --from-step and --to-step "
        "so that both have steps between them"
    )


def _side(curve: Curve) -> Side:
    return Side(
        name=curve.name,
        path=str(curve.path),
        steps=len(curve.steps),
        first_step=int(curve.steps[0]),
        last_step=int(curve.steps[-1]),
        attempts=len(np.unique(curve.attempts)),
        restarts=tuple(int(step) for step in curve.restarts),
        missing=curve.gaps,
    )


def _data(a: Curve, b: Curve) -> DataComparison | None:
    if a.data is None or b.data is None:
        return None
    differences = (*a.data.differences(b.data), *(said for _, said in verdict.skipped(a, b)))
    return DataComparison(same=not differences, differences=differences)


def _overlap(curve: Curve) -> Overlap:
    return Overlap(
        rows=curve.overlap_rows,
        identical=curve.overlap_identical,
        max_rel_diff=curve.overlap_max_rel_diff,
    )
