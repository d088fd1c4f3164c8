"""Statistics of the difference of two curves: figures to report, and its noise and onset."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist

import numpy as np

from slurmllm.compare.alignment import Points
from slurmllm.metrics.curves import Floats, Ints
from slurmllm.run.records import Record

WINDOWS = 10
_EXACT = 25  # values of which the signed-rank test is exact
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
    if width <= 1:
        return values
    count, left, right = len(values), (width - 1) // 2, width // 2 + 1
    total = np.cumsum(np.pad(values, (left + 1, right - 1)))
    places = np.arange(count)
    inside = np.minimum(places + right, count) - np.maximum(places - left, 0)
    means: Floats = (total[width:] - total[:-width]) / inside
    return means


def _correlation(a: Floats, b: Floats) -> float | None:
    """Return Pearson's correlation; None of fewer than 3 points or of a constant."""
    if len(a) < 3:
        return None
    means = float(a.mean()), float(b.mean())
    a, b = a - means[0], b - means[1]
    # Sums of products, not BLAS: its threads take longer to start.
    squares, product = (float((a * a).sum()), float((b * b).sum())), float((a * b).sum())
    # What is left of a constant is rounding.
    if any(s <= len(a) * (1e-13 * m) ** 2 for s, m in zip(squares, means, strict=True)):
        return None
    return float(np.clip(product / np.sqrt(squares[0] * squares[1]), -1.0, 1.0))


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

    def at(self, places: Ints) -> Floats:
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


def medians_of_three(values: Floats) -> Floats:
    """Return the median of each value and its two neighbours; the ends stay. [..., points]"""
    medians = values.copy()
    low = np.minimum(values[..., :-1], values[..., 1:])
    high = np.maximum(values[..., :-1], values[..., 1:])
    medians[..., 1:-1] = np.maximum(low[..., :-1], np.minimum(high[..., :-1], values[..., 2:]))
    return medians


def autocorrelation(rows: Floats) -> Floats:
    """Return the correlation of values so many points apart, of all rows together. [lags]

    Up to where it is lost in its own noise: its first value that is not above 0 (Geyer, Practical
    Markov chain Monte Carlo, Statistical Science 7, 1992). `rows`: of mean 0 [rows, points]
    """
    count = rows.shape[1]
    size = 1 << (2 * count - 1).bit_length()
    power = (np.abs(np.fft.rfft(rows, size, axis=1)) ** 2).sum(axis=0)
    products = np.fft.irfft(power, size)[:count]
    correlation: Floats = products[: int(np.argmax(products <= 0)) or count] / products[0]
    return correlation


_HEAVIEST = 3  # no noise has a heavier tail than Student's t with so many degrees of freedom
_TAIL = 64  # points from which the tail is estimated, an eighth of all at most


def largest(sizes: Floats, count: int) -> Floats:
    """Return the largest values in falling order. [count, or as many as there are]"""
    count = min(len(sizes), count)
    return np.sort(np.partition(sizes, -count)[-count:])[::-1]


def extrapolated(top: Floats, total: int, place: int, odds: float, shocks: int = 1) -> float:
    """Return what noise does not exceed, from the sizes of its points after the furthest ones.

    Of noise with a power-law tail of index α, points are x times as far as the k-th furthest in
    proportion to 1 / x^α, and logarithms of neighbouring order statistics differ by exponentials
    (Rényi). α is estimated from the points after the k-th (Hill's estimator trimmed at the top,
    Bhattacharya, Kallitsis & Stoev, Electronic Journal of Statistics 13, 2019), with the
    uncertainty that so many points leave.

    Args:
        top: The largest sizes, in falling order.
        total: How many there are in all.
        place: k - 1.
        odds: One over the chance that noise goes on beyond, as far as the k-th point.
        shocks: So many must do so at once, by chances of their own.
    """
    log = np.log(odds) / (shocks * _HEAVIEST)
    tail = min(max(_TAIL, 2 * place), total // 8, len(top))
    degrees = tail - place - 1
    if degrees > 0 and top[tail - 1] > 0:
        logs = np.log(top[place:tail] / top[tail - 1])
        hill = (logs.sum() + place * logs[0]) / degrees
        log = min(log, hill * degrees * (odds ** (1 / degrees) - 1) / shocks)
    return float(top[place] * np.exp(log))


_BACK = (64, 256, 1024, 4096)  # points before the evidence to search, in turn
_BEYOND = 5.0  # times the deviation before: not noise
_CLEAR = 10.0  # likewise: clear from single points, else from all of them together
_SURE = 8  # points that show the deviation before
_FLOOR = 1e-9  # smaller differences count as none


def find_onset(r: Floats, begin: int, end: int) -> int:
    """Find the onset of a departure that is known to be at the points `begin` … `end` - 1 of r.

    It is the point at which |r| grows most over all before, tenfold at least, and persists. If it
    emerges from noise it is the first point that is off by more than those before and persists;
    if the step is small compared with the noise, the point that best divides the values into
    those before and those after (CUSUM). It is `begin` if nothing clearer is found.
    """
    if end == begin + 1:
        # A single point, unless those after it are off as well, by more than all before it
        most = float(np.max(np.abs(r[:begin]), initial=_FLOOR))
        following = np.abs(r[end : end + 3])
        if not (len(following) and np.median(following) > _BEYOND * most):
            return begin
    if (jump := largest_rise(r, end)) is not None:
        return jump
    identical = int(np.argmax(np.abs(r[:end]) > _FLOOR))
    for back in _BACK:
        start = max(0, begin - back)
        if start == 0 and 0 < identical <= begin:
            level = float(np.median(np.abs(r[begin:end])))
            if begin - identical <= _SURE or np.median(np.abs(r[identical:begin])) > level / 3:
                return identical
        before = r[max(0, start - max(back, 256)) : start] if start else r[:begin]
        if not len(before):
            return begin
        middle = float(np.median(before)) if start else 0.0
        sigma = TO_SIGMA * float(np.median(np.abs(before - middle)))
        inside = r[start:end] - middle
        after = float(np.median(r[begin:end])) - middle
        # The evidence may begin long before the departure: then its later half is used.
        later = float(np.median(r[(begin + end) // 2 : end])) - middle
        after = later if abs(later) > 2 * abs(after) else after
        if sigma < abs(after) < _CLEAR * sigma:
            gained = np.cumsum(((inside - after / 2) * np.sign(after))[::-1])[::-1]
            return start + int(np.argmax(gained))
        off = np.abs(inside) > _BEYOND * sigma
        # At least two of the three points after it are off as well; fewer at the end.
        ahead = np.concatenate((off.astype(np.int8), np.ones(3, dtype=np.int8)))
        lasting = off & (ahead[1:-2] + ahead[2:-1] + ahead[3:] >= 2)
        if not lasting.any():
            return begin
        first = int(np.argmax(lasting))
        if first > 0 or start == 0:
            return start + first
    return begin


def largest_rise(r: Floats, end: int) -> int | None:
    """Return where |r| rises most, tenfold at least, over all before and stays up; else None.

    The first few points are what was before; those from `end` on only show whether it stays up.
    """
    if end <= _SURE:
        return None
    size = np.abs(r[: end + 3])
    before = np.maximum(np.maximum.accumulate(size)[_SURE - 1 : end - 1], _FLOOR)
    ahead = np.concatenate((size, np.repeat(size[-1:], 3)))
    # The second smallest of four: one of them may pass through zero.
    four = np.sort(np.stack([ahead[_SURE + i : end + i] for i in range(4)]), axis=0)
    rise = np.minimum(four[1], size[_SURE:end]) / before
    place = int(np.argmax(rise))
    return _SURE + place if rise[place] >= _CLEAR else None


def signed_rank(values: Floats) -> float:
    """Return how far above 0 values are, as the normal quantile of Wilcoxon's signed-rank test.

    Exact for up to 25 values; the normal approximation of the rank sum for more.
    """
    count = len(values)
    ranks = np.argsort(np.argsort(np.abs(values))) + 1
    below = int(ranks[values < 0].sum())  # the sum of the ranks of the values below 0
    if count > _EXACT:
        variance = count * (count + 1) * (2 * count + 1) / 24
        return float((count * (count + 1) / 4 - below) / np.sqrt(variance))
    ways = np.ones(1)  # number of sets of ranks, by their sum
    for rank in range(1, count + 1):
        ways = np.append(ways, np.zeros(rank)) + np.append(np.zeros(rank), ways)
    chance = ways[: below + 1].sum() / 2**count
    return NormalDist().inv_cdf(1 - min(chance, 1 - 1e-9))


def t_quantile(chance: float, degrees: float) -> float:
    """Return the value that |t| exceeds with a given chance, of both tails together."""
    # Not scipy.stats, which takes a second to import.
    from scipy.special import stdtrit

    return float(-stdtrit(degrees, chance / 2))
