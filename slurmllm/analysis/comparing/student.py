"""Quantiles of Student's t distribution."""

from __future__ import annotations

import math
from statistics import NormalDist


def t_quantile(chance: float, degrees: float) -> float:
    """What |t| exceeds with a given chance.

    Hill, Algorithm 396: Student's t-quantiles, Communications of the ACM 13 (10), 1970; exact for
    1 and 2 degrees of freedom, else to about five digits.

    Args:
        chance: Of both tails together, above 0 and below 1.
        degrees: Degrees of freedom, 1 or more.
    """
    if degrees < 1.0 + 1e-9:
        return 1.0 / math.tan(chance * math.pi / 2)
    if abs(degrees - 2) < 1e-9:
        return math.sqrt(2 / (chance * (2 - chance)) - 2)
    n = degrees
    a = 1 / (n - 0.5)
    b = 48 / a**2
    c = ((20700 * a / b - 98) * a - 16) * a + 96.36
    d = ((94.5 / (b + c) - 3) / b + 1) * math.sqrt(a * math.pi / 2) * n
    y = (d * chance) ** (2 / n)
    if y > 0.05 + a:
        x = NormalDist().inv_cdf(chance / 2)
        y = x * x
        if n < 5:
            c += 0.3 * (n - 4.5) * (x + 0.6)
        c += (((0.05 * d * x - 5) * x - 7) * x - 2) * x + b
        y = (((((0.4 * y + 6.3) * y + 36) * y + 94.5) / c - y - 3) / b + 1) * x
        y = math.expm1(a * y * y)
    else:
        y = (
            (1 / (((n + 6) / (n * y) - 0.089 * d - 0.822) * (n + 2) * 3) + 0.5 / (n + 4)) * y - 1
        ) * (n + 1) / (n + 2) + 1 / y
    return math.sqrt(n * y)
