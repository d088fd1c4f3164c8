"""The comparison of two curves: their alignment, the verdict, and the causes of a difference."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from slurmllm.analysis.compare import result, sentences
from slurmllm.analysis.compare.alignment import (
    ALL_DIGITS,
    Alignment,
    Points,
    StepMatch,
    match_steps,
    no_common_step,
    printed_digits,
)
from slurmllm.analysis.compare.bands import (
    SPACINGS,
    PrecisionLimits,
    SeedBand,
    precision_basis,
    precision_limits,
)
from slurmllm.analysis.compare.causes import explain
from slurmllm.analysis.compare.columns import EARLY_POINTS, SMALL
from slurmllm.analysis.compare.divergence import (
    IDENTICAL,
    DivergenceResult,
    Stretch,
    detect_divergence,
    roughness,
    shared_noise,
)
from slurmllm.analysis.compare.recorded import SettingDifference, compare_skips, find_differences
from slurmllm.analysis.compare.result import (
    Cause,
    Comparison,
    MetricComparison,
    Metrics,
    Statistics,
    Tolerances,
    statistics,
)
from slurmllm.core.errors import RunError
from slurmllm.core.format import Json, Texts
from slurmllm.core.metrics.curves import (
    Axis,
    Curve,
    Flags,
    Floats,
    Ints,
    argmax,
    median,
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

    def digits(self, alignment: Alignment) -> int:
        """Return how many digits the log of fewer digits prints of this metric."""
        a, b = alignment.curves
        return min(printed_digits(a, self.points.a), printed_digits(b, self.points.b))


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
    ignored: Collection[str] = (),
) -> Comparison:
    """Compare two curves at their common points.

    Args:
        a: The reference.
        from_step, to_step: Steps to compare, both included. By tokens or samples: of A's.
        seeds: More runs of A's training with other seeds: their spread is the tolerance then.
        shifts: What to add to the steps of A and B; None: by their formats and values.
        basis: None: `precision` if the runs are recorded and nothing else can be the difference.
        precisions: Of A and B; empty: as recorded.
        ignored: Kinds of recorded settings that may differ.

    Raises:
        RunError: no point in common, no loss, or the positions on the axis are unknown.
        UserError: a precision that the basis needs is unknown.
    """
    tolerances = tolerances or Tolerances()
    _require_loss(a, b)
    matches = match_steps(a, b, shifts, by_step=axis == "step")
    a = matches[0].used
    b = matches[1].used
    alignment = Alignment(a, b, axis, from_step, to_step, letter)
    if not len(alignment.steps):
        raise RunError(no_common_step(a, b, from_step, to_step))
    metrics = _common_metrics(alignment)
    points = {name: metric.points for name, metric in metrics.items()}
    warnings = [*sentences.warnings_of(alignment, points, tolerances.exact)]
    settings = [s for s in find_differences(a, b, alignment) if s.kind not in ignored]
    measure = result.Basis(kind="exact" if tolerances.exact else "tolerance")
    if seeds and not tolerances.exact:  # they allow for another seed
        measure = result.Basis(kind="seeds")
        settings = [setting for setting in settings if setting.kind != "seed"]
    elif not tolerances.exact and basis != "tolerance":
        requested = basis == "precision" or any(precisions)
        measure = precision_basis(alignment.curves, precisions, settings, requested, letter)
    limits = _limits(a, metrics, measure, tolerances)
    band: result.Band | None = None
    if seeds:
        seed_band = SeedBand(a, seeds, matches[0].shift, axis)
        band = seed_band.compare({name: points[name] for name in limits}, letter)
        warnings += seed_band.warnings
    rules = _Rules(tolerances, measure, settings, limits, band)
    return _conclude(matches, alignment, metrics, rules, warnings)


def _require_loss(*curves: Curve) -> None:
    for curve in curves:
        if "loss" not in curve.columns:
            tags = list_tags(curve.tags or curve.columns)
            raise RunError(
                f"no loss in {curve.path}: there are {tags}; name it with --tag loss=TAG"
            )


@dataclass(frozen=True)
class _Rules:
    """What the metrics are measured by, and the settings in which the runs differ."""

    tolerances: Tolerances
    basis: result.Basis
    settings: Sequence[SettingDifference]
    limits: Mapping[str, PrecisionLimits]  # of the metrics that decide the verdict
    band: result.Band | None  # of the seeds


def _limits(
    a: Curve, metrics: Mapping[str, _Metric], basis: result.Basis, tolerances: Tolerances
) -> dict[str, PrecisionLimits]:
    deciding = METRICS if basis.precisions is None else (*METRICS, "param_norm")
    by_name = {
        name: (metrics[name].points, metrics[name].signed) for name in deciding if name in metrics
    }
    if basis.precisions:
        return precision_limits(a, basis.precisions, by_name, tolerances)
    return {name: PrecisionLimits(tolerances.limit(name)) for name in by_name}


def _conclude(
    matches: tuple[StepMatch, StepMatch],
    alignment: Alignment,
    metrics: Mapping[str, _Metric],
    rules: _Rules,
    warnings: list[str],
) -> Comparison:
    """Compare the metrics; return verdict and causes. `warnings` are those of the steps before."""
    (a, b), band = alignment.curves, rules.band
    deciding = [metrics[name] for name in rules.limits]
    # The first step at which a metric is not bit-identical
    changes = np.concatenate([m.points.steps[~m.points.same][:1] for m in deciding])
    changed = min(changes.tolist(), default=math.inf)
    described = {
        name: statistics(metric.points, metric.signed, name not in RATES)
        for name, metric in metrics.items()
    }
    results = {
        name: _compare_metric(name, metrics[name], described[name], alignment, changed, rules)
        for name in rules.limits
    }
    verdict = _verdict(results, changed == math.inf and not alignment.one_sided & set(METRICS))
    if verdict == "match" and band:
        verdict = "equivalent"
    match = verdict != "differ"
    causes: tuple[Cause, ...] = ()
    if not match or (verdict == "equivalent" and not band):
        printed = {name: metric.printed for name, metric in metrics.items()}
        causes = explain(alignment, printed, rules.settings, results, rules.basis.kind)
    commands = sentences.command_differences(a, b)
    contrary = _contrary_settings(rules) if match else ()
    unexpected = (f"the curves match although {text}" for text in contrary)
    steps = metrics["loss"].points.steps
    identical = steps[steps < changed].tolist()
    digits, evident = min(m.digits(alignment) for m in deciding), () if match else causes
    reason = sentences.reason(
        verdict, results, rules.basis, band, evident, alignment.letter, steps, digits
    )
    return Comparison.model_validate(
        result.compared_steps(matches, alignment)
        | {
            "verdict": verdict,
            "match": match,
            "power": {name: metric.power for name, metric in results.items()},
            "causes": causes,
            "diagnosis": None if match else result.Diagnosis.from_cause(causes[0]),
            "data": _compare_data(a, b, alignment.letter),
            "tolerance": rules.tolerances,
            "basis": rules.basis,
            "metrics": results,
            "band": band,
            "bit_identical_to_step": identical[-1] if identical else None,
            "reason": sentences.invented_steps(alignment.curves, alignment.letter) + reason,
            "settings": (*commands, *(setting.text for setting in rules.settings)),
            "contrary_settings": contrary,
            "advice": _advice(alignment, metrics, rules, causes, results),
            "statistics": described,
            "warnings": (*commands, *warnings, *unexpected),
        }
    )


def _contrary_settings(rules: _Rules) -> Texts:
    """Return the settings that differ although the curves match."""
    return tuple(
        setting.text
        for setting in rules.settings
        if not (setting.weak or setting.uncertain) and setting.kind != rules.basis.kind
    )


def _advice(
    alignment: Alignment,
    metrics: Mapping[str, _Metric],
    rules: _Rules,
    causes: Sequence[Cause],
    results: Metrics,
) -> Texts:
    """Return options that judge a difference of seeds, or one as small as bf16's roundings.

    Not of curves that were bit-identical at first: they have no such noise.
    """
    if rules.basis.kind != "tolerance" or not causes:
        return ()
    differs = any(metric.departs for metric in results.values())
    if causes[0].kind == "seed" and not (differs and causes[0].confidence == "possible"):
        return ("--seed RUN",)
    a, b = alignment.curves
    names = [str(c.settings.get("train.precision") or "bf16_mixed") for c in (a, b)]
    rounds = differs and set(names) <= SPACINGS.keys() and set(names) != {"fp32"}
    unrelated = [c for c in causes if c.kind not in ("precision", "rounding", "mesh")]
    if not rounds or any(cause.confidence != "possible" for cause in unrelated):
        return ()
    for name in METRICS:
        if name not in metrics or not len(a.series("lr")[0]):
            return ()
        metric = metrics[name]
        begin = argmax(~metric.points.same)
        size = abs(metric.signed[begin:][:EARLY_POINTS])
        if not median(size) <= SMALL[name]:
            return ()
        if begin >= IDENTICAL and metric.digits(alignment) >= ALL_DIGITS:
            return ()
    return (f"--precision {','.join(names)}",)


def _verdict(results: Metrics, identical: bool) -> result.Verdict:
    if any(metric.departs for metric in results.values()):
        return "differ"
    if identical:
        return "identical"
    scattered = any(metric.scattered for metric in results.values())
    return "equivalent" if scattered else "match"


def _common_metrics(alignment: Alignment) -> dict[str, _Metric]:
    """Return the metrics that both curves have at common points; raises RunError without loss."""
    a, b = alignment.curves
    metrics = {}
    # The losses on further texts are those of one name.
    for name in dict.fromkeys((*METRICS, *OTHERS, *a.validation)):
        points = alignment.points_of(name)
        if len(points):
            printed = points.as_printed(a, b)
            metrics[name] = _Metric(
                points,
                signed_difference(points.a, points.b),
                printed,
                signed_difference(printed.a, printed.b),
            )
    if "loss" not in metrics:
        raise RunError(
            f"{a.name} and {b.name} have a loss at different steps only; log it at the same steps"
        )
    return metrics


def _compare_data(a: Curve, b: Curve, letter: str) -> result.DataComparison | None:
    if not (a.data and b.data):
        return None
    differences = a.data.differences(b.data)
    if skips := compare_skips(a, b, letter):
        differences += (skips.text,)
    return result.DataComparison(same=not differences, differences=differences)


def _comparable(metric: _Metric, alignment: Alignment, exact: bool) -> tuple[Points, Floats]:
    """Return the points and differences that the tolerance applies to."""
    if exact and {"text", "tensorboard"} & {curve.kind for curve in alignment.curves}:
        return metric.printed, metric.visible
    if not (exact or metric.visible.any()):
        return metric.points, metric.visible
    return metric.points, metric.signed


def _departure_rule(
    steps: Ints,
    detected: DivergenceResult,
    finite: Flags,
    departure: int | None,
    exact: bool,
    band: result.BandOfMetric | None,
) -> tuple[result.RuleName | None, int | None]:
    """Return the rule by which a metric departs, and the step of its onset."""
    onset = None if detected.onset is None else int(steps[finite][detected.onset])
    if not finite.all():
        # They may diverge before that; but a single point beyond the tolerance may be noise.
        starts = (departure if exact else onset, _first_step(steps, ~finite))
        return "not_finite", min(step for step in starts if step is not None)
    if exact:
        return None if departure is None else "exact", departure
    if band:
        return (None, None) if band.within else ("band", band.first_outside_step)
    return detected.rule, onset


def _lasting_fields(lasting: Stretch | None, steps: Ints) -> Json:
    if not lasting:
        return {}
    return {
        "lasting_departure_step": steps[lasting.first],
        "lasting_departure_last_step": steps[lasting.last],
        "lasting_departure_points": lasting.last - lasting.first + 1,
        "lasting_departure_rel_diff": lasting.size,
    }


def _compare_metric(
    name: str,
    metric: _Metric,
    described: Statistics,
    alignment: Alignment,
    changed: float,
    rules: _Rules,
) -> MetricComparison:
    """Apply the limits, or the band of seeds, to a metric. `changed`: first step of other bits"""
    limits, exact = rules.limits[name], rules.tolerances.exact
    band = rules.band.metrics[name] if rules.band else None
    points, r = _comparable(metric, alignment, exact)
    steps, finite, unequal = points.steps, np.isfinite(r), metric.visible != 0
    detected, correlation = DivergenceResult(), None
    if finite.any():
        detected, correlation = _detect(metric, r, limits, alignment.method, changed)
    bad_a, bad_b = ~np.isfinite(metric.points.a), ~np.isfinite(metric.points.b)
    # Two NaNs have the same bits and yet do not match: neither run has a value there.
    beyond = ~finite | (~points.same if exact else abs(r) > limits.bias)
    departure = _first_step(steps, beyond)
    size = abs(r[beyond.argmax()])
    rule, onset = _departure_rule(steps, detected, finite, departure, exact, band)
    at_onset = math.nan if onset is None else abs(r[steps.searchsorted(onset)])
    power = max(detected.power, 0.0 if rule else abs(detected.mean))  # that mean was not found
    if not unequal.any():
        # At a chance of 1 in 200 a larger bias leaves all printed digits as they are.
        power = max(power, 10.6 * (described.max_rel_diff or 0.0) / len(steps))
    return MetricComparison.model_validate(
        {
            **described.model_dump(include={"max_rel_diff", "max_rel_diff_step", "mean_rel_diff"}),
            **_lasting_fields(detected.lasting if rule else None, steps[finite]),
            "tolerance": limits.bias,
            "steps_compared": len(steps),
            "first_difference_step": _first_step(steps, ~metric.points.same),
            "first_visible_step": _first_step(steps, unequal),
            "first_departure_step": departure,
            "first_departure_rel_diff": size if beyond.any() and math.isfinite(size) else None,
            "departures": np.count_nonzero(beyond),
            "bit_identical": metric.points.same.all(),
            "non_finite_a": np.count_nonzero(bad_a),
            "non_finite_b": np.count_nonzero(bad_b),
            "first_non_finite_step_a": _first_step(steps, bad_a),
            "first_non_finite_step_b": _first_step(steps, bad_b),
            "departs": rule is not None,
            "rule": rule,
            "noise": detected.noise,
            "bias": detected.mean,
            "scattered": rule in (None, detected.rule)
            and (detected.scattered or (limits.unstable and not rule)),
            "scatter": result.Scattering(
                size=detected.noise,
                correlation=correlation,
                allowed=max(limits.bias, limits.scatter),
            ),
            "power": band.power if band else power,
            "onset_step": onset,
            "onset_rel_diff": at_onset if math.isfinite(at_onset) else None,
        }
    )


def _detect(
    metric: _Metric, r: Floats, limits: PrecisionLimits, method: str, changed: float
) -> tuple[DivergenceResult, float | None]:
    """Detect a divergence at a visible difference; also return the noise's correlation."""
    finite = np.isfinite(r)
    a = metric.points.a[finite]
    b = metric.points.b[finite]
    r = r[finite]
    rough = roughness(a, b) if method == "interpolated" else 0.0
    rough += max(0.0, limits.scatter - limits.bias)
    correlation = shared_noise(a, b, r)
    shared = 1.0 if correlation is None else correlation
    if limits.unstable:
        shared = 0.0
    identical = 0
    if not limits.scatter:  # after a change of precision there is noise
        identical = int(metric.points.steps[finite].searchsorted(changed))
    # A few that are identical are no noise, but too few to say that what follows is none.
    skipped = identical if identical < min(IDENTICAL, len(r)) else 0
    detected = detect_divergence(r[skipped:], limits.bias, rough, identical - skipped, shared)
    if detected.onset is None:
        return detected, correlation
    begin = detected.onset + skipped
    onset = begin + argmax(metric.visible[finite][begin:] != 0)
    lasting = detected.lasting
    if lasting:
        last = lasting.last + skipped
        lasting = replace(lasting, first=min(onset, last), last=last)
    return replace(detected, onset=onset, lasting=lasting), correlation


def _first_step(steps: Ints, flags: Flags) -> int | None:
    return int(steps[flags.argmax()]) if flags.any() else None
