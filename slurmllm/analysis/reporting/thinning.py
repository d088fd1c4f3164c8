"""Long curves with fewer points: what a picture of a thousand columns can show of them.

A picture of 500,000 steps needs no more than each column's lowest and highest value, so that no
spike is lost; smoothing needs each column's mean.
"""

from __future__ import annotations

import numpy as np

from slurmllm.analysis.curves import Floats, Ints


def extremes(values: Floats, most: int) -> Ints:
    """The rows to draw: of each of equally long pieces the first, lowest and highest.

    The first row that is not finite is there as well, so that a gap stays one, and the last row of
    all.

    Args:
        values: Of the curve. [rows]
        most: Rows at most, but for those that are not finite.

    Returns:
        Rows, ascending. [at most `most` + pieces with a gap]
    """
    rows = len(values)
    if rows <= most:
        return np.arange(rows, dtype=np.int64)
    table, begins = _pieces(values, max(1, (most - 1) // 3))
    bad = ~np.isfinite(table)
    lowest = np.argmin(np.where(bad, np.inf, table), axis=1) + begins
    highest = np.argmax(np.where(bad, -np.inf, table), axis=1) + begins
    gaps = (np.argmax(bad, axis=1) + begins)[bad.any(axis=1)]
    found = np.concatenate([begins, lowest, highest, gaps, [rows - 1]])
    return np.unique(found[found < rows])


def means(values: Floats, most: int) -> Floats:
    """The mean of each of equally long pieces, without what is not finite.

    Args:
        values: Of the curve. [rows]
        most: Pieces at most; shorter curves stay as they are.

    Returns:
        Means; NaN where a piece has nothing finite. [pieces]
    """
    if len(values) <= most:
        return values
    table, _ = _pieces(values, most)
    good = np.isfinite(table)
    count = good.sum(axis=1)
    total = np.where(good, table, 0.0).sum(axis=1)
    found: Floats = np.divide(total, count, out=np.full(len(count), np.nan), where=count > 0)
    return found


def _pieces(values: Floats, most: int) -> tuple[Floats, Ints]:
    """Rows as a table of pieces, the last one filled up with NaN, and where each begins."""
    length = -(-len(values) // most)
    pieces = -(-len(values) // length)
    table = np.full(pieces * length, np.nan)
    table[: len(values)] = values
    return table.reshape(pieces, length), np.arange(pieces, dtype=np.int64) * length
