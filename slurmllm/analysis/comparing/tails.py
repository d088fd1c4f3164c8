"""How far the points of heavy noise go, told from those that go nearly as far."""

from __future__ import annotations

import numpy as np

from slurmllm.analysis.curves import Floats

# The tail of all noise is no heavier than that of Student's t with so many degrees of freedom.
_HEAVIEST = 3
# Points that tell the tail, an eighth of all at most.
_TAIL = 64


def largest(sizes: Floats, count: int) -> Floats:
    """The largest values, the first the largest. [count, or as many as there are]"""
    count = min(len(sizes), count)
    return np.sort(np.partition(sizes, -count)[-count:])[::-1]


def extrapolated(top: Floats, total: int, place: int, odds: float, shocks: int = 1) -> float:
    """What noise does not exceed, from the size of its points up to a place.

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
