"""Whether two curves are of the same training: aligned, then held against a tolerance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from slurmllm.compare import causes as what_differs
from slurmllm.compare import diagnosis as diagnose
from slurmllm.compare import verdict
from slurmllm.compare.alignment import Alignment, Points, nothing_in_common
from slurmllm.compare.causes import Cause
from slurmllm.compare.comparison import (
    AlignmentRecord,
    Band,
    Comparison,
    DataComparison,
    Diagnosis,
    MetricComparison,
    Overlap,
    RuleName,
    Side,
    Tolerances,
)
from slurmllm.compare.diagnosis import Series
from slurmllm.compare.divergence import Judgement, judge
from slurmllm.compare.noise import TO_SIGMA
from slurmllm.compare.seed_band import CHANCE
from slurmllm.compare.seed_runs import Seeds, Within
from slurmllm.compare.statistics import Statistics, statistics
from slurmllm.errors import RunError
from slurmllm.metrics.curves import Axis, Curve, Flags, Floats, Ints, bit_identical

METRICS = ("loss", "grad_norm")
# Described, and no part of the verdict.
RATES = ("seq_per_s", "tokens_per_s", "step_time_s")
OTHERS = ("param_norm", "lr", "val_loss", *RATES)


@np.errstate(all="ignore")  # logs hold anything; what is not finite is dealt with below
def compare(
    a: Curve,
    b: Curve,
    tolerances: Tolerances | None = None,
    *,
    axis: Axis = "step",
    from_step: int | None = None,
    to_step: int | None = None,
    seeds: Sequence[Curve] = (),
    letter: str = "B",
) -> Comparison:
    """Compare two curves where they have points in common.

    Args:
        a: One curve, the reference.
        b: The other.
        tolerances: How far they may lie apart.
        axis: What they are aligned by.
        from_step: First step to look at; None: the first there is. By tokens or samples: of A's.
        to_step: Last step to look at, included; None: the last there is.
        seeds: Further runs of A's training with other seeds: their spread is the tolerance then.
        letter: What to call the other in words.

    Raises:
        RunError: no point in common, no loss, or the axis is not known.
    """
    tolerances = tolerances or Tolerances()
    for curve in (a, b):
        if "loss" not in curve.columns:
            raise RunError(
                f"no loss in {curve.path}: its rows must hold 'loss' (records.MetricsRow), or "
                "--tag loss=… name what holds it"
            )
    alignment = Alignment(a, b, axis, from_step, to_step, letter)
    if not len(alignment.steps):
        raise RunError(nothing_in_common(a, b, from_step, to_step))
    points = {name: alignment.of(name) for name in (*METRICS, *OTHERS)}
    if not len(points["loss"]):
        raise RunError(
            f"{a.name} and {b.name} have a loss at different steps only; log it at the same steps"
        )
    differences = {name: signed_difference(p.a, p.b) for name, p in points.items() if len(p)}
    band = Seeds(a, seeds, axis) if seeds else None
    within = {} if band is None else {
        name: band.judge(name, points[name]) for name in METRICS if len(points[name])
    }  # fmt: skip
    metrics = {
        name: _compare_metric(
            points[name], differences[name], tolerances, name,
            alignment.method == "interpolated", within.get(name),
        )
        for name in METRICS
        if len(points[name])
    }  # fmt: skip

    causes = what_differs.causes(a, b, alignment)
    if seeds:  # another seed is what the band allows for
        causes = [cause for cause in causes if cause.kind != "seed"]
    match = not any(metric.departs for metric in metrics.values())
    likely, diagnosis = (
        ([], None) if match else _explain(a, b, alignment, points, differences, metrics, causes)
    )
    if alignment.method == "exact" and band is None:
        likely, diagnosis = diagnose.since_the_first_difference(likely, diagnosis, metrics)
    only_in_a, only_in_b = alignment.only
    warnings = verdict.warnings_of("A", a, only_in_a) + verdict.warnings_of(letter, b, only_in_b)
    warnings += verdict.warnings_of_both(a, b, METRICS, metrics, alignment)
    if band is not None:
        warnings += band.warnings
    if match:
        warnings += [f"the curves match although {c.words}" for c in causes if not c.weak]
    seen = None if band is None else Band(
        seeds=band.names, chance=CHANCE, metrics={name: w.record for name, w in within.items()}
    )  # fmt: skip
    return Comparison(
        verdict="match" if match else "differ",
        match=match,
        reason=verdict.reason(metrics, tolerances, seen, likely, diagnosis, letter),
        causes=tuple(cause.words for cause in causes),
        diagnosis=diagnosis,
        data=_data(a, b),
        tolerance=tolerances,
        a=_side(a),
        b=_side(b),
        steps_compared=len(alignment.steps),
        first_step=int(alignment.steps[0]),
        last_step=int(alignment.steps[-1]),
        only_in_a=only_in_a,
        only_in_b=only_in_b,
        alignment=AlignmentRecord(axis=axis, method=alignment.method, points=len(alignment.steps)),
        metrics=metrics,
        statistics=_statistics(points, differences),
        band=seen,
        overlaps={"a": _overlap(a), "b": _overlap(b)},
        warnings=tuple(warnings),
    )


def _statistics(
    points: Mapping[str, Points], differences: Mapping[str, Floats]
) -> dict[str, Statistics]:
    """Of all metrics; two at a time, since numpy lets go of the interpreter."""
    with ThreadPoolExecutor(max_workers=2) as pool:
        found = pool.map(
            lambda name: statistics(points[name], differences[name], shape=name not in RATES),
            differences,
        )
        return dict(zip(differences, found, strict=True))


def signed_difference(a: Floats, b: Floats) -> Floats:
    """(b - a) / max(|a|, |b|), elementwise; 0 where both are 0, from -2 to 2.

    NaN where either is not a finite number.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        scale = np.maximum(np.maximum(np.abs(a), np.abs(b)), np.finfo(np.float64).tiny)
        difference = np.clip((b - a) / scale, -2.0, 2.0)
        # NaN alone comes of NaN; an infinite value may come to anything.
        difference[~np.isfinite(scale)] = np.nan
    return difference


def _compare_metric(
    points: Points,
    signed: Floats,
    tolerances: Tolerances,
    metric: str,
    interpolated: bool,
    within: Within | None,
) -> MetricComparison:
    a, b, steps = points.a, points.b, points.steps
    difference = np.abs(signed)
    finite = np.isfinite(signed)
    same = bit_identical(a, b)
    tolerance = tolerances.of(metric)
    # Two NaNs have the same bits and yet are no match: neither run has a value there.
    apart: Flags = ~finite | (~same if tolerances.exact else difference > tolerance)
    largest = int(np.nanargmax(difference)) if finite.any() else None
    departure = _first(apart)
    places = np.flatnonzero(finite)
    rough = _roughness(a[places], b[places]) if interpolated else 0.0
    judged = judge(signed[places], tolerance, rough) if len(places) else Judgement()
    rule = _rule(judged, apart, finite, tolerances, within)
    onset = _onset(rule, judged, apart, places, within)
    lasting = judged.lasting if rule is not None else None
    return MetricComparison(
        tolerance=tolerance,
        steps_compared=len(steps),
        max_rel_diff=None if largest is None else float(difference[largest]),
        max_rel_diff_step=None if largest is None else int(steps[largest]),
        mean_rel_diff=None if largest is None else float(np.mean(difference[finite])),
        first_difference_step=_first_step(steps, ~same),
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
        departs=rule is not None,
        rule=rule,
        noise=judged.noise,
        onset_step=None if onset is None else int(steps[onset]),
        lasting_departure_step=None if lasting is None else int(steps[places[lasting.first]]),
        lasting_departure_last_step=None if lasting is None else int(steps[places[lasting.last]]),
        lasting_departure_points=None if lasting is None else lasting.last - lasting.first + 1,
        lasting_departure_rel_diff=None if lasting is None else lasting.size,
    )


def _rule(
    judged: Judgement, apart: Flags, finite: Flags, tolerances: Tolerances, within: Within | None
) -> RuleName | None:
    """Which rule makes the metric differ; None: it does not."""
    if not finite.all():
        return "not_finite"
    if tolerances.exact:
        return "exact" if apart.any() else None
    if within is not None:
        return None if within.record.within else "band"
    return judged.rule


def _onset(
    rule: RuleName | None, judged: Judgement, apart: Flags, places: Ints, within: Within | None
) -> int | None:
    if rule is None:
        return None
    if rule == "band" and within is not None and within.first is not None:
        return int(places[min(within.first, len(places) - 1)])
    if rule in ("exact", "not_finite") or judged.onset is None:
        return _first(apart)
    return int(places[judged.onset])


def _roughness(a: Floats, b: Floats) -> float:
    """Scatter of the curves' own values around the middle of their neighbours, relative.

    What lies between logged points is not known better than that.
    """
    if len(a) < 3:
        return 0.0
    found = 0.0
    for values in (a, b):
        apart = np.median(np.abs(values[1:-1] - (values[2:] + values[:-2]) / 2))
        size = np.median(np.abs(values))
        # No curve is rougher than one whose values are all others.
        found += min(float(TO_SIGMA * apart / size), 1.0) ** 2 / 1.5 if size > 0 else 0.0
    return float(np.sqrt(found))


def _explain(
    a: Curve,
    b: Curve,
    alignment: Alignment,
    points: Mapping[str, Points],
    differences: Mapping[str, Floats],
    metrics: Mapping[str, MetricComparison],
    causes: Sequence[Cause],
) -> tuple[list[Cause], Diagnosis]:
    """The likely causes among what differs, and the main one or else what parts first."""
    onset = min(m.onset_step for m in metrics.values() if m.onset_step is not None)
    series = {}
    for name in (*METRICS, "param_norm"):
        if name in differences:
            finite = np.isfinite(differences[name])
            series[name] = Series(points[name].steps[finite], differences[name][finite])
    if not len(series["loss"].r):
        likely = [cause for cause in causes if cause.step <= onset]
    else:
        likely = diagnose.likely(causes, onset, series, a, b)
    found = diagnose.main_cause(likely)
    broken = [
        step
        for m in metrics.values()
        for step in (m.first_non_finite_step_a, m.first_non_finite_step_b)
        if step is not None
    ]
    no_loss = not len(series["loss"].r)
    if broken and (no_loss or (found is None and min(broken) <= onset)):
        found = Diagnosis(
            kind="not_finite",
            step=min(broken),
            words=f"a value is not a finite number from step {min(broken)} on",
        )
    if found is None or found.kind in ("mesh", "rounding"):
        seen = diagnose.what_parts_first(onset, series, alignment, a, b)
        # What rounds differently makes no jump.
        if found is None or seen.kind not in ("rounding", "unknown"):
            return [], seen
    return likely, found


def _first(flags: Flags) -> int | None:
    return int(np.argmax(flags)) if flags.any() else None


def _first_step(steps: Ints, flags: Flags) -> int | None:
    place = _first(flags)
    return None if place is None else int(steps[place])


def _side(curve: Curve) -> Side:
    takeovers = np.flatnonzero(np.diff(curve.attempts)) + 1
    return Side(
        name=curve.name,
        path=str(curve.path),
        steps=len(curve.steps),
        first_step=int(curve.steps[0]),
        last_step=int(curve.steps[-1]),
        attempts=len(set(curve.attempts[np.append(0, takeovers)].tolist())),
        restarts=tuple(int(step) for step in curve.restarts),
        missing=curve.gaps,
    )


def _data(a: Curve, b: Curve) -> DataComparison | None:
    if a.data is None or b.data is None:
        return None
    skips = (cause.words for cause in what_differs.skipped(a, b))
    differences = (*a.data.differences(b.data), *skips)
    return DataComparison(same=not differences, differences=differences)


def _overlap(curve: Curve) -> Overlap:
    return Overlap(
        rows=curve.overlap_rows,
        identical=curve.overlap_identical,
        max_rel_diff=curve.overlap_max_rel_diff,
    )
