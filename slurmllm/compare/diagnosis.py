"""Which of the things that differ made two curves part, or else what parted first.

A step's loss is that of the weights before it on its batch; its gradient norm is of the same
weights and batch; its parameter norm is of the weights after it. So

- the gradient norm parts at step k, the loss only after it → the gradients of step k are others;
- loss and gradient norm part at step k together → so is its batch, or its forward pass;
- the parameter norm parts first → so is the update;
- all drift from the first steps on, ever further and without a jump → so are the roundings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from slurmllm.compare.alignment import Alignment
from slurmllm.compare.causes import Cause
from slurmllm.compare.comparison import Diagnosis, Kind, MetricComparison
from slurmllm.compare.noise import largest_rise, stays
from slurmllm.metrics.curves import Curve, Floats, Ints

# An onset that comes out of noise is known to so many points.
_SLACK = 3
# Likewise, points that the gradient's effect on the loss may take to be seen.
_AHEAD = 16
_BEFORE = 64
_FLOOR = 1e-9
_EARLY = 5
# Points from which on what was before tells a jump from the growth of a drift.
_TOLD = 32
# Norms of the first weights that differ by more are of other weights: one update changes less.
_OTHER_WEIGHTS = 2e-4
# Roundings alone differ by no more; other batches by far more, from the first step on.
_ROUNDED = {"loss": 1e-4, "grad_norm": 2e-3}
# What changes the last digits of every step; all else has a step of its own.
_ROUNDINGS: tuple[Kind, ...] = ("precision", "mesh", "rounding")
_ORDER = ("data", "model", "batch", "seed", "precision", "lr", "optimizer", "mesh", "rounding")


@dataclass(frozen=True)
class Series:
    """Signed relative differences of a metric where both values are finite.

    Attributes:
        steps: Of the points. [points]
        r: Relative differences. [points]
    """

    steps: Ints
    r: Floats


def likely(
    causes: Sequence[Cause], onset: int, differences: Mapping[str, Series], a: Curve, b: Curve
) -> list[Cause]:
    """The causes that can have made curves part at a step.

    What differed all along is no cause where the curves were bit-identical at first, unless a
    restart followed, after which a run may have gone on with other settings.
    """
    steps = differences["loss"].steps
    place = int(np.searchsorted(steps, onset)) + _slack(differences)
    limit = int(steps[min(place, len(steps) - 1)])
    found = [cause for cause in causes if cause.step <= max(limit, onset)]
    same = _identical(differences)
    if same >= _SLACK and same < len(steps):
        parted = int(steps[same])
        restarts = np.concatenate((a.restarts, b.restarts))
        if not np.any((restarts > steps[0]) & (restarts <= parted + 1)):
            found = [cause for cause in found if cause.step > steps[0]]
    strong = [cause for cause in found if not cause.weak]
    return strong or found


def _slack(differences: Mapping[str, Series]) -> int:
    noisy = any(np.median(np.abs(series.r)) > 0 for series in differences.values() if len(series.r))
    return _SLACK if noisy and not _identical(differences) else 0


def _identical(differences: Mapping[str, Series]) -> int:
    """Points from the first on at which loss and gradient norm are the same."""
    counts = [
        int(np.argmax(series.r != 0)) if np.any(series.r) else len(series.r)
        for name, series in differences.items()
        if name in ("loss", "grad_norm")
    ]
    return min(counts)


def main_cause(found: Sequence[Cause]) -> Diagnosis | None:
    """The one that came last before the curves parted; of several the strongest."""
    if not found:
        return None
    best = max(found, key=lambda cause: (not cause.weak, cause.step, -_ORDER.index(cause.kind)))
    return Diagnosis(kind=best.kind, step=best.step, words=best.words)


def since_the_first_difference(
    likely: Sequence[Cause], diagnosis: Diagnosis | None, metrics: Mapping[str, MetricComparison]
) -> tuple[list[Cause], Diagnosis | None]:
    """Where roundings are the cause: from which step on, which the tolerance hides at first.

    Returns:
        The likely causes and the main one, with the step and the words of that.
    """
    differ = [m.first_difference_step for m in metrics.values()]
    part = [m.onset_step for m in metrics.values()]
    first = min((step for step in differ if step is not None), default=None)
    onset = min((step for step in part if step is not None), default=None)
    if diagnosis is None or diagnosis.kind not in _ROUNDINGS or first is None or onset is None:
        return list(likely), diagnosis
    words = diagnosis.words
    if first < onset:
        words += f"; the values differ from step {first} on, beyond the tolerance from step {onset}"
    told = diagnosis.model_copy(update={"step": max(diagnosis.step, first), "words": words})
    return [
        replace(cause, step=told.step, words=words) if cause.words == diagnosis.words else cause
        for cause in likely
    ], told


def what_parts_first(
    onset: int, differences: Mapping[str, Series], alignment: Alignment, a: Curve, b: Curve
) -> Diagnosis:
    """Tell from the curves alone, where nothing that is recorded differs."""
    if alignment.method != "exact":
        return _unknown(onset, alignment)
    begins = {name: _parts(series, onset) for name, series in differences.items()}
    loss, gradient, weights = (begins.get(name) for name in ("loss", "grad_norm", "param_norm"))
    steps = differences["loss"].steps
    place = int(np.searchsorted(steps, onset))
    jumps = place >= _TOLD and (loss is not None or gradient is not None)
    if not jumps and _drifts(differences):
        return Diagnosis(
            kind="rounding",
            step=int(steps[0]),
            words="the curves drift apart from the first steps on without a jump: other roundings, "
            "as of another precision, other kernels or other hardware",
        )
    if place < _EARLY and not _identical(differences):
        return _at_once(steps, differences, b, alignment.letter)
    if (
        gradient is not None
        and (loss is None or gradient < loss)
        and not _before(weights, gradient)
    ):
        if _untouched(differences["loss"], gradient):
            return _one_alone("gradient norm", gradient)
        return Diagnosis(
            kind="gradient", step=gradient, words=_bad_rank(gradient, b, alignment.letter)
        )
    if weights is not None and _before(weights, loss) and _before(weights, gradient):
        known = all("lr" in curve.columns for curve in (a, b))
        what = (
            "the optimizer or its state is another"
            if known
            else "another learning rate or optimizer"
        )
        return Diagnosis(
            kind="optimizer" if known else "lr",
            step=weights,
            words=f"the update of step {weights} differs though its loss and gradients do not: "
            f"{what}",
        )
    if loss is not None and _untouched(differences.get("grad_norm"), loss):
        return _one_alone("loss", loss)
    if loss is not None and place > 0 and steps[place] - steps[place - 1] == 1:
        what = f"the loss of step {loss} differs"
        if gradient is not None:
            what = f"loss and gradients of step {loss} differ"
        return Diagnosis(
            kind="batches",
            step=loss,
            words=f"{what} though the weights before it do not: its batch is another one, or the "
            "forward pass is wrong",
        )
    return _unknown(onset, alignment)


def _untouched(series: Series | None, step: int) -> bool:
    """Whether a metric is bit-identical from a step on."""
    return series is not None and not np.any(series.r[np.searchsorted(series.steps, step) :])


def _before(step: int | None, other: int | None) -> bool:
    return step is not None and (other is None or step < other)


def _parts(series: Series, onset: int) -> int | None:
    """The step near the onset from which a metric is off by more than it ever was before."""
    place = int(np.searchsorted(series.steps, onset))
    first = max(0, place - _SLACK)
    before = np.abs(series.r[max(0, first - _BEFORE) : first])
    limit = 3 * float(np.max(before, initial=_FLOOR / 3))
    off = stays(np.abs(series.r[first : place + _AHEAD]) > limit)
    return int(series.steps[first + int(np.argmax(off))]) if off.any() else None


def _drifts(differences: Mapping[str, Series]) -> bool:
    """Whether all differ a little from the first steps on and then ever more, without a jump.

    Other batches scatter instead, by as much as they differ.
    """
    for name in ("loss", "grad_norm"):
        series = differences.get(name)
        if series is None or len(series.r) < 4 * _EARLY:
            continue
        size, last = np.abs(series.r), series.r[-(len(series.r) // 4) :]
        early, late = np.median(size[:_EARLY]), np.median(np.abs(last))
        if early == 0 or early > 1e-2 or early * 4 > late:
            return False
        if np.median(np.abs(np.diff(last))) > late / 2:
            return False
        if largest_rise(series.r, len(size)) is not None:
            return False
    return bool(len(differences["loss"].r) >= 4 * _EARLY)


def _at_once(steps: Ints, differences: Mapping[str, Series], b: Curve, letter: str) -> Diagnosis:
    first = int(steps[0])
    apart = {
        name: [float(np.median(np.abs(r[:count]))) > limit for count in (_EARLY, len(r))]
        for name, limit in _ROUNDED.items()
        if name in differences and len(r := differences[name].r)
    }
    if apart and not any(map(any, apart.values())):
        return Diagnosis(
            kind="rounding",
            step=first,
            words=f"the curves differ by roundings from step {first} on: other kernels, another "
            "mesh or other hardware",
        )
    weights = differences.get("param_norm")
    if weights is not None and len(weights.r) and abs(weights.r[0]) > _OTHER_WEIGHTS:
        return Diagnosis(
            kind="seed",
            step=first,
            words=f"the weights differ from step {first} on: another seed, or another model",
        )
    if apart.get("grad_norm", [False])[0] and not apart.get("loss", [True])[0]:
        return Diagnosis(kind="gradient", step=first, words=_bad_rank(first, b, letter))
    return Diagnosis(
        kind="batches",
        step=first,
        words=f"the batches differ from step {first} on: other data, or in another order",
    )


def _bad_rank(step: int, b: Curve, letter: str) -> str:
    words = (
        f"the gradients of step {step} differ though its loss does not: the backward pass of one "
        "rank or the reduction is wrong"
    )
    row = int(np.searchsorted(b.steps, step))
    attempt = int(b.attempts[min(row, len(b.attempts) - 1)])
    near = [int(restart) for restart in b.restarts if 0 <= step - restart <= 2]
    nodes = b.nodes.get(attempt, ())
    if near or nodes:
        words += f"; attempt {attempt} of {letter}"
        words += f" on {', '.join(nodes[:8])}{' …' if len(nodes) > 8 else ''}" if nodes else ""
        words += f" took over at step {near[-1]}" if near else " made it"
    return f"{words}; check the nodes with `slurmllm health`"


def _one_alone(what: str, step: int) -> Diagnosis:
    return Diagnosis(
        kind="unknown",
        step=step,
        words=f"only the {what} differs, from step {step} on: the training itself does not",
    )


def _unknown(onset: int, alignment: Alignment) -> Diagnosis:
    place = int(np.searchsorted(alignment.steps, onset))
    where = f"at step {onset}"
    if place > 0 and onset - alignment.steps[place - 1] > 1:
        where = f"between steps {alignment.steps[place - 1]} and {onset}"
    return Diagnosis(
        kind="unknown",
        step=onset,
        words=f"nothing that is recorded differs; the curves part {where}",
    )
