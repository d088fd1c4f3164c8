"""The comparison of two curves: their alignment, the verdict, and the causes of a difference."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from slurmllm.analysis.compare import result, sentences
from slurmllm.analysis.compare.alignment import (
    Alignment,
    Points,
    StepMatch,
    counted_apart,
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
from slurmllm.analysis.compare.causes import explain
from slurmllm.analysis.compare.columns import clue_table
from slurmllm.analysis.compare.divergence import (
    IDENTICAL,
    DivergenceResult,
    detect_divergence,
    roughness,
    shared_noise,
)
from slurmllm.analysis.compare.recorded import SettingDifference, compare_skips, find_differences
from slurmllm.analysis.compare.result import (
    Cause,
    Comparison,
    MetricComparison,
    Statistics,
    Tolerances,
    statistics,
)
from slurmllm.core.errors import RunError
from slurmllm.core.metrics.curves import (
    Axis,
    Curve,
    Flags,
    Floats,
    Ints,
    signed_difference,
)
from slurmllm.core.metrics.tags import list_tags

METRICS = ("loss", "grad_norm")
# Statistics only, no part of the verdict.
RATES = ("seq_per_s", "tokens_per_s", "step_time_s")
OTHERS = ("param_norm", "lr", "val_loss", *RATES)


class _Metric(NamedTuple):
    """One metric of both curves at the points compared."""

    points: Points
    signed: Floats  # relative difference; NaN if a value is not finite [points]
    # Digits that only one of the logs has are no difference of the runs.
    printed: Points
    visible: Floats  # relative difference of the printed digits [points]


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
    basis: result.BasisKind | None = None,
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
    for curve in (a, b):
        if "loss" not in curve.columns:
            tags = list_tags(curve.tags or curve.columns)
            raise RunError(
                f"no loss in {curve.path}: there are {tags}; name it with --tag loss=TAG"
            )
    matches = match_steps(a, b, shifts, by_step=axis == "step")
    a, b = matches[0].used, matches[1].used
    alignment = Alignment(a, b, axis, from_step, to_step, letter)
    if not len(alignment.steps):
        raise RunError(no_common_step(a, b, from_step, to_step))
    metrics = _common_metrics(alignment)
    points = {name: metric.points for name, metric in metrics.items()}
    warnings = sentences.warnings_of(alignment, points, tolerances.exact)
    settings = find_differences(a, b, alignment)
    measure = result.Basis(kind="tolerance")
    if tolerances.exact:
        measure = result.Basis(kind="exact")
    elif seeds:  # they allow for another seed
        measure = result.Basis(kind="seeds")
        settings = [setting for setting in settings if setting.kind != "seed"]
    elif basis != "tolerance":
        requested = basis == "precision" or any(precisions)
        measure = (
            precision_basis(alignment.curves, precisions, settings, requested, letter) or measure
        )
    deciding = [name for name in (*METRICS, "param_norm") if name in metrics]
    if measure.precisions is None:
        deciding = [name for name in deciding if name != "param_norm"]
        limits = {name: PrecisionLimits(tolerances.limit(name)) for name in deciding}
    else:
        by_name = {name: (points[name], metrics[name].signed) for name in deciding}
        limits = precision_limits(a, measure.precisions, by_name, tolerances)
    band: result.Band | None = None
    if seeds:
        shifted = [shift_steps(seed, matches[0].shift) for seed in seeds]
        seed_band = SeedBand(a, shifted, axis)
        band = seed_band.compare({name: points[name] for name in limits}, letter)
        warnings += seed_band.warnings
    changes = [_first_step(points[name].steps, ~points[name].same) for name in limits]
    changed = min((step for step in changes if step is not None), default=math.inf)
    described = {
        name: statistics(metric.points, metric.signed, name not in RATES)
        for name, metric in metrics.items()
    }
    results = {
        name: _compare_metric(
            metrics[name],
            limit,
            described[name],
            alignment,
            changed,
            exact=tolerances.exact,
            band=None if band is None else band.metrics[name],
        )
        for name, limit in limits.items()
    }
    verdict: result.Verdict = "match"
    causes: tuple[Cause, ...] = ()
    if any(metric.departs for metric in results.values()):
        verdict = "differ"
    elif changed == math.inf and not alignment.one_sided & set(METRICS):
        verdict = "identical"
    elif band is not None or any(metric.scattered for metric in results.values()):
        verdict = "equivalent"
    match = verdict != "differ"
    if not match or (verdict == "equivalent" and band is None):
        causes = _causes(alignment, metrics, results, settings, measure)
    commands = sentences.command_differences(a, b)
    warnings += commands
    if match:
        warnings += [
            f"the curves match although {setting.text}"
            for setting in settings
            if not (setting.weak or setting.shifted) and setting.kind != measure.kind
        ]
    steps = points["loss"].steps
    reason = sentences.reason(
        verdict, results, measure, band, () if match else causes, letter, steps
    )
    identical = steps[steps < changed]
    only_in_a, only_in_b = alignment.only
    return Comparison(
        verdict=verdict,
        match=match,
        bit_identical_to_step=int(identical[-1]) if len(identical) else None,
        power={name: metric.power for name, metric in results.items()},
        reason=sentences.invented_steps(alignment.curves, letter) + reason,
        causes=causes,
        diagnosis=None
        if match
        else result.Diagnosis(kind=causes[0].kind, step=causes[0].step, text=causes[0].evidence),
        settings=(*(setting.text for setting in settings), *commands),
        data=_compare_data(a, b, letter),
        tolerance=tolerances,
        basis=measure,
        a=_side(matches[0]),
        b=_side(matches[1]),
        steps_compared=len(alignment.steps),
        first_step=int(alignment.steps[0]),
        last_step=int(alignment.steps[-1]),
        only_in_a=only_in_a,
        only_in_b=only_in_b,
        alignment=result.AlignmentRecord(
            axis=axis, method=alignment.method, points=len(alignment.steps)
        ),
        metrics=results,
        statistics=described,
        band=band,
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


def _causes(
    alignment: Alignment,
    metrics: Mapping[str, _Metric],
    results: Mapping[str, MetricComparison],
    settings: Sequence[SettingDifference],
    basis: result.Basis,
) -> tuple[Cause, ...]:
    a, b = alignment.curves
    if alignment.axis == "step" and (same_point := counted_apart(a, b)) is not None:
        evidence = clue_table()["counted_apart"].text.format(
            letter=alignment.letter, step_a=same_point[0], step_b=same_point[1]
        )
        step = int(alignment.steps[0])
        return (Cause(kind="logging", confidence="certain", step=step, evidence=evidence),)
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


def _compare_data(a: Curve, b: Curve, letter: str) -> result.DataComparison | None:
    if a.data is None or b.data is None:
        return None
    skips = (skip.text for skip in compare_skips(a, b, letter))
    differences = (*a.data.differences(b.data), *skips)
    return result.DataComparison(same=not differences, differences=differences)


def _compare_metric(
    metric: _Metric,
    limits: PrecisionLimits,
    described: Statistics,
    alignment: Alignment,
    changed: float,
    *,
    exact: bool,
    band: result.BandOfMetric | None,
) -> MetricComparison:
    """Apply the limits, or the band of seeds, to a metric. `changed`: first step of other bits"""
    points, r = metric.points, metric.signed
    if exact and {"text", "tensorboard"} & {curve.kind for curve in alignment.curves}:
        points, r = metric.printed, metric.visible
    elif not (exact or np.any(metric.visible != 0)):
        r = metric.visible
    steps, finite, unequal = points.steps, np.isfinite(r), metric.visible != 0
    detected, correlation = DivergenceResult(), None
    if finite.any():
        detected, correlation = _detect(metric, r, limits, alignment.method, changed)
    bad_a, bad_b = ~np.isfinite(metric.points.a), ~np.isfinite(metric.points.b)
    # Two NaNs have the same bits and yet do not match: neither run has a value there.
    beyond = ~finite | (~points.same if exact else np.abs(r) > limits.bias)
    departure = _first_step(steps, beyond)
    size = float(np.abs(r[np.argmax(beyond)]))
    rule: result.RuleName | None = detected.rule
    onset = None if detected.onset is None else int(steps[finite][detected.onset])
    if not finite.all():
        # They may diverge before that; but a single point beyond the tolerance may be noise.
        starts = (departure if exact else onset, _first_step(steps, ~finite))
        rule, onset = "not_finite", min(step for step in starts if step is not None)
    elif exact:
        rule, onset = None if departure is None else "exact", departure
    elif band is not None:
        rule, onset = (None, None) if band.within else ("band", band.first_outside_step)
    at_onset = math.nan if onset is None else float(abs(r[np.searchsorted(steps, onset)]))
    power = detected.power
    if not unequal.any():
        # At a chance of 1 in 200 a larger bias leaves all printed digits as they are.
        power = max(power, 10.6 * (described.max_rel_diff or 0.0) / len(steps))
    lasting = detected.lasting if rule is not None else None
    of_lasting = {}
    if lasting is not None:
        of_lasting = {
            "lasting_departure_step": int(steps[finite][lasting.first]),
            "lasting_departure_last_step": int(steps[finite][lasting.last]),
            "lasting_departure_points": lasting.last - lasting.first + 1,
            "lasting_departure_rel_diff": lasting.size,
        }
    return MetricComparison.model_validate(
        {
            **described.model_dump(include={"max_rel_diff", "max_rel_diff_step", "mean_rel_diff"}),
            **of_lasting,
            "tolerance": limits.bias,
            "steps_compared": len(steps),
            "first_difference_step": _first_step(steps, ~metric.points.same),
            "first_visible_step": _first_step(steps, unequal),
            "first_departure_step": departure,
            "first_departure_rel_diff": size if beyond.any() and math.isfinite(size) else None,
            "departures": int(np.count_nonzero(beyond)),
            "bit_identical": bool(np.all(metric.points.same)),
            "non_finite_a": int(np.count_nonzero(bad_a)),
            "non_finite_b": int(np.count_nonzero(bad_b)),
            "first_non_finite_step_a": _first_step(steps, bad_a),
            "first_non_finite_step_b": _first_step(steps, bad_b),
            "departs": rule is not None,
            "rule": rule,
            "noise": detected.noise,
            "bias": detected.mean,
            "scattered": rule in (None, detected.rule)
            and (detected.scattered or (limits.unstable and rule is None)),
            "scatter": result.Scattering(
                size=detected.noise,
                correlation=correlation,
                allowed=max(limits.bias, limits.scatter),
            ),
            "power": power if band is None else band.power,
            "onset_step": onset,
            "onset_rel_diff": at_onset if math.isfinite(at_onset) else None,
        }
    )


def _detect(
    metric: _Metric, r: Floats, limits: PrecisionLimits, method: str, changed: float
) -> tuple[DivergenceResult, float | None]:
    """Detect a divergence at a visible difference; also return the noise's correlation."""
    finite = np.isfinite(r)
    a, b, r = metric.points.a[finite], metric.points.b[finite], r[finite]
    rough = roughness(a, b) if method == "interpolated" else 0.0
    rough += max(0.0, limits.scatter - limits.bias)
    correlation = shared_noise(a, b, r)
    shared = 1.0 if correlation is None else correlation
    if limits.unstable:
        shared = 0.0
    identical = 0
    if not limits.scatter:  # after a change of precision there is noise
        identical = int(np.searchsorted(metric.points.steps[finite], changed))
    # A few that are identical are no noise, but too few to say that what follows is none.
    skipped = identical if identical < min(IDENTICAL, len(r)) else 0
    detected = detect_divergence(r[skipped:], limits.bias, rough, identical - skipped, shared)
    if detected.onset is None:
        return detected, correlation
    begin = detected.onset + skipped
    onset = begin + int(np.argmax(metric.visible[finite][begin:] != 0))
    lasting = detected.lasting
    if lasting is not None:
        last = lasting.last + skipped
        lasting = replace(lasting, first=min(max(lasting.first + skipped, onset), last), last=last)
    return replace(detected, onset=onset, lasting=lasting), correlation


def _first_step(steps: Ints, flags: Flags) -> int | None:
    return int(steps[np.argmax(flags)]) if flags.any() else None


def _side(match: StepMatch) -> result.Side:
    curve = match.read
    return result.Side(
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


def _overlap(curve: Curve) -> result.Overlap:
    identical, largest = curve.overlap_identical, curve.overlap_max_rel_diff
    return result.Overlap(rows=curve.overlap_rows, identical=identical, max_rel_diff=largest)
