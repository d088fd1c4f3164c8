"""Detection of a divergence of two curves, as opposed to noise.

The input is the signed relative difference r = (b - a) / max(|a|, |b|) at the points compared,
against a tolerance τ. Three rules make a difference (docs/compare.md):

1. **lasting**: r is beyond τ by more than its statistical error, in the middle of a window of 8 to
   1,024 points, of a quarter, of a half or of all points. After a bit-identical beginning nothing
   is noise: a mean of |r| over 8 points beyond τ lasts.
2. **outlier**, and **pointwise** of few points: single points that do not belong to the noise.
3. **noise**: r scatters by more than τ without a bias, and the curves share the noise of their
   batches; else such scatter leaves them equivalent.

The limits are set by simulation (`tools/benchmarks/departures --noise` prints the rates): at most
one false alarm in a hundred with noise of up to τ/3, from normal to Student's t with 3 degrees of
freedom, white and slow, 50 to 20,000 points.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import NormalDist
from typing import Literal

import numpy as np

from slurmllm.core.metrics.curves import Flags, Floats, Ints, argmax, median

Rule = Literal["pointwise", "lasting", "noise", "outlier"]

FALSE_ALARMS = 1e-3  # probability that noise alone satisfies a test, over all its windows
WINDOWS = (8, 16, 32, 64, 128, 256, 512, 1024)  # points of a lasting difference
IDENTICAL = 5  # points with the same bits, after which nothing is noise
_FEW = 20  # points up to which single ones beyond τ may count
_MIN_POINTS = 5  # fewer have no scatter
_OUTLIER_OF_FEW = 4.0  # times the scatter: not noise, of few points
_OUTLIER = 10.0  # likewise, of many
# Scatter over τ that is no noise within it, by the points that show it: fewer are less certain.
_NOISY = ((64, 1.75), (512, 1.25))
_NOISY_EVERYWHERE = 1.1
SHARED = 0.5  # correlation of the curves' noise above which scatter is not independent
_LATE = 100  # points of independent scatter, after which an onset has a cause of its own
_GROWN = 0.25  # times what is usual: differences at first, if they grow


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
class _Hit:
    """A rule that applies, shown by the points `first` … `end` - 1; a lasting one until `last`."""

    rule: Rule
    first: int
    end: int
    last: int = -1


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
    is_short = spread is None or len(r) < _MIN_POINTS
    after_identical = identical >= IDENTICAL
    power = tolerance
    if not (is_short or after_identical):
        power += error_of_mean(r)
    noise = spread.median if spread else None
    result = DivergenceResult(noise=noise, mean=r.mean(), power=power)
    if not (abs(r) > tolerance).any():
        return result
    scattered = False
    if not spread or is_short:
        hits = [*_single_points(abs(r) > tolerance + 3 * rough, "pointwise")]
    elif after_identical:
        hits = [*_after_identical(r, tolerance, identical)]
    else:
        hits = [*_lasting(r, tolerance, spread)]
        noisy = [*_noisy(r, spread, tolerance + rough)]
        scattered = bool(noisy) and shared < SHARED
        if not scattered:
            hits += noisy
            hits += _outliers(r, tolerance + 3 * rough, spread)
    if not (hits or after_identical or scattered):
        hits, scattered = _slow(r, tolerance, rough, shared)
    if not hits:
        return replace(result, scattered=scattered)
    return _describe(result, r, hits, scattered)


def _slow(r: Floats, tolerance: float, rough: float, shared: float) -> tuple[list[_Hit], bool]:
    """Return the hit of slow differences, or that they are scatter, if they are large."""
    usual = TO_SIGMA * median(abs(r))
    if not usual > _NOISY_EVERYWHERE * tolerance + rough:
        return [], False
    if shared < SHARED:
        return [], True
    # They are no noise of curves whose other noise is the same.
    early = np.median(abs(r[: max(3, len(r) // 8)]))
    rule: Rule = "lasting" if early < _GROWN * usual else "noise"
    return [_Hit(rule, 0, len(r), len(r) - 1)], False


def _describe(
    result: DivergenceResult, r: Floats, hits: Sequence[_Hit], scattered: bool
) -> DivergenceResult:
    """Return the divergence that hits show: its onset, its rule and its lasting part."""
    earliest = min(hits, key=lambda hit: hit.end)
    hit = hits[0]
    onset = find_onset(r, earliest.first, earliest.end)
    rule = hit.rule
    before = r[hit.first : onset]
    after = r[onset : hit.end]
    is_segment = rule == "lasting" and 4 * (hit.end - hit.first) >= len(r) - 3
    if is_segment and len(before) and len(after) and before.mean() / after.mean() > 0.5:
        onset = hit.first  # the bias is there already
    if {hit.rule for hit in hits} >= {"noise", "lasting"} and len(r) - onset > 2:
        is_bias = abs(np.median(r[onset:])) > scatter(r[onset:]).median
        rule = "lasting" if is_bias else "noise"
    last = max(hit.last for hit in hits)
    lasting = None
    if last >= onset:
        lasting = Stretch(onset, last, median(abs(r[onset : last + 1])))
    return replace(
        result,
        rule=rule,
        onset=onset,
        lasting=lasting,
        scattered=scattered and onset >= _LATE,
    )


def _lasting(r: Floats, tolerance: float, spread: Scatter) -> Iterator[_Hit]:
    """Yield a bias of all points, a half or a quarter, and of the earliest window."""
    yield from _biased_segment(r, tolerance)
    if len(r) < _FEW:
        return
    # A long curve has many short windows, and its slow noise fills them.
    shortest = max(width for width in WINDOWS if width**2 <= max(2 * len(r), WINDOWS[0] ** 2))
    widths = [width for width in WINDOWS if shortest <= width <= max(shortest, len(r) // 8)]
    windows = {width: medians_of_windows(r, width) for width in widths}
    chance = FALSE_ALARMS / sum(len(begins) for begins, _ in windows.values())
    quantile = NormalDist().inv_cdf(1 - chance / 2)
    hits = []
    for width, (begins, middles) in windows.items():
        # Of white noise, and what windows differ by: slow noise does not show from point to point.
        sigma = spread.sigma[spread.block(begins + width // 2)]
        white = sigma * np.sqrt(np.pi / 2 / width)
        slow = TO_SIGMA * np.median(abs(middles - np.median(middles)))
        beyond = abs(middles) > tolerance + quantile * np.maximum(2 * white, slow)
        if beyond.any():
            hit = argmax(beyond)
            first = begins[hit]
            end = begins[hit] + width
            ends = np.append(begins[hit:][abs(middles[hit:]) <= tolerance / 2], len(r))
            hits.append(_Hit("lasting", first, end, max(end, ends[0]) - 1))
    if hits:
        yield min(hits, key=lambda hit: hit.end)


def _biased_segment(r: Floats, tolerance: float) -> Iterator[_Hit]:
    """Yield the first of all points, halves and quarters that is beyond τ on one side.

    By Wilcoxon's signed-rank test of r - τ; neighbours on the same side of τ count as fewer.
    """
    splits = [count for count in (1, 2, 4) if count == 1 or len(r) >= 10 * count]
    needed = NormalDist().inv_cdf(1 - 10 * FALSE_ALARMS / 2 / sum(splits))
    for count in splits:
        bounds = [len(r) * i // count for i in range(count + 1)]
        for first, end in pairwise(bounds):
            segment = r[first:end]
            side = segment * np.sign(np.median(segment))
            beyond = side > tolerance
            share = beyond.mean()
            if share <= 0.5:
                continue
            alike = 0.0
            if share < 1:
                together = (beyond[1:] & beyond[:-1]).mean()
                alike = max(0.0, (together - share**2) / (share - share**2))
            from scipy.stats import wilcoxon  # takes a second to import: if a test is due

            chance = wilcoxon(side - tolerance, alternative="greater").pvalue
            quantile = NormalDist().inv_cdf(1 - min(max(chance, 1e-9), 1 - 1e-9))
            if quantile * np.sqrt((1 - alike) / (1 + alike)) > needed:
                yield _Hit("lasting", first, end, end - 1)
                return


def _after_identical(r: Floats, tolerance: float, identical: int) -> Iterator[_Hit]:
    """Yield what follows a bit-identical beginning, if it reaches the tolerance in mean."""
    width = max(1, min(WINDOWS[0], len(r) - identical))
    means = np.convolve(abs(r), np.full(width, 1 / width), "valid")
    beyond = means > tolerance
    if beyond.any():
        hit = argmax(beyond)
        last = _end_of_run(means > tolerance / 2, hit) + width - 1
        yield _Hit("lasting", max(identical, hit), hit + width, last - 1)


def _end_of_run(flags: Flags, begin: int) -> int:
    """Return the index after the flags that are set from `begin` on."""
    return begin + int(np.append(flags[begin:], False).argmin())


def _outliers(r: Floats, limit: float, spread: Scatter) -> Iterator[_Hit]:
    """Yield the first point that is too far off to belong to the noise."""
    beyond = abs(r) > limit
    if len(r) < _FEW:
        far = abs(r) > _OUTLIER_OF_FEW * spread.median
        yield from _single_points(beyond & far, "pointwise")
    elif beyond.any():
        blocks = spread.block(np.arange(len(r)))
        off = abs(r - spread.medians(r)[blocks])
        # Slow noise scatters less from point to point than over a block.
        sigma = np.maximum(spread.sigma, TO_SIGMA * spread.medians(off))[blocks]
        far = off > np.maximum(_OUTLIER * sigma, tail_limit(off))
        yield from _single_points(beyond & far, "outlier")


def _single_points(far: Flags, rule: Rule) -> Iterator[_Hit]:
    if far.any():
        first = argmax(far)
        # Of few points the first three in a row are a lasting departure.
        three = np.flatnonzero(far[:-2] & far[1:-1] & far[2:]) if rule == "pointwise" else far[:0]
        last = _end_of_run(far, int(three[0])) - 1 if len(three) else -1
        yield _Hit(rule, first, first + 1, last)


def _noisy(r: Floats, spread: Scatter, tolerance: float) -> Iterator[_Hit]:
    sigma = spread.sigma
    size = spread.size
    noisy = np.zeros(len(sigma), dtype=bool)
    for points, factor in _NOISY:
        blocks = points // _NOISY[0][0]
        if len(sigma) >= blocks:
            means = np.convolve(sigma, np.full(blocks, 1 / blocks), "valid")
            windows = np.convolve(means > factor * tolerance, np.ones(blocks)) > 0.5
            noisy |= windows & (sigma > tolerance)
    if spread.median > _NOISY_EVERYWHERE * tolerance:
        noisy |= sigma > tolerance
    if noisy.any():
        first = argmax(noisy)
        end = _end_of_run(noisy, first)
        last = len(r) if end == len(sigma) else end * size
        yield _Hit("noise", first * size, min((first + 1) * size, len(r)), last - 1)


TO_SIGMA = 1.4826  # median of |x| of a normal x → its standard deviation
_BLOCK = 64


@dataclass(frozen=True)
class Scatter:
    """Robust standard deviations of r by blocks of points, from the median of |r_i+1 - r_i|."""

    size: int  # points of a block; the last one has up to twice as many
    sigma: Floats  # standard deviation [blocks]

    def block(self, places: Ints) -> Ints:
        return np.minimum(places // self.size, len(self.sigma) - 1)

    def medians(self, values: Floats) -> Floats:
        edge = (len(self.sigma) - 1) * self.size
        whole = np.median(values[:edge].reshape(-1, self.size), axis=1)
        return np.append(whole, np.median(values[edge:]))

    @property
    def median(self) -> float:
        return median(self.sigma)


def scatter(r: Floats) -> Scatter:
    """Measure the scatter of 3 values or more, in blocks of 64, or of a quarter of few. [points]"""
    size = min(_BLOCK, max(3, len(r) // 4))
    edge = (max(1, len(r) // size) - 1) * size
    whole = np.median(abs(np.diff(r[:edge].reshape(-1, size), axis=1)), axis=1)
    last = np.median(abs(np.diff(r[edge:])))
    return Scatter(size, np.append(whole, last) * (TO_SIGMA / np.sqrt(2)))


def roughness(*curves: Floats) -> float:
    """Return the relative scatter of curves from point to point, all added. [points] each

    From third differences, which a trend leaves small; those of white noise have 20 times its
    variance. It bounds the error of values that are interpolated between logged points.
    """
    variance = 0.0
    for values in curves:
        size = median(abs(values))
        if len(values) >= 5 and size > 0:
            # At most 1: the values of such a curve have nothing to do with each other.
            variance += min(_third(values) / size, 1.0) ** 2
    return float(np.sqrt(variance))


def shared_noise(a: Floats, b: Floats, r: Floats) -> float | None:
    """Return the correlation of two curves' noise; None without noise. [points] each"""
    curve_noise = roughness(a, b)
    if not curve_noise > 1e-12:
        return None
    return float(np.clip(1 - (_third(r) / curve_noise) ** 2, -1.0, 1.0))


def _third(values: Floats) -> float:
    return float(TO_SIGMA * np.median(abs(np.diff(values, 3))) / np.sqrt(20))


_HEAVIEST = 3  # no noise has a heavier tail than Student's t with so many degrees of freedom
_SEGMENTS = 16  # by whose means the mean over all points is tested


def error_of_mean(r: Floats) -> float:
    """Return the error of the mean of r at a chance of 1 in 200, by the means of its segments.

    Means of segments are independent if the noise is slow, too, but not slower than a segment.
    """
    means = np.array([segment.mean() for segment in np.array_split(r, min(_SEGMENTS, len(r)))])
    deviation = float(means.std(ddof=1)) / np.sqrt(len(means))
    return float(t_quantile(5e-3, len(means) - 1) * deviation)


def medians_of_windows(r: Floats, width: int) -> tuple[Ints, Floats]:
    """Return first points and medians of windows, a quarter of the width apart, the last too."""
    begins = np.union1d(np.arange(0, len(r) - width + 1, width // 4), [len(r) - width])
    windows = np.lib.stride_tricks.sliding_window_view(r, width)[begins]
    return begins, np.median(windows, axis=1)


def tail_limit(sizes: Floats) -> float:
    """Return what noise does not exceed, but for a chance, of points that are noise but for some.

    Up to a thirty-second of the points, those furthest off, may be anything else.
    """
    furthest = max(4, len(sizes) // 32)
    top = np.sort(sizes)[::-1][: max(64, 2 * furthest + 1)]
    return extrapolated(top, len(sizes), furthest, (furthest + 1) / FALSE_ALARMS)


def extrapolated(top: Floats, total: int, rank: int, odds: float) -> float:
    """Return what noise does not exceed, from the sizes of its points after the furthest ones.

    Of noise with a power-law tail of index α, points are x times as far as the k-th furthest in
    proportion to 1 / x^α, and logarithms of neighbouring order statistics differ by exponentials
    (Rényi). α is estimated from the points after the k-th (Hill's estimator trimmed at the top,
    Bhattacharya, Kallitsis & Stoev, Electronic Journal of Statistics 13, 2019), with the
    uncertainty that so many points leave.

    Args:
        top: The largest sizes, in falling order.
        total: How many there are in all.
        rank: k - 1.
        odds: One over the chance that noise goes on beyond, as far as the k-th point.
    """
    rank = min(rank, len(top) - 1)
    log = np.log(odds) / _HEAVIEST
    tail = min(max(64, 2 * rank), total // 8, len(top))
    degrees = tail - rank - 1
    if degrees > 0 and top[tail - 1] > 0:
        logs = np.log(top[rank:tail] / top[tail - 1])
        hill = (logs.sum() + rank * logs[0]) / degrees
        log = min(log, hill * degrees * (odds ** (1 / degrees) - 1))
    return float(top[rank] * np.exp(log))


_LARGE_RISE = 10.0  # times all differences before
_FIRST_POINTS = 8  # show what was before
_FLOOR = 1e-9  # smaller differences count as none


def find_onset(r: Floats, begin: int, end: int) -> int:
    """Find the onset of a departure that the points `begin` … `end` - 1 of r show.

    It is the point at which |r| grows most over all before, tenfold at least, and persists; else
    the first that is not 0, if it is near; else the point that best divides log |r| into smaller
    values and larger ones. It is `begin` if those are not
    twice as large.
    """
    if end == begin + 1:
        # A single point, unless those after it are off as well, by more than all before it
        highest = float(abs(r[:begin]).max(initial=_FLOOR))
        following = abs(r[end : end + 3])
        if not (len(following) and median(following) > 5 * highest):
            return begin
    if (jump := largest_rise(r, end)) is not None:
        return jump
    size = np.log(np.maximum(abs(r[:end]), _FLOOR))
    first = argmax(abs(r) > _FLOOR)
    if 0 < first <= begin and begin - first <= _FIRST_POINTS:
        return first
    if begin == 0:
        return begin
    count = np.arange(1, end)
    total = size.cumsum()[:-1]
    rise = np.maximum((size.sum() - total) / (end - count) - total / count, 0.0)
    between = count * (end - count) / end * rise**2
    onset = argmax(between)
    return onset + 1 if rise[onset] > np.log(2) else begin


def largest_rise(r: Floats, end: int) -> int | None:
    """Return where |r| rises most, tenfold at least, over all before and stays up; else None.

    The first few points are what was before; those from `end` on only show whether it stays up.
    """
    if end <= _FIRST_POINTS:
        return None
    size = abs(r[: end + 3])
    before = np.maximum.accumulate(size)[_FIRST_POINTS - 1 : end - 1]
    ahead = np.concatenate((size, size[-1:].repeat(3)))
    # The second smallest of four: one of them may pass through zero.
    four = np.lib.stride_tricks.sliding_window_view(ahead, 4)[_FIRST_POINTS:end]
    rise = np.minimum(np.sort(four, axis=1)[:, 1], four[:, 0]) / np.maximum(before, _FLOOR)
    index = argmax(rise)
    return _FIRST_POINTS + index if rise[index] >= _LARGE_RISE else None


def t_quantile(chance: float, degrees: float) -> float:
    """Return the value that |t| exceeds with a given chance, of both tails together."""
    # Not scipy.stats, which takes a second to import.
    from scipy.special import stdtrit

    return float(-stdtrit(degrees, chance / 2))
