"""Curves for compare, and what a right verdict is by the logged values."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from slurmllm.core.metrics.curves import Curve, Ints

Floats = npt.NDArray[np.float64]
Verdict = Literal["identical", "match", "equivalent", "differ"]

TOLERANCES = {"loss": 1e-3, "grad_norm": 1e-2}  # compare's defaults
_WINDOW = 8  # points whose mean counts as lasting
_CLEAR = 1.5  # times the tolerance: beyond doubt lasting
_SCATTER = 3.0  # times the tolerance, as a root mean square: beyond doubt different


def curve(name: str, columns: Mapping[str, Floats], steps: Ints | None = None) -> Curve:
    """Return a curve of some columns, as of a log without settings; by default of steps 1, 2, …"""
    points = len(columns["loss"])
    return Curve(
        name=name,
        path=Path(name),
        steps=np.arange(1, points + 1) if steps is None else steps,
        attempts=np.zeros(points, dtype=np.int64),
        columns=columns,
        kind="csv",
    )


def visible_verdicts(a: Mapping[str, Floats], b: Mapping[str, Floats]) -> frozenset[Verdict]:
    """Return the right verdicts by what two logs show, columns [points] at the same steps.

    Two runs whose logged loss and gradient norm have the same bits are identical; within the
    tolerance at every point they match. If only single points are beyond it, or a mean is beyond it
    by less than half, any verdict but `identical` is right.
    """
    pairs = [(a[name], b[name], limit) for name, limit in TOLERANCES.items() if name in a]
    if all(np.array_equal(x, y) for x, y, _ in pairs):
        return frozenset({"identical"})
    sizes = []
    for x, y, tolerance in pairs:
        if not (np.isfinite(x).all() and np.isfinite(y).all()):
            return frozenset({"differ"})
        scale = np.maximum(np.abs(x), np.abs(y))
        sizes.append((y - x) / np.where(scale > 0, scale, 1.0) / tolerance)
    if all(np.abs(r).max() <= 1 for r in sizes):
        return frozenset({"match"})
    for r in sizes:
        windows = np.lib.stride_tricks.sliding_window_view(r, min(_WINDOW, len(r)))
        if np.abs(windows.mean(axis=1)).max() > _CLEAR:
            return frozenset({"differ"})
        if np.sqrt((windows**2).mean(axis=1)).max() > _SCATTER:
            return frozenset({"differ"})
    return frozenset({"match", "equivalent", "differ"})
