"""Spikes of the loss after HLAT (Fan et al., 2024, arXiv 2404.10630).

1. The running mean before a step is over the `window` logged steps before it (20), those inside
   spikes included. After a jump that stays, the mean has caught up within a window.
2. A step is in a spike where its loss is above that mean by more than the threshold (0.1). The
   first `window` steps have no mean and are not judged.
3. Such steps in a row are one spike, and its duration is their number. Two spikes with fewer than
   `min_gap` calm steps between them are one.
4. Steps whose loss is NaN or infinite are counted by themselves: they are in no spike and in no
   mean.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from slurmllm.errors import RunError, UserError
from slurmllm.metrics.curves import Curve, Flags, Floats, Ints, Range
from slurmllm.spikes.analysis import NotFinite, Spike, SpikeAnalysis
from slurmllm.spikes.trends import (
    find_stretches,
    first_at_most,
    grad_norm_of,
    growth_of,
    medians_before,
    name_state,
    noise_of,
    param_norm_of,
    window_means,
)

WINDOW = 20
THRESHOLD = 0.1
_MOST_SPIKES = 1000  # that an analysis holds one by one
_NEAR = 5  # logged steps after a restart or a skip that a spike is still put beside it


# Differences of values near the largest float are infinite, and taken for what they are.
@np.errstate(over="ignore", invalid="ignore")
def find_spikes(
    curve: Curve, window: int = WINDOW, threshold: float = THRESHOLD, min_gap: int = 1
) -> SpikeAnalysis:
    """Find the spikes of a curve's loss, and what lies beside them.

    Args:
        curve: With a loss. Where it has no more than `window` steps, none is judged.
        window: Logged steps that the running mean is over, from 1.
        threshold: Above the running mean, from 0.
        min_gap: Calm steps that part two spikes, from 1.

    Raises:
        RunError: the curve has no loss.
        UserError: window, threshold or min_gap make no sense.
    """
    _require(window, threshold, min_gap)
    there = _there(curve, "loss")
    steps, losses = curve.steps[there], curve.columns["loss"][there]
    finite = np.isfinite(losses)
    means = _means_before(losses, window)
    heights = np.where(finite, losses - means, np.nan)
    inside = heights > threshold
    first, last = _joined(*find_stretches(inside), min_gap)
    durations = last - first + 1
    returned = first_at_most(losses, first, means[first]) - first
    back = first + returned < len(losses)
    grads = _column(curve, "grad_norm", there)
    ratios = _ratios(grads, first, last, window)
    restarts, skips = curve.restarts, _skips(curve)
    near_restart = _near(np.searchsorted(steps, restarts), first, last)
    near_skip = _near(np.searchsorted(steps, [step for step, _ in skips]), first, last)
    peaks, highest = _peaks(heights, first, last)
    spikes = [
        Spike(
            step=int(steps[first[i]]),
            last_step=int(steps[last[i]]),
            duration=int(durations[i]),
            mean=float(means[first[i]]),
            height=float(highest[i]),
            peak_step=int(steps[peaks[i]]),
            loss=float(losses[peaks[i]]),
            returned_after=int(returned[i]) if back[i] else None,
            grad_norm_ratio=_number(ratios[i]),
            restart=None if near_restart[i] < 0 else int(restarts[near_restart[i]]),
            skipped=None if near_skip[i] < 0 else skips[near_skip[i]][1],
        )
        for i in _kept(highest)
    ]
    bad_first, bad_last = find_stretches(~finite)
    lengths, numbers = np.unique(durations, return_counts=True)
    judged = int(np.count_nonzero(np.isfinite(heights)))
    count, interval, noise = len(first), _interval(steps), noise_of(losses)
    analysis = SpikeAnalysis(
        name=curve.name,
        path=str(curve.path),
        kind=curve.kind,
        window=window,
        threshold=threshold,
        min_gap=min_gap,
        steps=len(steps),
        judged=judged,
        first_step=int(steps[0]),
        last_step=int(steps[-1]),
        interval=interval,
        noise=noise,
        count=count,
        per_1000_steps=1000 * count / judged if judged else None,
        inside=int(durations.sum()),
        inside_share=min(1.0, float(durations.sum()) / judged) if judged else None,
        one_step=int(np.count_nonzero(durations == 1)),
        one_step_share=float(np.mean(durations == 1)) if count else None,
        longest=int(durations.max(initial=0)),
        highest=float(highest.max()) if count else None,
        returned_after_median=float(np.median(returned[back])) if back.any() else None,
        unreturned=int(np.count_nonzero(~back & (len(losses) - first > window))),
        at_restarts=int(np.count_nonzero(near_restart >= 0)),
        at_skips=int(np.count_nonzero(near_skip >= 0)),
        durations={int(k): int(v) for k, v in zip(lengths, numbers, strict=True)},
        spikes=tuple(spikes),
        not_finite_steps=int(np.count_nonzero(~finite)),
        not_finite=tuple(
            NotFinite(step=int(steps[a]), last_step=int(steps[b]), duration=int(b - a + 1))
            for a, b in zip(bad_first[:_MOST_SPIKES], bad_last[:_MOST_SPIKES], strict=True)
        ),
        growth=growth_of(steps, losses, window, threshold) if judged else None,
        grad_norm=grad_norm_of(steps, grads, ratios, window),
        param_norm=param_norm_of(steps, _column(curve, "param_norm", there)),
        restarts=tuple(int(step) for step in restarts),
        warnings=(*curve.warnings, *_warnings(interval, noise, window, threshold)),
    )
    state, verdict = name_state(analysis)
    return analysis.model_copy(update={"state": state, "verdict": verdict})


def select_steps(curve: Curve, first: int | None, last: int | None) -> Curve:
    """The rows of some steps, both ends included.

    Raises:
        RunError: there are none.
    """
    if first is None and last is None:
        return curve
    rows = (curve.steps >= (first or 0)) & (curve.steps <= (math.inf if last is None else last))
    if not rows.any():
        asked = f"from {first or 0}" + ("" if last is None else f" to {last}")
        raise RunError(
            f"{curve.name} has no steps {asked}: its own are {curve.steps[0]} to {curve.steps[-1]}"
        )
    return replace(
        curve,
        steps=curve.steps[rows],
        attempts=curve.attempts[rows],
        columns={name: column[rows] for name, column in curve.columns.items()},
        absent={name: flags[rows] for name, flags in curve.absent.items()},
    )


def _require(window: int, threshold: float, min_gap: int) -> None:
    if window < 1:
        raise UserError(f"window {window}: a running mean is over 1 step or more, such as 20")
    if not 0 <= threshold < math.inf:
        raise UserError(f"threshold {threshold:g}: a height above the mean, 0 or more, such as 0.1")
    if min_gap < 1:
        raise UserError(f"min-gap {min_gap}: spikes are parted by 1 calm step or more")


def _there(curve: Curve, metric: str) -> Flags:
    """Which rows have a metric.

    Raises:
        RunError: none has.
    """
    absent = curve.absent.get(metric)
    there = np.ones(len(curve.steps), dtype=bool) if absent is None else ~absent
    if metric not in curve.columns or not there.any():
        known = ", ".join(curve.columns) or "nothing"
        raise RunError(
            f"{curve.path} has no {metric}, but {known}; spikes are looked for in the {metric} "
            f"(--tag {metric}=TAG says what another framework calls it)"
        )
    return there


def _column(curve: Curve, metric: str, rows: Flags) -> Floats | None:
    """The finite values of a metric at some rows, NaN elsewhere; None where there are none."""
    if metric not in curve.columns:
        return None
    values = curve.columns[metric][rows]
    there = np.isfinite(values)
    if metric in curve.absent:
        there &= ~curve.absent[metric][rows]
    return np.where(there, values, np.nan) if there.any() else None


def _means_before(values: Floats, window: int) -> Floats:
    """The running mean before each value; NaN for the first `window` ones. [n]"""
    means = np.full(len(values), np.nan)
    if len(values) > window:
        means[window:] = window_means(values, window)[:-1]
    return means


def _joined(first: Ints, last: Ints, min_gap: int) -> tuple[Ints, Ints]:
    """Stretches, those with fewer than `min_gap` places between them as one."""
    if not first.size:
        return first, last
    apart = first[1:] - last[:-1] - 1 >= min_gap
    return first[np.append(True, apart)], last[np.append(apart, True)]


def _peaks(heights: Floats, first: Ints, last: Ints) -> tuple[Ints, Floats]:
    """The place of the largest height of each stretch, and that height."""
    largest = _largest(heights, first, last)
    stretch = np.repeat(np.arange(len(first)), last - first + 1)
    places = np.arange(len(stretch)) + np.repeat(first - _begins(first, last), last - first + 1)
    at_peak = heights[places] == largest[stretch]
    _, earliest = np.unique(stretch[at_peak], return_index=True)
    return places[at_peak][earliest], largest


def _begins(first: Ints, last: Ints) -> Ints:
    """Where each stretch begins once they are put end to end."""
    lengths = last - first + 1
    begins: Ints = np.cumsum(lengths) - lengths
    return begins


def _largest(values: Floats, first: Ints, last: Ints) -> Floats:
    """The largest value of each stretch; NaN where all are."""
    if not first.size:
        return np.empty(0)
    edges = np.ravel(np.column_stack([first, last + 1]))
    found: Floats = np.fmax.reduceat(np.append(values, np.nan), edges)[::2]
    return found


def _ratios(grads: Floats | None, first: Ints, last: Ints, window: int) -> Floats:
    """Of each spike: its largest gradient norm / the median before it; NaN where not known."""
    if grads is None:
        return np.full(len(first), np.nan)
    medians = medians_before(grads, first, window)
    # Each stretch by itself: one that begins a step earlier may touch the one before it.
    largest = np.fmax(_largest(grads, first, last), grads[np.maximum(first - 1, 0)])
    ratios = np.full(len(first), np.nan)
    np.divide(largest, medians, out=ratios, where=medians > 0)
    return ratios


def _skips(curve: Curve) -> list[tuple[int, Range]]:
    """The step that follows on each window of skipped batches, and the window."""
    found, passed, reached = [], 0, 0
    for skip in sorted(curve.skips, key=lambda skip: skip.first):
        passed += max(0, skip.last - max(skip.first - 1, reached))
        reached = max(reached, skip.last)
        found.append((reached + 1 - passed, (skip.first, skip.last)))
    return found


def _near(places: Ints, first: Ints, last: Ints) -> Ints:
    """For each spike the latest of some places that lies in it or shortly before; -1: none does."""
    if not places.size:
        return np.full(len(first), -1)
    latest = np.searchsorted(places, last, side="right") - 1
    near = (latest >= 0) & (places[np.maximum(latest, 0)] >= first - _NEAR)
    return np.where(near, latest, -1)


def _kept(highest: Floats) -> Ints:
    """The spikes to hold one by one, in their order."""
    order = np.argsort(-highest, kind="stable")[:_MOST_SPIKES]
    return np.sort(order)


def _interval(steps: Ints) -> int:
    if len(steps) < 2:
        return 1
    values, counts = np.unique(np.diff(steps), return_counts=True)
    return int(values[np.argmax(counts)])


def _warnings(interval: int, noise: float, window: int, threshold: float) -> list[str]:
    found = []
    if interval > 1:
        found.append(
            f"one step in {interval} was logged: window and durations count logged steps, and "
            "spikes between them are not seen"
        )
    # Beyond three standard deviations of a step's distance from the mean of those before it.
    least = 3 * noise * math.sqrt(1 + 1 / window)
    if threshold < least:
        found.append(
            f"the loss varies by {noise:.2g} from step to step, so most heights above {threshold:g}"
            f" may be noise; --threshold {least:.2g} is above it"
        )
    return found


def _number(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
