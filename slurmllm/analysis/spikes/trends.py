"""What goes slowly: growth of the loss over its lowest value, the norms' trends."""

from __future__ import annotations

import math

import numpy as np

from slurmllm.analysis.curves import Floats, Ints
from slurmllm.analysis.spikes.analysis import Direction, GradNorm, Growth, ParamNorm
from slurmllm.analysis.spikes.running import stretches, window_means

_NOISE_ERRORS = 10.0  # standard errors of a running mean that noise does not come to
_BLOCKS, _DIRECTION_BLOCKS = 200, 20


def growth_of(steps: Ints, losses: Floats, window: int, threshold: float) -> Growth | None:
    """How far the running mean rose above its lowest value; None without a finite loss."""
    means = window_means(losses, window)
    lowest = np.fmin.accumulate(means)
    rise = means - lowest
    there = np.flatnonzero(np.isfinite(rise))
    if not there.size:
        return None
    at = steps[window - 1 :]
    top = int(there[np.argmax(rise[there])])
    limit = max(threshold, _NOISE_ERRORS * noise_of(losses) / math.sqrt(window))
    first, last = stretches(rise > limit)
    lengths = last - first + 1
    longest = int(np.argmax(lengths)) if lengths.size else None
    return Growth(
        largest=float(rise[top]),
        step=int(at[top]),
        lowest=float(lowest[top]),
        lowest_step=int(at[np.nanargmin(means[: top + 1])]),
        at_end=float(rise[there[-1]]),
        limit=limit,
        longest=0 if longest is None else int(lengths[longest]),
        longest_from=None if longest is None else int(at[first[longest]]),
    )


def noise_of(values: Floats) -> float:
    """Standard deviation from step to step, robust against spikes and without the trend."""
    jumps = np.diff(values[np.isfinite(values)])
    jumps = jumps[np.isfinite(jumps)]
    if not jumps.size:
        return 0.0
    return 1.4826 * float(np.median(np.abs(jumps - np.median(jumps)))) / math.sqrt(2)


def grad_norm_of(steps: Ints, grads: Floats | None, ratios: Floats, window: int) -> GradNorm | None:
    """What the gradient norm did; None where it was not logged.

    Args:
        steps: [n]
        grads: NaN where not known. [n]
        ratios: Of the spikes. [spikes]
        window: Of the running mean.
    """
    if grads is None:
        return None
    known = ratios[np.isfinite(ratios)]
    growth, growth_step = None, None
    if len(grads) >= window:
        means = window_means(grads, window)
        lowest = np.fmin.accumulate(means)
        grown = np.divide(means, lowest, out=np.full(len(means), np.nan), where=lowest > 0)
        if np.isfinite(grown).any():
            top = int(np.nanargmax(np.where(np.isfinite(grown), grown, np.nan)))
            growth, growth_step = float(grown[top]), int(steps[window - 1 + top])
    return GradNorm(
        ratio_median=float(np.median(known)) if known.size else None,
        ratio_largest=float(known.max()) if known.size else None,
        doubled=int(np.count_nonzero(known > 2)),
        growth=growth,
        growth_step=growth_step,
    )


def param_norm_of(steps: Ints, norms: Floats | None) -> ParamNorm | None:
    """The trend of the parameter norm; None where it was not logged."""
    if norms is None:
        return None
    there = np.isfinite(norms)
    steps, norms = steps[there], norms[there]
    half = len(norms) // 2
    first, last = float(norms[0]), float(norms[-1])
    return ParamNorm(
        first=first,
        last=last,
        ratio=last / first if first else None,
        slope=_slope(steps[half:], norms[half:]),
        direction=_direction(norms[half:]),
    )


def _slope(steps: Ints, norms: Floats) -> float | None:
    """Per 1,000 steps, after Theil and Sen: lone steps that stand out do not turn it."""
    if len(norms) < 2:
        return None
    at = _block_medians(steps.astype(np.float64), _BLOCKS)
    medians = _block_medians(norms, _BLOCKS)
    i, j = np.triu_indices(len(at), 1)
    slope = 1000.0 * float(np.median((medians[j] - medians[i]) / (at[j] - at[i])))
    return slope if math.isfinite(slope) else None


def _direction(norms: Floats) -> Direction | None:
    if len(norms) < 2:
        return None
    changes = np.diff(_block_medians(norms, _DIRECTION_BLOCKS))
    if (changes > 0).all():
        return "rising"
    return "falling" if (changes < 0).all() else "neither"


def _block_medians(values: Floats, blocks: int) -> Floats:
    parts = np.array_split(values, min(blocks, len(values)))
    return np.array([np.median(part) for part in parts])
