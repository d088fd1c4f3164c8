"""Spikes of the loss and of the gradient norm.

The definition is that of `metrics.spike`, applied to either:

1. The running mean before a step is over the `window` logged steps before it (20), those inside
   spikes included. After a jump that stays, the mean has caught up within a window.
2. A step is in a spike if its value is above that mean by more than the threshold (0.1). The
   first `window` steps have no mean and are not judged.
3. Such steps in a row are one spike, and its duration is their number. Two spikes with fewer than
   `min_gap` calm steps between them are one.
4. Steps whose value is NaN or infinite are counted separately: they are in no spike and in no
   mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from slurmllm.errors import RunError, UserError
from slurmllm.format import format_plural
from slurmllm.metrics.curves import Curve, Flags, Floats, Ints, Range
from slurmllm.metrics.spike import spike_height
from slurmllm.spikes.analysis import (
    MOST_GROWTH,
    NAMES,
    REFERENCES,
    Metric,
    NotFinite,
    Spike,
    SpikeAnalysis,
    State,
    find_stretches,
    first_at_most,
    grad_norm_of,
    growth_of,
    medians_before,
    noise_of,
    param_norm_of,
    window_means,
)

WINDOW = 20
THRESHOLD = 0.1
_MAX_SPIKES = 1000  # in an analysis, one by one
_NEAR_STEPS = 5  # a spike so many logged steps after a restart or a skip coincides with it
_steps = partial(format_plural, noun="step")


def analyze(
    curve: Curve,
    window: int = WINDOW,
    threshold: float = THRESHOLD,
    min_gap: int = 1,
    metric: Metric | None = None,
) -> SpikeAnalysis:
    """Find the spikes of a metric; None: of the loss and of the gradient norm, if logged."""
    logged = [name for name in NAMES if len(curve.series(name)[0])]
    metrics = logged or ["loss"] if metric is None else [metric]
    found = [find_spikes(curve, window, threshold, min_gap, name) for name in metrics]
    if len(found) == 1:
        return found[0]
    own = tuple(text for text in found[1].warnings if text not in found[0].warnings)
    second = found[1].model_copy(update={"warnings": own})
    return found[0].model_copy(update={"grad_norm_spikes": second})


# Differences of values near the largest float overflow to infinity, which is correct here.
@np.errstate(over="ignore", invalid="ignore")
def find_spikes(
    curve: Curve,
    window: int = WINDOW,
    threshold: float = THRESHOLD,
    min_gap: int = 1,
    metric: Metric = "loss",
) -> SpikeAnalysis:
    """Find the spikes of a metric, and what coincides with them.

    If the curve has at most `window` steps, none is judged.

    Raises:
        RunError: the curve has no such metric.
        UserError: window, threshold or min_gap are out of range.
    """
    if window < 1:
        raise UserError(f"window {window}: a running mean is over 1 step or more, such as 20")
    if not 0 <= threshold < math.inf:
        raise UserError(f"threshold {threshold:g}: a height above the mean, 0 or more, such as 0.1")
    if min_gap < 1:
        raise UserError(f"min-gap {min_gap}: between spikes there are 1 calm step or more")
    steps, values = curve.series(metric)
    title = NAMES[metric]
    if not len(steps):
        known = ", ".join(curve.columns) or "nothing"
        raise RunError(
            f"{curve.path} has no {title}, but {known}; --tag {metric}=TAG names it in the log of "
            "another framework, --metric chooses between loss and grad_norm"
        )
    finite = np.isfinite(values)
    means = np.full(len(values), np.nan)
    if len(values) > window:
        # The mean of a window is that before the step after it: the last window precedes none.
        means[window:] = window_means(values, window)[:-1]
    heights = np.where(finite, spike_height(values, means), np.nan)
    # NaN compares as false: a step without a mean or a finite loss is in no spike.
    first, last = find_stretches(heights > threshold)
    if first.size:
        separate = first[1:] - last[:-1] - 1 >= min_gap
        first, last = first[np.append(True, separate)], last[np.append(separate, True)]
    durations = last - first + 1
    returned = first_at_most(values, first, means[first]) - first
    back = first + returned < len(values)
    rows = np.isin(curve.steps, steps)
    grads, norms, losses = (
        _finite_column(curve, name, rows) for name in ("grad_norm", "param_norm", "loss")
    )
    ratios = np.full(len(first), np.nan)
    if grads is not None:
        medians = medians_before(grads, first, window)
        # The step before a spike too: its gradient makes the spike's first loss.
        largest = _largest_between(grads, np.maximum(first - 1, 0), last)
        np.divide(largest, medians, out=ratios, where=medians > 0)
    restarts, skips = curve.restarts, _steps_after_skips(curve)
    near_restart = _latest_near(np.searchsorted(steps, restarts), first, last)
    near_skip = _latest_near(np.searchsorted(steps, [step for step, _ in skips]), first, last)
    highest = _largest_between(heights, first, last)
    peaks = first_at_most(-heights, first, -highest)
    spikes = [
        Spike(
            step=int(steps[first[i]]),
            last_step=int(steps[last[i]]),
            duration=int(durations[i]),
            mean=float(means[first[i]]),
            height=float(highest[i]),
            peak_step=int(steps[peaks[i]]),
            value=float(values[peaks[i]]),
            loss=None if losses is None else float(losses[peaks[i]]),
            returned_after=int(returned[i]) if back[i] else None,
            grad_norm_ratio=float(ratios[i]) if math.isfinite(ratios[i]) else None,
            restart=None if near_restart[i] < 0 else int(restarts[near_restart[i]]),
            skipped=None if near_skip[i] < 0 else skips[near_skip[i]][1],
        )
        for i in np.sort(np.argsort(-highest, kind="stable")[:_MAX_SPIKES])
    ]
    bad_first, bad_last = find_stretches(~finite)
    lengths, numbers = np.unique(durations, return_counts=True)
    judged = int(np.count_nonzero(np.isfinite(heights)))
    count, noise, interval = len(first), noise_of(values), 1
    if len(steps) > 1:
        intervals, frequencies = np.unique(np.diff(steps), return_counts=True)
        interval = int(intervals[np.argmax(frequencies)])
    warnings = list(curve.warnings)
    if interval > 1:
        warnings.append(
            f"one step in {interval} was logged: window and durations count logged steps, and "
            "spikes between them are not seen"
        )
    # Three standard deviations of the distance of a step from the mean of the window before it
    min_threshold = 3 * noise * math.sqrt(1 + 1 / window)
    option = "" if metric == "loss" else f"--metric {metric} "
    if threshold < min_threshold:
        warnings.append(
            f"the {title} varies by {noise:.2g} from step to step, so most heights above "
            f"{threshold:g} may be noise; {option}--threshold {min_threshold:.2g} is above it"
        )
    gradient = grad_norm_of(steps, grads, ratios, window)
    if metric == "grad_norm" and gradient and (gradient.growth or 0.0) > MOST_GROWTH:
        warnings.append(
            f"the running mean of the gradient norm grew to {gradient.growth:.3g} times its lowest "
            f"value, at step {gradient.growth_step}: more than {MOST_GROWTH:g} times may be the "
            "beginning of a divergence"
        )
    analysis = SpikeAnalysis(
        name=curve.name,
        path=str(curve.path),
        kind=curve.kind,
        metric=metric,
        definition=f"a step whose {title} is more than {threshold:g} above the mean of the "
        f"{window} logged steps before it",
        reference=REFERENCES.get(metric),
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
        unreturned=int(np.count_nonzero(~back & (len(values) - first > window))),
        at_restarts=int(np.count_nonzero(near_restart >= 0)),
        at_skips=int(np.count_nonzero(near_skip >= 0)),
        durations={int(k): int(v) for k, v in zip(lengths, numbers, strict=True)},
        spikes=tuple(spikes),
        not_finite_steps=int(np.count_nonzero(~finite)),
        not_finite=tuple(
            NotFinite(step=int(steps[a]), last_step=int(steps[b]), duration=int(b - a + 1))
            for a, b in zip(bad_first[:_MAX_SPIKES], bad_last[:_MAX_SPIKES], strict=True)
        ),
        growth=growth_of(metric, steps, values, window, threshold) if judged else None,
        grad_norm=gradient,
        param_norm=param_norm_of(steps, norms),
        restarts=tuple(int(step) for step in restarts),
        warnings=tuple(warnings),
    )
    state, verdict = _name_state(analysis)
    return analysis.model_copy(update={"state": state, "verdict": verdict})


def select_steps(curve: Curve, first: int | None, last: int | None) -> Curve:
    """Select the rows of some steps, both ends included; raises RunError if there are none."""
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


def _largest_between(values: Floats, first: Ints, last: Ints) -> Floats:
    """Returns the largest finite value of each range, both ends included; NaN without any."""
    edges = np.column_stack([first, last + 1]).ravel()
    largest: Floats = np.fmax.reduceat(np.append(values, np.nan), edges)[::2]
    return largest


def _finite_column(curve: Curve, metric: str, rows: Flags) -> Floats | None:
    """Returns the finite values of a metric at some rows, NaN for others; None without any."""
    if metric not in curve.columns:
        return None
    values = curve.columns[metric][rows]
    present = np.isfinite(values)
    if metric in curve.absent:
        present &= ~curve.absent[metric][rows]
    return np.where(present, values, np.nan) if present.any() else None


def _steps_after_skips(curve: Curve) -> list[tuple[int, Range]]:
    """Returns the step after each window of skipped batches, and the window."""
    found, skipped, reached = [], 0, 0
    for skip in sorted(curve.skips, key=lambda skip: skip.first):
        skipped += max(0, skip.last - max(skip.first - 1, reached))
        reached = max(reached, skip.last)
        # Batches are counted with the skipped ones, steps without.
        found.append((reached + 1 - skipped, (skip.first, skip.last)))
    return found


def _latest_near(places: Ints, first: Ints, last: Ints) -> Ints:
    """Returns the index of the latest place in each spike or shortly before it; -1: none."""
    if not places.size:
        return np.full(len(first), -1)
    latest = np.searchsorted(places, last, side="right") - 1
    near = (latest >= 0) & (places[np.maximum(latest, 0)] >= first - _NEAR_STEPS)
    return np.where(near, latest, -1)


def _name_state(found: SpikeAnalysis) -> tuple[State, str]:
    """Returns the state of a run and its description, by the other fields of the analysis."""
    # A single high loss lifts the running mean for one window only.
    rising = found.growth is not None and found.growth.longest > 2 * found.window
    state: State = "passing" if found.count else "calm"
    if found.not_finite_steps:
        state = "not_finite"
    elif not found.judged:
        state = "too_short"
    elif rising:
        state = "rising"
    elif found.unreturned or found.longest >= found.window:
        state = "lasting"
    return state, "; ".join(_clauses(found, rising))


def _clauses(found: SpikeAnalysis, rising: bool) -> Iterator[str]:
    if found.not_finite:
        number, first = _steps(found.not_finite_steps), found.not_finite[0].step
        yield f"the {NAMES[found.metric]} is not a finite number at {number}, first at step {first}"
    if not found.judged:
        yield (
            f"{_steps(found.steps)} logged are too few: a spike is tested against the "
            f"{found.window} steps before it"
        )
        return
    yield from _describe_spikes(found)
    growth = found.growth
    if growth is not None and rising:
        yield (
            f"the running mean rose {growth.largest:.3g} above its lowest value (step "
            f"{growth.step}), and was more than {growth.limit:.3g} above it for "
            f"{_steps(growth.longest)} from step {growth.longest_from} on: slow divergence"
        )
    elif growth is not None and found.metric == "grad_norm" and found.grad_norm is not None:
        ratio = found.grad_norm.growth
        if ratio is not None:
            yield f"the running mean never grew to more than {ratio:.3g} times its lowest value"
    elif growth is not None:
        yield f"the running mean never rose more than {growth.largest:.3g} above its lowest value"


def _describe_spikes(found: SpikeAnalysis) -> Iterator[str]:
    count = found.count
    if not count:
        yield f"no spike in {_steps(found.judged)}"
        return
    many = format_plural(count, "spike")
    yield f"{many} in {_steps(found.judged)} ({found.per_1000_steps:.3g} per 1,000)"
    if count == 1:
        yield f"it lasts {_steps(found.longest)}"
    else:
        yield (
            f"{found.one_step:,} of them ({found.one_step_share:.0%}) last one step, the "
            f"longest {_steps(found.longest)}"
        )
    highest = max(found.spikes, key=lambda spike: spike.height)
    yield f"the highest is {highest.height:.3g} above the mean, at step {highest.peak_step}"
    if found.unreturned:
        which = "it" if count == 1 else f"{found.unreturned:,} of them"
        yield f"{which} did not come back to the mean"
    elif found.returned_after_median is not None:
        which = "it came" if count == 1 else "they came"
        after = _steps(round(found.returned_after_median)) + (" (median)" if count > 1 else "")
        yield f"{which} back to the mean after {after}"
    for number, what in ((found.at_restarts, "a restart"), (found.at_skips, "skipped batches")):
        if number:
            yield f"{number:,} {'coincides' if number == 1 else 'coincide'} with {what}"
