"""What a comparison says in words: the reason of the verdict, likely causes, warnings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from slurmllm.analysis.comparing.comparison import MetricComparison, Tolerances
from slurmllm.analysis.curves import (
    Curve,
    Floats,
    Ints,
    Range,
    align,
    bit_identical,
    describe_ranges,
    relative_difference,
)

# Backends may work a schedule out in single precision: two equal schedules then differ by 1e-7.
_LR_TOLERANCE = 1e-6

Cause = tuple[int, str]  # the first step at which a setting differs, and what differs


def reason(
    metrics: Mapping[str, MetricComparison], tolerances: Tolerances, causes: Sequence[Cause]
) -> str:
    """Why two curves match or differ, in one line."""
    parted = [s for m in metrics.values() if (s := m.first_departure_step) is not None]
    if not parted:
        return _agreement(metrics)
    parts = [
        _departure(name, metric, tolerances)
        for name, metric in metrics.items()
        if metric.first_departure_step is not None
    ]
    likely = [cause for step, cause in causes if step <= min(parted)]
    if likely:
        parts.append(f"likely cause: {' and '.join(likely)}")
    return "; ".join(parts)


def _agreement(metrics: Mapping[str, MetricComparison]) -> str:
    count = max(metric.steps_compared for metric in metrics.values())
    steps = "the one step compared" if count == 1 else f"all {count} steps compared"
    if all(metric.bit_identical for metric in metrics.values()):
        verb = "is" if len(metrics) == 1 else "are"
        return f"{' and '.join(metrics)} {verb} bit-identical at {steps}"
    within = [
        f"{name} within {figure(metric.tolerance)} ({figure(metric.max_rel_diff or 0.0)} at most)"
        for name, metric in metrics.items()
    ]
    return f"{' and '.join(within)} relative at {steps}"


def _departure(name: str, metric: MetricComparison, tolerances: Tolerances) -> str:
    sides = [
        f"in {side} at step {step}"
        for side, step in (
            ("A", metric.first_non_finite_step_a),
            ("B", metric.first_non_finite_step_b),
        )
        if step is not None
    ]
    not_finite = f"is not a finite number {' and '.join(sides)}"
    if metric.first_departure_rel_diff is None:
        return f"{name} {not_finite}"
    rule = (
        "bit-identical asked for" if tolerances.exact else f"tolerance {figure(metric.tolerance)}"
    )
    text = (
        f"{name} parts at step {metric.first_departure_step}: "
        f"{figure(metric.first_departure_rel_diff)} relative, {rule}"
    )
    return f"{text}, and {not_finite}" if sides else text


def causes(a: Curve, b: Curve, first: int, last: int) -> list[Cause]:
    """Settings that differ from step `first` to step `last`, the earliest first."""
    found = []
    if a.data is not None and b.data is not None:
        differences = a.data.differences(b.data)
        if differences:
            found.append((first, f"they did not see the same data: {', '.join(differences)}"))
    found += [cause for cause in skipped(a, b) if cause[0] <= last]
    steps, lr_a, lr_b = align(a, b, "lr", first, last)
    same = bit_identical(lr_a, lr_b) | (relative_difference(lr_a, lr_b) <= _LR_TOLERANCE)
    if not same.all():
        i = int(np.argmin(same))
        values = f"{lr_a[i]:.6g} and {lr_b[i]:.6g}"
        found.append((int(steps[i]), f"learning rates differ from step {steps[i]} ({values})"))
    steps, tokens_a, tokens_b = align(a, b, "tokens", first, last)
    same = bit_identical(tokens_a, tokens_b)
    if not same.all():
        i = int(np.argmin(same))
        per_step_a, per_step_b = _per_step(steps, tokens_a), _per_step(steps, tokens_b)
        if per_step_a != per_step_b:
            what = f"tokens per step differ ({per_step_a:,.0f} and {per_step_b:,.0f})"
        else:
            values = f"{tokens_a[i]:,.0f} and {tokens_b[i]:,.0f}"
            what = f"tokens trained on differ from step {steps[i]} ({values})"
        found.append((int(steps[i]), what))
    return sorted(found)


def skipped(a: Curve, b: Curve) -> list[Cause]:
    """Batches that one of the two has passed over and the other has not."""
    windows = [tuple((skip.first, skip.last) for skip in curve.skips) for curve in (a, b)]
    if windows[0] == windows[1]:
        return []
    parts = [
        f"{label} skipped batches {describe_ranges(ranges)}"
        for label, ranges in zip("AB", windows, strict=True)
        if ranges
    ]
    first = min(1 + (skip.roll_back_to or 0) for skip in (*a.skips, *b.skips))
    return [(first, " and ".join(parts))]


def _per_step(steps: Ints, tokens: Floats) -> float:
    """Median tokens a step; of a single step, all tokens so far."""
    if len(steps) < 2:
        return float(tokens[0])
    return float(np.median(np.diff(tokens) / np.diff(steps)))


def warnings_of(label: str, curve: Curve, only: tuple[Range, ...]) -> list[str]:
    """What a reader of the comparison should know about one of the curves.

    Args:
        label: "A" or "B".
        curve: The curve.
        only: Steps that the other curve lacks.
    """
    who = f"{label} ({curve.name})"
    found = [f"{who}: {warning}" for warning in curve.warnings]
    if curve.gaps:
        found.append(f"{who} lacks steps {describe_ranges(curve.gaps)}")
    if curve.overlap_identical is False:
        extent = curve.overlap_max_rel_diff
        by = f" by up to {figure(extent)} relative" if extent else ""
        found.append(
            f"{who}: {curve.overlap_rows} rows made again after a restart differ{by} from the "
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
    num_steps: int,
) -> list[str]:
    """What a reader should know about the two together."""
    found = []
    if a.path.absolute() == b.path.absolute():
        found.append(f"A and B are the same: {a.path}")
    for name in wanted:
        lacking = num_steps - (metrics[name].steps_compared if name in metrics else 0)
        if lacking:
            found.append(f"{name} is not there at {lacking} of {num_steps} common steps")
    return found


def figure(value: float) -> str:
    """A small number with up to three digits: 0, 1e-3, 1.25e-2."""
    if value == 0:
        return "0"
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
