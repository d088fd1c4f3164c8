"""How far a heavy tail goes, on noise whose tail is known."""

from __future__ import annotations

import numpy as np
import pytest

from slurmllm.compare.statistics import extrapolated, largest, shared_noise

CHANCE = 0.05


@pytest.mark.parametrize("index", [3.0, 6.0])
@pytest.mark.parametrize("points", [50, 800])
def test_a_power_law_goes_beyond_as_often_as_was_asked(index: float, points: int) -> None:
    random = np.random.default_rng(1)
    beyond = 0
    for _ in range(1000):
        top = largest(random.pareto(index, points) + 1, 512)
        beyond += top[0] > extrapolated(top, points, 4, 4 / CHANCE)
    assert beyond / 1000 < 1.3 * CHANCE
    if points == 800:  # enough to tell the index
        assert beyond / 1000 > CHANCE / 2


def test_shared_noise() -> None:
    random = np.random.default_rng(2)
    trend = 2 + 6 * np.exp(-5 * np.arange(300) / 300)
    noise = 0.02 * random.standard_normal((3, 300))
    a, b = trend * (1 + noise[0]), trend * (1 + noise[1])
    correlation = shared_noise(a, b, (b - a) / a)
    assert correlation is not None
    assert abs(correlation) < 0.4
    same = a * (1 + noise[2] / 10)
    correlation = shared_noise(a, same, (same - a) / a)
    assert correlation is not None
    assert correlation > 0.95
    assert shared_noise(np.ones(9), np.ones(9), np.zeros(9)) is None
