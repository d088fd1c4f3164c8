"""Noise of the difference of two curves: scatter, tails, and the onset of a departure in it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from slurmllm.metrics.curves import Flags, Floats, Ints

TO_SIGMA = 1.4826  # median of |x| of a normal x → its standard deviation
_BLOCK = 64


@dataclass(frozen=True)
class Scatter:
    """Robust standard deviations of r by blocks of points, from the median of |r_i+1 - r_i|.

    Attributes:
        size: Points of a block; the last one has up to twice as many.
        sigma: Standard deviation. [blocks]
    """

    size: int
    sigma: Floats

    def at(self, places: Ints) -> Floats:
        """Returns the standard deviations at some points. [places]"""
        return self.sigma[self.block(places)]

    def block(self, places: Ints) -> Ints:
        """Returns the blocks of some points. [places]"""
        return np.minimum(places // self.size, len(self.sigma) - 1)

    @property
    def median(self) -> float:
        """Over the blocks."""
        return float(np.median(self.sigma))


def scatter(r: Floats) -> Scatter:
    """Measure the scatter.

    Args:
        r: At least 3 values; 64 a block, or a quarter of few. [points]
    """
    size = min(_BLOCK, max(3, len(r) // 4))
    blocks = max(1, len(r) // size)
    found = np.empty(blocks)
    whole = r[: (blocks - 1) * size].reshape(-1, size)
    if len(whole):
        found[:-1] = np.median(np.abs(np.diff(whole, axis=1)), axis=1)
    found[-1] = np.median(np.abs(np.diff(r[(blocks - 1) * size :])))
    return Scatter(size, found * (TO_SIGMA / np.sqrt(2)))


def medians_of_three(values: Floats) -> Floats:
    """Each value's median with its two neighbours, which single points do not move; ends as is.

    Args:
        values: At least one. [..., points]
    """
    found = values.copy()
    low = np.minimum(values[..., :-1], values[..., 1:])
    high = np.maximum(values[..., :-1], values[..., 1:])
    found[..., 1:-1] = np.maximum(low[..., :-1], np.minimum(high[..., :-1], values[..., 2:]))
    return found


# No noise has a heavier tail than Student's t with so many degrees of freedom.
_HEAVIEST = 3
# Points from which the tail is estimated, an eighth of all at most
_TAIL = 64


def largest(sizes: Floats, count: int) -> Floats:
    """The largest values, the first the largest. [count, or as many as there are]"""
    count = min(len(sizes), count)
    return np.sort(np.partition(sizes, -count)[-count:])[::-1]


def extrapolated(top: Floats, total: int, place: int, odds: float, shocks: int = 1) -> float:
    """Returns what noise does not exceed, from the sizes of its points after the furthest ones.

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
    """Find the onset of a departure.

    It is the point at which |r| grows most over all before, tenfold at least, and persists. If it
    emerges from noise it is the first point that is off by more than those before and persists;
    if the step is small compared with the noise, the point that best divides the values into
    those before and those after (CUSUM).

    Args:
        r: Signed differences. [points]
        begin: First point of what is known to be a departure.
        end: The point after its last.

    Returns:
        An index from 0 to end - 1; `begin` if nothing clearer is found.
    """
    if end == begin + 1 and not _goes_on(r, begin):
        return begin
    jump = largest_rise(r, end)
    if jump is not None:
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
        lasting = persists(np.abs(inside) > _BEYOND * sigma)
        if not lasting.any():
            return begin
        first = int(np.argmax(lasting))
        if first > 0 or start == 0:
            return start + first
    return begin


def largest_rise(r: Floats, end: int) -> int | None:
    """Where |r| rises most over its largest value before, and stays up; None: nowhere tenfold.

    Args:
        r: Signed differences; the first few are not looked at: they are what was before. [points]
        end: Points from here on are not looked at, except for whether it stays up.
    """
    if end <= _SURE:
        return None
    size = np.abs(r[: end + 3])
    before = np.maximum(np.maximum.accumulate(size)[_SURE - 1 : end - 1], _FLOOR)
    ahead = np.concatenate((size, np.repeat(size[-1:], 3)))
    # The second smallest of four: one of them may pass through zero.
    four = np.sort(np.stack([ahead[_SURE + i : end + i] for i in range(4)]), axis=0)
    rise = np.minimum(four[1], size[_SURE:end]) / before
    largest = int(np.argmax(rise))
    return _SURE + largest if rise[largest] >= _CLEAR else None


def _goes_on(r: Floats, place: int) -> bool:
    """Whether what follows a point is off as well, by more than all that was before it."""
    before = float(np.max(np.abs(r[:place]), initial=_FLOOR))
    after = np.abs(r[place + 1 : place + 4])
    return bool(len(after) and np.median(after) > _BEYOND * before)


def persists(flags: Flags) -> Flags:
    """Where a flag is set and at least two of the three after it are too; fewer at the end."""
    ahead = np.concatenate((flags.astype(np.int8), np.ones(3, dtype=np.int8)))
    found: Flags = flags & (ahead[1:-2] + ahead[2:-1] + ahead[3:] >= 2)
    return found
