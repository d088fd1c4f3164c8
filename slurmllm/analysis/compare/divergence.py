"""Detection of a divergence of two curves, as opposed to noise.

The input is the signed relative difference r = (b - a) / max(|a|, |b|) at the points compared,
against a tolerance τ. Three rules make a difference (docs/compare.md):

1. **lasting**: r is beyond τ by more than its statistical error, in the middle of a window of 8 to
   1,024 points, of a quarter, of a half or of all points. After a bit-identical beginning nothing
   is noise: a mean of |r| over 8 points beyond τ lasts.
2. **outlier**, and **pointwise** of few points: single points that do not belong to the noise.
3. **noise**: r scatters by more than τ without a bias, and the curves share the noise of their
   batches; else such scatter leaves them equivalent.

The limits are set by simulation (`tools/benchmarks/departures --noise` prints the rates): at most
one false alarm in a hundred with noise of up to τ/3, from normal to Student's t with 3 degrees of
freedom, white and slow, 50 to 20,000 points.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import NormalDist
from typing import Literal

import numpy as np

from slurmllm.analysis.compare.statistics import (
    TO_SIGMA,
    Scatter,
    error_of_mean,
    find_onset,
    medians_of_windows,
    scatter,
    tail_limit,
)
from slurmllm.core.metrics.curves import Flags, Floats

Rule = Literal["pointwise", "lasting", "noise", "outlier"]

FALSE_ALARMS = 1e-3  # probability that noise alone satisfies a test, over all its windows
WINDOWS = (8, 16, 32, 64, 128, 256, 512, 1024)  # points of a lasting difference
IDENTICAL = 5  # points with the same bits, after which nothing is noise
_FEW = 20  # points up to which single ones beyond τ may count
_MIN_POINTS = 5  # fewer have no scatter
_OUTLIER_OF_FEW = 4.0  # times the scatter: not noise, of few points
_OUTLIER = 10.0  # likewise, of many
# Scatter over τ that is no noise within it, by the points that show it: fewer are less certain.
_NOISY = ((64, 1.75), (512, 1.25))
_NOISY_EVERYWHERE = 1.1
_SHARED = 0.5  # correlation of the curves' noise above which scatter is not independent
_WHITE, _UNEVEN = 0.3, 5.0  # correlation of neighbours and ratio of mean squares of steady noise
_LATE = 100  # points of independent scatter, after which an onset has a cause of its own
_GROWN = 0.25  # times what is usual: differences at first, if they grow


@dataclass(frozen=True)
class Stretch:
    """Points that are a lasting departure."""

    first: int  # index
    last: int  # index, included
    size: float  # median of |r|


@dataclass(frozen=True)
class DivergenceResult:
    """Result of the detection."""

    rule: Rule | None = None  # that applies; None: noise at most
    onset: int | None = None  # index of the point at which the curves begin to diverge
    lasting: Stretch | None = None  # the first lasting departure
    noise: float | None = None  # median scatter; None with fewer than 3 points
    scattered: bool = False  # beyond the tolerance by independent scatter, before any onset
    mean: float = 0.0  # of r
    power: float = 0.0  # smallest bias over all points that is found


@dataclass(frozen=True)
class _Hit:
    """A rule that applies, shown by the points `first` … `end` - 1; a lasting one until `last`."""

    rule: Rule
    first: int
    end: int
    last: int | None = None


def detect_divergence(
    r: Floats, tolerance: float, rough: float = 0.0, identical: int = 0, shared: float = 1.0
) -> DivergenceResult:
    """Detect a divergence of signed, finite relative differences r [points].

    Args:
        tolerance: τ.
        rough: Additional scatter of single points if one of the curves is interpolated.
        identical: First points at which all metrics have the same bits.
        shared: Correlation of the noise of the two curves.
    """
    spread = scatter(r) if len(r) > 2 else None
    is_short = spread is None or len(r) < _MIN_POINTS
    after_identical = identical >= IDENTICAL
    power = tolerance
    if not (is_short or after_identical):
        power += error_of_mean(r)
    noise = None if spread is None else spread.median
    result = DivergenceResult(noise=noise, mean=float(r.mean()), power=power)
    if not (np.abs(r) > tolerance).any():
        return result
    scattered = False
    if spread is None or is_short:
        hits = [*_single_points(r, np.abs(r) > tolerance + 3 * rough, "pointwise")]
    elif after_identical:
        hits = [*_after_identical(r, tolerance, identical)]
    else:
        hits = [*_lasting(r, tolerance, spread)]
        noisy = [*_noisy(r, spread, tolerance + rough)]
        scattered = bool(noisy) and (shared < _SHARED or _is_steady(r))
        if not scattered:
            hits += noisy
            hits += _outliers(r, tolerance + 3 * rough, spread)
    if not (hits or after_identical or scattered):
        # Slow differences are no noise of curves whose other noise is the same, if they grew.
        usual = TO_SIGMA * float(np.median(np.abs(r)))
        if usual > _NOISY_EVERYWHERE * tolerance + rough:
            early = np.median(np.abs(r[: max(3, len(r) // 8)]))
            scattered = not (early < _GROWN * usual and shared > _SHARED)
            if not scattered:
                hits = [_Hit("lasting", 0, len(r), len(r) - 1)]
    if not hits:
        return replace(result, scattered=scattered)
    earliest = min(hits, key=lambda hit: hit.end)
    onset = find_onset(r, earliest.first, earliest.end)
    before, after = r[hits[0].first : onset], r[onset : hits[0].end]
    is_segment = hits[0].rule == "lasting" and 4 * (hits[0].end - hits[0].first) >= len(r) - 3
    if is_segment and len(before) and len(after) and before.mean() / after.mean() > 0.5:
        onset = hits[0].first  # the bias is there already
    return replace(
        result,
        rule=_choose_rule(hits, r[onset:]),
        onset=onset,
        lasting=_stretch(r, hits, onset),
        scattered=scattered and onset >= _LATE,
    )


def _choose_rule(hits: Sequence[_Hit], after: Floats) -> Rule:
    rules = {hit.rule for hit in hits}
    if rules >= {"noise", "lasting"} and len(after) > 2:
        return "lasting" if abs(np.median(after)) > scatter(after).median else "noise"
    return hits[0].rule


def _stretch(r: Floats, hits: Sequence[_Hit], onset: int) -> Stretch | None:
    ends = [hit.last for hit in hits if hit.last is not None and hit.last >= onset]
    if not ends:
        return None
    return Stretch(onset, max(ends), float(np.median(np.abs(r[onset : max(ends) + 1]))))


def _lasting(r: Floats, tolerance: float, spread: Scatter) -> Iterator[_Hit]:
    """Yield a bias of all points, a half or a quarter, and of the earliest window."""
    yield from _biased_segment(r, tolerance)
    if len(r) < _FEW:
        return
    # A long curve has many short windows, and its slow noise fills them.
    shortest = max(width for width in WINDOWS if width**2 <= max(2 * len(r), WINDOWS[0] ** 2))
    widths = [width for width in WINDOWS if shortest <= width <= max(shortest, len(r) // 8)]
    windows = {width: medians_of_windows(r, width) for width in widths}
    chance = FALSE_ALARMS / sum(len(begins) for begins, _ in windows.values())
    quantile = NormalDist().inv_cdf(1 - chance / 2)
    hits = []
    for width, (begins, middles) in windows.items():
        # Of white noise, and what windows differ by: slow noise does not show from point to point.
        white = spread.sigma_at(begins + width // 2) * np.sqrt(np.pi / 2 / width)
        slow = TO_SIGMA * np.median(np.abs(middles - np.median(middles)))
        beyond = np.abs(middles) > tolerance + quantile * np.maximum(2 * white, slow)
        if beyond.any():
            hit = int(np.argmax(beyond))
            after = np.abs(middles[hit:]) <= tolerance / 2
            ends = begins[hit:][after] if after.any() else np.array([len(r)])
            first, end = int(begins[hit]), int(begins[hit] + width)
            hits.append(_Hit("lasting", first, end, max(end, int(ends[0])) - 1))
    if hits:
        yield min(hits, key=lambda hit: hit.end)


def _biased_segment(r: Floats, tolerance: float) -> Iterator[_Hit]:
    """Yield the first of all points, halves and quarters that is beyond τ on one side.

    By Wilcoxon's signed-rank test of r - τ; neighbours on the same side of τ count as fewer.
    """
    splits = [count for count in (1, 2, 4) if count == 1 or len(r) >= 10 * count]
    needed = NormalDist().inv_cdf(1 - 10 * FALSE_ALARMS / 2 / sum(splits))
    for count in splits:
        bounds = [len(r) * i // count for i in range(count + 1)]
        for first, end in pairwise(bounds):
            segment = r[first:end]
            side = segment * np.sign(np.median(segment))
            beyond = side > tolerance
            share = float(beyond.mean())
            if share <= 0.5:
                continue
            alike = 0.0
            if share < 1:
                together = float(np.mean(beyond[1:] & beyond[:-1]))
                alike = max(0.0, (together - share**2) / (share - share**2))
            if _signed_rank(side - tolerance) * np.sqrt((1 - alike) / (1 + alike)) > needed:
                yield _Hit("lasting", first, end, end - 1)
                return


def _signed_rank(values: Floats) -> float:
    """Return how far above 0 values are, as the normal quantile of the signed-rank test."""
    from scipy.stats import wilcoxon  # takes a second to import

    chance = float(wilcoxon(values, alternative="greater").pvalue)
    return NormalDist().inv_cdf(1 - min(max(chance, 1e-9), 1 - 1e-9))


def _after_identical(r: Floats, tolerance: float, identical: int) -> Iterator[_Hit]:
    """Yield what follows a bit-identical beginning, if it reaches the tolerance in mean."""
    width = max(1, min(WINDOWS[0], len(r) - identical))
    means = np.convolve(np.abs(r), np.full(width, 1 / width), "valid")
    if (means > tolerance).any():
        hit = int(np.argmax(means > tolerance))
        last = _end_of_run(means > tolerance / 2, hit) + width - 1
        yield _Hit("lasting", max(identical, hit), hit + width, last - 1)


def _end_of_run(flags: Flags, begin: int) -> int:
    """Return the index after the flags that are set from `begin` on."""
    return begin + int(np.argmin(np.append(flags[begin:], False)))


def _outliers(r: Floats, limit: float, spread: Scatter) -> Iterator[_Hit]:
    """Yield the first point that is too far off to belong to the noise."""
    beyond = np.abs(r) > limit
    if len(r) < _FEW:
        far = np.abs(r) > _OUTLIER_OF_FEW * spread.median
        yield from _single_points(r, beyond & far, "pointwise")
    elif beyond.any():
        blocks = spread.block(np.arange(len(r)))
        off = np.abs(r - spread.medians(r)[blocks])
        # Slow noise scatters less from point to point than over a block.
        sigma = np.maximum(spread.sigma, TO_SIGMA * spread.medians(off))[blocks]
        far = off > np.maximum(_OUTLIER * sigma, tail_limit(off, FALSE_ALARMS))
        yield from _single_points(r, beyond & far, "outlier")


def _single_points(r: Floats, far: Flags, rule: Rule) -> Iterator[_Hit]:
    if far.any():
        first = int(np.argmax(far))
        # Of few points the first three in a row are a lasting departure.
        three = np.flatnonzero(far[:-2] & far[1:-1] & far[2:]) if rule == "pointwise" else far[:0]
        last = _end_of_run(far, int(three[0])) - 1 if len(three) else None
        yield _Hit(rule, first, first + 1, last)


def _noisy(r: Floats, spread: Scatter, tolerance: float) -> Iterator[_Hit]:
    sigma, size = spread.sigma, spread.size
    noisy = np.zeros(len(sigma), dtype=bool)
    for points, factor in _NOISY:
        blocks = points // _NOISY[0][0]
        if len(sigma) >= blocks:
            means = np.convolve(sigma, np.full(blocks, 1 / blocks), "valid")
            windows = np.convolve(means > factor * tolerance, np.ones(blocks)) > 0.5
            noisy |= windows & (sigma > tolerance)
    if spread.median > _NOISY_EVERYWHERE * tolerance:
        noisy |= sigma > tolerance
    if noisy.any():
        first = int(np.argmax(noisy))
        end = _end_of_run(noisy, first)
        last = len(r) if end == len(sigma) else end * size
        yield _Hit("noise", first * size, min((first + 1) * size, len(r)), last - 1)


def _is_steady(r: Floats) -> bool:
    """Return whether r is noise, white and equally strong in each segment, as no departure is."""
    count = min(8, len(r) // 16)
    if count < 2 or r[0] == 0:
        return False
    squares = [float((segment**2).mean()) for segment in np.array_split(r, count)]
    neighbours = abs(float(np.corrcoef(r[1:], r[:-1])[0, 1]))
    return neighbours < _WHITE and max(squares) < _UNEVEN * min(squares)
