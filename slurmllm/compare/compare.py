"""Compares two curves: aligns them, applies the tolerance, and diagnoses a difference."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

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
from slurmllm.compare.comparison import (
    AlignmentRecord,
    Band,
    Comparison,
    DataComparison,
    MetricComparison,
    Overlap,
    RuleName,
    Scattering,
    Side,
    Tolerances,
    Verdict,
)
from slurmllm.compare.diagnosis import explain
from slurmllm.compare.divergence import DivergenceResult, detect_divergence
from slurmllm.compare.seed_band import CHANCE, BandCheck, SeedBand
from slurmllm.compare.statistics import roughness, shared_noise, statistics
from slurmllm.errors import RunError
from slurmllm.metrics.curves import Axis, Curve, Flags, Floats, Ints, bit_identical

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
) -> Comparison:
    """Compare two curves at their common points.

    Args:
        a: The reference.
        b: The other curve.
        tolerances: Tolerances of the metrics.
        axis: Axis by which they are aligned.
        from_step: First step to compare; None: all. By tokens or samples: of A's.
        to_step: Last step to compare, included; None: all.
        seeds: More runs of A's training with other seeds: their spread is the tolerance then.
        letter: Name of B in texts.
        shifts: What to add to the steps of A and B; None: by their formats and values.

    Raises:
        RunError: no point in common, no loss, or the positions on the axis are unknown.
    """
    tolerances = tolerances or Tolerances()
    for curve in (a, b):
        if "loss" not in curve.columns:
            raise RunError(
                f"no loss in {curve.path}: its rows must hold 'loss' (records.MetricsRow), or "
                "--tag loss=… name what holds it"
            )
    matched = match_steps(a, b, shifts, by_step=axis == "step")
    a, b = matched.used
    seeds = [shift_steps(seed, matched.shifts[0]) for seed in seeds]
    alignment = Alignment(a, b, axis, from_step, to_step, letter)
    if not len(alignment.steps):
        raise RunError(no_common_step(a, b, from_step, to_step))
    points = {name: alignment.of(name) for name in (*METRICS, *OTHERS)}
    if not len(points["loss"]):
        raise RunError(
            f"{a.name} and {b.name} have a loss at different steps only; log it at the same steps"
        )
    points = {name: of_metric for name, of_metric in points.items() if len(of_metric)}
    differences = {name: signed_difference(p.a, p.b) for name, p in points.items()}
    compared = [name for name in METRICS if name in points]
    band = SeedBand(a, seeds, axis) if seeds else None
    checks = {} if band is None else {name: band.check(name, points[name]) for name in compared}
    same = {name: bit_identical(points[name].a, points[name].b) for name in compared}
    changed = [
        points[name].steps[np.argmin(same[name])] for name in compared if not same[name].all()
    ]
    metrics = {
        name: _compare_metric(
            points[name],
            differences[name],
            same[name],
            int(np.searchsorted(points[name].steps, min(changed))) if changed else len(same[name]),
            tolerances,
            name,
            alignment.method == "interpolated",
            checks.get(name),
        )
        for name in compared
    }
    settings = find_differences(a, b, alignment)
    if seeds:  # the band allows for another seed
        settings = [one for one in settings if one.kind != "seed"]
    verdict: Verdict = "match"
    if any(metric.departs for metric in metrics.values()):
        verdict = "differ"
    elif not changed:
        verdict = "identical"
    elif band is not None or any(metric.scattered for metric in metrics.values()):
        verdict = "equivalent"
    match = verdict != "differ"
    identical = points["loss"].steps
    if changed:
        identical = identical[identical < min(changed)]
    causes: tuple[Cause, ...] = ()
    if not match or (verdict == "equivalent" and band is None):
        onsets = [m.onset_step for m in metrics.values() if m.onset_step is not None]
        # Scatter of their own came before the departure: its causes are not those of the scatter.
        apart = not match and all(m.scattered for m in metrics.values() if m.departs)
        causes = explain(
            *(a, b, points, differences, settings, min(onsets, default=None)),
            exact=alignment.method == "exact",
            shared=not (seeds or apart),
            letter=letter,
        )
    only_in_a, only_in_b = alignment.only
    warnings = [
        *comparison.warnings_of("A", a, only_in_a),
        *comparison.warnings_of(letter, b, only_in_b),
        *comparison.warnings_of_both(a, b, METRICS, metrics, alignment),
        *(band.warnings if band is not None else ()),
    ]
    if match:
        warnings += [f"the curves match although {one.text}" for one in settings if not one.weak]
    data = None
    if a.data is not None and b.data is not None:
        skips = (cause.text for cause in compare_skips(a, b))
        unlike = (*a.data.differences(b.data), *skips)
        data = DataComparison(same=not unlike, differences=unlike)
    band_record = None
    if band is not None:
        records = {name: check.record for name, check in checks.items()}
        band_record = Band(seeds=band.names, chance=CHANCE, metrics=records)
    with ThreadPoolExecutor(max_workers=2) as pool:  # numpy releases the GIL
        shapes = [name not in RATES for name in points]
        of_all = pool.map(statistics, points.values(), differences.values(), shapes)
        described = dict(zip(points, of_all, strict=True))
    return Comparison(
        verdict=verdict,
        match=match,
        bit_identical_to_step=int(identical[-1]) if len(identical) else None,
        power={name: metric.power for name, metric in metrics.items()},
        reason=comparison.reason(
            *(verdict, metrics, tolerances, band_record, () if match else causes, letter),
            int(identical[-1]) if len(identical) else None,
        ),
        causes=causes,
        diagnosis=None if match else comparison.diagnosis(causes),
        settings=tuple(one.text for one in settings),
        data=data,
        tolerance=tolerances,
        a=_side(matched, 0),
        b=_side(matched, 1),
        steps_compared=len(alignment.steps),
        first_step=int(alignment.steps[0]),
        last_step=int(alignment.steps[-1]),
        only_in_a=only_in_a,
        only_in_b=only_in_b,
        alignment=AlignmentRecord(axis=axis, method=alignment.method, points=len(alignment.steps)),
        metrics=metrics,
        statistics=described,
        band=band_record,
        overlaps={"a": _overlap(a), "b": _overlap(b)},
        warnings=tuple(warnings),
    )


def signed_difference(a: Floats, b: Floats) -> Floats:
    """(b - a) / max(|a|, |b|), elementwise; 0 if both are 0, from -2 to 2.

    NaN if either is not a finite number.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        scale = np.maximum(np.maximum(np.abs(a), np.abs(b)), np.finfo(np.float64).tiny)
        difference = np.clip((b - a) / scale, -2.0, 2.0)
        # An infinite value may give any number.
        difference[~np.isfinite(scale)] = np.nan
    return difference


def _compare_metric(
    points: Points,
    signed: Floats,
    same: Flags,
    identical: int,
    tolerances: Tolerances,
    metric: str,
    interpolated: bool,
    check: BandCheck | None,
) -> MetricComparison:
    a, b, steps = points.a, points.b, points.steps
    difference = np.abs(signed)
    finite = np.isfinite(signed)
    tolerance = tolerances.of(metric)
    # Two NaNs have the same bits and yet do not match: neither run has a value there.
    beyond: Flags = ~finite | (~same if tolerances.exact else difference > tolerance)
    largest = int(np.nanargmax(difference)) if finite.any() else None
    departure = _first(beyond)
    places = np.flatnonzero(finite)
    result, shared = DivergenceResult(), None
    if len(places):
        finite_a, finite_b, r = a[places], b[places], signed[places]
        rough = roughness(finite_a, finite_b) if interpolated else 0.0
        shared = shared_noise(finite_a, finite_b, r)
        known = 1.0 if shared is None else shared
        result = detect_divergence(r, tolerance, rough, identical, known)
    rule: RuleName | None
    if not finite.all():
        rule = "not_finite"
    elif tolerances.exact:
        rule = "exact" if beyond.any() else None
    elif check is not None:
        rule = None if check.record.within else "band"
    else:
        rule = result.rule
    if rule is None:
        onset = None
    elif rule == "band" and check is not None and check.first is not None:
        onset = int(places[min(check.first, len(places) - 1)])
    elif rule in ("exact", "not_finite") or result.onset is None:
        onset = departure
    else:
        onset = int(places[result.onset])
    lasting = result.lasting if rule is not None else None
    return MetricComparison(
        tolerance=tolerance,
        steps_compared=len(steps),
        max_rel_diff=None if largest is None else float(difference[largest]),
        max_rel_diff_step=None if largest is None else int(steps[largest]),
        mean_rel_diff=None if largest is None else float(np.mean(difference[finite])),
        first_difference_step=_first_step(steps, ~same),
        first_departure_step=_first_step(steps, beyond),
        first_departure_rel_diff=(
            float(difference[departure]) if departure is not None and finite[departure] else None
        ),
        departures=int(np.count_nonzero(beyond)),
        bit_identical=bool(np.all(same)),
        non_finite_a=int(np.count_nonzero(~np.isfinite(a))),
        non_finite_b=int(np.count_nonzero(~np.isfinite(b))),
        first_non_finite_step_a=_first_step(steps, ~np.isfinite(a)),
        first_non_finite_step_b=_first_step(steps, ~np.isfinite(b)),
        departs=rule is not None,
        rule=rule,
        noise=result.noise,
        bias=result.mean,
        scattered=result.scattered and rule in (None, result.rule),
        scatter=Scattering(size=result.noise, correlation=shared),
        power=result.power if check is None else check.power,
        onset_step=None if onset is None else int(steps[onset]),
        lasting_departure_step=None if lasting is None else int(steps[places[lasting.first]]),
        lasting_departure_last_step=None if lasting is None else int(steps[places[lasting.last]]),
        lasting_departure_points=None if lasting is None else lasting.last - lasting.first + 1,
        lasting_departure_rel_diff=None if lasting is None else lasting.size,
    )


def _first(flags: Flags) -> int | None:
    return int(np.argmax(flags)) if flags.any() else None


def _first_step(steps: Ints, flags: Flags) -> int | None:
    index = _first(flags)
    return None if index is None else int(steps[index])


def _side(matched: StepMatch, place: int) -> Side:
    curve = matched.read[place]
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
        shift=matched.shifts[place],
        shift_reason=matched.reasons[place] if matched.shifts[place] else "",
        averaged=matched.averaged[place],
    )


def _overlap(curve: Curve) -> Overlap:
    identical, largest = curve.overlap_identical, curve.overlap_max_rel_diff
    return Overlap(rows=curve.overlap_rows, identical=identical, max_rel_diff=largest)
