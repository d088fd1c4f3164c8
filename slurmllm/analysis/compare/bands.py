"""Tolerance bands of a comparison: the spread of several seeds, and that of rounding alone.

`compare --seed` uses the first, `compare --as precision` the second.

A further seed of the same training differs from the mean of m seeds by their spread, pooled over
the points around, times √(1 + 1/m), and by Student's t with few seeds. Seeds also differ slowly
(one learns a little faster for a while): the same is tested of means over 4, 16, 64 … points and of
the whole, by the spread of the seeds' own means. The means are of medians of three neighbours,
so that heavy noise counts in single points only; correlated means count as fewer. If a seed is
further off for a while, the band is wider there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.ndimage import maximum_filter, median_filter

from slurmllm.analysis.compare.alignment import Alignment, Points, shift_steps
from slurmllm.analysis.compare.divergence import (
    extrapolated,
    roughness,
    scatter,
    t_quantile,
)
from slurmllm.analysis.compare.recorded import SettingDifference
from slurmllm.analysis.compare.result import Band, BandOfMetric, Basis, Tolerances
from slurmllm.core.errors import RunError, UserError
from slurmllm.core.metrics.curves import Axis, Curve, Floats, Ints, argmax, median

CHANCE = 0.01  # probability that another seed leaves the band, over both metrics
# For t: few seeds show little of the shape of the noise.
_ASKED = CHANCE / 5
_METRICS = 2
# For single points of heavy noise, by metric; and the rank of the point it is estimated from
_HEAVY = CHANCE / _METRICS / 2
_TELLS = 5
# A block of points in which the seeds are so many times as far apart as usually has a seed's
# excursion.
_EXCURSION = 3.0


@dataclass(frozen=True)
class BandResult:
    """Result of the comparison of a curve with the band."""

    record: BandOfMetric
    steps: Ints  # compared [points]
    mean: Floats  # of the seeds [points]
    half_width: Floats  # by which single points may differ from the mean [points]


def compare_with_band(steps: Ints, seeds: Floats, other: Floats) -> BandResult:
    """Compare a curve [points] with the band of two seeds or more [seeds, points], all finite."""
    count, points = seeds.shape
    mean = seeds.mean(axis=0)
    deviations = seeds - mean
    floor = abs(mean).max() * 1e-12 or 1e-300
    scale = np.maximum(_point_to_point(deviations), floor)
    scale *= _excursions(deviations / scale)
    further = np.sqrt(1 + 1 / count)
    units = deviations / scale
    z = ((other - mean) / (scale * further))[None]
    calm, calm_z = (median_filter(x, (1, 3), mode="nearest") for x in (units, z))
    # 1, 4, 16 … points as long as there are 8 means at least, and all points
    widths = sorted({1, points, *(4**k for k in range(1, 20) if 8 * 4**k <= points)})
    chance = _ASKED / _METRICS / len(widths)
    limits = {width: _limit(units if width == 1 else calm, width, chance) for width in widths}
    excess, worst, first, end = 0.0, 1, None, points + 1
    for width, limit in limits.items():
        reach = abs(_means(z if width == 1 else calm_z, width)[0]) / limit
        if reach.max() > excess:
            excess = float(reach.max())
            worst = width
        if reach.max() > 1:
            begin = argmax(reach > 1) * width
            if begin + width < end:
                first = begin
                end = begin + width
    size = abs(mean).mean() or 1.0
    record = BandOfMetric(
        within=excess <= 1,
        spread=np.sqrt((deviations**2).sum() / (count - 1) / points) / size,
        excess=excess,
        width=worst,
        first_outside_step=None if first is None else steps[first],
        power=limits[points] * further * scale.mean() / size,
    )
    return BandResult(record, steps, mean, limits[1] * further * scale)


def _point_to_point(deviations: Floats) -> Floats:
    """Return the seeds' standard deviation from point to point, over an eighth of them. [points]

    It is a unit for all else: there are many differences from point to point, and so it is known
    well everywhere, where two seeds cross too.
    """
    count, points = deviations.shape
    if points < 3:
        spread: Floats = np.sqrt((deviations**2).sum(axis=0) / (count - 1))
        return spread
    squares = (np.diff(deviations, axis=1) ** 2).sum(axis=0) / (2 * (count - 1))
    width = min(points - 1, max(32, points // 8))
    total = np.concatenate(([0.0], squares.cumsum()))
    begin = (np.arange(points) - width // 2).clip(0, points - 1 - width)
    local: Floats = np.sqrt(np.maximum(total[begin + width] - total[begin], 0.0) / width)
    return np.maximum(local, 1e-3 * median(local))


def _excursions(units: Floats) -> Floats:
    """Return by how much the band is wider where a seed makes an excursion. [points]

    By blocks of a 32nd of the points, and those next to them.
    `units`: the seeds' deviations in units of their scatter. [seeds, points]
    """
    points = units.shape[1]
    width = max(8, points // 32)
    if points < 4 * width:
        return np.ones(points)
    begins = np.arange(0, points - width + 1, width)
    counts = np.diff(np.append(begins, points))
    level = np.sqrt(np.add.reduceat((units**2).mean(axis=0), begins) / counts)
    level /= max(median(level), 1e-300)
    wider = np.where(level > _EXCURSION, level, 1.0)
    return np.repeat(maximum_filter(wider, 3, mode="nearest"), counts)


def _means(rows: Floats, width: int) -> Floats:
    """Return means over neighbours; an incomplete last block is dropped. [rows, means]"""
    blocks = rows.shape[1] // width
    means: Floats = rows[:, : blocks * width].reshape(len(rows), blocks, width).mean(axis=2)
    return means


def _limit(units: Floats, width: int, chance: float) -> float:
    """Return the limit of a further seed's means over `width` points, in the unit.

    One of them exceeds it with this chance. `units`: the seeds' deviations. [seeds, points]
    """
    means = _means(units, width)
    seeds, blocks = means.shape
    variance = float((means**2).sum()) / ((seeds - 1) * blocks)
    degrees = max(1.0, (seeds - 1) * _independent(means))
    t = t_quantile(chance / blocks, degrees) * float(np.sqrt(variance))
    # Heavy tails go beyond what t allows. Each seed against the others, as the further one is:
    far = abs(means) * np.sqrt(seeds / (seeds - 1))
    if width == 1:
        rows = far[: 1 if seeds == 2 else seeds]  # two seeds are as far off from each other
        top = np.sort(rows, axis=None)[::-1][:512]
        rank = min(_TELLS, len(top)) - 1
        beyond = extrapolated(top, rows.size, rank, (rank + 1) / (len(rows) * _HEAVY))
    else:  # beyond the furthest of the seeds, by a larger factor the fewer there are
        beyond = (1.35 + 1.65 / seeds) * float(far.max())
    return float(max(t, beyond, 1e-300))


def _independent(means: Floats) -> float:
    """Return the number of independent means of a seed, from their autocorrelation ρ.

    n / (1 + 2 Σ (1 - k/n) ρ_k²) of n means (Bartlett 1946). `means`: [seeds, means]
    """
    blocks = means.shape[1]
    if blocks < 3 or not means.any():
        return 1.0
    # Up to where the correlation is lost in its own noise: its first value that is not above 0
    # (Geyer, Practical Markov chain Monte Carlo, Statistical Science 7, 1992).
    size = 1 << (2 * blocks - 1).bit_length()
    power = (abs(np.fft.rfft(means, size, axis=1)) ** 2).sum(axis=0)
    products = np.fft.irfft(power, size)[:blocks]
    end = argmax(products <= 0) or blocks
    correlation = products[1:end] / products[0]  # of a part 1 - k/n of the means: (1 - k/n) ρ_k
    pairs = 1 - np.arange(1, end) / blocks
    return float(blocks / (1 + 2 * (correlation**2 / pairs).sum()))


class SeedBand:
    """A and further runs that differ from it in the seed alone."""

    def __init__(self, a: Curve, seed_curves: Sequence[Curve], shift: int, axis: Axis) -> None:
        """`shift`: what was added to the steps of A."""
        self._aligned = [
            Alignment(a, shift_steps(curve, shift), axis, None, None) for curve in seed_curves
        ]
        self.names = (a.name, *(other.name for other in seed_curves))
        self.warnings = [
            f"seed {curve.name}: {warning}" for curve in seed_curves for warning in curve.warnings
        ]
        for curve, alignment in zip(seed_curves, self._aligned, strict=True):
            if alignment.method != "exact" or not len(alignment.steps):
                raise RunError(
                    f"--seed {curve.name} logged other steps than {a.name}; the runs that make a "
                    "band log the same ones"
                )

    def compare(self, points: Mapping[str, Points], letter: str) -> Band:
        """Compare the metrics of B, named `letter`, with the band; raises as `check` does."""
        return Band(
            seeds=self.names,
            chance=CHANCE,
            metrics={
                name: self.check(name, metric_points, letter).record
                for name, metric_points in points.items()
            },
        )

    def check(self, metric: str, points: Points, letter: str) -> BandResult:
        """Compare B's values with the band, at their common points.

        Raises RunError if a seed lacks the metric there, or has the losses of another run.
        """
        steps = points.steps
        rows = [points.a]
        finite = np.isfinite(points.a) & np.isfinite(points.b)
        for name, alignment in zip(self.names[1:], self._aligned, strict=True):
            seed_points = alignment.points_of(metric)
            indices = seed_points.steps.searchsorted(steps).clip(max=len(seed_points) - 1)
            logged = np.isin(steps, seed_points.steps)
            if np.count_nonzero(logged) < 2:
                raise RunError(
                    f"--seed {name} has {metric} at none of the steps compared; name runs that "
                    "logged the same steps"
                )
            values = np.where(logged, seed_points.b[indices], np.nan)
            if metric == "loss":
                # A band that contains B is too wide, one that has a seed twice too narrow.
                for whose, losses in zip((letter, *self.names), (points.b, *rows), strict=False):
                    if np.array_equal(values, losses, equal_nan=True):
                        raise RunError(
                            f"--seed {name} has exactly the losses of {whose}, so that it is not "
                            "another seed; give runs with different train.seed, and each run once"
                        )
            finite &= np.isfinite(values)
            rows.append(values)
        if not finite.any():
            raise RunError(
                f"the seeds {', '.join(self.names)} and {letter} have {metric} at no step in "
                "common; name runs that logged the same steps"
            )
        return compare_with_band(steps[finite], np.stack(rows)[:, finite], points.b[finite])


# The band of `compare --as precision`: how far rounding alone moves two trainings apart.
#
# A weight w in a format whose values are s·w apart moves at random by its roundings: the
# stochastic rounding of an update δ has variance δ(s·w - δ), and δ is about the learning rate. So
# the weights of two runs part by a random walk √(s·w·Σlr), their losses by about that times the
# gradient norm, and the gradient norms by ten times as much, since they follow the curvature.
# Weights that are rounded for products only stay below that. How much a training amplifies
# roundings is no property of a format: the factors below are measured (docs/compare.md).
#
# Rounding to nearest (plain bf16) loses small updates: a bias, which no band allows for.

# Distance of neighbouring values, relative, in the narrowest format of a training
# (fp8_mixed, which rounds for products alone, is held to bf16's)
SPACINGS = {
    "fp32": 2.0**-23,
    **dict.fromkeys(("bf16_mixed", "fp8_mixed", "bf16_sr", "bf16"), 2.0**-8),
}
_BIASED = "bf16"
_WEIGHT = 0.02  # size of a weight if model.init_std is not recorded
# Limits of bias and scatter in units of the walk; and of an unstable training, whose noise grows:
# bias over scatter, and scatter over the curves' own noise
_FACTORS = {
    "loss": (3.0, 6.0, 2.0, 0.25),
    "grad_norm": (10.0, 48.0, 1.0, 2.0),
    "param_norm": (0.6, 0.0, 0.0, 0.0),
}


class PrecisionLimits(NamedTuple):
    """What a metric may differ by, relative."""

    bias: float  # lasting
    scatter: float = 0.0  # from point to point
    unstable: bool = False  # it scatters by more: roundings were amplified


def precision_basis(
    curves: Sequence[Curve],
    named: Sequence[str],
    differences: Sequence[SettingDifference],
    requested: bool,
    letter: str,
) -> Basis:
    """Return the basis: precisions if `requested`, or if only recorded, unbiased ones differ.

    Raises UserError if it is requested, and a precision is unknown or not the recorded one.
    """
    recorded = [curve.settings.get("train.precision") for curve in curves]
    if not requested:
        kinds = {difference.kind for difference in differences if not difference.weak}
        logged = {"lr", "grad_norm"} <= curves[0].columns.keys()
        if kinds != {"precision"} or not set(recorded) <= SPACINGS.keys() - {_BIASED} or not logged:
            return Basis(kind="tolerance")
    for side, curve, record, name in zip(("A", letter), curves, recorded, named, strict=True):
        if name and record not in (None, name):
            raise UserError(
                f"--precision {','.join(named)}: {side} ({curve.name}) was trained in {record}, by "
                "its config.yaml; leave the option out"
            )
        if (name or record) not in SPACINGS:
            raise UserError(
                f"--as precision: {name or 'that'} of {side} ({curve.name}) is no known precision; "
                f"give those of A, B, … by --precision P,P with P one of {', '.join(SPACINGS)}"
            )
    a, b = (str(name or record) for name, record in zip(named, recorded, strict=True))
    why = "requested" if requested else "selected because only the precision differs"
    return Basis(kind="precision", reason=why, precisions=(a, b))


def precision_limits(
    a: Curve,
    precisions: Sequence[str],
    metrics: Mapping[str, tuple[Points, Floats]],
    tolerances: Tolerances,
) -> dict[str, PrecisionLimits]:
    """Return the limits of each metric, of its points and their relative differences.

    Raises RunError without A's rate or gradient norm.
    """
    for name in ("lr", "grad_norm"):
        if not len(a.series(name)[0]):
            raise RunError(
                f"--as precision needs {name}, which A ({a.name}) lacks, to compute the noise of "
                f"roundings; name its column with --tag A:{name}=…"
            )
    steps, rates = a.series("lr")
    gradient_steps, gradients = a.series("grad_norm")
    spacing = max(SPACINGS[precision] for precision in precisions)
    weight = a.positive_setting("model.init_std") or _WEIGHT
    distance = np.nancumsum(np.maximum(rates, 0.0) * np.diff(steps, prepend=0))
    walk = np.sqrt(spacing * weight * np.interp(gradient_steps, steps, distance))
    moves = abs(gradients / np.interp(gradient_steps, *a.series("loss"))) * walk
    # Medians: the estimate is linear, and does not hold in a spike of the gradient norm.
    weights, losses = (median(x[np.isfinite(x)]) for x in (walk, moves))
    limits = {}
    for name, (points, r) in metrics.items():
        bias, maximum, over_scatter, share = _FACTORS[name]
        unit = weights if name == "param_norm" else losses
        if _BIASED in precisions and name != "param_norm":
            unit = share = 0.0
        rough = roughness(points.a, points.b)
        noise = scatter(r[np.isfinite(r)]) if np.isfinite(r).sum() > 2 else None
        bias = max(bias * unit, tolerances.limit(name))
        allowed = max(bias, min(maximum * unit, rough / 2))
        unstable = False
        if noise and (largest := float(noise.sigma.max())) < share * rough:
            bias = max(bias, over_scatter * largest)
            unstable = noise.median > allowed
        limits[name] = PrecisionLimits(bias, allowed, unstable)
    return limits
