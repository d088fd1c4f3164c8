"""Texts of a comparison: the reason of the verdict, and warnings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from slurmllm.compare.alignment import Alignment
from slurmllm.compare.causes import Cause, tokens_per_step
from slurmllm.compare.comparison import Band, Diagnosis, MetricComparison, Tolerances
from slurmllm.metrics.curves import Curve, Range, describe_ranges

# Diagnoses by the curves only that are part of the reason
_REASONS = ("gradient", "batches", "seed", "rounding", "optimizer", "lr")


def reason(
    metrics: Mapping[str, MetricComparison],
    tolerances: Tolerances,
    band: Band | None,
    likely: Sequence[Cause],
    diagnosis: Diagnosis | None,
    letter: str,
) -> str:
    """Returns why A and another curve match or differ, in one line."""
    departed = {name: metric for name, metric in metrics.items() if metric.departs}
    if not departed:
        return _describe_match(metrics) if band is None else _describe_inside(band)
    texts = [
        _describe_outside(name, band) if band is not None and metric.rule == "band"
        else _describe_divergence(name, metric, tolerances, letter)
        for name, metric in departed.items()
    ]  # fmt: skip
    if likely:
        texts.append(f"likely cause: {' and '.join(cause.text for cause in likely)}")
    elif diagnosis is not None and diagnosis.kind in _REASONS:
        texts.append(f"likely cause: {diagnosis.text}")
    return "; ".join(texts)


def _describe_match(metrics: Mapping[str, MetricComparison]) -> str:
    count = max(metric.steps_compared for metric in metrics.values())
    steps = "the one step compared" if count == 1 else f"all {count} steps compared"
    if all(metric.bit_identical for metric in metrics.values()):
        verb = "is" if len(metrics) == 1 else "are"
        return f"{' and '.join(metrics)} {verb} bit-identical at {steps}"
    within = [
        f"{name} within {format_figure(metric.tolerance)} "
        f"({format_figure(metric.max_rel_diff or 0.0)} at most)"
        for name, metric in metrics.items()
    ]
    text = f"{' and '.join(within)} relative at {steps}"
    single = [
        f"{metric.departures} of {name}" for name, metric in metrics.items() if metric.departures
    ]
    return f"{text}, but for single points that are noise ({', '.join(single)})" if single else text


def _describe_inside(band: Band) -> str:
    spreads = [
        f"{name} (spread {format_figure(metric.spread)} relative)"
        for name, metric in band.metrics.items()
    ]
    return f"within the band of {len(band.seeds)} seeds: {' and '.join(spreads)}"


def _describe_outside(name: str, band: Band) -> str:
    metric = band.metrics[name]
    what = "single points are" if metric.width == 1 else f"means over {metric.width} points are"
    return (
        f"{name} leaves the band of {len(band.seeds)} seeds at step {metric.first_outside_step}: "
        f"{what} up to {metric.excess:.3g} times as far off as the seeds' spread allows"
    )


def _describe_divergence(
    name: str, metric: MetricComparison, tolerances: Tolerances, letter: str
) -> str:
    sides = [
        f"in {side} at step {step}"
        for side, step in (
            ("A", metric.first_non_finite_step_a),
            (letter, metric.first_non_finite_step_b),
        )
        if step is not None
    ]
    not_finite = f"is not a finite number {' and '.join(sides)}"
    if metric.first_departure_rel_diff is None:
        return f"{name} {not_finite}"
    rule = (
        "bit-identical asked for"
        if tolerances.exact
        else f"tolerance {format_figure(metric.tolerance)}"
    )
    step, size = metric.first_departure_step, metric.first_departure_rel_diff
    if metric.lasting_departure_rel_diff and metric.onset_step != step:
        # Under noise a single point beyond the tolerance may come long before the divergence.
        step, size = metric.onset_step, metric.lasting_departure_rel_diff
    text = f"{name} diverges at step {step}: {format_figure(size)} relative, {rule}"
    if metric.rule == "noise":
        text += ", and scatters from point to point"
    return f"{text}, and {not_finite}" if sides else text


def warnings_of(label: str, curve: Curve, only: tuple[Range, ...]) -> list[str]:
    """Returns warnings about one of the curves; `only`: steps that the other curve lacks."""
    who = f"{label} ({curve.name})"
    found = [f"{who}: {warning}" for warning in curve.warnings]
    if curve.gaps:
        found.append(f"{who} lacks steps {describe_ranges(curve.gaps)}")
    if curve.overlap_identical is False:
        extent = curve.overlap_max_rel_diff
        by = f" by up to {format_figure(extent)} relative" if extent else ""
        found.append(
            f"{who}: {curve.overlap_rows} rows recomputed after a restart differ{by} from the "
            "first ones; its resume was not bit-exact"
        )
    if only:
        found.append(f"only {who} has steps {describe_ranges(only)}; they are not compared")
    return found


def warnings_of_both(
    a: Curve,
    b: Curve,
    wanted: Sequence[str],
    metrics: Mapping[str, MetricComparison],
    alignment: Alignment,
) -> list[str]:
    """Returns warnings about both curves."""
    found = []
    num_steps = len(alignment.steps)
    if alignment.method == "interpolated":
        found.append(
            f"few points are common: the denser curve is interpolated at the {num_steps} points of "
            "the other, and the values between its points are not its own"
        )
    if alignment.axis == "step" and (hint := batch_hint(a, b, alignment.letter)):
        found.append(hint)
    if a.path.absolute() == b.path.absolute():
        found.append(f"A and {alignment.letter} are the same: {a.path}")
    for name in wanted:
        lacking = num_steps - (metrics[name].steps_compared if name in metrics else 0)
        if lacking:
            found.append(f"{name} is missing at {lacking} of {num_steps} common steps")
    return found


def batch_hint(a: Curve, b: Curve, letter: str) -> str | None:
    """Returns a hint if a step of the two has different numbers of tokens."""
    each = [tokens_per_step(curve) for curve in (a, b)]
    if None in each or each[0] == each[1]:
        return None
    return (
        f"a step of A is {each[0]:,.0f} tokens and one of {letter} {each[1]:,.0f}; "
        "`slurmllm compare --by tokens` compares them at the same numbers of tokens"
    )


def format_figure(value: float) -> str:
    """Format a small number with up to three digits: 0, 1e-3, 1.25e-2."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
