"""The comparison of two curves: their alignment, the verdict, and the causes of a difference."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from slurmllm.analysis.compare import comparison, reasons
from slurmllm.analysis.compare.alignment import (
    Alignment,
    Points,
    StepMatch,
    match_steps,
    no_common_step,
    shift_steps,
)
from slurmllm.analysis.compare.bands import (
    PrecisionLimits,
    SeedBand,
    precision_basis,
    precision_limits,
)
from slurmllm.analysis.compare.causes import (
    Cause,
    SettingDifference,
    compare_skips,
    find_differences,
)
from slurmllm.analysis.compare.comparison import Comparison, MetricComparison, Tolerances
from slurmllm.analysis.compare.diagnosis import explain
from slurmllm.analysis.compare.divergence import (
    IDENTICAL,
    DivergenceResult,
    Stretch,
    detect_divergence,
)
from slurmllm.analysis.compare.statistics import Statistics, roughness, shared_noise, statistics
from slurmllm.core.errors import RunError
from slurmllm.core.metrics.curves import (
    Axis,
    Curve,
    Flags,
    Floats,
    Ints,
    bit_identical,
    signed_difference,
)
from slurmllm.core.metrics.tags import list_tags

METRICS = ("loss", "grad_norm")
# Statistics only, no part of the verdict.
RATES = ("seq_per_s", "tokens_per_s", "step_time_s")
OTHERS = ("param_norm", "lr", "val_loss", *RATES)


@dataclass(frozen=True)
class _Metric:
    """One metric of both curves at the points compared."""

    points: Points
    signed: Floats  # relative difference; NaN if a value is not finite [points]
    # Digits that only one of the logs has are no difference of the runs.
    printed: Points
    visible: Floats  # relative difference of the printed digits [points]


@dataclass(frozen=True)
class _Rules:
    """What the metrics are measured by, and the settings in which the runs differ."""

    tolerances: Tolerances
    basis: comparison.Basis
    settings: Sequence[SettingDifference]


@dataclass(frozen=True)
class _Findings:
    verdict: comparison.Verdict
    metrics: Mapping[str, MetricComparison]  # those that decide the verdict
    described: Mapping[str, Statistics]  # all
    steps: Ints  # with a loss of both
    changed: float  # first step without the same bits; infinite if there is none
    band: comparison.Band | None  # of the seeds


@np.errstate(all="ignore")  # logs may hold any value; those that are not finite are handled below
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
    shifts: tuple[int | None, int | None] = (None, None),
    basis: comparison.BasisKind | None = None,
    precisions: tuple[str, str] = ("", ""),
) -> Comparison:
    """Compare two curves at their common points.

    Args:
        a: The reference.
        from_step, to_step: Steps to compare, both included. By tokens or samples: of A's.
        seeds: More runs of A's training with other seeds: their spread is the tolerance then.
        shifts: What to add to the steps of A and B; None: by their formats and values.
        basis: None: `precision` if the runs are recorded and nothing else can be the difference.
        precisions: Of A and B; empty: as recorded.

    Raises:
        RunError: no point in common, no loss, or the positions on the axis are unknown.
        UserError: a precision that the basis needs is unknown.
    """
    tolerances = tolerances or Tolerances()
    _require_loss(a, b)
    matches = match_steps(a, b, shifts, by_step=axis == "step")
    alignment = Alignment(matches[0].used, matches[1].used, axis, from_step, to_step, letter)
    if not len(alignment.steps):
        raise RunError(no_common_step(*alignment.curves, from_step, to_step))
    metrics = _common_metrics(alignment)
    points = {name: metric.points for name, metric in metrics.items()}
    warnings = reasons.warnings_of(alignment, points)
    if tolerances.exact:
        warnings += reasons.precision_warnings(alignment.curves, letter)
    settings = find_differences(*alignment.curves, alignment)
    if seeds:  # they allow for another seed
        measure = comparison.Basis(kind="seeds")
        settings = [setting for setting in settings if setting.kind != "seed"]
    else:
        measure = _basis(alignment, tolerances, basis, precisions, settings)
    limits = _limits(alignment.curves[0], metrics, measure, tolerances)
    band: comparison.Band | None = None
    if seeds:
        shifted = [shift_steps(seed, matches[0].shift) for seed in seeds]
        seed_band = SeedBand(alignment.curves[0], shifted, axis)
        band = seed_band.compare({name: points[name] for name in limits}, letter)
        warnings += seed_band.warnings
    rules = _Rules(tolerances, measure, settings)
    findings = _find(alignment, metrics, limits, rules, band)
    causes: tuple[Cause, ...] = ()
    if findings.verdict == "differ" or (findings.verdict == "equivalent" and band is None):
        causes = _causes(alignment, metrics, findings.metrics, settings, measure)
    return _record(matches, alignment, rules, findings, causes, warnings)


def _require_loss(*curves: Curve) -> None:
    for curve in curves:
        if "loss" not in curve.columns:
            tags = list_tags(curve.tags or curve.columns)
            raise RunError(
                f"no loss in {curve.path}: there are {tags}; name it with --tag loss=TAG"
            )


def _basis(
    alignment: Alignment,
    tolerances: Tolerances,
    basis: comparison.BasisKind | None,
    precisions: tuple[str, str],
    settings: Sequence[SettingDifference],
) -> comparison.Basis:
    """Return what differences are measured by without seeds."""
    if tolerances.exact:
        return comparison.Basis(kind="exact")
    by_tolerance = comparison.Basis(kind="tolerance")
    if basis == "tolerance":
        return by_tolerance
    requested = basis == "precision" or any(precisions)
    by_precision = precision_basis(
        alignment.curves, precisions, settings, requested, alignment.letter
    )
    return by_precision or by_tolerance


def _find(
    alignment: Alignment,
    metrics: Mapping[str, _Metric],
    limits: Mapping[str, PrecisionLimits],
    rules: _Rules,
    band: comparison.Band | None,
) -> _Findings:
    """Compare each metric that decides, and return the verdict that follows."""
    changes = [_first_change(metrics[name].points) for name in limits]
    changed = min((step for step in changes if step is not None), default=math.inf)
    described = {
        name: statistics(metric.points, metric.signed, name not in RATES)
        for name, metric in metrics.items()
    }
    interpolated = alignment.method == "interpolated"
    results = {}
    for name, limit in limits.items():
        comparable = _comparable(metrics[name], alignment.curves, rules.tolerances.exact)
        detection = _detect(metrics[name], comparable[1], limit, interpolated, changed)
        results[name] = _compare_metric(
            metrics[name],
            comparable,
            limit,
            detection,
            described[name],
            exact=rules.tolerances.exact,
            band=None if band is None else band.metrics[name],
        )
    verdict: comparison.Verdict = "match"
    if any(metric.departs for metric in results.values()):
        verdict = "differ"
    elif changed == math.inf and not alignment.one_sided & set(METRICS):
        verdict = "identical"
    elif band is not None or any(metric.scattered for metric in results.values()):
        verdict = "equivalent"
    return _Findings(verdict, results, described, metrics["loss"].points.steps, changed, band)


def _record(
    matches: tuple[StepMatch, StepMatch],
    alignment: Alignment,
    rules: _Rules,
    findings: _Findings,
    causes: tuple[Cause, ...],
    warnings: list[str],
) -> Comparison:
    """Return the findings with their reason; `warnings` are those of all steps before."""
    (a, b), match = alignment.curves, findings.verdict != "differ"
    commands = reasons.command_differences(a, b)
    warnings = warnings + commands
    if match:
        warnings += [
            f"the curves match although {setting.text}"
            for setting in rules.settings
            if not setting.weak and setting.kind != rules.basis.kind
        ]
    reason = reasons.reason(
        findings.verdict,
        findings.metrics,
        rules.basis,
        findings.band,
        () if match else causes,
        alignment.letter,
        findings.steps,
    )
    identical = findings.steps[findings.steps < findings.changed]
    only_in_a, only_in_b = alignment.only
    return Comparison(
        verdict=findings.verdict,
        match=match,
        bit_identical_to_step=int(identical[-1]) if len(identical) else None,
        power={name: metric.power for name, metric in findings.metrics.items()},
        reason=reasons.invented_steps(alignment.curves, alignment.letter) + reason,
        causes=causes,
        diagnosis=None if match else _diagnosis(causes[0]),
        settings=(*(setting.text for setting in rules.settings), *commands),
        data=_compare_data(a, b, alignment.letter),
        tolerance=rules.tolerances,
        basis=rules.basis,
        a=_side(matches[0]),
        b=_side(matches[1]),
        steps_compared=len(alignment.steps),
        first_step=int(alignment.steps[0]),
        last_step=int(alignment.steps[-1]),
        only_in_a=only_in_a,
        only_in_b=only_in_b,
        alignment=comparison.AlignmentRecord(
            axis=alignment.axis, method=alignment.method, points=len(alignment.steps)
        ),
        metrics=findings.metrics,
        statistics=findings.described,
        band=findings.band,
        overlaps={"a": _overlap(a), "b": _overlap(b)},
        warnings=tuple(warnings),
    )


def _common_metrics(alignment: Alignment) -> dict[str, _Metric]:
    """Return the metrics that both curves have at common points; raises RunError without loss."""
    a, b = alignment.curves
    metrics = {}
    # The losses on further texts are those of one name.
    for name in dict.fromkeys((*METRICS, *OTHERS, *a.validation)):
        points = alignment.points_of(name)
        if len(points):
            printed = points.as_printed(a, b)
            signed = signed_difference(points.a, points.b)
            visible = signed_difference(printed.a, printed.b)
            metrics[name] = _Metric(points, signed, printed, visible)
    if "loss" not in metrics:
        raise RunError(
            f"{a.name} and {b.name} have a loss at different steps only; log it at the same steps"
        )
    return metrics


def _limits(
    a: Curve, metrics: Mapping[str, _Metric], basis: comparison.Basis, tolerances: Tolerances
) -> dict[str, PrecisionLimits]:
    """Return the limits of the metrics that decide the verdict."""
    names = METRICS if basis.precisions is None else (*METRICS, "param_norm")
    deciding = [name for name in names if name in metrics]
    if basis.precisions is None:
        return {name: PrecisionLimits(tolerances.limit(name)) for name in deciding}
    points = {name: metrics[name].points for name in deciding}
    differences = {name: metrics[name].signed for name in deciding}
    return precision_limits(a, basis.precisions, points, differences, tolerances)


def _first_change(points: Points) -> int | None:
    """Return the first step without the same bits."""
    return _first_step(points.steps, ~bit_identical(points.a, points.b))


def _causes(
    alignment: Alignment,
    metrics: Mapping[str, _Metric],
    results: Mapping[str, MetricComparison],
    settings: Sequence[SettingDifference],
    basis: comparison.Basis,
) -> tuple[Cause, ...]:
    a, b = alignment.curves
    departing = [metric for metric in results.values() if metric.departs]
    onsets = [metric.onset_step for metric in departing if metric.onset_step is not None]
    # Scatter came before the departure: its causes are not those of the scatter.
    after_scatter = bool(departing) and all(metric.scattered for metric in departing)
    # The band allows for another precision, so that anything else is the cause.
    decisive = [setting for setting in settings if setting.kind != basis.kind]
    if all(setting.weak for setting in decisive):
        decisive = list(settings)
    return explain(
        a,
        b,
        {name: metric.printed for name, metric in metrics.items()},
        {name: metric.visible for name, metric in metrics.items()},
        decisive,
        min(onsets, default=None),
        exact=alignment.method == "exact",
        shared=basis.kind != "seeds" and not after_scatter,
        letter=alignment.letter,
    )


def _diagnosis(cause: Cause) -> comparison.Diagnosis:
    return comparison.Diagnosis(kind=cause.kind, step=cause.step, text=cause.evidence)


def _compare_data(a: Curve, b: Curve, letter: str) -> comparison.DataComparison | None:
    if a.data is None or b.data is None:
        return None
    skips = (skip.text for skip in compare_skips(a, b, letter))
    differences = (*a.data.differences(b.data), *skips)
    return comparison.DataComparison(same=not differences, differences=differences)


def _comparable(metric: _Metric, curves: Sequence[Curve], exact: bool) -> tuple[Points, Floats]:
    """Return the points and differences that the tolerance applies to."""
    if exact and {"text", "tensorboard"} & {curve.kind for curve in curves}:
        return metric.printed, metric.visible
    if not (exact or np.any(metric.visible != 0)):
        return metric.points, metric.visible
    return metric.points, metric.signed


def _compare_metric(
    metric: _Metric,
    comparable: tuple[Points, Floats],
    limits: PrecisionLimits,
    detection: tuple[DivergenceResult, float | None],
    described: Statistics,
    *,
    exact: bool,
    band: comparison.BandOfMetric | None,
) -> MetricComparison:
    """Apply the limits, or the band of seeds, to a metric."""
    points, signed = comparable
    steps, finite, unequal = points.steps, np.isfinite(signed), metric.visible != 0
    result, correlation = detection
    bad_a, bad_b = ~np.isfinite(metric.points.a), ~np.isfinite(metric.points.b)
    differ = ~bit_identical(points.a, points.b) if exact else np.abs(signed) > limits.bias
    # Two NaNs have the same bits and yet do not match: neither run has a value there.
    beyond = ~finite | differ
    departure = _first_step(steps, beyond)
    size = float(np.abs(signed[np.argmax(beyond)]))
    rule, onset = _decide(steps, result, finite, departure, exact, band)
    power = result.power
    if not unequal.any():
        # At a chance of 1 in 200 a larger bias leaves all printed digits as they are.
        power = max(power, 10.6 * (described.max_rel_diff or 0.0) / len(steps))
    same = bit_identical(metric.points.a, metric.points.b)
    at_onset = math.nan if onset is None else float(abs(signed[np.searchsorted(steps, onset)]))
    return MetricComparison(
        **_lasting(steps[finite], result.lasting if rule is not None else None),
        tolerance=limits.bias,
        steps_compared=len(steps),
        max_rel_diff=described.max_rel_diff,
        max_rel_diff_step=described.max_rel_diff_step,
        mean_rel_diff=described.mean_rel_diff,
        first_difference_step=_first_step(steps, ~same),
        first_visible_step=_first_step(steps, unequal),
        first_departure_step=departure,
        first_departure_rel_diff=size if beyond.any() and math.isfinite(size) else None,
        departures=int(np.count_nonzero(beyond)),
        bit_identical=bool(np.all(same)),
        non_finite_a=int(np.count_nonzero(bad_a)),
        non_finite_b=int(np.count_nonzero(bad_b)),
        first_non_finite_step_a=_first_step(steps, bad_a),
        first_non_finite_step_b=_first_step(steps, bad_b),
        departs=rule is not None,
        rule=rule,
        noise=result.noise,
        bias=result.mean,
        scattered=rule in (None, result.rule)
        and (result.scattered or (limits.unstable and rule is None)),
        scatter=comparison.Scattering(
            size=result.noise, correlation=correlation, allowed=max(limits.bias, limits.scatter)
        ),
        power=power if band is None else band.power,
        onset_step=onset,
        onset_rel_diff=at_onset if math.isfinite(at_onset) else None,
    )


def _lasting(steps: Ints, stretch: Stretch | None) -> dict[str, Any]:
    """Return the fields of a lasting departure. `steps`: the finite ones"""
    if stretch is None:
        return {}
    return {
        "lasting_departure_step": int(steps[stretch.first]),
        "lasting_departure_last_step": int(steps[stretch.last]),
        "lasting_departure_points": stretch.last - stretch.first + 1,
        "lasting_departure_rel_diff": stretch.size,
    }


def _decide(
    steps: Ints,
    result: DivergenceResult,
    finite: Flags,
    departure: int | None,
    exact: bool,
    band: comparison.BandOfMetric | None,
) -> tuple[comparison.RuleName | None, int | None]:
    """Return the rule by which a metric differs, and the step from which it does."""
    onset = None if result.onset is None else int(steps[finite][result.onset])
    if not finite.all():
        # They may diverge before that; but a single point beyond the tolerance may be noise.
        starts = (departure if exact else onset, _first_step(steps, ~finite))
        return "not_finite", min(step for step in starts if step is not None)
    if exact:
        return None if departure is None else "exact", departure
    if band is None:
        return result.rule, onset
    return (None, None) if band.within else ("band", band.first_outside_step)


def _detect(
    metric: _Metric, signed: Floats, limits: PrecisionLimits, interpolated: bool, changed: float
) -> tuple[DivergenceResult, float | None]:
    """Detect a divergence at a visible difference; also return the noise's correlation."""
    points, finite = metric.points, np.isfinite(signed)
    if not finite.any():
        return DivergenceResult(), None
    a, b, r = points.a[finite], points.b[finite], signed[finite]
    rough = roughness(a, b) if interpolated else 0.0
    rough += max(0.0, limits.scatter - limits.bias)
    correlation = shared_noise(a, b, r)
    shared = 1.0 if correlation is None else correlation
    if limits.unstable:
        shared = 0.0
    identical = 0
    if not limits.scatter:  # after a change of precision there is noise
        identical = int(np.searchsorted(points.steps[finite], changed))
    # A few that are identical are no noise, but too few to say that what follows is none.
    skipped = identical if identical < min(IDENTICAL, len(r)) else 0
    result = detect_divergence(r[skipped:], limits.bias, rough, identical - skipped, shared)
    if result.onset is None:
        return result, correlation
    begin = result.onset + skipped
    onset = begin + int(np.argmax(metric.visible[finite][begin:] != 0))
    lasting = result.lasting
    if lasting is not None:
        last = lasting.last + skipped
        first = min(max(lasting.first + skipped, onset), last)
        lasting = Stretch(first, last, lasting.size)
    return replace(result, onset=onset, lasting=lasting), correlation


def _first_step(steps: Ints, flags: Flags) -> int | None:
    return int(steps[np.argmax(flags)]) if flags.any() else None


def _side(match: StepMatch) -> comparison.Side:
    curve = match.read
    return comparison.Side(
        name=curve.name,
        path=str(curve.path),
        steps=len(curve.steps),
        first_step=int(curve.steps[0]),
        last_step=int(curve.steps[-1]),
        attempts=len(np.unique(curve.attempts)),
        restarts=tuple(curve.restarts.tolist()),
        missing=curve.gaps,
        shift=match.shift,
        shift_reason=match.reason if match.shift else "",
        averaged=match.averaged,
    )


def _overlap(curve: Curve) -> comparison.Overlap:
    identical, largest = curve.overlap_identical, curve.overlap_max_rel_diff
    return comparison.Overlap(rows=curve.overlap_rows, identical=identical, max_rel_diff=largest)
