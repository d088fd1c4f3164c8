"""The band of several seeds: another seed stays in it, another training does not."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest

from slurmllm.compare.seed_band import BandResult, compare_with_band
from slurmllm.compare.statistics import t_quantile
from slurmllm.metrics.curves import Floats


def seed(
    random: np.random.Generator, points: int, white: float, slow: float, degrees: float = 1e6
) -> Floats:
    loss = 2 + 6 * np.exp(-5 * np.arange(points) / points)
    shocks = random.standard_t(degrees, (2, points)) / np.sqrt(degrees / (degrees - 2))
    walk = accumulate(shocks[0].tolist(), lambda last, new: 0.97 * last + new)
    steady = np.fromiter(walk, float, points) * np.sqrt(1 - 0.97**2)
    return np.asarray(loss * (1 + white * shocks[1] + slow * steady))


def judge(seeds: Floats, other: Floats) -> BandResult:
    return compare_with_band(np.arange(len(other)), seeds, other)


@pytest.mark.parametrize("count", [2, 5])
@pytest.mark.parametrize("slow", [0.0, 0.003])
@pytest.mark.parametrize("degrees", [5, 1e6])
def test_another_seed_stays_within(count: int, slow: float, degrees: float) -> None:
    random = np.random.default_rng(11)
    alarms = 0
    for _ in range(50):
        runs = np.stack([seed(random, 300, 0.01, slow, degrees) for _ in range(count + 1)])
        alarms += judge(runs[:-1], runs[-1]).record.excess > 1
    assert alarms <= 1


@pytest.mark.parametrize("count", [2, 8])
def test_a_loss_that_is_one_percent_higher_leaves_it(count: int) -> None:
    random = np.random.default_rng(12)
    for _ in range(5):
        runs = np.stack([seed(random, 3000, 0.01, 0.0) for _ in range(count + 1)])
        result = judge(runs[:-1], runs[-1] * 1.01)
        assert result.record.excess > 1
        assert result.record.width > 1
        assert result.record.first_outside_step is not None


def test_a_curve_that_turns_away_late_is_found_there() -> None:
    random = np.random.default_rng(13)
    runs = np.stack([seed(random, 2000, 0.005, 0.001) for _ in range(5)])
    runs[-1, 1200:] *= 1.03
    result = judge(runs[:-1], runs[-1])
    assert result.record.excess > 1
    assert result.record.first_outside_step is not None
    assert 1100 <= result.record.first_outside_step <= 1300
    random = np.random.default_rng(14)
    runs = np.stack([seed(random, 500, 0.005, 0.0) for _ in range(5)])
    runs[-1, 250] *= 2
    result = judge(runs[:-1], runs[-1])
    assert (result.record.width, result.record.first_outside_step is not None) == (1, True)


@pytest.mark.parametrize(
    ("chance", "degrees", "value"),
    # Tables of Student's t, both tails.
    [
        *((0.05, 1, 12.706), (0.01, 2, 9.925), (0.05, 3, 3.182), (0.001, 4, 8.610)),
        *((0.01, 10, 3.169), (0.05, 30, 2.042), (0.001, 120, 3.373), (0.01, 1e6, 2.5758)),
    ],
)
def test_quantiles_of_t(chance: float, degrees: float, value: float) -> None:
    assert t_quantile(chance, degrees) == pytest.approx(value, rel=1e-3)


def test_an_excursion_of_one_seed_widens_the_band_only_there() -> None:
    random = np.random.default_rng(15)
    for _ in range(4):
        runs = np.stack([seed(random, 1000, 0.005, 0.002) for _ in range(4)])
        calm = judge(runs, runs[0])
        runs[1, 800:860] *= 1.5
        result = judge(runs, runs[0])
        assert result.half_width[:700].max() < 2 * calm.half_width[:700].max()
        assert result.half_width[830] > 5 * calm.half_width[830]
        higher = judge(runs, 1.1 * seed(random, 1000, 0.005, 0.002))
        assert higher.record.excess > 1
        assert judge(runs, seed(random, 1000, 0.005, 0.002)).record.excess <= 1
