"""The causes of a difference between two curves: a ranked list, each with its evidence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from slurmllm.analysis.compare.alignment import Alignment, Points, counted_apart
from slurmllm.analysis.compare.columns import (
    EARLY_POINTS,
    ROUNDED,
    SLACK_POINTS,
    SMALL,
    TINY,
    Observation,
    clue_table,
    describe_steps,
)
from slurmllm.analysis.compare.recorded import SettingDifference
from slurmllm.analysis.compare.result import (
    BasisKind,
    Cause,
    Confidence,
    Kind,
    Metrics,
)
from slurmllm.core.format import format_names
from slurmllm.core.metrics.curves import Curve

_LIKELY = 6  # points from which the first cause is likely, not only possible
_ROUNDING_KINDS: tuple[Kind, ...] = ("precision", "mesh", "rounding")
_ORDER = ("data", "model", "batches", "seed", "precision", "lr", "optimizer", "mesh", "rounding")


def explain(
    alignment: Alignment,
    points: Mapping[str, Points],
    settings: Sequence[SettingDifference],
    results: Metrics,
    basis: BasisKind,
) -> tuple[Cause, ...]:
    """Rank the causes of a difference, the likeliest first.

    Args:
        points: Columns at the compared points.
        settings: Recorded settings that differ.
        basis: By which the verdict was measured.
    """
    a, b = alignment.curves
    if alignment.axis == "step" and (same_point := counted_apart(a, b)):
        evidence = clue_table()["counted_apart"].text.format(
            letter=alignment.letter, step_a=same_point[0], step_b=same_point[1]
        )
        step = alignment.steps[0]
        return (Cause(kind="logging", confidence="certain", step=step, evidence=evidence),)
    departing = [metric for metric in results.values() if metric.departs]
    onsets = [metric.onset_step for metric in departing if metric.onset_step is not None]
    # Scatter came before the departure: its causes are not those of the scatter.
    after_scatter = bool(departing) and all(metric.scattered for metric in departing)
    # The band allows for another precision, so that anything else is the cause.
    decisive = [setting for setting in settings if setting.kind != basis]
    if all(setting.weak for setting in decisive):
        decisive = list(settings)
    observation = Observation(points, min(onsets, default=None))
    return _rank(alignment, observation, decisive, basis != "seeds" and not after_scatter)


def _rank(
    alignment: Alignment,
    observation: Observation,
    settings: Sequence[SettingDifference],
    shared: bool,
) -> tuple[Cause, ...]:
    """Rank the causes; `shared`: the curves would be the same without one, unlike other seeds."""
    a, b = alignment.curves
    letter = alignment.letter
    onset = observation.onset
    first = _not_finite(observation, letter)
    within = bool(first) and onset == first[0].step  # what differed before is no cause of it
    starts = [start for start in (onset, observation.first) if start is not None]
    step = min(starts, default=observation.points["loss"].steps[0])
    if onset is not None and (within or not shared):
        step = onset
    clues: list[str] = []
    # At interpolated points only recorded settings are used.
    if alignment.method == "exact" and shared:
        first += _of_columns(observation, step, ((letter, b), ("A", a)))
        if any(c.kind in ("transient", "logging") and c.confidence != "possible" for c in first):
            return tuple(first)
        clues = observation.clues()
    selected = _select_settings(settings, step, observation, a, b)
    of_settings = [*_of_settings(selected, observation, clues)]
    recorded = [cause for cause in of_settings if cause.confidence != "possible"]
    resumes = [cause for cause in first if cause.kind == "resume"]
    first = _without_kinds_of(first, resumes)
    seen = _of_clues(clues, observation, b, letter)
    _add_unexplained(recorded, observation, letter)
    _add_unexplained(seen, observation, letter)
    if any(cause.confidence == "certain" for cause in recorded):
        return (*first, *recorded, *resumes)
    of_settings = [cause for cause in of_settings if cause.confidence == "possible"]
    if within:
        seen = [_before_not_finite(observation, step)]
        recorded = []
    # A loss by itself does not show which part of a step differs.
    undecided = len(observation.points) == 1 and not _has_likely(seen)
    if onset is None or _has_likely(resumes):
        seen = [cause.model_copy(update={"confidence": "possible"}) for cause in seen]
    seen = _without_kinds_of([*seen, *of_settings], recorded)
    position = observation.moment if step == observation.first else f"at step {step}"
    evidence = f"the settings and values recorded do not decide what differs {position}"
    unknown = Cause(kind="unknown", confidence="possible", step=step, evidence=evidence)
    if undecided and not recorded and not first and not resumes:
        return (unknown, *seen)
    return (*first, *recorded, *resumes, *seen, unknown)


def _add_unexplained(causes: list[Cause], observation: Observation, letter: str) -> None:
    """Add to the evidence of another random seed the differences that a seed cannot make."""
    if causes and causes[0].kind == "seed" and (remainder := observation.unexplained(letter)):
        evidence = f"{causes[0].evidence}; {remainder}"
        causes[0] = causes[0].model_copy(update={"evidence": evidence})


def _has_likely(causes: Sequence[Cause]) -> bool:
    return any(cause.confidence == "likely" for cause in causes)


def _without_kinds_of(causes: Sequence[Cause], recorded: Sequence[Cause]) -> list[Cause]:
    kinds = {cause.kind for cause in recorded}
    return [cause for cause in causes if cause.kind not in kinds]


def _of_columns(
    observation: Observation, step: int, curves: Sequence[tuple[str, Curve]]
) -> list[Cause]:
    """Return what columns and attempts show by themselves."""
    step = observation.first or step
    if clipped := observation.clipped(curves[0][0]):
        return [Cause(kind="logging", confidence="certain", step=step, evidence=clipped)]
    transient = observation.transient()
    causes = _resume(observation, curves)
    if transient and transient.confidence != "possible":
        return [transient]
    if name := observation.identity():
        confidence: Confidence = "likely" if name == "digits" else "certain"
        evidence = clue_table()[name].text
        causes.append(Cause(kind="logging", confidence=confidence, step=step, evidence=evidence))
    return [transient, *causes] if transient else causes


def _not_finite(observation: Observation, letter: str) -> list[Cause]:
    """Return the cause if values are not finite."""
    causes = []
    for name, points in observation.points.items():
        sides = {"A": ~np.isfinite(points.a), letter: ~np.isfinite(points.b)}
        bad = points.steps[np.logical_or(*sides.values())]
        if len(bad):
            lasts = len(bad) > 1 and bad[0] == points.steps[-len(bad)]
            span = f"from step {bad[0]} on" if lasts else describe_steps(bad, points.steps)
            who = " and ".join(side for side, flags in sides.items() if flags.any())
            evidence = f"{name} is not a finite number in {who} {span}"
            causes.append(
                Cause(kind="not_finite", confidence="certain", step=bad[0], evidence=evidence)
            )
    return sorted(causes, key=lambda cause: cause.step)[:1]


def _before_not_finite(observation: Observation, step: int) -> Cause:
    """Return what can have made values not finite; finite gradient norms rule out the weights."""
    kind: Kind = "gradient"
    evidence = "a gradient that is not finite makes the weights so"
    norm = observation.points.get("grad_norm")
    if norm:
        later = norm.steps >= step
        if np.count_nonzero(later) > 1 and np.isfinite([norm.a[later], norm.b[later]]).all():
            kind = "logging"
            evidence = "the gradient norms stay finite, and so the weights: what was logged is not"
    return Cause(kind=kind, confidence="possible", step=step, evidence=evidence)


def _resume(observation: Observation, curves: Sequence[tuple[str, Curve]]) -> list[Cause]:
    """Return the resume at which the curves begin to differ, and what it did not restore."""
    steps = observation.points["loss"].steps
    starts = [(observation.first, 0), (observation.onset, SLACK_POINTS)]
    for letter, curve in curves:
        restarts = curve.restarts.tolist()
        # The rows before and after a restart are the same: it is no cause.
        for restart in () if curve.overlap_identical and len(restarts) == 1 else restarts:
            row = int(steps.searchsorted(restart))
            for start, slack in starts if row else ():
                points = -row if start is None else int(steps.searchsorted(start)) - row
                if -slack <= points <= SLACK_POINTS:
                    confidence: Confidence = "possible" if slack or points > 1 else "likely"
                    clue = observation.lost_state(points) if confidence == "likely" else "resume"
                    if clue == "gradient_first":
                        return []
                    evidence = clue_table()["resume"].text.format(letter=letter, step=restart)
                    if clue != "resume":
                        evidence += f": {clue_table()[clue].text.format(step=restart)}"
                    return [
                        Cause(kind="resume", confidence=confidence, step=restart, evidence=evidence)
                    ]
    return []


def _select_settings(
    settings: Sequence[SettingDifference],
    step: int,
    observation: Observation,
    a: Curve,
    b: Curve,
) -> list[SettingDifference]:
    """Select the settings that can have made curves diverge at a step, the likeliest first.

    A difference that existed long before is no cause if the curves were bit-identical since,
    unless a restart followed, after which a run may have continued with other settings, or the
    first difference is so small that it may have grown below the digits logged.
    """
    steps = observation.points["loss"].steps
    row = int(steps.searchsorted(step))
    noisy = observation.jumped or row == 0
    limit = max(step, steps[min(row + noisy * SLACK_POINTS, len(steps) - 1)])
    if observation.onset is not None and observation.below(TINY, slice(EARLY_POINTS)):
        # What made them diverge may have begun after the first difference.
        limit = max(limit, observation.onset)
    restarts = np.concatenate((a.restarts, b.restarts))
    restarted = ((restarts > steps[0]) & (restarts <= step + 1)).any()
    all_along = row < SLACK_POINTS or observation.jumped or restarted
    recent = steps[max(row - SLACK_POINTS, 0)]
    differences = []
    for setting in settings:
        explains = all_along and not (setting.kind == "lr" and observation.jumped)
        grown = setting.step > steps[0] and observation.emerged
        if setting.step <= limit and (explains or grown or setting.step >= max(recent, 1)):
            differences.append(setting)
    return sorted(
        differences, key=lambda setting: (setting.weak, -setting.step, _ORDER.index(setting.kind))
    )


def _of_settings(
    settings: Sequence[SettingDifference], observation: Observation, clues: Sequence[str]
) -> Iterator[Cause]:
    """Yield the settings as causes; those that may not explain the curves are `possible`."""
    first = observation.first or 0
    # An update cannot change the loss of its own step.
    forward = "together" in clues and not observation.jumped
    strong = [setting for setting in settings if not setting.weak]
    small = not clues or (observation.below(SMALL, slice(EARLY_POINTS)) and not observation.sudden)
    jumps = observation.jumped or {"gradient_first", "update_first", "other_batches"} & set(clues)
    for setting in settings:
        step = max(setting.step, first) if setting.kind in _ROUNDING_KINDS else setting.step
        explains = small and not jumps and not strong
        if not setting.weak:
            explains = not (
                forward and setting.step >= first and setting.kind in ("lr", "optimizer")
            )
        alone = len(strong) == 1 and not (setting.weak or setting.uncertain)
        confidence = ("certain" if alone else "likely") if explains else "possible"
        yield Cause(kind=setting.kind, confidence=confidence, step=step, evidence=setting.text)


def _of_clues(clues: Sequence[str], observation: Observation, b: Curve, letter: str) -> list[Cause]:
    points: Counter[Kind] = Counter()
    rows = [clue_table()[name] for name in clues]
    for clue in rows:
        points.update(clue.points)
    step = observation.first or 0
    if observation.sudden or not observation.below(ROUNDED, slice(EARLY_POINTS)):
        del points["precision"], points["rounding"]
    causes: list[Cause] = []
    ratio = observation.ratio("first_ratio" in clues)
    for kind, sum_of_points in points.most_common():
        best = max(rows, key=lambda clue: clue.points.get(kind, 0))
        evidence = best.text.format(
            at=observation.moment,
            gap=observation.gap,
            step=observation.first,
            ratio=f"{ratio:.3g}",
            letter=letter,
        )
        if kind == "gradient" and not causes:
            row = int(b.steps.searchsorted(step))
            attempt = b.attempts[min(row, len(b.attempts) - 1)]
            if nodes := b.nodes.get(attempt):
                names = format_names(nodes, 8)
                evidence += f"; attempt {attempt} of {letter} on {names} made it"
            evidence += "; check the nodes with `slurmllm health`"
        confidence = "likely" if not causes and sum_of_points >= _LIKELY else "possible"
        causes.append(Cause(kind=kind, confidence=confidence, step=step, evidence=evidence))
    return causes
