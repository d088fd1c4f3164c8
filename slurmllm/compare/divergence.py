"""Detects whether two curves diverge, or differ only by noise, as two runs of one training do.

The input is the signed relative difference r = (b - a) / max(|a|, |b|) at the points compared,
against a tolerance τ. Noise takes single points beyond τ. The curves differ by one of these rules:

- **lasting**: the mean of r over a window of 8 to 1,024 points, and √points at least, is beyond τ
  by more than the window's own statistical error. It is a mean over medians of three neighbours,
  which single points do not move, and stays beyond without what few points have to themselves: a
  shock that noise takes points to forget is none. The error is what neighbouring windows differ by,
  so that slow noise counts; of a window of less than three independent values it is more. The
  departure lasts as long as means are beyond τ/2.
- **noise**: r scatters by more than τ from point to point: the curves do not coincide.
- **outlier**: points are too far off to belong to the noise: beyond τ, 10 times the scatter
  around them, and further than the tail of the noise goes (statistics.extrapolated).

If the curves are otherwise the same the scatter is 0, and one point beyond τ is a departure.
Fewer than 20 points cannot show noise: then each point beyond τ is a departure.

The constants are set by simulation (tools/benchmarks/departures --noise): at most one false alarm
in a hundred with noise of up to τ/3, from normal to Student's t with 3 degrees of freedom, white
and slow, 50 to 20,000 points.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import comb
from statistics import NormalDist
from typing import Literal

import numpy as np

from slurmllm.compare.statistics import (
    TO_SIGMA,
    Scatter,
    extrapolated,
    find_onset,
    largest,
    medians_of_three,
    scatter,
)
from slurmllm.metrics.curves import Flags, Floats, Ints

Rule = Literal["pointwise", "lasting", "noise", "outlier"]

FEW = 20
SCALES = (8, 16, 32, 64, 128, 256, 512, 1024)
# Probability that noise alone takes some window of a curve beyond τ plus its error
_CHANCE = 1e-3
# Blocks and scatter over τ: the fewer points, the less certain an estimate.
_NOISY = ((1, 1.75), (8, 1.25))
_NOISY_ALL = 1.1
# Limit of a single point, in multiples of what a window's mean needs
_WINSOR = 1.5
# Values that a window must hold, neighbours that are alike counted as one.
_INDEPENDENT = 3.0
# Number of windows, each a quarter after the last, from which the error can be estimated
_TOLD = 24
# Points around an outlier scatter by less than a tenth of it.
_OFF = 10.0
# Points that one shock may take far off
_SHOCK = 16
# Number of the furthest points among which outliers are searched
_RANKED = 512


@dataclass(frozen=True)
class Stretch:
    """Points that are a lasting departure."""

    first: int  # index
    last: int  # index, included
    size: float  # median of |r|


@dataclass(frozen=True)
class DivergenceResult:
    """Result of the detection."""

    rule: Rule | None = None  # that applies; None: noise at most
    onset: int | None = None  # index of the point at which the curves begin to diverge
    lasting: Stretch | None = None  # the first lasting departure
    noise: float | None = None  # median scatter; None with fewer than 3 points


@dataclass(frozen=True)
class _Found:
    """A rule fired: points from `first` to before `end` show it; it holds `since` … `last`."""

    rule: Rule
    first: int
    end: int
    since: int = 0
    last: int | None = None


def detect_divergence(r: Floats, tolerance: float, rough: float = 0.0) -> DivergenceResult:
    """Detect a divergence of signed, finite relative differences r [points].

    `rough` is the additional scatter of single points if one of the curves is interpolated.
    """
    spread = scatter(r) if len(r) > 2 else None
    noise = None if spread is None else spread.median
    beyond = np.abs(r) > tolerance + 3 * rough
    if not (np.abs(r) > tolerance).any():
        return DivergenceResult(noise=noise)
    if spread is None or len(r) < FEW:
        if not beyond.any():
            return DivergenceResult(noise=noise)
        # Of few points the first three in a row beyond τ are a lasting departure.
        edges = np.flatnonzero(np.diff(np.concatenate(([0], beyond.astype(np.int8), [0]))))
        rows = [(int(a), int(b)) for a, b in edges.reshape(-1, 2) if b - a >= 3]
        of_few = [Stretch(a, b - 1, float(np.median(np.abs(r[a:b])))) for a, b in rows[:1]]
        return DivergenceResult(
            "pointwise", int(np.argmax(beyond)), next(iter(of_few), None), noise
        )
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
        return DivergenceResult(noise=noise)
    earliest = min(found, key=lambda one: one.end)
    onset = find_onset(r, earliest.first, earliest.end)
    stays = [one for one in found if one.last is not None]
    stretch = None
    if stays:
        longest = min(stays, key=lambda one: one.since)
        last = max(one.last or 0 for one in stays if one.since <= (longest.last or 0) + 1)
        near = longest.since - (longest.end - longest.first) <= onset <= last
        first = onset if near else longest.since
        inside = r[first : last + 1]
        stretch = Stretch(first, last, float(np.median(np.abs(inside))))
    rule = found[0].rule
    if stretch is not None and {one.rule for one in found} >= {"noise", "lasting"}:
        around = float(np.median(spread.at(np.arange(stretch.first, stretch.last + 1))))
        rule = "lasting" if abs(np.median(inside)) > around else "noise"
    return DivergenceResult(rule, onset, stretch, noise)


def _lasting(r: Floats, spread: Scatter, tolerance: float) -> _Found | None:
    calm = medians_of_three(r)
    total = np.concatenate(([0.0], np.cumsum(calm)))
    shortest = max(width for width in SCALES if width**2 <= max(len(r), SCALES[0] ** 2))
    scales = [width for width in SCALES if shortest <= width <= max(shortest, len(r) // 8)]
    # First points of windows, a quarter of the width apart; the last window ends with the curve.
    begins = {
        width: np.union1d(np.arange(0, len(r) - width + 1, width // 4), [len(r) - width])
        for width in scales
    }
    chance = _CHANCE / sum(len(places) for places in begins.values())
    z = NormalDist().inv_cdf(1 - chance / 2)
    middles = begins[scales[-1]] + scales[-1] // 2
    single = _error(r[middles], spread.at(middles), 1)
    covered = np.zeros(len(r) + 1, dtype=np.int64)
    error = 0.0
    first: _Found | None = None
    for width in reversed(scales):  # a mean of fewer points is no more certain than one of more
        places = begins[width]
        means = (total[places + width] - total[places]) / width
        sigma = spread.at(places + width // 2)
        error = max(error, _error(means, sigma, width))
        independent = (single / error) ** 2
        few = 1.0 if width == scales[-1] else max(1.0, _INDEPENDENT / independent)
        size = np.abs(means)
        stays = places[size > tolerance / 2]
        covered += np.bincount(stays, minlength=len(r) + 1)
        covered -= np.bincount(stays + width, minlength=len(r) + 1)
        needed = tolerance + z * few * error * sigma
        hits = np.flatnonzero(size > needed)
        # Winsorized means (Tukey), to which no point adds more than a limit
        most = (_WINSOR * needed[hits] + 3 * sigma[hits])[:, None]
        inside = np.lib.stride_tricks.sliding_window_view(calm, width)[places[hits]]
        cut_means = np.abs(np.clip(inside, -most, most).mean(axis=1))
        hits = places[hits[cut_means >= needed[hits]]]
        if not len(hits):
            continue
        if first is None or hits[0] + width < first.end:
            first = _Found("lasting", int(hits[0]), int(hits[0] + width))
    if first is None:
        return None
    departed = np.cumsum(covered[:-1]) > 0
    before, after = departed[: first.first + 1][::-1], departed[first.first :]
    since = 0 if before.all() else first.first + 1 - int(np.argmin(before))
    last = len(r) - 1 if after.all() else first.first + int(np.argmin(after)) - 1
    return _Found("lasting", first.first, first.end, since, last)


def _error(means: Floats, sigma: Floats, width: int) -> float:
    """Standard error of the means of windows [windows] over the scatter around each [windows].

    1 / √width for white noise, more for slow noise, which the scatter from point to point does not
    show: that is measured between neighbouring windows if there are enough of them. A window begins
    a quarter of the width after the one before.
    """
    white = 1 / np.sqrt(width)
    there = sigma[4:-4] > 0
    if np.count_nonzero(there) < _TOLD:
        return float(2 * white)
    # Against the mean of the windows before and after: a trend is no noise.
    ratios = np.abs(means[4:-4] - (means[8:] + means[:-8]) / 2)[there] / sigma[4:-4][there]
    return float(max(white, TO_SIGMA * np.median(ratios) / np.sqrt(1.5)))


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
    usual = np.append(
        np.median(off[:edge].reshape(-1, spread.size), axis=1) if edge else (),
        np.median(off[edge:]),
    )
    # Slow noise scatters less from point to point than over a block.
    sigma = np.maximum(spread.sigma, TO_SIGMA * usual)[blocks[places]]
    limit = _limit(off)
    off = off[places]
    flagged = (off > _OFF * sigma) & (off > limit)
    hits: Ints = places[flagged]
    return _Found("outlier", int(hits[0]), int(hits[0]) + 1) if len(hits) else None


def _limit(off: Floats) -> float:
    """Returns a limit that noise does not exceed; infinite if all points are noise.

    Of distances from the noise's middle the furthest is compared with the fifth furthest. Several
    outliers hide each other, so the fourth is also compared with the seventeenth, and so on.
    """
    top = largest(off, _RANKED)
    limit, several = np.inf, 1
    while 8 * several <= len(off) and 8 * several <= _RANKED:
        shocks = max(1, several // _SHOCK)
        odds = comb(4 * shocks, shocks) / _CHANCE
        far = extrapolated(top, len(off), 4 * several, odds, shocks)
        if top[several - 1] > far:
            limit = min(limit, far)
        several *= 4
    return limit
