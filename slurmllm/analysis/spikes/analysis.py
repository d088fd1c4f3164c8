"""The analysis of a run's spikes: the keys of `slurmllm spikes --json`, and trends.

A step is one that was logged: of a log with every tenth step, windows and durations count those.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

from slurmllm.core.format import Texts
from slurmllm.core.metrics.curves import Flags, Floats, Ints, Range, SourceKind, argmax, median
from slurmllm.core.run.records import Record

# passing: all returned to the mean; lasting: one did not, or went on for a whole window;
# rising: the running mean stays above its lowest value; not_finite: NaN or infinite.
State = Literal["too_short", "calm", "passing", "lasting", "rising", "not_finite"]
Direction = Literal["rising", "falling", "neither"]
Metric = Literal["loss", "grad_norm"]
NAMES: dict[Metric, str] = {"loss": "loss", "grad_norm": "gradient norm"}
# Shown with the metric that it is of, and with no other.
REFERENCES: dict[Metric, str] = {"grad_norm": "AWS, HLAT (Llama 2 7B on trn1), 2024: over 86%"}
SHOWN = 10  # spikes in a table
MOST_GROWTH = 3.0  # of the gradient norm's running mean: HLAT's post takes more as a warning

_NOISE_ERRORS = 10.0  # standard errors of a running mean that noise does not reach
# Blocks of the last half of a run, for the slope and the direction of the parameter norm
_BLOCKS = 200
_DIRECTION_BLOCKS = 20
_SIGMA_OF_MEDIAN = 1.4826  # median of |x| of a normal x → its standard deviation


class Spike(Record):
    """Steps in a row whose metric is more than the threshold above the running mean before each."""

    step: int  # its first
    last_step: int
    duration: int  # logged steps from the first to the last
    mean: float  # running mean before its first step
    height: float  # largest value above the running mean of the same step
    peak_step: int  # the step that has it
    value: float  # of the metric at that step
    loss: float | None  # of that step; None: not logged
    # Logged steps from its first to one whose value is no more than `mean`; None: none is.
    returned_after: int | None
    # Largest gradient norm, from the step before it to its last / median over the window before
    grad_norm_ratio: float | None
    restart: int | None  # step of a restart in it or shortly before it
    skipped: Range | None  # batches skipped in it or shortly before it


class NotFinite(Record):
    """Steps in a row whose metric is NaN or infinite; no spike."""

    step: int  # the first
    last_step: int
    duration: int


class Growth(Record):
    """How far the running mean rose above its lowest value so far."""

    largest: float  # running mean - its lowest value before
    step: int  # step of that
    lowest: float  # the lowest value before that step
    lowest_step: int
    at_end: float  # at the curve's last finite step
    # What noise alone does not reach: the threshold (gradient norm: twice the lowest value), or
    # ten standard errors of the running mean if those are larger
    limit: float
    longest: int  # most logged steps in a row with more than the limit
    longest_from: int | None  # their first; None without any


class GradNorm(Record):
    """The gradient norm, at spikes and over the run."""

    ratio_median: float | None  # of the spikes' ratios
    ratio_largest: float | None
    doubled: int  # spikes with a ratio above 2
    growth: float | None  # largest running mean / its lowest value so far
    growth_step: int | None


class ParamNorm(Record):
    """The trend of the parameter norm."""

    first: float
    last: float
    ratio: float | None  # last / first
    # Per 1,000 steps over the last half: median of the slopes between all pairs of up to 200
    # block medians (Theil and Sen)
    slope: float | None
    direction: Direction | None  # of the second half, if all its block medians follow it


class SpikeDefinition(Record):
    """What counts as a spike."""

    metric: Metric = "loss"
    definition: str = ""  # of a spike, with its figures
    reference: str | None = None  # published share of one-step spikes
    window: int  # logged steps of the running mean
    threshold: float  # above the running mean
    min_gap: int  # calm steps between two spikes


class LoggedSteps(Record):
    """The curve that was searched, and its steps that have the metric."""

    name: str
    path: str
    kind: SourceKind
    steps: int  # with the metric
    judged: int  # steps tested for spikes: finite, with a full window before them
    first_step: int
    last_step: int
    interval: int  # usual distance between two logged steps
    restarts: tuple[int, ...]  # steps at which another attempt takes over
    warnings: Texts = ()
    plot: str | None = None  # path of the picture


class SpikeCounts(Record):
    """How many spikes there are, how long they last, and with what they coincide."""

    count: int  # number of spikes
    per_1000_steps: float | None
    inside: int  # steps inside spikes
    inside_share: float | None  # of the steps judged
    one_step: int  # spikes that last one step
    one_step_share: float | None  # of the spikes
    longest: int  # duration of the longest spike; 0 without any
    highest: float | None  # largest height
    returned_after_median: float | None  # over the spikes that returned
    unreturned: int  # spikes without a return, a window or more later
    at_restarts: int  # spikes that coincide with a restart
    at_skips: int  # spikes that coincide with skipped batches
    durations: dict[int, int]  # duration → number of spikes, shortest first


class SpikeAnalysis(SpikeDefinition, LoggedSteps, SpikeCounts):
    """The spikes of one run in one metric."""

    state: State = "calm"
    verdict: str = ""
    noise: float  # standard deviation from step to step, robust
    spikes: tuple[Spike, ...]  # by step; of more than 1,000 the highest
    not_finite_steps: int
    not_finite: tuple[NotFinite, ...]  # the first 1,000
    growth: Growth | None
    grad_norm: GradNorm | None  # None: not logged
    param_norm: ParamNorm | None  # None: not logged
    # The same of the gradient norm, next to that of the loss
    grad_norm_spikes: SpikeAnalysis | None = None

    @property
    def by_metric(self) -> tuple[SpikeAnalysis, ...]:
        """This analysis, and that of the gradient norm if there is one."""
        return (self, self.grad_norm_spikes) if self.grad_norm_spikes else (self,)

    def highest_spikes(self) -> tuple[Texts, list[Texts]]:
        """Return headings and rows of a table of the highest spikes, highest first."""
        ratio = "grad norm" if self.metric == "loss" else "ratio"
        headings = (
            "step",
            "steps",
            "above mean",
            NAMES[self.metric],
            "back after",
            ratio,
            "coincides",
        )
        rows: list[Texts] = []
        for spike in sorted(self.spikes, key=lambda spike: (-spike.height, spike.step))[:SHOWN]:
            coincident = [] if spike.restart is None else [f"restart at {spike.restart}"]
            if spike.skipped:
                coincident.append(f"batches {spike.skipped[0]}–{spike.skipped[1]} skipped")
            rows.append(
                (
                    str(spike.step),
                    str(spike.duration),
                    f"{spike.height:.4g}",
                    f"{spike.value:.4g}",
                    "never" if spike.returned_after is None else str(spike.returned_after),
                    "-" if spike.grad_norm_ratio is None else f"× {spike.grad_norm_ratio:.3g}",
                    ", ".join(coincident) or "-",
                )
            )
        return headings, rows


def growth_of(metric: Metric, steps: Ints, values: Floats, window: int, threshold: float) -> Growth:
    """Measure how far the running mean, finite somewhere, rose above its lowest value."""
    means = window_means(values, window)
    # fmin, not minimum: a window without a finite value has no mean (NaN).
    lowest = np.fmin.accumulate(means)
    rise = means - lowest
    finite = np.flatnonzero(np.isfinite(rise))
    ends = steps[window - 1 :]
    top = finite[rise[finite].argmax()]
    # The standard error of a mean of `window` steps is noise / √window.
    noise = _NOISE_ERRORS * noise_of(values) / math.sqrt(window)
    # A gradient norm grows by itself, as the loss falls: only a multiple is a sign.
    base = lowest * (MOST_GROWTH - 1) if metric == "grad_norm" else np.full_like(lowest, threshold)
    limit = np.fmax(base, noise)
    first, last = find_stretches(rise > limit)
    lengths = last - first + 1
    return Growth(
        largest=rise[top],
        step=ends[top],
        lowest=lowest[top],
        lowest_step=ends[np.nanargmin(means[: top + 1])],
        at_end=rise[finite[-1]],
        limit=limit[top],
        longest=lengths.max(initial=0),
        longest_from=ends[first[argmax(lengths)]] if lengths.size else None,
    )


def noise_of(values: Floats) -> float:
    """Return the standard deviation from step to step, robust against spikes and trends."""
    # The difference of two steps has twice the variance of one.
    jumps = np.diff(values[np.isfinite(values)])
    jumps = jumps[np.isfinite(jumps)]
    if not jumps.size:
        return 0.0
    return _SIGMA_OF_MEDIAN * median(abs(jumps - np.median(jumps))) / math.sqrt(2)


def grad_norm_of(
    steps: Ints, grads: Floats | None, ratios: Sequence[float], window: int
) -> GradNorm | None:
    """Describe the gradient norm (NaN if unknown [n]) and its ratios at spikes."""
    if grads is None:
        return None
    growth = None
    growth_step = None
    if len(grads) >= window:
        means = window_means(grads, window)
        lowest = np.fmin.accumulate(means)
        grown = means / np.where(lowest > 0, lowest, np.nan)
        grown[~np.isfinite(grown)] = 0.0
        if grown.any():
            top = argmax(grown)
            growth = grown[top]
            growth_step = steps[window - 1 + top]
    return GradNorm(
        ratio_median=median(ratios) if ratios else None,
        ratio_largest=max(ratios, default=None),
        doubled=sum(ratio > 2 for ratio in ratios),
        growth=growth,
        growth_step=growth_step,
    )


def param_norm_of(steps: Ints, norms: Floats | None) -> ParamNorm | None:
    if norms is None:
        return None
    finite = np.isfinite(norms)
    steps = steps[finite]
    norms = norms[finite]
    first = norms[0]
    last = norms[-1]
    half = len(norms) // 2
    steps = steps[half:]
    norms = norms[half:]
    slope: float | None = None
    direction: Direction | None = None
    if len(norms) > 1:
        # The slope after Theil and Sen, which single outliers do not change
        block_steps = _block_medians(steps.astype(np.float64), _BLOCKS)
        medians = _block_medians(norms, _BLOCKS)
        i, j = np.triu_indices(len(block_steps), 1)
        slope = 1000.0 * median((medians[j] - medians[i]) / (block_steps[j] - block_steps[i]))
        changes = np.diff(_block_medians(norms, _DIRECTION_BLOCKS))
        falling: Direction = "falling" if (changes < 0).all() else "neither"
        direction = "rising" if (changes > 0).all() else falling
    return ParamNorm(
        first=first,
        last=last,
        ratio=last / first if first else None,
        slope=slope if slope is not None and math.isfinite(slope) else None,
        direction=direction,
    )


def _block_medians(values: Floats, blocks: int) -> Floats:
    parts = np.array_split(values, min(blocks, len(values)))
    return np.array([np.median(block) for block in parts])


def window_means(values: Floats, window: int) -> Floats:
    """Return the means of the finite ones among each `window` (1 to n) of n values in a row.

    By their window's first value; NaN without a finite value. [n - window + 1]
    """
    # Not by differences of a cumulative sum: one huge value would spoil all means after it.
    finite = np.isfinite(values)
    ones = np.ones(window)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        sums = np.convolve(np.where(finite, values, 0.0), ones, "valid")
        means: Floats = sums / np.convolve(finite, ones, "valid")
    return means


def first_at_most(values: Floats, place: int, limit: float) -> int | None:
    """Find the first place, from `place` on, with a value of no more than `limit`; None: none."""
    width = 16  # most are near, so that the searched stretches grow
    while place < len(values):
        hits = np.flatnonzero(values[place : place + width] <= limit)
        if hits.size:
            return place + int(hits[0])
        place += width
        width *= 2
    return None


def find_stretches(flags: Flags) -> tuple[Ints, Ints]:
    """Return first and last place of each stretch of set flags. [stretches], [stretches]"""
    edges = np.diff(np.concatenate([[False], flags, [False]]).astype(np.int8))
    return np.flatnonzero(edges == 1), np.flatnonzero(edges == -1) - 1
