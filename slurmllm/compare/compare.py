"""The comparison of two curves: their alignment, the verdict, and the causes of a difference."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

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
from slurmllm.compare.causes import Cause, SettingDifference, compare_skips, find_differences
from slurmllm.compare.comparison import Comparison, MetricComparison, Tolerances
from slurmllm.compare.diagnosis import explain
from slurmllm.compare.divergence import (
    IDENTICAL,
    DivergenceResult,
    Stretch,
    detect_divergence,
)
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
from slurmllm.metrics.tags import list_tags

METRICS = ("loss", "grad_norm")
# Statistics only, no part of the verdict.
RATES = ("seq_per_s", "tokens_per_s", "step_time_s")
OTHERS = ("param_norm", "lr", "val_loss", *RATES)


@dataclass(frozen=True)
class _Pair:
    """Two curves, aligned, and the differences of their metrics."""

    matches: tuple[StepMatch, StepMatch]
    alignment: Alignment
    points: dict[str, Points]
    differences: dict[str, Floats]  # signed, relative
    statistics: dict[str, Statistics]

    @property
    def curves(self) -> tuple[Curve, Curve]:
        return self.alignment.curves


@dataclass(frozen=True)
class _Measure:
    """What the verdict is measured by, and the recorded settings that differ."""

    tolerances: Tolerances
    basis: comparison.Basis
    points: dict[str, Points]  # of the metrics that decide
    limits: dict[str, PrecisionLimits]
    band: comparison.Band | None
    changed: float  # first step at which one of these differs; infinite: none
    settings: list[SettingDifference]
    warnings: list[str]


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
    for curve in (a, b):
        if "loss" not in curve.columns:
            raise RunError(
                f"no loss in {curve.path}: there are {list_tags(curve.tags or curve.columns)}; "
                "name it with --tag loss=TAG"
            )
    matches = match_steps(a, b, shifts, by_step=axis == "step")
    alignment = Alignment(matches[0].used, matches[1].used, axis, from_step, to_step, letter)
    points = _points_of_metrics(alignment, from_step, to_step)
    differences = _differences(points)
    pair = _Pair(matches, alignment, points, differences, _describe(points, differences))
    measure = _choose_measure(pair, tolerances or Tolerances(), seeds, basis, precisions)
    # Digits that only one of the logs has are no difference of the runs.
    points = {
        name: metric_points.as_printed(*pair.curves) for name, metric_points in points.items()
    }
    printed = replace(pair, points=points, differences=_differences(points))
    by_digits = {"text", "tensorboard"} & {curve.kind for curve in pair.curves}
    shown = printed if measure.tolerances.exact and by_digits else pair
    metrics = {name: _compare_metric(name, shown, printed, measure) for name in measure.points}
    verdict: comparison.Verdict = "match"
    if any(metric.departs for metric in metrics.values()):
        verdict = "differ"
    elif measure.changed == math.inf and not alignment.one_sided & set(METRICS):
        verdict = "identical"
    elif measure.band is not None or any(metric.scattered for metric in metrics.values()):
        verdict = "equivalent"
    return _record(pair, measure, verdict, metrics, _causes(printed, measure, verdict, metrics))


def _choose_measure(
    pair: _Pair,
    tolerances: Tolerances,
    seeds: Sequence[Curve],
    basis: comparison.BasisKind | None,
    precisions: tuple[str, str],
) -> _Measure:
    a, letter = pair.curves[0], pair.alignment.letter
    warnings = comparison.warnings_of(pair.alignment, pair.points)
    if tolerances.exact:
        warnings += comparison.precision_warnings(pair.curves, letter)
    settings = find_differences(*pair.curves, pair.alignment)
    if seeds:  # they allow for another seed
        settings = [setting for setting in settings if setting.kind != "seed"]
    chosen = comparison.Basis(
        kind="exact" if tolerances.exact else "seeds" if seeds else "tolerance"
    )
    if chosen.kind == "tolerance" and basis != "tolerance":
        requested = basis == "precision" or any(precisions)
        chosen = precision_basis(pair.curves, precisions, settings, requested, letter) or chosen
    names = METRICS if chosen.precisions is None else (*METRICS, "param_norm")
    points = {name: pair.points[name] for name in names if name in pair.points}
    limits = {name: PrecisionLimits(tolerances.of(name)) for name in points}
    if chosen.precisions is not None:
        limits = precision_limits(a, chosen.precisions, points, pair.differences, tolerances)
    steps = (_first_step(p.steps, ~bit_identical(p.a, p.b)) for p in points.values())
    changed = min((step for step in steps if step is not None), default=math.inf)
    band = None
    if seeds:
        shifted = [shift_steps(seed, pair.matches[0].shift) for seed in seeds]
        seed_band = SeedBand(a, shifted, pair.alignment.axis)
        band = seed_band.compare(points, letter)
        warnings += seed_band.warnings
    return _Measure(tolerances, chosen, points, limits, band, changed, settings, warnings)


def _causes(
    shown: _Pair,
    measure: _Measure,
    verdict: comparison.Verdict,
    metrics: Mapping[str, MetricComparison],
) -> tuple[Cause, ...]:
    differ, banded = verdict == "differ", measure.band is not None
    if not differ and (verdict != "equivalent" or banded):
        return ()
    onsets = [m.onset_step for m in metrics.values() if m.onset_step is not None]
    # Scatter of their own came before the departure: its causes are not those of the scatter.
    apart = differ and all(m.scattered for m in metrics.values() if m.departs)
    # The band allows for another precision, so that anything else is the cause.
    others = [setting for setting in measure.settings if setting.kind != measure.basis.kind]
    suspects = measure.settings if all(setting.weak for setting in others) else others
    return explain(
        *shown.curves,
        shown.points,
        shown.differences,
        suspects,
        min(onsets, default=None),
        exact=shown.alignment.method == "exact",
        shared=not banded and not apart,
        letter=shown.alignment.letter,
    )


def _record(
    pair: _Pair,
    measure: _Measure,
    verdict: comparison.Verdict,
    metrics: dict[str, MetricComparison],
    causes: tuple[Cause, ...],
) -> Comparison:
    a, b = pair.curves
    alignment, letter, basis = pair.alignment, pair.alignment.letter, measure.basis
    match = verdict != "differ"
    warnings = measure.warnings
    if match:
        warnings += [
            f"the curves match although {setting.text}"
            for setting in measure.settings
            if not setting.weak and setting.kind != basis.kind
        ]
    data = None
    if a.data is not None and b.data is not None:
        skips = (skip.text for skip in compare_skips(a, b, letter))
        unlike = (*a.data.differences(b.data), *skips)
        data = comparison.DataComparison(same=not unlike, differences=unlike)
    steps = pair.points["loss"].steps
    identical = steps[steps < measure.changed]
    only_in_a, only_in_b = alignment.only
    return Comparison(
        verdict=verdict,
        match=match,
        bit_identical_to_step=int(identical[-1]) if len(identical) else None,
        power={name: metric.power for name, metric in metrics.items()},
        reason=comparison.invented_steps((a, b), letter)
        + comparison.reason(
            verdict, metrics, basis, measure.band, () if match else causes, letter, steps
        ),
        causes=causes,
        diagnosis=None if match else comparison.Diagnosis.of(causes[0]),
        settings=tuple(setting.text for setting in measure.settings),
        data=data,
        tolerance=measure.tolerances,
        basis=basis,
        a=_side(pair.matches[0]),
        b=_side(pair.matches[1]),
        steps_compared=len(alignment.steps),
        first_step=int(alignment.steps[0]),
        last_step=int(alignment.steps[-1]),
        only_in_a=only_in_a,
        only_in_b=only_in_b,
        alignment=comparison.AlignmentRecord(
            axis=alignment.axis, method=alignment.method, points=len(alignment.steps)
        ),
        metrics=metrics,
        statistics=pair.statistics,
        band=measure.band,
        overlaps={"a": _overlap(a), "b": _overlap(b)},
        warnings=tuple(warnings),
    )


def _points_of_metrics(
    alignment: Alignment, from_step: int | None, to_step: int | None
) -> dict[str, Points]:
    """Return the points of each metric that both have.

    Raises:
        RunError: no common point has a loss.
    """
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
    return {name: metric_points for name, metric_points in points.items() if len(metric_points)}


def _differences(points: Mapping[str, Points]) -> dict[str, Floats]:
    return {name: signed_difference(p.a, p.b) for name, p in points.items()}


def _describe(
    points: Mapping[str, Points], differences: Mapping[str, Floats]
) -> dict[str, Statistics]:
    with ThreadPoolExecutor(max_workers=2) as pool:  # numpy releases the GIL
        shapes = [name not in RATES for name in points]
        described = pool.map(statistics, points.values(), differences.values(), shapes)
        return dict(zip(points, described, strict=True))


def _compare_metric(name: str, shown: _Pair, printed: _Pair, measure: _Measure) -> MetricComparison:
    """Apply the limits, or the band of seeds, to a metric.

    `shown` decides; `printed` has the digits of the coarser log.
    """
    points, limits, signed = measure.points[name], measure.limits[name], shown.differences[name]
    unequal = printed.differences[name] != 0
    if not unequal.any() and not measure.tolerances.exact:
        signed = printed.differences[name]
    steps, finite, described = points.steps, np.isfinite(signed), shown.statistics[name]
    bad_a, bad_b = ~np.isfinite(points.a), ~np.isfinite(points.b)
    exact, visible = measure.tolerances.exact, shown.points[name]
    differ = ~bit_identical(visible.a, visible.b) if exact else np.abs(signed) > limits.bias
    # Two NaNs have the same bits and yet do not match: neither run has a value there.
    beyond = ~finite | differ
    departure = _first_step(steps, beyond)
    size = float(np.abs(signed[np.argmax(beyond)]))
    result, correlation = _detect(name, signed, unequal, shown, measure)
    rule, onset = _decide(name, result, steps, finite, departure, measure)
    if not unequal.any():
        # At a chance of 1 in 200 a larger bias leaves all printed digits as they are.
        hidden = 10.6 * (described.max_rel_diff or 0.0) / len(steps)
        result = replace(result, power=max(result.power, hidden))
    lasting = result.lasting if rule is not None else None
    at_onset = math.nan if onset is None else float(abs(signed[np.searchsorted(steps, onset)]))
    same = bit_identical(points.a, points.b)
    return MetricComparison(
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
        power=result.power if measure.band is None else measure.band.metrics[name].power,
        onset_step=onset,
        onset_rel_diff=at_onset if math.isfinite(at_onset) else None,
        lasting_departure_step=None if lasting is None else int(steps[finite][lasting.first]),
        lasting_departure_last_step=None if lasting is None else int(steps[finite][lasting.last]),
        lasting_departure_points=None if lasting is None else lasting.last - lasting.first + 1,
        lasting_departure_rel_diff=None if lasting is None else lasting.size,
    )


def _decide(
    name: str,
    result: DivergenceResult,
    steps: Ints,
    finite: Flags,
    departure: int | None,
    measure: _Measure,
) -> tuple[comparison.RuleName | None, int | None]:
    """Return the rule by which a metric differs, and the step from which it does."""
    onset = None if result.onset is None else int(steps[finite][result.onset])
    if not finite.all():
        # They may diverge before that; but a single point beyond the tolerance may be noise.
        starts = (departure if measure.tolerances.exact else onset, _first_step(steps, ~finite))
        return "not_finite", min(step for step in starts if step is not None)
    if measure.tolerances.exact:
        return None if departure is None else "exact", departure
    if measure.band is None:
        return result.rule, onset
    band = measure.band.metrics[name]
    return (None, None) if band.within else ("band", band.first_outside_step)


def _detect(
    name: str, signed: Floats, unequal: Flags, shown: _Pair, measure: _Measure
) -> tuple[DivergenceResult, float | None]:
    """Detect a divergence at the finite points; also return the correlation of the noise.

    It begins at one of the `unequal` points.
    """
    points, limits, finite = measure.points[name], measure.limits[name], np.isfinite(signed)
    if not finite.any():
        return DivergenceResult(), None
    a, b, r, unequal = points.a[finite], points.b[finite], signed[finite], unequal[finite]
    rough = roughness(a, b) if shown.alignment.method == "interpolated" else 0.0
    rough += max(0.0, limits.scatter - limits.bias)
    correlation = shared_noise(a, b, r)
    shared = 1.0 if correlation is None else 0.0 if limits.unstable else correlation
    # After a change of precision there is noise.
    identical = 0 if limits.scatter else int(np.searchsorted(points.steps[finite], measure.changed))
    # A few that are identical are no noise, but too few to say that what follows is none.
    skipped = identical if identical < min(IDENTICAL, len(r)) else 0
    result = detect_divergence(r[skipped:], limits.bias, rough, identical - skipped, shared)
    if result.onset is None:
        return result, correlation
    begin = result.onset + skipped
    onset = begin + int(np.argmax(unequal[begin:]))
    if (lasting := result.lasting) is not None:
        first, last = max(lasting.first + skipped, onset), lasting.last + skipped
        lasting = Stretch(min(first, last), last, lasting.size)
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
