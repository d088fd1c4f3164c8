"""Statistics of the difference of two curves; the verdict does not depend on them."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from pydantic import Field

from slurmllm.compare.alignment import Points
from slurmllm.metrics.curves import Flags, Floats, Ints
from slurmllm.records import Record

WINDOWS = 10
# Of all points: the width of the running mean that smooths the curves.
_SMOOTHING = 1 / 50


class Window(Record):
    """A tenth of the points compared."""

    first_step: int
    last_step: int
    points: int
    mean_rel_diff: float | None = Field(description="None if no point is finite")
    mean_signed_rel_diff: float | None = Field(description="above 0 if B is above A")


class Statistics(Record):
    """One metric of both curves; None: no figure, as of points that are not finite."""

    points: int = Field(description="that both have")
    max_rel_diff: float | None
    max_rel_diff_step: int | None
    mean_rel_diff: float | None
    median_rel_diff: float | None
    p99_rel_diff: float | None = Field(description="99 % of the points differ by no more")
    correlation: float | None = Field(description="Pearson's, of the values")
    correlation_detrended: float | None = Field(
        description="Pearson's, of the values less their running means"
    )
    area_between: float | None = Field(
        description="between the running means of both, over the area under A's"
    )
    ratio: float | None = Field(description="median of B / A")
    windows: tuple[Window, ...]


@np.errstate(all="ignore")  # it runs in a thread, which has a state of its own
def statistics(points: Points, signed: Floats, *, shape: bool) -> Statistics:
    """Describe how a metric differs.

    Args:
        points: Of the metric, at least one.
        signed: Their signed relative differences; NaN if a value is not finite. [points]
        shape: Also correlate and smooth, which is meaningless for times and rates.
    """
    finite = np.isfinite(signed)
    if finite.all():
        steps, positions, a, b, r = points.steps, points.positions, points.a, points.b, signed
    else:
        steps, positions = points.steps[finite], points.positions[finite]
        a, b, r = points.a[finite], points.b[finite], signed[finite]
    size = np.abs(r)
    if not len(r):
        none = dict.fromkeys(Statistics.model_fields)
        return Statistics.model_validate(none | {"points": len(points), "windows": ()})
    largest = int(np.argmax(size))
    median, p99 = np.percentile(size, [50, 99])
    ratio = _ratio(a, b)
    of_shape = _shape(positions, a, b) if shape else _Shape(None, None, None)
    return Statistics(
        points=len(points),
        max_rel_diff=float(size[largest]),
        max_rel_diff_step=int(steps[largest]),
        mean_rel_diff=float(size.mean()),
        median_rel_diff=float(median),
        p99_rel_diff=float(p99),
        correlation=of_shape.correlation,
        correlation_detrended=of_shape.detrended,
        area_between=of_shape.area,
        ratio=ratio,
        windows=_windows(points.steps, finite, signed),
    )


class _Shape(NamedTuple):
    correlation: float | None
    detrended: float | None
    area: float | None


def _shape(positions: Floats, a: Floats, b: Floats) -> _Shape:
    width = max(1, round(len(a) * _SMOOTHING))
    # Large values must not overflow in a running sum or a product.
    scale = float(max(np.abs(a).max(), np.abs(b).max())) or 1.0
    if scale > 1e100:
        a, b = a / scale, b / scale
    smooth_a, smooth_b = running_mean(a, width), running_mean(b, width)
    return _Shape(
        correlation=_correlation(a, b),
        detrended=_correlation(a - smooth_a, b - smooth_b) if width > 1 else None,
        area=_area(positions, smooth_a, smooth_b),
    )


def running_mean(values: Floats, width: int) -> Floats:
    """Means over `width` neighbours, centred; fewer at the ends. [points]"""
    if width <= 1:
        return values
    count = len(values)
    total = np.empty(count + 1)
    total[0] = 0.0
    np.cumsum(values, out=total[1:])
    left, right = (width - 1) // 2, width // 2 + 1
    means = np.empty(count)
    if count > width:
        means[left : count - right + 1] = (total[width:] - total[:-width]) / width
        ends = np.concatenate((np.arange(left), np.arange(count - right + 1, count)))
    else:
        ends = np.arange(count)
    first, last = np.maximum(ends - left, 0), np.minimum(ends + right, count)
    means[ends] = (total[last] - total[first]) / (last - first)
    return means


def _correlation(a: Floats, b: Floats) -> float | None:
    """None of fewer than 3 points, and of a side that does not vary."""
    if len(a) < 3:
        return None
    means = float(a.mean()), float(b.mean())
    a, b = a - means[0], b - means[1]
    # Sums of products, not BLAS: its threads take longer to start.
    variances = float((a * a).sum()), float((b * b).sum())
    # What is left of a constant is rounding.
    for variance, mean in zip(variances, means, strict=True):
        if variance <= len(a) * (1e-13 * mean) ** 2:
            return None
    variance = variances[0] * variances[1]
    return float(np.clip((a * b).sum() / np.sqrt(variance), -1.0, 1.0))


def _area(positions: Floats, a: Floats, b: Floats) -> float | None:
    if len(a) < 2:
        under, between = float(np.abs(a).sum()), float(np.abs(b - a).sum())
    else:
        under = float(np.trapezoid(np.abs(a), positions))
        between = float(np.trapezoid(np.abs(b - a), positions))
    return between / under if under > 0 else None


def _ratio(a: Floats, b: Floats) -> float | None:
    there = a != 0
    if not there.any():
        return None
    return float(np.median(b / a if there.all() else b[there] / a[there]))


def _windows(steps: Ints, finite: Flags, signed: Floats) -> tuple[Window, ...]:
    count = min(WINDOWS, len(steps))
    bounds = np.linspace(0, len(steps), count + 1).round().astype(int)
    found = []
    for first, last in pairwise(bounds.tolist()):
        r = signed[first:last][finite[first:last]]
        found.append(
            Window(
                first_step=int(steps[first]),
                last_step=int(steps[last - 1]),
                points=int(last - first),
                mean_rel_diff=float(np.abs(r).mean()) if len(r) else None,
                mean_signed_rel_diff=float(r.mean()) if len(r) else None,
            )
        )
    return tuple(found)
