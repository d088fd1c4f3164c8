"""The reason of a verdict, and the warnings of a comparison, as text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from difflib import SequenceMatcher

import numpy as np

from slurmllm.analysis.compare.alignment import ALL_DIGITS, Alignment, Points
from slurmllm.analysis.compare.divergence import SHARED
from slurmllm.analysis.compare.recorded import describe_schedule_change, tokens_per_step
from slurmllm.analysis.compare.result import (
    Band,
    Basis,
    Cause,
    MetricComparison,
    Metrics,
    Verdict,
    format_figure,
)
from slurmllm.core.metrics.curves import Curve, Ints, describe_ranges


def invented_steps(curves: Sequence[Curve], letter: str) -> str:
    """Return the begin of a reason that says which curves have steps their logs do not show."""
    labels = [x for x, curve in zip(("A", letter), curves, strict=True) if curve.invented_steps]
    if not labels:
        return ""
    return f"if the step numbers of {' and '.join(labels)}, which no log shows, are right, "


def reason(
    verdict: Verdict,
    metrics: Metrics,
    basis: Basis,
    band: Band | None,
    causes: Sequence[Cause],
    letter: str,
    steps: Ints,
    digits: int,
) -> str:
    everywhere = f"all {len(steps)} steps compared" if len(steps) > 1 else "the one step compared"
    same = "bit-identical" if digits >= ALL_DIGITS else f"the same in the {digits} digits logged"
    names = " and ".join(metrics)
    if verdict == "identical":
        verb = "is" if len(metrics) == 1 else "are"
        return f"{names} {verb} {same} at {everywhere}"
    if verdict != "differ":
        if basis.kind == "exact":
            return f"{names} are the same at {everywhere}, as far as both logs show it"
        if not band:
            texts = [" and ".join(_describe_match(*item) for item in metrics.items())]
            if basis.precisions:
                texts[0] = f"as {' and '.join(basis.precisions)}, {texts[0]}"
        else:
            spreads = [
                f"{name} (spread {format_figure(metric.spread)} relative)"
                for name, metric in band.metrics.items()
            ]
            texts = [f"within the band of {len(band.seeds)} seeds: {' and '.join(spreads)}"]
        if verdict == "match":
            texts[0] += f" at {everywhere}"
        power = [f"{format_figure(metric.power)} in {name}" for name, metric in metrics.items()]
        texts.append(f"a lasting bias of {' or '.join(power)} would have been found")
    else:
        texts = [
            _describe_divergence(name, metric, basis, band, letter)
            for name, metric in metrics.items()
            if metric.departs
        ]
    texts += _describe_beginning(metrics, steps, same)
    for confidence, title in (("certain", "cause (certain)"), ("likely", "likely cause")):
        evidence = [
            cause.evidence
            for cause in causes
            # The metrics' texts have what is not finite.
            if cause.confidence == confidence and cause.kind != "not_finite"
        ]
        if evidence:
            texts.append(f"{title}: {' and '.join(evidence)}")
    return "; ".join(texts)


def _describe_match(name: str, metric: MetricComparison) -> str:
    tolerance = format_figure(metric.tolerance)
    maximum = format_figure(metric.max_rel_diff or 0.0)
    if metric.scattered:
        shared = metric.scatter.correlation
        mean = format_figure(metric.bias)
        systematic = f"with no systematic difference above {tolerance} (mean {mean})"
        if abs(metric.bias) > metric.tolerance:
            systematic = f"with a mean difference of {mean}, which its scatter can explain,"
        independent = "independent " if shared is not None and shared < SHARED else ""
        return (
            f"{name} {systematic} but {independent}scatter of "
            f"{format_figure(metric.noise or 0.0)}"
            + ("" if shared is None else f" (correlation of the curves' noise {shared:.2f})")
        )
    if metric.first_visible_step is None and (metric.max_rel_diff or 0.0) > metric.tolerance:
        return f"{name} the same as printed ({maximum} at most)"
    if not metric.departures:
        return f"{name} within {tolerance} ({maximum} at most)"
    return (
        f"{name} within {tolerance} but for {metric.departures} single points that are noise "
        f"(up to {maximum})"
    )


def _describe_divergence(
    name: str, metric: MetricComparison, basis: Basis, band: Band | None, letter: str
) -> str:
    if band and metric.rule == "band":
        of_band = band.metrics[name]
        values = f"means over {of_band.width} points" if of_band.width > 1 else "single points"
        return (
            f"{name} leaves the band of {len(band.seeds)} seeds at step "
            f"{of_band.first_outside_step}: {values} are up to {of_band.excess:.3g} times as far "
            "off as the seeds' spread allows"
        )
    steps = {"A": metric.first_non_finite_step_a, letter: metric.first_non_finite_step_b}
    sides = [f"in {side} at step {step}" for side, step in steps.items() if step is not None]
    not_finite = f"is not a finite number {' and '.join(sides)}"
    if metric.onset_rel_diff is None:
        return f"{name} {not_finite}"
    sizes = f"{format_figure(metric.onset_rel_diff)} relative"
    if metric.lasting_departure_rel_diff and metric.onset_rel_diff <= metric.tolerance:
        last = metric.lasting_departure_last_step
        sizes += (
            f", {format_figure(metric.lasting_departure_rel_diff)} in the median to step {last}"
        )
    rule = f"tolerance {format_figure(metric.tolerance)}"
    if basis.kind == "exact":
        rule = "bit-identical values required"
    sentence = f"{name} diverges at step {metric.onset_step}: {sizes}, {rule}"
    if metric.rule == "noise":
        sentence += ", and scatters from point to point"
    return f"{sentence}, and {not_finite}" if sides else sentence


def _describe_beginning(metrics: Metrics, steps: Ints, equal: str) -> list[str]:
    """Describe up to which step the curves are the same, if they are not all along."""

    def earliest(field: str) -> float:
        values = (getattr(metric, field) for metric in metrics.values())
        return min((step for step in values if step is not None), default=math.inf)

    first = earliest("first_difference_step")
    visible = earliest("first_visible_step")
    onset = earliest("onset_step")
    if len(same := steps[steps < first]):
        return [f"{equal} up to step {same[-1]}"]
    if first >= onset or onset == math.inf:
        return []
    if visible <= onset and len(same := steps[steps < visible]):
        return [f"the same as printed up to step {same[-1]}"]
    return [f"the first difference is at step {first:.0f}"]


def warnings_of(alignment: Alignment, points: Mapping[str, Points], exact: bool) -> Iterator[str]:
    a, b = alignment.curves
    for label, curve, only in zip(("A", alignment.letter), (a, b), alignment.only, strict=True):
        who = f"{label} ({curve.name})"
        for warning in curve.warnings:
            yield f"{who}: {warning}"
        if exact and curve.kind in ("tensorboard", "text"):
            source = "TensorBoard, which stores float32 (6e-8 relative)"
            if curve.kind == "text":
                source = "text, whose numbers are rounded"
            yield (
                f"{who} is read from {source}: --exact compares no more digits; for all of them "
                "give a run with its metrics/attempt_NNN.jsonl"
            )
        if curve.gaps:
            yield f"{who} lacks steps {describe_ranges(curve.gaps)}"
        for new in curve.schedules:
            changed = describe_schedule_change(curve, *new.attempts)
            yield (
                f"{who}: steps from {new.step} were computed again with another learning rate "
                f"({new.values[0]:.6g} → {new.values[1]:.6g}); the schedule was changed "
                + (changed or f"at the resume of attempt {new.attempts[1]} or before")
                + " (certain), so they differ from the first ones, whether the resume was exact or "
                "not"
            )
        if curve.overlap_identical is False:
            extent = curve.overlap_max_rel_diff
            by = f" by up to {format_figure(extent)} relative" if extent else ""
            yield (
                f"{who}: {curve.overlap_rows} rows recomputed after a restart differ{by} from the "
                "first ones; its resume was not bit-exact"
            )
        if only:
            yield f"only {who} has steps {describe_ranges(only)}; they are not compared"
    yield from _axis_warnings(alignment)
    same_file = a.path.absolute() == b.path.absolute()
    if same_file and np.array_equal(a.columns["loss"], b.columns["loss"], equal_nan=True):
        yield f"A and {alignment.letter} are the same: {a.path}"
    num_steps = len(alignment.steps)
    for name in ("loss", "grad_norm"):
        lacking = num_steps - len(points.get(name, ()))
        if lacking:
            yield f"{name} is missing at {lacking} of {num_steps} common steps"


def _axis_warnings(alignment: Alignment) -> Iterator[str]:
    """Yield what makes the numbers of two logs' steps different things."""
    num_steps = len(alignment.steps)
    a, b = alignment.curves
    if alignment.method == "interpolated":
        yield (
            f"few points are common: the denser curve is interpolated at the {num_steps} points of "
            "the other, and its values between points are estimates"
        )
    of_a = tokens_per_step(a)
    of_b = tokens_per_step(b)
    if alignment.axis == "step" and None not in (of_a, of_b) and of_a != of_b:
        yield (
            f"a step of A is {of_a:,.0f} tokens and one of {alignment.letter} {of_b:,.0f}; "
            "`slurmllm compare --by tokens` compares them at the same numbers of tokens"
        )
    unit, other_unit = (c.convention.counts if c.convention else "steps" for c in (a, b))
    if alignment.axis == "step" and unit != other_unit:
        yield (
            f"A counts {unit}, {alignment.letter} counts {other_unit}: compare them by what "
            "both log (--by samples, --by tokens), or shift one by --shift A=…"
        )


def command_differences(a: Curve, b: Curve) -> list[str]:
    """Return in which arguments the commands of two other projects' trainers differ."""
    words_a, words_b = (str(curve.settings.get("command.run") or "").split() for curve in (a, b))
    if not words_a or not words_b or words_a == words_b:
        return []
    changes = SequenceMatcher(None, words_a, words_b, autojunk=False).get_opcodes()
    differences = []
    for kind, start_a, end_a, start_b, end_b in changes:
        if kind != "equal":  # with the argument before, which may be an option
            of_a = " ".join(words_a[max(start_a - 1, 0) : end_a])
            of_b = " ".join(words_b[max(start_b - 1, 0) : end_b])
            differences.append(f"{of_a} and {of_b}")
    return [f"the commands differ: {'; '.join(differences)}"]
