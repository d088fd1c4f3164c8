"""Figures over windows of an array, for all places at once."""

from __future__ import annotations

import numpy as np

from slurmllm.analysis.curves import Flags, Floats, Ints

_MOST_CELLS = 2_000_000  # of a table of windows; memory stays bounded


def window_means(values: Floats, window: int) -> Floats:
    """The means of the finite ones among each `window` values in a row.

    Not by differences of a cumulated sum: one huge value would spoil all means after it.

    Args:
        values: [n]
        window: From 1 to n.

    Returns:
        Means, by their window's first value; NaN without a finite value. [n - window + 1]
    """
    finite = np.isfinite(values)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        sums = _window_sums(np.where(finite, values, 0.0), window)
        return sums / _window_sums(finite.astype(np.float64), window)


def _window_sums(values: Floats, window: int) -> Floats:
    """Sums of `window` values in a row, put together of sums of 1, 2, 4, … values."""
    count = len(values) - window + 1
    total, begin, length = np.zeros(count), 0, 1
    sums = values
    while True:
        if window & length:
            total = total + sums[begin : begin + count]
            begin += length
        if 2 * length > window:
            return total
        sums = sums[:-length] + sums[length:]
        length *= 2


def medians_before(values: Floats, places: Ints, window: int) -> Floats:
    """The medians of the finite ones among the `window` values before each place.

    Returns:
        Medians; NaN without a finite value. [places]
    """
    found = np.full(len(places), np.nan)
    chunk = max(1, _MOST_CELLS // window)
    before = np.arange(-window, 0)
    padded = np.concatenate(
        [np.full(window, np.nan), np.where(np.isfinite(values), values, np.nan)]
    )
    for begin in range(0, len(places), chunk):
        table = np.sort(padded[places[begin : begin + chunk, None] + window + before], axis=1)
        counts = window - np.isnan(table).sum(axis=1)
        rows = np.arange(len(table))
        low, high = np.maximum(counts - 1, 0) // 2, np.minimum(counts // 2, window - 1)
        found[begin : begin + chunk] = 0.5 * table[rows, low] + 0.5 * table[rows, high]
    return found


def first_at_most(values: Floats, places: Ints, limits: Floats) -> Ints:
    """The first place from each given one on whose value is no more than a limit.

    By a tree of smallest values, climbed and descended for all places together.

    Args:
        values: NaN is above every limit. [n]
        places: [m]
        limits: [m]

    Returns:
        Places; n where there is none. [m]
    """
    size = 1 << max(1, len(values).bit_length())
    tree = np.full(2 * size, -np.inf)  # the value after the last one ends every search
    tree[size : size + len(values)] = np.where(np.isnan(values), np.inf, values)
    level = size
    while level > 1:
        pairs = tree[level : 2 * level].reshape(-1, 2)
        tree[level // 2 : level] = pairs.min(axis=1)
        level //= 2
    nodes = places + size
    climbing = np.flatnonzero(tree[nodes] > limits)
    while climbing.size:
        after = nodes[climbing] + 1
        # A left child's parent begins where it does, and holds more.
        nodes[climbing] = np.where(after % 2 == 0, after // 2, after)
        climbing = climbing[tree[nodes[climbing]] > limits[climbing]]
    descending = np.flatnonzero(nodes < size)
    while descending.size:
        left = 2 * nodes[descending]
        nodes[descending] = left + (tree[left] > limits[descending])
        descending = descending[nodes[descending] < size]
    return nodes - size


def stretches(flags: Flags) -> tuple[Ints, Ints]:
    """First and last place of each stretch of flags that are set. [stretches], [stretches]"""
    edges = np.diff(np.concatenate([[False], flags, [False]]).astype(np.int8))
    return np.flatnonzero(edges == 1), np.flatnonzero(edges == -1) - 1
