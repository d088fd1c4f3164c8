"""How much the difference of two curves scatters from point to point, whatever its trend."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from slurmllm.analysis.curves import Floats, Ints

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
        """Those of the blocks that points lie in. [places]"""
        return self.sigma[self.block(places)]

    def block(self, places: Ints) -> Ints:
        """The blocks that points lie in. [places]"""
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
