"""Long lines with as few points as a picture can show."""

from __future__ import annotations

import numpy as np

from slurmllm.analysis.curves import Floats

MOST = 1200  # points of a line: one for each column of the picture


def thin(x: Floats, y: Floats, most: int = MOST) -> tuple[Floats, Floats]:
    """Keep the lowest and the highest value of each of many equal parts, so that no spike is lost.

    Args:
        x: Ascending. [points]
        y: Values; those that are no number are gaps, kept where a whole part is one. [points]
        most: Points to keep, about.
    """
    if len(y) <= most:
        return x, y
    width = -(-len(y) // (most // 2))
    whole = len(y) // width * width
    parts = y[:whole].reshape(-1, width)
    gaps = np.isnan(parts)
    low = np.argmin(np.where(gaps, np.inf, parts), axis=1)
    high = np.argmax(np.where(gaps, -np.inf, parts), axis=1)
    begins = np.arange(len(parts)) * width
    picked = np.stack([np.minimum(low, high), np.maximum(low, high)]) + begins
    places = np.concatenate((picked.T.ravel(), np.arange(whole, len(y))))
    return x[places], y[places]
