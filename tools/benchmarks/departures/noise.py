"""False alarms in simulated noise, and what is found in it.

Noise of a third of the tolerance, normal and heavy-tailed, white and slow, must not be called a
departure; nor must a further seed outside of a band of seeds, or independent noise around one
trajectory of 100,000 steps. A bias of twice the tolerance must be found. A transient, and values
that are not finite, must be the first cause, with their step, whatever digits are printed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from scipy.signal import lfilter

from departures.answers import TOLERANCES, Floats, curve
from slurmllm.analysis.compare.compare import compare
from slurmllm.core.display.tables import markdown_table

SHAPES = {"normal": None, "Laplace": 0, "Student t5": 5, "Student t3": 3}
_LONG = 100_000
_PLANTED = 40_000  # step of the departure in long curves
_LONG_SEEDS = 20
# Relative scatter in long curves, and the size of the planted departure
_LONG_NOISE = {"loss": 1e-3, "grad_norm": 2e-2}
_LONG_DEPARTURE = {"loss": 5e-3, "grad_norm": 3e-2}
_LOGGED = {"all digits": None, "6 digits": 6, "4 digits": 4}
_ROUNDED = {"loss": 1e-6, "grad_norm": 1e-5}  # relative scatter by roundings


def measure(seeds: int) -> dict[str, float]:
    return {
        **false_alarms(seeds),
        **band_alarms(seeds),
        **biases_found(seeds),
        **causes_found(seeds),
        **long_curves(min(seeds, _LONG_SEEDS)),
    }


def show(rates: Mapping[str, float], seeds: int) -> str:
    heading = f"of {seeds} simulations ({min(seeds, _LONG_SEEDS)} of long curves)"
    return markdown_table((heading, "%"), [(name, f"{100 * r:.1f}") for name, r in rates.items()])


def decay(points: int) -> Floats:
    """A loss that falls from 8 to 2. [points]"""
    return np.asarray(2 + 6 * np.exp(-5 * np.arange(points) / points))


def differs(r: Floats) -> bool:
    """Whether compare calls two losses different whose relative difference is r tolerances."""
    loss = decay(len(r))
    other = loss * (1 + TOLERANCES["loss"] * r)
    comparison = compare(curve("A", {"loss": loss}), curve("B", {"loss": other}))
    return comparison.verdict == "differ"


def false_alarms(seeds: int) -> dict[str, float]:
    """False-positive rate of compare on pure noise, by distribution and number of points."""
    random = np.random.default_rng(8)
    rates = {}
    for points in (50, 200, 1000, 5000, 20000):
        for shape, degrees in SHAPES.items():
            for slowness in (0.0, 0.5, 0.9, 0.99):
                alarms = sum(
                    differs(noise(random, points, degrees, slowness) / 3) for _ in range(seeds)
                )
                kind = f"AR(1) {slowness:g}" if slowness else "white"
                rates[f"alarms: {points:,} points, {shape}, {kind}"] = alarms / seeds
    return rates


def band_alarms(seeds: int) -> dict[str, float]:
    """How often a further seed is called different from a band of seeds."""
    random = np.random.default_rng(9)
    rates = {}
    for count in (2, 3, 5, 8):
        for shape, degrees in SHAPES.items():
            for slowness in (0.98, 0.998):
                alarms = 0
                for _ in range(seeds):
                    runs = [
                        curve(f"run{i}", {"loss": seeded(random, 500, degrees, slowness)})
                        for i in range(count + 1)
                    ]
                    alarms += compare(runs[0], runs[-1], seeds=runs[1:-1]).verdict == "differ"
                kind = f"white and AR(1) {slowness:g}"
                rates[f"alarms: band of {count} seeds, {shape}, {kind}"] = alarms / seeds
    return rates


def biases_found(seeds: int) -> dict[str, float]:
    """How often a constant bias of twice the tolerance is found in noise of 0.7 tolerances."""
    random = np.random.default_rng(10)
    return {
        f"found: bias of 2 tolerances, {points} points": sum(
            differs(2 + 0.7 * random.standard_normal(points)) for _ in range(seeds)
        )
        / seeds
        for points in (20, 64, 200)
    }


def causes_found(seeds: int) -> dict[str, float]:
    """How often a transient, or values that are not finite, are the first cause with their step."""
    random = np.random.default_rng(12)
    kinds: dict[str, tuple[str, Callable[[Floats, int], None]]] = {
        "1 step": ("transient", lambda values, at: _multiply(values[at : at + 1])),
        "1 loss of 1 step": ("transient", lambda values, at: _multiply(values[at : at + 1])),
        "12 steps": ("transient", lambda values, at: _multiply(values[at : at + 12])),
        "NaN to the end": ("not_finite", lambda values, at: values[at:].fill(np.nan)),
        "NaN at 1 step": ("not_finite", lambda values, at: values[at : at + 1].fill(np.nan)),
        "Inf after a departure": ("not_finite", _departs_and_overflows),
    }
    rates = {}
    for name, (kind, change) in kinds.items():
        for logged, digits in (*_LOGGED.items(), ("roundings", None)):
            right = 0
            for _ in range(seeds):
                points = int(random.integers(40, 400))
                at = int(random.integers(8, points - 24))
                a = {
                    "loss": decay(points) * (1 + 0.01 * random.standard_normal(points)),
                    "grad_norm": decay(points) / 4 * (1 + 0.1 * random.standard_normal(points)),
                }
                b = {metric: values.copy() for metric, values in a.items()}
                for metric, values in b.items():
                    if logged == "roundings":
                        values *= 1 + _ROUNDED[metric] * random.standard_normal(points)
                    if metric == "loss" or "1 loss" not in name:
                        change(values, at)
                    if digits:
                        values[:] = [float(f"{value:.{digits}g}") for value in values]
                answer = compare(curve("A", a), curve("B", b)).causes
                step = at + 1 + (12 if change is _departs_and_overflows else 0)
                right += bool(answer) and (answer[0].kind, answer[0].step) == (kind, step)
            rates[f"cause: {kind}, {name}, {logged}"] = right / seeds
    return rates


def _multiply(values: Floats) -> None:
    values *= 1.25


def _departs_and_overflows(values: Floats, at: int) -> None:
    values[at:] *= 1.02
    values[at + 12 :] = np.inf


def long_curves(seeds: int) -> dict[str, float]:
    """Two curves of one trajectory, each with noise of its own; then with a planted departure.

    The step is right within 1 % of all steps.
    """
    random = np.random.default_rng(11)
    alarms = detected = dated = 0
    for _ in range(seeds):
        a, b = (curve(name, _long(random, departs=False)) for name in "AB")
        alarms += compare(a, b).verdict == "differ"
        different = compare(a, curve("C", _long(random, departs=True)))
        if different.verdict == "differ":
            detected += 1
            onsets = [m.onset_step for m in different.metrics.values() if m.onset_step is not None]
            step = next((cause.step for cause in different.causes[:1]), None)
            step = min(onsets, default=None) if step is None else step
            dated += step is not None and abs(step - _PLANTED) <= _LONG // 100
    return {
        f"alarms: independent noise, {_LONG:,} steps": alarms / seeds,
        f"found: the same, a departure at step {_PLANTED:,}": detected / seeds,
        "the step too": dated / seeds,
    }


def _long(random: np.random.Generator, departs: bool) -> dict[str, Floats]:
    truth = {"loss": decay(_LONG), "grad_norm": decay(_LONG) / 4}
    later = np.arange(1, _LONG + 1) >= _PLANTED
    return {
        name: values
        * (1 + _LONG_NOISE[name] * random.standard_normal(_LONG))
        * (1 + (_LONG_DEPARTURE[name] * later if departs else 0.0))
        for name, values in truth.items()
    }


def noise(random: np.random.Generator, points: int, degrees: int | None, slowness: float) -> Floats:
    """Noise of standard deviation 1, whose neighbours have the correlation `slowness`.

    `degrees` are of Student's t; None: normal; 0: Laplace.
    """
    count = points + 500
    if degrees is None:
        white = random.standard_normal(count)
    elif degrees == 0:
        white = random.laplace(size=count) / np.sqrt(2)
    else:
        white = random.standard_t(degrees, count) / np.sqrt(degrees / (degrees - 2))
    if slowness:
        white = lfilter([1.0], [1.0, -slowness], white) * np.sqrt(1 - slowness**2)
    return white[500:]


def seeded(
    random: np.random.Generator, points: int, degrees: int | None, slowness: float
) -> Floats:
    """The loss of a run with a seed of its own: 1 % of white noise, 0.3 % of slow noise."""
    loss = decay(points)
    white, slow = noise(random, points, degrees, 0.0), noise(random, points, degrees, slowness)
    return np.asarray(loss * (1 + 0.01 * white + 0.003 * slow))
