"""The band of `compare --as precision`: how far rounding alone moves two trainings apart.

A weight w in a format whose values are s·w apart moves at random by its roundings: the stochastic
rounding of an update δ has variance δ(s·w - δ), and δ is about the learning rate. So the weights of
two runs part by a random walk √(s·w·Σlr), their losses by about that times the gradient norm, and
the gradient norms by ten times as much, since they follow the curvature. Weights that are rounded
for products only stay below that. How much a training amplifies roundings is no property of a
format: the factors below are measured (docs/compare.md).

Rounding to nearest (plain bf16) loses small updates: a bias, which no band allows for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from slurmllm.analysis.compare.alignment import Points
from slurmllm.analysis.compare.causes import SettingDifference
from slurmllm.analysis.compare.comparison import Basis, Tolerances
from slurmllm.analysis.compare.statistics import roughness, scatter
from slurmllm.core.errors import RunError, UserError
from slurmllm.core.metrics.curves import Curve, Floats

# Distance of neighbouring values, relative, in the narrowest format of a training
SPACINGS = {"fp32": 2.0**-23, "bf16_mixed": 2.0**-8, "bf16_sr": 2.0**-8, "bf16": 2.0**-8}
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
) -> Basis | None:
    """Return the basis if it is requested, or if only recorded, unbiased precisions differ.

    Raises UserError if it is requested, and a precision is unknown or not the recorded one.
    """
    recorded = [curve.settings.get("train.precision") for curve in curves]
    if not requested:
        kinds = {difference.kind for difference in differences if not difference.weak}
        logged = {"lr", "grad_norm"} <= curves[0].columns.keys()
        if kinds != {"precision"} or not set(recorded) <= SPACINGS.keys() - {_BIASED} or not logged:
            return None
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
    why = "requested" if requested else "selected because only train.precision differs"
    return Basis(kind="precision", reason=why, precisions=(a, b))


def precision_limits(
    a: Curve,
    precisions: Sequence[str],
    points: Mapping[str, Points],
    differences: Mapping[str, Floats],
    tolerances: Tolerances,
) -> dict[str, PrecisionLimits]:
    """Return the limits of each metric; raise RunError without A's rate or gradient norm."""
    for name in ("lr", "grad_norm"):
        if not len(a.series(name)[0]):
            raise RunError(
                f"--as precision needs {name}, which A ({a.name}) lacks, to compute the noise of "
                f"roundings; name its column with --tag A:{name}=…"
            )
    (steps, rates), (gradient_steps, gradients) = a.series("lr"), a.series("grad_norm")
    spacing = max(SPACINGS[precision] for precision in precisions)
    weight = a.positive_setting("model.init_std") or _WEIGHT
    distance = np.nancumsum(np.maximum(rates, 0.0) * np.diff(steps, prepend=0))
    walk = np.sqrt(spacing * weight * np.interp(gradient_steps, steps, distance))
    moves = np.abs(gradients / np.interp(gradient_steps, *a.series("loss"))) * walk
    # Medians: the estimate is linear, and does not hold in a spike of the gradient norm.
    weights, losses = (float(np.median(x[np.isfinite(x)])) for x in (walk, moves))
    limits = {}
    for name, of_metric in points.items():
        bias, maximum, over_scatter, share = _FACTORS[name]
        unit = weights if name == "param_norm" else losses
        if _BIASED in precisions and name != "param_norm":
            unit = share = 0.0
        r, rough = differences[name], roughness(of_metric.a, of_metric.b)
        noise = scatter(r[np.isfinite(r)]) if np.isfinite(r).sum() > 2 else None
        bias = max(bias * unit, tolerances.limit(name))
        allowed, unstable = max(bias, min(maximum * unit, rough / 2)), False
        if noise is not None and (largest := float(noise.sigma.max())) < share * rough:
            bias = max(bias, over_scatter * largest)
            unstable = noise.median > allowed
        limits[name] = PrecisionLimits(bias, allowed, unstable)
    return limits
