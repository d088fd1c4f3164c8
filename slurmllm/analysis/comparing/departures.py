"""Whether two curves part, or differ as two runs of one training do: by noise.

What is judged is the signed relative difference r = (b - a) / max(|a|, |b|) at the points compared,
against a tolerance τ. Single points beyond τ are what noise brings; the curves differ where

- **lasting**: the mean of r over a window of 8 to 1,024 points is beyond τ by more than the
  window's own statistical error. It is a mean over medians of three neighbours, which single
  points do not move. The error is what neighbouring windows differ by, so that slow noise counts.
  The departure lasts as long as means are beyond τ/2.
- **noise**: r scatters by more than τ from point to point: the curves do not lie on each other.
- **outlier**: points are too far off to belong to the noise: beyond τ, and either 10 times the
  scatter around them and 6 times as far as the fifth furthest of all, or three and more of them 24
  times the scatter, or one 100 times.

Of curves that are otherwise the same the scatter is 0, and so one point beyond τ is a departure.
Fewer than 20 points do not tell noise: there, each point beyond τ is a departure.

The constants are set by simulation (tools/benchmarks/departures.py): under one false alarm in a
hundred with noise of up to τ/3, normal and heavy-tailed, white and slow, 50 to 20,000 points.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from statistics import NormalDist
from typing import Literal

import numpy as np

from slurmllm.analysis.comparing.onset import emergence
from slurmllm.analysis.comparing.scatter import TO_SIGMA, Scatter, scatter
from slurmllm.analysis.curves import Flags, Floats, Ints

Rule = Literal["pointwise", "lasting", "noise", "outlier"]

FEW = 20
SCALES = (8, 16, 32, 64, 128, 256, 512, 1024)
# From so many points on the shortest windows are left out: more points, more bursts of noise.
_LONG = (256, 4096)
# That noise alone takes some window of a curve beyond τ plus its error.
_CHANCE = 1e-3
# Blocks and scatter over τ: the fewer points, the less certain an estimate.
_NOISY = ((1, 1.75), (8, 1.25))
_NOISY_ALL = 1.1
_LONE, _OF_FIFTH, _SEVERAL, _CERTAIN = 10.0, 6.0, 24.0, 100.0


@dataclass(frozen=True)
class Stretch:
    """Points that are a lasting departure.

    Attributes:
        first: Place of the first one.
        last: Place of the last one.
        size: Median of |r|.
    """

    first: int
    last: int
    size: float


@dataclass(frozen=True)
class Judgement:
    """What came out.

    Attributes:
        rule: That calls it a departure; None: noise at most.
        onset: Place at which the curves begin to part; None where they do not.
        lasting: The first lasting departure, if there is one.
        noise: Median scatter; None of fewer than 3 points.
    """

    rule: Rule | None = None
    onset: int | None = None
    lasting: Stretch | None = None
    noise: float | None = None


@dataclass(frozen=True)
class _Found:
    """A rule fired: points from `first` to before `end` show it; it holds `since` … `last`."""

    rule: Rule
    first: int
    end: int
    since: int = 0
    last: int | None = None


def judge(r: Floats, tolerance: float, rough: float = 0.0) -> Judgement:
    """Judge relative differences.

    Args:
        r: Signed and finite. [points]
        tolerance: τ.
        rough: Scatter that single points have on top, for not being measured where they are.
    """
    spread = scatter(r) if len(r) > 2 else None
    noise = None if spread is None else spread.median
    beyond = np.abs(r) > tolerance + 3 * rough
    if not (np.abs(r) > tolerance).any():
        return Judgement(noise=noise)
    if spread is None or len(r) < FEW:
        if not beyond.any():
            return Judgement(noise=noise)
        return Judgement("pointwise", int(np.argmax(beyond)), _row(r, beyond), noise)
    found = [
        one
        for one in (
            _noisy(len(r), spread, tolerance + rough),
            _lasting(r, spread, tolerance),
            _outlier(r, spread, beyond),
        )
        if one is not None
    ]
    if not found:
        return Judgement(noise=noise)
    earliest = min(found, key=lambda one: one.end)
    onset = emergence(r, earliest.first, earliest.end)
    stays = [one for one in found if one.last is not None]
    stretch = None
    if stays:
        longest = min(stays, key=lambda one: one.since)
        near = abs(longest.since - onset) <= longest.end - longest.first
        first = onset if near else longest.since
        last = max(one.last or 0 for one in stays if one.since <= (longest.last or 0) + 1)
        inside = r[first : last + 1]
        stretch = Stretch(first, last, float(np.median(np.abs(inside))))
    rule = found[0].rule
    if stretch is not None and {one.rule for one in found} >= {"noise", "lasting"}:
        around = float(np.median(spread.at(np.arange(stretch.first, stretch.last + 1))))
        rule = "lasting" if abs(np.median(inside)) > around else "noise"
    return Judgement(rule, onset, stretch, noise)


def _row(r: Floats, beyond: Flags) -> Stretch | None:
    """Of few points: the first three in a row that are beyond τ."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], beyond.astype(np.int8), [0]))))
    for first, end in edges.reshape(-1, 2):
        if end - first >= 3:
            return Stretch(int(first), int(end - 1), float(np.median(np.abs(r[first:end]))))
    return None


def _lasting(r: Floats, spread: Scatter, tolerance: float) -> _Found | None:
    calm = r.copy()
    low, high = np.minimum(r[:-1], r[1:]), np.maximum(r[:-1], r[1:])
    calm[1:-1] = np.maximum(low[:-1], np.minimum(high[:-1], r[2:]))
    total = np.concatenate(([0.0], np.cumsum(calm)))
    shortest = SCALES[sum(len(r) >= points for points in _LONG)]
    scales = [width for width in SCALES if shortest <= width <= max(shortest, len(r) // 8)]
    begins = {width: np.arange(0, len(r) - width + 1, width // 4) for width in scales}
    z = _quantile(_CHANCE / sum(len(places) for places in begins.values()))
    error = 0.0
    first: _Found | None = None
    covered = np.zeros(len(r) + 1, dtype=np.int64)
    for width in reversed(scales):  # a mean of fewer points is no more certain than one of more
        places = begins[width]
        means = (total[places + width] - total[places]) / width
        sigma = spread.at(places + width // 2)
        error = max(error, _error(means, sigma, width))
        size = np.abs(means)
        stays = places[size > tolerance / 2]
        covered += np.bincount(stays, minlength=len(r) + 1)
        covered -= np.bincount(stays + width, minlength=len(r) + 1)
        hits = places[size > tolerance + z * error * sigma]
        if not len(hits):
            continue
        if first is None or hits[0] + width < first.end:
            first = _Found("lasting", int(hits[0]), int(hits[0] + width))
    if first is None:
        return None
    inside = np.cumsum(covered[:-1]) > 0
    before, after = inside[: first.first + 1][::-1], inside[first.first :]
    since = 0 if before.all() else first.first + 1 - int(np.argmin(before))
    last = len(r) - 1 if after.all() else first.first + int(np.argmin(after)) - 1
    return _Found("lasting", first.first, first.end, since, last)


def _error(means: Floats, sigma: Floats, width: int) -> float:
    """Standard error of a window's mean over the scatter around it.

    1 / √width for white noise, more for slow noise, which the scatter from point to point does not
    show: that is measured between neighbouring windows where there are enough of them.

    Args:
        means: Of windows, each a quarter of the width after the one before. [windows]
        sigma: Scatter around them. [windows]
        width: Points of a window.
    """
    white = 1 / np.sqrt(width)
    there = sigma[4:-4] > 0
    if np.count_nonzero(there) < 24:
        return float(2 * white)
    # Against the mean of the windows before and after: a trend is no noise.
    ratios = np.abs(means[4:-4] - (means[8:] + means[:-8]) / 2)[there] / sigma[4:-4][there]
    return float(max(white, TO_SIGMA * np.median(ratios) / np.sqrt(1.5)))


@cache
def _quantile(chance: float) -> float:
    """Of the normal distribution: beyond it on either side lies this share."""
    return NormalDist().inv_cdf(1 - chance / 2)


def _noisy(count: int, spread: Scatter, tolerance: float) -> _Found | None:
    sigma, size = spread.sigma, spread.size
    noisy = np.zeros(len(sigma), dtype=bool)
    for blocks, factor in _NOISY:
        if len(sigma) < blocks:
            continue
        total = np.concatenate(([0.0], np.cumsum(sigma)))
        hits = np.flatnonzero(total[blocks:] - total[:-blocks] > factor * tolerance * blocks)
        for block in range(blocks):
            noisy[hits + block] |= sigma[hits + block] > tolerance
    if spread.median > _NOISY_ALL * tolerance:
        noisy |= sigma > tolerance
    if not noisy.any():
        return None
    first = int(np.argmax(noisy))
    after = noisy[first:]
    end = len(sigma) if after.all() else first + int(np.argmin(after))
    last = count - 1 if end == len(sigma) else end * size - 1
    return _Found("noise", first * size, min((first + 1) * size, count), first * size, last)


def _outlier(r: Floats, spread: Scatter, beyond: Flags) -> _Found | None:
    places = np.flatnonzero(beyond)
    if not len(places):
        return None
    blocks = spread.block(np.arange(len(r)))
    edge = (len(spread.sigma) - 1) * spread.size
    middles = np.append(
        np.median(r[:edge].reshape(-1, spread.size), axis=1) if edge else (), np.median(r[edge:])
    )
    off = np.abs(r - middles[blocks])
    fifth = float(np.partition(off, -5)[-5])
    usual = np.append(
        np.median(off[:edge].reshape(-1, spread.size), axis=1) if edge else (),
        np.median(off[edge:]),
    )
    # Slow noise scatters less from point to point than over a block.
    sigma = np.maximum(spread.sigma, TO_SIGMA * usual)[blocks[places]]
    off = off[places]
    lone = (off > _LONE * sigma) & (off > _OF_FIFTH * fifth)
    several = off > _SEVERAL * sigma
    flagged = lone | (off > _CERTAIN * sigma)
    if np.count_nonzero(several) >= 3:
        flagged |= several
    hits: Ints = places[flagged]
    return _Found("outlier", int(hits[0]), int(hits[0]) + 1) if len(hits) else None
