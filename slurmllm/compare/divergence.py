"""Detection of a divergence of two curves, as opposed to noise.

The input is the signed relative difference r = (b - a) / max(|a|, |b|) at the points compared,
against a tolerance τ. Noise takes single points beyond τ. The rules are those of docs/compare.md:

- **lasting**: a mean of r is beyond τ by more than its own statistical error. Tested are the mean
  over all points, the signed ranks of r - τ, and means over windows of medians of three neighbours,
  whose error is what neighbouring windows differ by. After a bit-identical beginning nothing is
  noise: a mean of |r| over 8 points beyond τ lasts.
- **noise**: r scatters by more than τ from point to point, and the curves share the noise of their
  batches; else such scatter leaves them equivalent.
- **outlier**: points too far off to belong to the noise.
- **pointwise**: of few points, single ones beyond τ.

The constants are set by simulation (tools/benchmarks/departures --noise): at most one false alarm
in a hundred with noise of up to τ/3, from normal to Student's t with 3 degrees of freedom, white
and slow, 50 to 20,000 points.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import comb
from statistics import NormalDist
from typing import Literal, NamedTuple

import numpy as np

from slurmllm.compare.statistics import (
    TO_SIGMA,
    Scatter,
    autocorrelation,
    extrapolated,
    find_onset,
    largest,
    medians_of_three,
    scatter,
    signed_rank,
    t_quantile,
)
from slurmllm.metrics.curves import Flags, Floats

Rule = Literal["pointwise", "lasting", "noise", "outlier"]

FEW = 20
# Likewise of the mean over all points, and of the signed ranks, if the bias is τ
_CHANCE_OF_MEAN = 5e-3
_CHANCE_OF_RANKS = 1e-2
_FEWEST = 5  # points of which a mean is tested
IDENTICAL = 5  # points with the same bits, after which nothing is noise
_CHANGED = 8  # points after these whose mean counts
# Shared noise of the curves above which scatter is not independent
_SHARED = 0.5
SCALES = (8, 16, 32, 64, 128, 256, 512, 1024)
_CHANCE = 1e-3  # probability that noise alone takes some window of a curve beyond τ plus its error
# Blocks and scatter over τ: the fewer points, the less certain an estimate.
_NOISY = ((1, 1.75), (8, 1.25))
_NOISY_ALL = 1.1
_WINSOR = 1.5  # limit of a single point, in multiples of what a window's mean needs
_INDEPENDENT = 3.0  # values that a window must hold, neighbours that are alike counted as one
# Number of windows, each a quarter after the last, from which the error can be estimated
_TOLD = 24
_OFF = 10.0  # points around an outlier scatter by less than a tenth of it
_SHOCK = 16  # points that one shock may take far off
_BLOCKS = 4096  # blocks of a long curve, by whose means the mean over all points is tested
# Noise that is the same throughout: share of independent values, ratio of mean squares in parts
_WHITE, _UNEVEN = 0.7, 5.0
_ALIKE = 0.5  # ratio of the means before and after an onset that is none
_LATE = 100  # points of independent scatter, after which an onset has a cause of its own
_GROWN = 0.25  # times what is usual: differences at first, if they grow
_RANKED = 512  # number of the furthest points among which outliers are searched


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
    scattered: bool = False  # beyond the tolerance by independent scatter, before any onset
    mean: float = 0.0  # of r
    power: float = 0.0  # smallest bias over all points that is found


@dataclass(frozen=True)
class _Sign:
    """A rule that applies, shown by the points `first` … `end` - 1; it holds `since` … `last`."""

    rule: Rule
    first: int
    end: int
    since: int = 0
    last: int | None = None
    biased: bool = False  # all points, or a whole part


class Mean(NamedTuple):
    """The mean of all points."""

    value: float
    error: float  # at a chance of 1 in 200
    independent: float  # number of independent values


def detect_divergence(
    r: Floats, tolerance: float, rough: float = 0.0, identical: int = 0, shared: float = 1.0
) -> DivergenceResult:
    """Detect a divergence of signed, finite relative differences r [points].

    Args:
        tolerance: τ.
        rough: Additional scatter of single points if one of the curves is interpolated.
        identical: First points at which all metrics have the same bits.
        shared: Correlation of the noise of the two curves.
    """
    spread = scatter(r) if len(r) > 2 else None
    after_identical = identical >= IDENTICAL
    mean = mean_and_error(r)
    power = tolerance if after_identical or len(r) < _FEWEST else tolerance + mean.error
    noise = None if spread is None else spread.median
    none = DivergenceResult(noise=noise, mean=mean.value, power=power)
    if not (np.abs(r) > tolerance).any():
        return none
    scattered = False
    if spread is None or len(r) < _FEWEST:
        signs = [_pointwise(r, np.abs(r) > tolerance + 3 * rough)]
    elif after_identical:
        signs = [_changed(r, tolerance, identical)]
    else:
        signs, scattered = _search(r, tolerance, rough, shared, spread, mean)
    shown = [sign for sign in signs if sign is not None]
    if not shown and not (after_identical or scattered):
        # Slow differences are no noise of curves whose other noise is the same, if they grew.
        usual = TO_SIGMA * float(np.median(np.abs(r)))
        if usual > _NOISY_ALL * tolerance + rough:
            early = np.median(np.abs(r[: max(3, len(r) // 8)]))
            scattered = not (early < _GROWN * usual and shared > _SHARED)
            shown = [] if scattered else [_Sign("lasting", 0, len(r), 0, len(r) - 1)]
    if not shown:
        return replace(none, scattered=scattered)
    onset = _onset(r, shown)
    stretch = _stretch(r, shown, onset)
    rule = shown[0].rule
    if stretch and spread and {sign.rule for sign in shown} >= {"noise", "lasting"}:
        places = np.arange(stretch.first, stretch.last + 1)
        rule = "lasting" if abs(np.median(r[places])) > np.median(spread.at(places)) else "noise"
    late = scattered and onset >= _LATE
    return replace(none, rule=rule, onset=onset, lasting=stretch, scattered=late)


def _search(
    r: Floats, tolerance: float, rough: float, shared: float, spread: Scatter, mean: Mean
) -> tuple[list[_Sign | None], bool]:
    """Search for signs by all rules, and return whether there is independent scatter instead."""
    signs: list[_Sign | None]
    if abs(mean.value) > tolerance + mean.error:
        signs = [_Sign("lasting", 0, len(r), 0, len(r) - 1, biased=True)]
    else:
        signs = [_one_sided(r, tolerance)]
    if len(r) >= FEW:
        signs.append(_lasting(r, spread, tolerance))
    noisy = _noisy(len(r), spread, tolerance + rough)
    if noisy is not None and (shared < _SHARED or _steady(r, mean.independent)):
        return signs, True
    beyond = np.abs(r) > tolerance + 3 * rough
    if len(r) >= FEW:
        return [*signs, noisy, _outlier(r, spread, beyond)], False
    return [*signs, _pointwise(r, beyond & (np.abs(r) > 4 * spread.median)), noisy], False


def _onset(r: Floats, signs: Sequence[_Sign]) -> int:
    earliest = min(signs, key=lambda sign: sign.end)
    onset = find_onset(r, earliest.first, earliest.end)
    for sign in signs:
        before, after = r[sign.first : onset], r[onset : sign.end]
        if sign.biased and len(before) and len(after) and before.mean() / after.mean() > _ALIKE:
            return sign.first  # the bias is there already
    return onset


def _stretch(r: Floats, signs: Sequence[_Sign], onset: int) -> Stretch | None:
    ends = [(sign, sign.last) for sign in signs if sign.last is not None]
    if not ends:
        return None
    longest, end = min(ends, key=lambda pair: pair[0].since)
    last = max(other for sign, other in ends if sign.since <= end + 1)
    near = longest.since - (longest.end - longest.first) <= onset <= last
    first = onset if near else longest.since
    return Stretch(first, last, float(np.median(np.abs(r[first : last + 1]))))


def mean_and_error(r: Floats) -> Mean:
    """Return the mean of r, and its error.

    The variance of a mean of n values is that of n / (1 + 2 Σ ρ_k) independent ones, of
    autocorrelations ρ. Long curves are means over blocks.
    """
    mean = float(r.mean())
    width = -(-len(r) // _BLOCKS)
    blocks = r[: len(r) // width * width].reshape(-1, width).mean(axis=1)
    count = len(blocks)
    off = blocks - blocks.mean()
    deviation = float(np.std(off, ddof=1)) if count > 2 else 0.0
    if deviation == 0:
        return Mean(mean, 0.0, float(count))
    independent = float(count / (1 + 2 * autocorrelation(off[None])[1:].sum()))
    quantile = t_quantile(_CHANCE_OF_MEAN, max(1.0, independent - 1))
    return Mean(mean, float(quantile * deviation / np.sqrt(independent)), independent)


def _one_sided(r: Floats, tolerance: float) -> _Sign | None:
    """Test whether values are beyond τ on one side, by Wilcoxon's signed-rank test of r - τ.

    Of all points, their halves and quarters: it also finds a bias under noise that grows, which
    hides it from the mean. Neighbours on the same side of τ count as fewer.
    """
    splits = [parts for parts in (1, 2, 4) if parts == 1 or len(r) >= 10 * parts]
    needed = NormalDist().inv_cdf(1 - _CHANCE_OF_RANKS / 2 / sum(splits))
    for parts in splits:
        for place in range(parts):
            begin, end = len(r) * place // parts, len(r) * (place + 1) // parts
            for side in (r[begin:end], -r[begin:end]):
                beyond = side > tolerance
                share = float(beyond.mean())
                alike = 0.0
                if 0.5 < share < 1:
                    together = float(np.mean(beyond[1:] & beyond[:-1]))
                    alike = max(0.0, (together - share**2) / (share - share**2))
                z = signed_rank(side - tolerance) if share > 0.5 else 0.0
                if z * np.sqrt((1 - alike) / (1 + alike)) > needed:
                    return _Sign("lasting", begin, end, begin, end - 1, biased=True)
    return None


def _steady(r: Floats, independent: float) -> bool:
    """Return whether r is noise, white and equally strong in each part: a departure's is not."""
    parts = min(8, len(r) // 16)
    if parts < 2 or r[0] == 0:
        return False
    size = np.array([float((part**2).mean()) for part in np.array_split(r, parts)])
    white = independent > _WHITE * min(len(r), _BLOCKS)
    return bool(white and size.max() < _UNEVEN * size.min())


def _pointwise(r: Floats, beyond: Flags) -> _Sign | None:
    if not beyond.any():
        return None
    first = int(np.argmax(beyond))
    # The first three in a row are a lasting departure.
    three = np.flatnonzero(beyond[:-2] & beyond[1:-1] & beyond[2:])
    since, last = _run(beyond, int(three[0])) if len(three) else (0, None)
    return _Sign("pointwise", first, first + 1, since, last)


def _run(flags: Flags, place: int) -> tuple[int, int]:
    """Return the first and the last of the flags that are set around one of them."""
    unset = np.flatnonzero(~flags)
    after = int(np.searchsorted(unset, place))
    bounds = np.concatenate(([-1], unset, [len(flags)]))
    return int(bounds[after]) + 1, int(bounds[after + 1]) - 1


def _changed(r: Floats, tolerance: float, identical: int) -> _Sign | None:
    """Test what follows a bit-identical beginning: whether it reaches the tolerance in mean."""
    width = max(1, min(_CHANGED, len(r) - identical))
    means = np.convolve(np.abs(r), np.full(width, 1 / width), "valid")
    hits = np.flatnonzero(means > tolerance)
    if not len(hits):
        return None
    first = max(identical, int(hits[0]))
    last = _run(means > tolerance / 2, int(hits[0]))[1] + width - 1
    return _Sign("lasting", first, int(hits[0]) + width, first, last)


def _lasting(r: Floats, spread: Scatter, tolerance: float) -> _Sign | None:
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
    first: _Sign | None = None
    for width in reversed(scales):  # a mean of fewer points is no more certain than one of more
        places = begins[width]
        means = (total[places + width] - total[places]) / width
        sigma = spread.at(places + width // 2)
        error = max(error, _error(means, sigma, width))
        independent = (single / error) ** 2
        few = 1.0 if width == scales[-1] else max(1.0, _INDEPENDENT / independent)
        size = np.abs(means)
        stays = places[size > tolerance / 2]
        covered += np.bincount(stays, minlength=len(covered))
        covered -= np.bincount(stays + width, minlength=len(covered))
        needed = tolerance + z * few * error * sigma
        hits = np.flatnonzero(size > needed)
        # Winsorized means (Tukey), to which no point adds more than a limit
        most = (_WINSOR * needed[hits] + 3 * sigma[hits])[:, None]
        inside = np.lib.stride_tricks.sliding_window_view(calm, width)[places[hits]]
        cut_means = np.abs(np.clip(inside, -most, most).mean(axis=1))
        hits = places[hits[cut_means >= needed[hits]]]
        if len(hits) and (first is None or hits[0] + width < first.end):
            first = _Sign("lasting", int(hits[0]), int(hits[0] + width))
    if first is None:
        return None
    since, last = _run(np.cumsum(covered[:-1]) > 0, first.first)
    return replace(first, since=since, last=last)


def _error(means: Floats, sigma: Floats, width: int) -> float:
    """Return the standard error of windows' means over the scatter around them. [windows] each

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


def _noisy(count: int, spread: Scatter, tolerance: float) -> _Sign | None:
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
    end = _run(noisy, first)[1] + 1
    last = count - 1 if end == len(sigma) else end * size - 1
    return _Sign("noise", first * size, min((first + 1) * size, count), first * size, last)


def _outlier(r: Floats, spread: Scatter, beyond: Flags) -> _Sign | None:
    places = np.flatnonzero(beyond)
    if not len(places):
        return None
    blocks = spread.block(np.arange(len(r)))
    off = np.abs(r - spread.medians(r)[blocks])
    # Slow noise scatters less from point to point than over a block.
    sigma = np.maximum(spread.sigma, TO_SIGMA * spread.medians(off))[blocks[places]]
    hits = places[off[places] > np.maximum(_OFF * sigma, _limit(off))]
    return _Sign("outlier", int(hits[0]), int(hits[0]) + 1) if len(hits) else None


def _limit(off: Floats) -> float:
    """Return a limit that noise does not exceed; infinite if all points are noise.

    Of distances from the noise's middle the furthest is compared with the fifth furthest. Several
    outliers hide each other, so the fourth is also compared with the seventeenth, and so on.
    """
    top = largest(off, _RANKED)
    limit, rank = np.inf, 1
    while 8 * rank <= min(len(off), _RANKED):
        shocks = max(1, rank // _SHOCK)
        odds = comb(4 * shocks, shocks) / _CHANCE
        far = extrapolated(top, len(off), 4 * rank, odds, shocks)
        if top[rank - 1] > far:
            limit = min(limit, far)
        rank *= 4
    return limit
