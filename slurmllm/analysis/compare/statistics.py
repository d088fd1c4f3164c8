"""Statistics of the difference of two curves: figures to report, and its noise and onset."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from scipy.ndimage import uniform_filter1d

from slurmllm.analysis.compare.alignment import Points
from slurmllm.core.metrics.curves import Floats, Ints
from slurmllm.core.run.records import Record

WINDOWS = 10
_SMOOTHING = 1 / 50  # of all points: the width of the running mean that smooths the curves


class Window(Record):
    """A tenth of the points compared."""

    first_step: int
    last_step: int
    points: int
    mean_rel_diff: float | None  # None if no point is finite
    mean_signed_rel_diff: float | None  # above 0 if B is above A


class Statistics(Record):
    """One metric of both curves; None: no figure, as of points that are not finite."""

    points: int  # that both have
    max_rel_diff: float | None
    max_rel_diff_step: int | None
    mean_rel_diff: float | None
    median_rel_diff: float | None
    p99_rel_diff: float | None  # 99 % of the points differ by no more
    correlation: float | None  # Pearson's, of the values
    correlation_detrended: float | None  # Pearson's, of the values less their running means
    area_between: float | None  # between the running means of both, over the area under A's
    ratio: float | None  # median of B / A
    windows: tuple[Window, ...]


@np.errstate(all="ignore")
def statistics(points: Points, signed: Floats, shape: bool) -> Statistics:
    """Describe how a metric differs, by its points and their signed relative differences.

    `shape`: also correlate and smooth, which is meaningless for times and rates.
    """
    finite = np.isfinite(signed)
    used = slice(None) if finite.all() else finite
    a, b, size = points.a[used], points.b[used], np.abs(signed[used])
    if not len(size):
        none = dict.fromkeys(Statistics.model_fields)
        return Statistics.model_validate(none | {"points": len(points), "windows": ()})
    worst = int(np.argmax(size))
    median, p99 = np.percentile(size, [50, 99])
    nonzero = a != 0
    ratio = float(np.median(b[nonzero] / a[nonzero])) if nonzero.any() else None
    correlation = detrended = area = None
    if shape:
        width = max(1, round(len(a) * _SMOOTHING))
        # Large values must not overflow in a running sum or a product.
        scale = float(max(np.abs(a).max(), np.abs(b).max())) or 1.0
        if scale > 1e100:
            a, b = a / scale, b / scale
        smooth_a, smooth_b = running_mean(a, width), running_mean(b, width)
        correlation = _correlation(a, b)
        detrended = _correlation(a - smooth_a, b - smooth_b) if width > 1 else None
        under, between = np.abs(smooth_a), np.abs(smooth_b - smooth_a)
        if len(a) > 1:
            positions = points.positions[used]
            under, between = (np.trapezoid(y, positions) for y in (under, between))
        area = float(between.sum() / under.sum()) if under.sum() > 0 else None
    count = min(WINDOWS, len(points))
    bounds = np.linspace(0, len(points), count + 1).round().astype(int).tolist()
    return Statistics(
        points=len(points),
        max_rel_diff=float(size[worst]),
        max_rel_diff_step=int(points.steps[used][worst]),
        mean_rel_diff=float(size.mean()),
        median_rel_diff=float(median),
        p99_rel_diff=float(p99),
        correlation=correlation,
        correlation_detrended=detrended,
        area_between=area,
        ratio=ratio,
        windows=tuple(_window(points.steps[i:j], signed[i:j]) for i, j in pairwise(bounds)),
    )


def running_mean(values: Floats, width: int) -> Floats:
    """Return means over `width` neighbours, centred; fewer at the ends. [points]"""
    sums, counts = (
        uniform_filter1d(x, width, mode="constant", origin=width % 2 - 1)
        for x in (values, np.ones(len(values)))
    )
    means: Floats = sums / counts
    return means


def _correlation(a: Floats, b: Floats) -> float | None:
    """Return Pearson's correlation; None of fewer than 3 points or of a constant."""
    # The deviation of a constant is rounding.
    if len(a) < 3 or any(x.std() <= 1e-13 * abs(x.mean()) for x in (a, b)):
        return None
    return float(np.corrcoef(a, b)[0, 1])


def _window(steps: Ints, r: Floats) -> Window:
    r = r[np.isfinite(r)]
    return Window(
        first_step=int(steps[0]),
        last_step=int(steps[-1]),
        points=len(steps),
        mean_rel_diff=float(np.abs(r).mean()) if len(r) else None,
        mean_signed_rel_diff=float(r.mean()) if len(r) else None,
    )


TO_SIGMA = 1.4826  # median of |x| of a normal x → its standard deviation
_BLOCK = 64


@dataclass(frozen=True)
class Scatter:
    """Robust standard deviations of r by blocks of points, from the median of |r_i+1 - r_i|."""

    size: int  # points of a block; the last one has up to twice as many
    sigma: Floats  # standard deviation [blocks]

    def sigma_at(self, places: Ints) -> Floats:
        return self.sigma[self.block(places)]

    def block(self, places: Ints) -> Ints:
        return np.minimum(places // self.size, len(self.sigma) - 1)

    def medians(self, values: Floats) -> Floats:
        edge = (len(self.sigma) - 1) * self.size
        whole = np.median(values[:edge].reshape(-1, self.size), axis=1)
        return np.append(whole, np.median(values[edge:]))

    @property
    def median(self) -> float:
        return float(np.median(self.sigma))


def scatter(r: Floats) -> Scatter:
    """Measure the scatter of 3 values or more, in blocks of 64, or of a quarter of few. [points]"""
    size = min(_BLOCK, max(3, len(r) // 4))
    edge = (max(1, len(r) // size) - 1) * size
    whole = np.median(np.abs(np.diff(r[:edge].reshape(-1, size), axis=1)), axis=1)
    last = np.median(np.abs(np.diff(r[edge:])))
    return Scatter(size, np.append(whole, last) * (TO_SIGMA / np.sqrt(2)))


def roughness(*curves: Floats) -> float:
    """Return the relative scatter of curves from point to point, all added. [points] each

    From third differences, which a trend leaves small; those of white noise have 20 times its
    variance. It bounds the error of values that are interpolated between logged points.
    """
    variance = 0.0
    for values in curves:
        size = float(np.median(np.abs(values)))
        if len(values) >= 5 and size > 0:
            # At most 1: the values of such a curve have nothing to do with each other.
            variance += min(_third(values) / size, 1.0) ** 2
    return float(np.sqrt(variance))


def shared_noise(a: Floats, b: Floats, r: Floats) -> float | None:
    """Return the correlation of two curves' noise; None without noise. [points] each"""
    curve_noise = roughness(a, b)
    return (
        float(np.clip(1 - (_third(r) / curve_noise) ** 2, -1.0, 1.0))
        if curve_noise > 1e-12
        else None
    )


def _third(values: Floats) -> float:
    return float(TO_SIGMA * np.median(np.abs(np.diff(values, 3))) / np.sqrt(20))


_HEAVIEST = 3  # no noise has a heavier tail than Student's t with so many degrees of freedom
_SEGMENTS = 16  # by whose means the mean over all points is tested


def error_of_mean(r: Floats) -> float:
    """Return the error of the mean of r at a chance of 1 in 200, by the means of its segments.

    Means of segments are independent if the noise is slow, too, but not slower than a segment.
    """
    means = np.array([segment.mean() for segment in np.array_split(r, min(_SEGMENTS, len(r)))])
    deviation = float(np.std(means, ddof=1)) / np.sqrt(len(means))
    return float(t_quantile(5e-3, len(means) - 1) * deviation)


def medians_of_windows(r: Floats, width: int) -> tuple[Ints, Floats]:
    """Return first points and medians of windows, a quarter of the width apart, the last too."""
    begins = np.union1d(np.arange(0, len(r) - width + 1, width // 4), [len(r) - width])
    windows = np.lib.stride_tricks.sliding_window_view(r, width)[begins]
    return begins, np.median(windows, axis=1)


def largest(sizes: Floats, count: int) -> Floats:
    """Return the largest values in falling order. [count, or as many as there are]"""
    count = min(len(sizes), count)
    return np.sort(np.partition(sizes, -count)[-count:])[::-1]


def tail_limit(sizes: Floats, chance: float) -> float:
    """Return what noise does not exceed, but for a chance, of points that are noise but for some.

    Up to a thirty-second of the points, those furthest off, may be anything else.
    """
    furthest = max(4, len(sizes) // 32)
    top = largest(sizes, max(64, 2 * furthest + 1))
    return extrapolated(top, len(sizes), furthest, (furthest + 1) / chance)


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
        highest = float(np.max(np.abs(r[:begin]), initial=_FLOOR))
        following = np.abs(r[end : end + 3])
        if not (len(following) and np.median(following) > 5 * highest):
            return begin
    if (jump := largest_rise(r, end)) is not None:
        return jump
    size = np.log(np.maximum(np.abs(r[:end]), _FLOOR))
    first = int(np.argmax(np.abs(r) > _FLOOR))
    if 0 < first <= begin and begin - first <= _FIRST_POINTS:
        return first
    if begin == 0:
        return begin
    count = np.arange(1, end)
    total = np.cumsum(size)[:-1]
    rise = np.maximum((size.sum() - total) / (end - count) - total / count, 0.0)
    between = count * (end - count) / end * rise**2
    onset = int(np.argmax(between))
    return onset + 1 if rise[onset] > np.log(2) else begin


def largest_rise(r: Floats, end: int) -> int | None:
    """Return where |r| rises most, tenfold at least, over all before and stays up; else None.

    The first few points are what was before; those from `end` on only show whether it stays up.
    """
    if end <= _FIRST_POINTS:
        return None
    size = np.abs(r[: end + 3])
    before = np.maximum.accumulate(size)[_FIRST_POINTS - 1 : end - 1]
    ahead = np.concatenate((size, np.repeat(size[-1:], 3)))
    # The second smallest of four: one of them may pass through zero.
    four = np.lib.stride_tricks.sliding_window_view(ahead, 4)[_FIRST_POINTS:end]
    rise = np.minimum(np.sort(four, axis=1)[:, 1], four[:, 0]) / np.maximum(before, _FLOOR)
    index = int(np.argmax(rise))
    return _FIRST_POINTS + index if rise[index] >= _LARGE_RISE else None


def t_quantile(chance: float, degrees: float) -> float:
    """Return the value that |t| exceeds with a given chance, of both tails together."""
    # Not scipy.stats, which takes a second to import.
    from scipy.special import stdtrit

    return float(-stdtrit(degrees, chance / 2))
