"""Diagnosis of two curves that diverge: which difference caused it, or what diverged first.

A step's loss is that of the weights before it on its batch; its gradient norm is of the same
weights and batch; its parameter norm is of the weights after it. So

- the gradient norm diverges at step k, the loss only after it → the gradients of step k differ;
- loss and gradient norm diverge at step k together → its batch or its forward pass differs;
- the parameter norm diverges first → the update differs;
- all drift from the first steps on, ever further and without a jump → the roundings differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from slurmllm.compare.alignment import Alignment
from slurmllm.compare.causes import Cause, Kind
from slurmllm.compare.comparison import Diagnosis, MetricComparison
from slurmllm.compare.statistics import largest_rise, persists
from slurmllm.metrics.curves import Curve, Floats, Ints

# Points by which an onset that emerges from noise may be wrong
_SLACK_POINTS = 3
# Points until the effect of other gradients on the loss shows
_AHEAD_POINTS = 16
_BEFORE_POINTS = 64
_MIN_DIFFERENCE = 1e-9
_EARLY_POINTS = 5
# From this point on, the differences before it distinguish a jump from a growing drift.
_MIN_HISTORY = 32
# Parameter norms of the first step that differ by more are of other initial weights: one update
# changes less.
_OTHER_WEIGHTS = 2e-4
# Roundings differ by no more at first; other batches by far more, from the first step on.
_MAX_ROUNDING = {"loss": 1e-4, "grad_norm": 2e-3}
# Causes that change the last digits of every step; all others begin at a certain step.
_ROUNDING_KINDS: tuple[Kind, ...] = ("precision", "mesh", "rounding")
_ORDER = ("data", "model", "batch", "seed", "precision", "lr", "optimizer", "mesh", "rounding")


@dataclass(frozen=True)
class DifferenceSeries:
    """Signed relative differences of a metric, at points at which both values are finite."""

    steps: Ints  # [points]
    r: Floats  # [points]

    def identical_points(self) -> int:
        """Returns the number of points before the first difference."""
        return int(np.argmax(self.r != 0)) if np.any(self.r) else len(self.r)

    def identical_from(self, step: int) -> bool:
        return not np.any(self.r[np.searchsorted(self.steps, step) :])


def select_likely(
    causes: Sequence[Cause],
    onset: int,
    differences: Mapping[str, DifferenceSeries],
    a: Curve,
    b: Curve,
) -> list[Cause]:
    """Select the causes that can have made curves diverge at a step.

    A difference that existed all along is no cause if the curves were bit-identical at first,
    unless a restart followed, after which a run may have continued with other settings.
    """
    steps = differences["loss"].steps
    same = _identical_points(differences)
    noisy = any(np.median(np.abs(one.r)) > 0 for one in differences.values() if len(one.r))
    index = int(np.searchsorted(steps, onset)) + (_SLACK_POINTS if noisy and not same else 0)
    limit = int(steps[min(index, len(steps) - 1)])
    found = [cause for cause in causes if cause.step <= max(limit, onset)]
    if _SLACK_POINTS <= same < len(steps):
        restarts = np.concatenate((a.restarts, b.restarts))
        if not np.any((restarts > steps[0]) & (restarts <= int(steps[same]) + 1)):
            found = [cause for cause in found if cause.step > steps[0]]
    return [cause for cause in found if not cause.weak] or found


def main_cause(found: Sequence[Cause]) -> Diagnosis | None:
    """Returns the last cause before the curves diverged; of several the strongest."""
    if not found:
        return None
    best = max(found, key=lambda cause: (not cause.weak, cause.step, -_ORDER.index(cause.kind)))
    return Diagnosis(kind=best.kind, step=best.step, text=best.text)


def date_roundings(
    likely: Sequence[Cause], diagnosis: Diagnosis | None, metrics: Mapping[str, MetricComparison]
) -> tuple[list[Cause], Diagnosis | None]:
    """Date roundings from the first difference, which is within the tolerance at first.

    Returns:
        The likely causes and the main one, with that step in their texts.
    """
    first_steps = [m.first_difference_step for m in metrics.values()]
    onsets = [m.onset_step for m in metrics.values()]
    first = min((step for step in first_steps if step is not None), default=None)
    onset = min((step for step in onsets if step is not None), default=None)
    if diagnosis is None or diagnosis.kind not in _ROUNDING_KINDS or first is None or onset is None:
        return list(likely), diagnosis
    text, step = diagnosis.text, max(diagnosis.step, first)
    if first < onset:
        text += f"; the values differ from step {first} on, beyond the tolerance from step {onset}"
    dated = [
        replace(cause, step=step, text=text) if cause.text == diagnosis.text else cause
        for cause in likely
    ]
    return dated, diagnosis.model_copy(update={"step": step, "text": text})


def diagnose_curves(
    onset: int,
    differences: Mapping[str, DifferenceSeries],
    alignment: Alignment,
    a: Curve,
    b: Curve,
) -> Diagnosis:
    """Diagnose by the curves only, when no recorded setting differs."""
    if alignment.method != "exact":
        return _unknown(onset, alignment)
    begins = {name: _diverges_at(series, onset) for name, series in differences.items()}
    loss, gradient, weights = (begins.get(name) for name in ("loss", "grad_norm", "param_norm"))
    steps = differences["loss"].steps
    index = int(np.searchsorted(steps, onset))
    jumps = index >= _MIN_HISTORY and (loss is not None or gradient is not None)
    if not jumps and _drift(differences):
        return Diagnosis(
            kind="rounding",
            step=int(steps[0]),
            text="the curves drift apart from the first steps on without a jump: other roundings, "
            "as of another precision, other kernels or other hardware",
        )
    if index < _EARLY_POINTS and not _identical_points(differences):
        return _diagnose_start(steps, differences, b, alignment.letter)
    if gradient is not None and _before(gradient, loss) and not _before(weights, gradient):
        if differences["loss"].identical_from(gradient):
            return _only_one_differs("gradient norm", gradient)
        text = _describe_wrong_gradients(gradient, b, alignment.letter)
        return Diagnosis(kind="gradient", step=gradient, text=text)
    if weights is not None and _before(weights, loss) and _before(weights, gradient):
        known_lr = all("lr" in curve.columns for curve in (a, b))
        what = "another learning rate or optimizer"
        if known_lr:
            what = "the optimizer or its state is another"
        return Diagnosis(
            kind="optimizer" if known_lr else "lr",
            step=weights,
            text=f"the update of step {weights} differs though its loss and gradients do not: "
            f"{what}",
        )
    gradients = differences.get("grad_norm")
    if loss is not None and gradients is not None and gradients.identical_from(loss):
        return _only_one_differs("loss", loss)
    if loss is not None and index > 0 and steps[index] - steps[index - 1] == 1:
        what = f"the loss of step {loss} differs"
        if gradient is not None:
            what = f"loss and gradients of step {loss} differ"
        return Diagnosis(
            kind="batches",
            step=loss,
            text=f"{what} though the weights before it do not: its batch is another one, or the "
            "forward pass is wrong",
        )
    return _unknown(onset, alignment)


def _identical_points(differences: Mapping[str, DifferenceSeries]) -> int:
    """Returns the number of first points at which loss and gradient norm are the same."""
    return min(
        series.identical_points()
        for name, series in differences.items()
        if name in ("loss", "grad_norm")
    )


def _before(step: int | None, other: int | None) -> bool:
    return step is not None and (other is None or step < other)


def _diverges_at(series: DifferenceSeries, onset: int) -> int | None:
    """Returns the step near the onset from which a metric differs by more than ever before."""
    index = int(np.searchsorted(series.steps, onset))
    first = max(0, index - _SLACK_POINTS)
    before = np.abs(series.r[max(0, first - _BEFORE_POINTS) : first])
    limit = 3 * float(np.max(before, initial=_MIN_DIFFERENCE / 3))
    beyond = persists(np.abs(series.r[first : index + _AHEAD_POINTS]) > limit)
    return int(series.steps[first + int(np.argmax(beyond))]) if beyond.any() else None


def _drift(differences: Mapping[str, DifferenceSeries]) -> bool:
    """Whether all metrics differ a little from the first steps on, then ever more, without a jump.

    Other batches scatter instead, by as much as they differ.
    """
    for name in ("loss", "grad_norm"):
        series = differences.get(name)
        if series is None or len(series.r) < 4 * _EARLY_POINTS:
            continue
        size, last = np.abs(series.r), series.r[-(len(series.r) // 4) :]
        early, late = np.median(size[:_EARLY_POINTS]), np.median(np.abs(last))
        if early == 0 or early > 1e-2 or early * 4 > late:
            return False
        if np.median(np.abs(np.diff(last))) > late / 2:
            return False
        if largest_rise(series.r, len(size)) is not None:
            return False
    return bool(len(differences["loss"].r) >= 4 * _EARLY_POINTS)


def _diagnose_start(
    steps: Ints, differences: Mapping[str, DifferenceSeries], b: Curve, letter: str
) -> Diagnosis:
    """Diagnose curves that differ from their first points on."""
    first = int(steps[0])
    # Whether a metric differs by more than roundings: at first, and over all points
    beyond = {
        name: [float(np.median(np.abs(r[:count]))) > limit for count in (_EARLY_POINTS, len(r))]
        for name, limit in _MAX_ROUNDING.items()
        if name in differences and len(r := differences[name].r)
    }
    weights = differences.get("param_norm")
    if beyond and not any(map(any, beyond.values())):
        kind: Kind = "rounding"
        text = (
            f"the curves differ by roundings from step {first} on: other kernels, another "
            "mesh or other hardware"
        )
    elif weights is not None and len(weights.r) and abs(weights.r[0]) > _OTHER_WEIGHTS:
        kind = "seed"
        text = f"the weights differ from step {first} on: another seed, or another model"
    elif beyond.get("grad_norm", [False])[0] and not beyond.get("loss", [True])[0]:
        kind, text = "gradient", _describe_wrong_gradients(first, b, letter)
    else:
        kind = "batches"
        text = f"the batches differ from step {first} on: other data, or in another order"
    return Diagnosis(kind=kind, step=first, text=text)


def _describe_wrong_gradients(step: int, b: Curve, letter: str) -> str:
    text = (
        f"the gradients of step {step} differ though its loss does not: the backward pass of one "
        "rank or the reduction is wrong"
    )
    row = int(np.searchsorted(b.steps, step))
    attempt = int(b.attempts[min(row, len(b.attempts) - 1)])
    near = [int(restart) for restart in b.restarts if 0 <= step - restart <= 2]
    nodes = b.nodes.get(attempt, ())
    if near or nodes:
        text += f"; attempt {attempt} of {letter}"
        text += f" on {', '.join(nodes[:8])}{' …' if len(nodes) > 8 else ''}" if nodes else ""
        text += f" took over at step {near[-1]}" if near else " made it"
    return f"{text}; check the nodes with `slurmllm health`"


def _only_one_differs(what: str, step: int) -> Diagnosis:
    return Diagnosis(
        kind="unknown",
        step=step,
        text=f"only the {what} differs, from step {step} on: the training itself does not",
    )


def _unknown(onset: int, alignment: Alignment) -> Diagnosis:
    index = int(np.searchsorted(alignment.steps, onset))
    where = f"at step {onset}"
    if index > 0 and onset - alignment.steps[index - 1] > 1:
        where = f"between steps {alignment.steps[index - 1]} and {onset}"
    return Diagnosis(
        kind="unknown",
        step=onset,
        text=f"no recorded setting differs; the curves diverge {where}",
    )
