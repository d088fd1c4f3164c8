"""Compares two curves: aligns them, applies the tolerance, and diagnoses a difference."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from slurmllm.compare import comparison
from slurmllm.compare.alignment import (
    Alignment,
    Points,
    StepMatch,
    match_steps,
    no_common_step,
    shift_steps,
)
from slurmllm.compare.causes import Cause, compare_skips, find_differences
from slurmllm.compare.comparison import Comparison, MetricComparison, Tolerances
from slurmllm.compare.diagnosis import explain
from slurmllm.compare.divergence import DivergenceResult, detect_divergence
from slurmllm.compare.precision_band import PrecisionLimits, precision_basis, precision_limits
from slurmllm.compare.seed_band import SeedBand
from slurmllm.compare.statistics import Statistics, roughness, shared_noise, statistics
from slurmllm.errors import RunError
from slurmllm.metrics.curves import (
    Axis,
    Curve,
    Flags,
    Floats,
    Ints,
    bit_identical,
    signed_difference,
)

METRICS = ("loss", "grad_norm")
# Statistics only, no part of the verdict.
RATES = ("seq_per_s", "tokens_per_s", "step_time_s")
OTHERS = ("param_norm", "lr", "val_loss", *RATES)


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
        from_step: First step to compare; None: all. By tokens or samples: of A's.
        to_step: Last step to compare, included; None: all.
        seeds: More runs of A's training with other seeds: their spread is the tolerance then.
        shifts: What to add to the steps of A and B; None: by their formats and values.
        basis: `precision` or `tolerance`; None: `precision` if both runs are recorded and nothing
            else can have made the curves differ.
        precisions: Of A and B; empty: as recorded.

    Raises:
        RunError: no point in common, no loss, or the positions on the axis are unknown.
        UserError: a precision that the basis needs is unknown.
    """
    tolerances = tolerances or Tolerances()
    for curve in (a, b):
        if "loss" not in curve.columns:
            raise RunError(
                f"no loss in {curve.path}: its rows must hold 'loss' (records.MetricsRow), or "
                "--tag loss=… name what holds it"
            )
    matched = match_steps(a, b, shifts, by_step=axis == "step")
    a, b = (one.used for one in matched)
    alignment = Alignment(a, b, axis, from_step, to_step, letter)
    points = points_of_metrics(alignment, from_step, to_step)
    differences = {name: signed_difference(one.a, one.b) for name, one in points.items()}
    described = describe(points, differences)
    warnings = comparison.warnings_of(alignment, points)
    if tolerances.exact:
        warnings += comparison.precision_warnings((a, b), letter)
    # Seeds allow for another seed.
    settings = [
        setting
        for setting in find_differences(a, b, alignment)
        if not seeds or setting.kind != "seed"
    ]
    measure = comparison.Basis(
        kind="exact" if tolerances.exact else "seeds" if seeds else "tolerance"
    )
    if measure.kind == "tolerance" and basis != "tolerance":
        asked = basis == "precision" or any(precisions)
        measure = precision_basis((a, b), precisions, settings, asked, letter) or measure
    names = METRICS if measure.precisions is None else (*METRICS, "param_norm")
    compared = {name: points[name] for name in names if name in points}
    limits = {name: PrecisionLimits(tolerances.of(name)) for name in compared}
    if measure.precisions is not None:
        limits = precision_limits(a, measure.precisions, compared, differences, tolerances)
    band: comparison.Band | None = None
    if seeds:
        of_seeds = SeedBand(a, [shift_steps(one, matched[0].shift) for one in seeds], axis)
        band = of_seeds.compare(compared, letter)
        warnings += of_seeds.warnings
    # Digits that only one of the logs has are no difference of the runs.
    shown, shown_differences = points, differences
    if tolerances.exact and a.kind != b.kind:
        shown = {name: round_to_logs(one, a, b) for name, one in points.items()}
        shown_differences = {n: signed_difference(one.a, one.b) for n, one in shown.items()}
    changes = (_first_step(one.steps, ~bit_identical(one.a, one.b)) for one in compared.values())
    changed = min((step for step in changes if step is not None), default=math.inf)
    metrics = {
        name: compare_metric(
            *(metric_points, shown_differences[name], described[name], limits[name], changed),
            exact=bit_identical(shown[name].a, shown[name].b) if tolerances.exact else None,
            interpolated=alignment.method == "interpolated",
            band=None if band is None else band.metrics[name],
        )
        for name, metric_points in compared.items()
    }
    verdict: comparison.Verdict = "match"
    if any(metric.departs for metric in metrics.values()):
        verdict = "differ"
    elif changed == math.inf and not alignment.one_sided & set(METRICS):
        verdict = "identical"
    elif band is not None or any(metric.scattered for metric in metrics.values()):
        verdict = "equivalent"
    match = verdict != "differ"
    causes: tuple[Cause, ...] = ()
    if not match or (verdict == "equivalent" and band is None):
        onsets = [one.onset_step for one in metrics.values() if one.onset_step is not None]
        # Scatter of their own came before the departure: its causes are not those of the scatter.
        apart = not match and all(one.scattered for one in metrics.values() if one.departs)
        # The band allows for another precision, so that anything else is the cause.
        others = [setting for setting in settings if setting.kind != measure.kind]
        suspects = settings if all(setting.weak for setting in others) else others
        causes = explain(
            *(a, b, shown, shown_differences, suspects, min(onsets, default=None)),
            exact=alignment.method == "exact",
            shared=band is None and not apart,
            letter=letter,
        )
    if match:
        warnings += [
            f"the curves match although {setting.text}"
            for setting in settings
            if not setting.weak and setting.kind != measure.kind
        ]
    data = None
    if a.data is not None and b.data is not None:
        skips = (one.text for one in compare_skips(a, b, letter))
        unlike = (*a.data.differences(b.data), *skips)
        data = comparison.DataComparison(same=not unlike, differences=unlike)
    identical = points["loss"].steps[points["loss"].steps < changed]
    identical_to = int(identical[-1]) if len(identical) else None
    only_in_a, only_in_b = alignment.only
    return Comparison(
        verdict=verdict,
        match=match,
        bit_identical_to_step=identical_to,
        power={name: metric.power for name, metric in metrics.items()},
        reason=comparison.reason(
            *(verdict, metrics, measure, band, () if match else causes, letter, identical_to)
        ),
        causes=causes,
        diagnosis=None if match else comparison.Diagnosis.of(causes[0]),
        settings=tuple(one.text for one in settings),
        data=data,
        tolerance=tolerances,
        basis=measure,
        a=_side(matched[0]),
        b=_side(matched[1]),
        steps_compared=len(alignment.steps),
        first_step=int(alignment.steps[0]),
        last_step=int(alignment.steps[-1]),
        only_in_a=only_in_a,
        only_in_b=only_in_b,
        alignment=comparison.AlignmentRecord(
            axis=axis, method=alignment.method, points=len(alignment.steps)
        ),
        metrics=metrics,
        statistics=described,
        band=band,
        overlaps={"a": _overlap(a), "b": _overlap(b)},
        warnings=tuple(warnings),
    )


def points_of_metrics(
    alignment: Alignment, from_step: int | None, to_step: int | None
) -> dict[str, Points]:
    """The points of each metric that both have; a RunError without a common point with a loss."""
    a, b = alignment.curves
    if not len(alignment.steps):
        raise RunError(no_common_step(a, b, from_step, to_step))
    # The losses on further texts are those of one name.
    names = dict.fromkeys((*METRICS, *OTHERS, *a.validation))
    points = {name: alignment.of(name) for name in names}
    if not len(points["loss"]):
        raise RunError(
            f"{a.name} and {b.name} have a loss at different steps only; log it at the same steps"
        )
    return {name: of_metric for name, of_metric in points.items() if len(of_metric)}


def round_to_logs(points: Points, a: Curve, b: Curve) -> Points:
    """Round the values of both curves to what the less precise log can hold: float32, or text."""
    kinds = {a.kind, b.kind}
    if "tensorboard" in kinds:
        a32, b32 = points.a.astype(np.float32), points.b.astype(np.float32)
        points = replace(points, a=a32.astype(np.float64), b=b32.astype(np.float64))
    if "text" in kinds:
        printed, other = (points.a, points.b) if a.kind == "text" else (points.b, points.a)
        places = (np.format_float_positional(value, trim="-") for value in printed)
        decimals = max(len(text.partition(".")[2]) for text in places)
        same = np.abs(printed - other) <= 0.5000001 * 10.0**-decimals
        points = replace(points, a=np.where(same, points.b, points.a))
    return points


def describe(
    points: Mapping[str, Points], differences: Mapping[str, Floats]
) -> dict[str, Statistics]:
    with ThreadPoolExecutor(max_workers=2) as pool:  # numpy releases the GIL
        shapes = [name not in RATES for name in points]
        found = pool.map(statistics, points.values(), differences.values(), shapes)
        return dict(zip(points, found, strict=True))


def compare_metric(
    points: Points,
    signed: Floats,
    described: Statistics,
    limits: PrecisionLimits,
    changed: float,
    *,
    exact: Flags | None,
    interpolated: bool,
    band: comparison.BandOfMetric | None,
) -> MetricComparison:
    """Apply the limits, or the band of seeds, to the points of a metric.

    `signed` are their relative differences, `exact` the points that are the same if they must be,
    both as far as the logs have digits; `described` are their statistics; `changed` is the first
    step at which any metric differs; `band` is B's place in the band, None without seeds.
    """
    steps, finite, tolerance = points.steps, np.isfinite(signed), limits.bias
    same = bit_identical(points.a, points.b)
    # Two NaNs have the same bits and yet do not match: neither run has a value there.
    beyond = ~finite | (np.abs(signed) > tolerance if exact is None else ~exact)
    departure = _first_step(steps, beyond)
    result, shared = DivergenceResult(), None
    if finite.any():
        a, b, r = points.a[finite], points.b[finite], signed[finite]
        rough = max(0.0, limits.scatter - tolerance) + (roughness(a, b) if interpolated else 0.0)
        shared = shared_noise(a, b, r)
        correlation = 1.0 if shared is None else 0.0 if limits.unstable else shared
        # After a change of precision there is noise.
        identical = 0 if limits.scatter else int(np.searchsorted(steps, changed))
        result = detect_divergence(r, tolerance, rough, identical, correlation)
    at = steps[finite]
    rule: comparison.RuleName | None = result.rule
    onset = None if result.onset is None else int(at[result.onset])
    if not finite.all():
        # They may diverge before that; but a single point beyond the tolerance may be noise.
        starts = (onset if exact is None else departure, _first_step(steps, ~finite))
        rule, onset = "not_finite", min(step for step in starts if step is not None)
    elif exact is not None:
        rule, onset = "exact" if departure is not None else None, departure
    elif band is not None:
        rule, onset = None if band.within else "band", band.first_outside_step
    lasting = result.lasting if rule is not None else None
    first_size = float(np.abs(signed[np.argmax(beyond)]))
    return MetricComparison(
        tolerance=tolerance,
        steps_compared=len(steps),
        max_rel_diff=described.max_rel_diff,
        max_rel_diff_step=described.max_rel_diff_step,
        mean_rel_diff=described.mean_rel_diff,
        first_difference_step=_first_step(steps, ~same),
        first_departure_step=departure,
        first_departure_rel_diff=(
            first_size if departure is not None and math.isfinite(first_size) else None
        ),
        departures=int(np.count_nonzero(beyond)),
        bit_identical=bool(np.all(same)),
        non_finite_a=int(np.count_nonzero(~np.isfinite(points.a))),
        non_finite_b=int(np.count_nonzero(~np.isfinite(points.b))),
        first_non_finite_step_a=_first_step(steps, ~np.isfinite(points.a)),
        first_non_finite_step_b=_first_step(steps, ~np.isfinite(points.b)),
        departs=rule is not None,
        rule=rule,
        noise=result.noise,
        bias=result.mean,
        scattered=rule in (None, result.rule)
        and (result.scattered or (limits.unstable and rule is None)),
        scatter=comparison.Scattering(
            size=result.noise, correlation=shared, allowed=max(tolerance, limits.scatter)
        ),
        power=result.power if band is None else band.power,
        onset_step=None if rule is None else onset,
        lasting_departure_step=None if lasting is None else int(at[lasting.first]),
        lasting_departure_last_step=None if lasting is None else int(at[lasting.last]),
        lasting_departure_points=None if lasting is None else lasting.last - lasting.first + 1,
        lasting_departure_rel_diff=None if lasting is None else lasting.size,
    )


def _first_step(steps: Ints, flags: Flags) -> int | None:
    return int(steps[np.argmax(flags)]) if flags.any() else None


def _side(matched: StepMatch) -> comparison.Side:
    curve = matched.read
    return comparison.Side(
        name=curve.name,
        path=str(curve.path),
        steps=len(curve.steps),
        first_step=int(curve.steps[0]),
        last_step=int(curve.steps[-1]),
        attempts=len(np.unique(curve.attempts)),
        restarts=tuple(curve.restarts.tolist()),
        missing=curve.gaps,
        shift=matched.shift,
        shift_reason=matched.reason if matched.shift else "",
        averaged=matched.averaged,
    )


def _overlap(curve: Curve) -> comparison.Overlap:
    identical, largest = curve.overlap_identical, curve.overlap_max_rel_diff
    return comparison.Overlap(rows=curve.overlap_rows, identical=identical, max_rel_diff=largest)
