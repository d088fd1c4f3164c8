"""Spikes of the loss and of the gradient norm.

The definition is that of AWS's training of HLAT (Llama 2 7B; Fan et al. 2024, arXiv 2404.10630) for
the gradient norm, applied to either. docs/report.md has it: a step whose value is more than the
threshold above the mean of the `window` logged steps before it, spikes included; such steps in a
row are one spike. Steps that are NaN or infinite are in no spike and in no mean.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice

import numpy as np

from slurmllm.analysis.spikes.analysis import (
    MOST_GROWTH,
    NAMES,
    REFERENCES,
    Metric,
    NotFinite,
    Spike,
    SpikeAnalysis,
    SpikeCounts,
    SpikeDefinition,
    State,
    find_stretches,
    first_at_most,
    grad_norm_of,
    growth_of,
    noise_of,
    param_norm_of,
    window_means,
)
from slurmllm.core.errors import RunError, UserError
from slurmllm.core.format import format_plural
from slurmllm.core.metrics.curves import (
    Curve,
    Flags,
    Floats,
    Ints,
    Range,
    argmax,
    median,
    spike_height,
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
    """Find the spikes of a metric; None: of the loss and of the gradient norm, if logged.

    Raises RunError if the curve has no such metric. Of at most `window` steps none is judged.
    """
    if window < 1:
        raise UserError(f"window {window}: a running mean is over 1 step or more, such as 20")
    if not 0 <= threshold < math.inf:
        raise UserError(f"threshold {threshold:g}: a height above the mean, 0 or more, such as 0.1")
    if min_gap < 1:
        raise UserError(f"min-gap {min_gap}: between spikes there are 1 calm step or more")
    logged = [name for name in NAMES if len(curve.series(name)[0])]
    definitions = [
        SpikeDefinition(
            metric=name,
            definition=f"a step whose {NAMES[name]} is more than {threshold:g} above the mean of "
            f"the {window} logged steps before it",
            reference=REFERENCES.get(name),
            window=window,
            threshold=threshold,
            min_gap=min_gap,
        )
        for name in (logged or ["loss"] if metric is None else [metric])
    ]
    # Differences of values near the largest float overflow to infinity, which is correct here.
    with np.errstate(over="ignore", invalid="ignore"):
        first, *of_grad_norm = [_find_spikes(curve, definition) for definition in definitions]
    if not of_grad_norm:
        return first
    warnings = tuple(
        warning for warning in of_grad_norm[0].warnings if warning not in first.warnings
    )
    return first.model_copy(
        update={"grad_norm_spikes": of_grad_norm[0].model_copy(update={"warnings": warnings})}
    )


def _find_spikes(curve: Curve, definition: SpikeDefinition) -> SpikeAnalysis:
    metric = definition.metric
    window = definition.window
    steps, values = curve.series(metric)
    if not len(steps):
        columns = ", ".join(curve.columns) or "nothing"
        raise RunError(
            f"{curve.path} has no {NAMES[metric]}, but {columns}; --tag {metric}=TAG names it in "
            "the log of another framework, --metric chooses between loss and grad_norm"
        )
    means = np.full(len(values), np.nan)
    if len(values) > window:
        # The mean of a window is that before the step after it: the last window precedes none.
        means[window:] = window_means(values, window)[:-1]
    heights = np.where(np.isfinite(values), spike_height(values, means), np.nan)
    spikes = _spikes(curve, means, heights, definition)
    judged = int(np.count_nonzero(np.isfinite(heights)))
    analysis = _analysis(curve, spikes, judged, definition)
    state, verdict = _name_state(analysis)
    warnings = (*curve.warnings, *_warnings(analysis))
    return analysis.model_copy(update={"state": state, "verdict": verdict, "warnings": warnings})


def _analysis(
    curve: Curve, spikes: Sequence[Spike], judged: int, definition: SpikeDefinition
) -> SpikeAnalysis:
    window = definition.window
    metric = definition.metric
    steps, values = curve.series(metric)
    ratios = [spike.grad_norm_ratio for spike in spikes if spike.grad_norm_ratio is not None]
    highest = sorted(spikes, key=lambda spike: -spike.height)[:_MAX_SPIKES]
    rows = np.isin(curve.steps, steps)
    bad = ~np.isfinite(values)
    intervals, frequencies = np.unique(np.diff(steps), return_counts=True)
    stretches = islice(zip(*find_stretches(bad), strict=True), _MAX_SPIKES)
    return SpikeAnalysis(
        **dict(_count_spikes(spikes, judged, steps[-window:])),
        **dict(definition),
        name=curve.name,
        path=str(curve.path),
        kind=curve.kind,
        steps=len(steps),
        judged=judged,
        first_step=steps[0],
        last_step=steps[-1],
        interval=intervals[frequencies.argmax()] if len(intervals) else 1,
        noise=noise_of(values),
        spikes=sorted(highest, key=lambda spike: spike.step),
        not_finite_steps=np.count_nonzero(bad),
        not_finite=[
            NotFinite(step=steps[i], last_step=steps[j], duration=j - i + 1) for i, j in stretches
        ],
        growth=growth_of(metric, steps, values, window, definition.threshold) if judged else None,
        grad_norm=grad_norm_of(steps, _finite_column(curve, "grad_norm", rows), ratios, window),
        param_norm=param_norm_of(steps, _finite_column(curve, "param_norm", rows)),
        restarts=curve.restarts.tolist(),
    )


def _count_spikes(spikes: Sequence[Spike], judged: int, last_window: Ints) -> SpikeCounts:
    durations = Counter(spike.duration for spike in spikes)
    returned = [spike.returned_after for spike in spikes if spike.returned_after is not None]
    inside = sum(spike.duration for spike in spikes)
    count = len(spikes)
    return SpikeCounts(
        count=count,
        per_1000_steps=1000 * count / judged if judged else None,
        inside=inside,
        inside_share=min(1.0, inside / judged) if judged else None,
        one_step=durations[1],
        one_step_share=durations[1] / count if count else None,
        longest=max(durations, default=0),
        highest=max((spike.height for spike in spikes), default=None),
        returned_after_median=median(returned) if returned else None,
        unreturned=sum(s.returned_after is None and s.step < last_window[0] for s in spikes),
        at_restarts=sum(spike.restart is not None for spike in spikes),
        at_skips=sum(spike.skipped is not None for spike in spikes),
        durations=dict(sorted(durations.items())),
    )


def _spikes(
    curve: Curve, means: Floats, heights: Floats, definition: SpikeDefinition
) -> list[Spike]:
    """Return the spikes and what coincides with them.

    `means` and `heights`: running means before each value, and heights above these. [values]
    """
    steps, values = curve.series(definition.metric)
    # NaN compares as false: a step without a mean or a finite loss is in no spike.
    first, last = find_stretches(heights > definition.threshold)
    if first.size:
        separate = first[1:] - last[:-1] - 1 >= definition.min_gap
        first = first[np.append(True, separate)]
        last = last[np.append(separate, True)]
    rows = np.isin(curve.steps, steps)
    grads, losses = (_finite_column(curve, name, rows) for name in ("grad_norm", "loss"))
    above = np.fmax(heights, -np.inf)  # of all, -inf for NaN
    skips = _steps_after_skips(curve)
    at_restart = _latest_near(steps, curve.restarts.tolist(), first, last)
    after_skip = _latest_near(steps, list(skips), first, last)
    spikes = []
    for i, j, restart, skip in zip(
        first.tolist(), last.tolist(), at_restart, after_skip, strict=True
    ):
        peak = i + argmax(above[i : j + 1])
        returned = first_at_most(values, i, means[i])
        spikes.append(
            Spike(
                step=steps[i],
                last_step=steps[j],
                duration=j - i + 1,
                mean=means[i],
                height=heights[peak],
                peak_step=steps[peak],
                value=values[peak],
                loss=None if losses is None else losses[peak],
                returned_after=None if returned is None else returned - i,
                grad_norm_ratio=_grad_norm_ratio(grads, i, j, definition.window),
                restart=restart,
                skipped=None if skip is None else skips[skip],
            )
        )
    return spikes


def _grad_norm_ratio(grads: Floats | None, first: int, last: int, window: int) -> float | None:
    """Return the largest gradient norm of a spike over the median of those before; or None."""
    if grads is None:
        return None
    before = [norm for norm in grads[first - window : first].tolist() if math.isfinite(norm)]
    usual = statistics.median(before) if before else 0.0
    # The step before a spike too: its gradient makes the spike's first loss.
    largest = float(np.fmax.reduce(grads[first - 1 : last + 1]))
    return largest / usual if usual > 0 and math.isfinite(largest / usual) else None


def select_steps(curve: Curve, first: int | None, last: int | None) -> Curve:
    """Select the rows of some steps, both ends included; raises RunError if there are none."""
    if first is None and last is None:
        return curve
    rows = (curve.steps >= (first or 0)) & (curve.steps <= (math.inf if last is None else last))
    if not rows.any():
        span = f"from {first or 0}" + ("" if last is None else f" to {last}")
        raise RunError(
            f"{curve.name} has no steps {span}: its own are {curve.steps[0]} to {curve.steps[-1]}"
        )
    return curve.take(rows)


def _finite_column(curve: Curve, metric: str, rows: Flags) -> Floats | None:
    """Return the finite values of a metric at some rows, NaN for others; None without any."""
    if metric not in curve.columns:
        return None
    values = curve.columns[metric][rows]
    present = np.isfinite(values) & curve.present(metric)[rows]
    return np.where(present, values, np.nan) if present.any() else None


def _steps_after_skips(curve: Curve) -> dict[int, Range]:
    """Return the windows of skipped batches by the step after each."""
    windows = dict[int, Range]()
    skipped = 0
    reached = 0
    for skip in sorted(curve.skips, key=lambda skip: skip.first):
        skipped += max(0, skip.last - max(skip.first - 1, reached))
        reached = max(reached, skip.last)
        # Batches are counted with the skipped ones, steps without.
        windows[reached + 1 - skipped] = (skip.first, skip.last)
    return windows


def _latest_near(steps: Ints, events: Sequence[int], first: Ints, last: Ints) -> list[int | None]:
    """Return the step of the latest event in each spike or shortly before it; None: none."""
    if not events:
        return [None] * len(first)
    places = steps.searchsorted(events)
    latest = places.searchsorted(last, side="right") - 1
    near = (latest >= 0) & (places[np.maximum(latest, 0)] >= first - _NEAR_STEPS)
    return [events[i] if is_near else None for i, is_near in zip(latest, near, strict=True)]


def _warnings(analysis: SpikeAnalysis) -> Iterator[str]:
    metric = analysis.metric
    noise = analysis.noise
    if analysis.interval > 1:
        yield (
            f"one step in {analysis.interval} was logged: window and durations count logged steps, "
            "and spikes between them are not seen"
        )
    # Three standard deviations of the distance of a step from the mean of the window before it
    min_threshold = 3 * noise * math.sqrt(1 + 1 / analysis.window)
    if analysis.threshold < min_threshold:
        option = "" if metric == "loss" else f"--metric {metric} "
        yield (
            f"the {NAMES[metric]} varies by {noise:.2g} from step to step, so most heights above "
            f"{analysis.threshold:g} may be noise; {option}--threshold {min_threshold:.2g} is "
            "above it"
        )
    gradient = analysis.grad_norm
    if metric == "grad_norm" and gradient and (gradient.growth or 0.0) > MOST_GROWTH:
        yield (
            f"the running mean of the gradient norm grew to {gradient.growth:.3g} times its lowest "
            f"value, at step {gradient.growth_step}: more than {MOST_GROWTH:g} times may be the "
            "beginning of a divergence"
        )


def _name_state(analysis: SpikeAnalysis) -> tuple[State, str]:
    # A single high loss lifts the running mean for one window only.
    rising = analysis.growth is not None and analysis.growth.longest > 2 * analysis.window
    state: State = "passing" if analysis.count else "calm"
    if analysis.not_finite_steps:
        state = "not_finite"
    elif not analysis.judged:
        state = "too_short"
    elif rising:
        state = "rising"
    elif analysis.unreturned or analysis.longest >= analysis.window:
        state = "lasting"
    return state, "; ".join(_clauses(analysis, rising))


def _clauses(analysis: SpikeAnalysis, rising: bool) -> Iterator[str]:
    if analysis.not_finite:
        name = NAMES[analysis.metric]
        first = analysis.not_finite[0].step
        number = _steps(analysis.not_finite_steps)
        yield f"the {name} is not a finite number at {number}, first at step {first}"
    if not analysis.judged:
        if finite := analysis.steps - analysis.not_finite_steps:
            yield (
                f"{_steps(finite)} logged are too few: a spike is tested against the "
                f"{analysis.window} steps before it"
            )
        return
    yield from _describe_spikes(analysis)
    growth = analysis.growth
    if not growth:
        return
    if rising:
        yield (
            f"the running mean rose {growth.largest:.3g} above its lowest value (step "
            f"{growth.step}), and was more than {growth.limit:.3g} above it for "
            f"{_steps(growth.longest)} from step {growth.longest_from} on: slow divergence"
        )
    elif analysis.metric == "grad_norm" and analysis.grad_norm:
        ratio = analysis.grad_norm.growth
        if ratio is not None:
            yield f"the running mean never grew to more than {ratio:.3g} times its lowest value"
    else:
        yield f"the running mean never rose more than {growth.largest:.3g} above its lowest value"


def _describe_spikes(analysis: SpikeAnalysis) -> Iterator[str]:
    count = analysis.count
    if not count:
        yield f"no spike in {_steps(analysis.judged)}"
        return
    many = format_plural(count, "spike")
    yield f"{many} in {_steps(analysis.judged)} ({analysis.per_1000_steps:.3g} per 1,000)"
    if count == 1:
        yield f"it lasts {_steps(analysis.longest)}"
    else:
        yield (
            f"{analysis.one_step:,} of them ({analysis.one_step_share:.0%}) last one step, the "
            f"longest {_steps(analysis.longest)}"
        )
    highest = max(analysis.spikes, key=lambda spike: spike.height)
    yield f"the highest is {highest.height:.3g} above the mean, at step {highest.peak_step}"
    if analysis.unreturned:
        which = "it" if count == 1 else f"{analysis.unreturned:,} of them"
        yield f"{which} did not come back to the mean"
    elif analysis.returned_after_median is not None:
        which = "it came" if count == 1 else "they came"
        after = _steps(round(analysis.returned_after_median)) + (" (median)" if count > 1 else "")
        yield f"{which} back to the mean after {after}"
    for number, event in (
        (analysis.at_restarts, "a restart"),
        (analysis.at_skips, "skipped batches"),
    ):
        if number:
            yield f"{number:,} {'coincides' if number == 1 else 'coincide'} with {event}"
