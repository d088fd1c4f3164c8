"""The band of several seeds, and the statistics and lines of two curves."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmllm.analysis.compare.alignment import Points
from slurmllm.analysis.compare.bands import BandResult, compare_with_band
from slurmllm.analysis.compare.result import Statistics, running_mean, statistics
from slurmllm.core.metrics.curves import Floats, signed_difference


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
    assert 1100 <= result.record.first_outside_step <= 1300
    random = np.random.default_rng(14)
    runs = np.stack([seed(random, 500, 0.005, 0.0) for _ in range(5)])
    runs[-1, 250] *= 2
    result = judge(runs[:-1], runs[-1])
    assert (result.record.width, result.record.first_outside_step is not None) == (1, True)


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


def described(a: Floats, b: Floats, *, shape: bool = True) -> Statistics:
    steps = np.arange(1, len(a) + 1)
    points = Points(steps, steps.astype(float), a, b)
    return statistics(points, signed_difference(a, b), shape=shape)


def test_figures_of_a_constant_offset_and_figures_that_do_not_exist() -> None:
    a = 3 + np.sin(np.arange(200.0))
    figures = described(a, a * 1.25)
    for value in (figures.max_rel_diff, figures.mean_rel_diff, figures.median_rel_diff):
        assert value == pytest.approx(0.2)
    assert figures.p99_rel_diff == pytest.approx(0.2)
    assert figures.correlation == pytest.approx(1)
    assert figures.correlation_detrended == pytest.approx(1)
    assert figures.area_between == pytest.approx(0.25)
    assert figures.ratio == pytest.approx(1.25)
    assert len(figures.windows) == 10
    assert sum(window.points for window in figures.windows) == 200
    assert figures.windows[3].mean_signed_rel_diff == pytest.approx(0.2)
    assert described(a * 1.25, a).windows[3].mean_signed_rel_diff == pytest.approx(-0.2)
    constant = np.full(30, 0.1)
    assert described(constant, constant).correlation is None
    nothing = described(np.full(4, np.nan), np.ones(4))
    assert (nothing.points, nothing.max_rel_diff, nothing.windows) == (4, None, ())
    single = described(np.array([2.0]), np.array([3.0]))
    assert (single.correlation, single.area_between, len(single.windows)) == (None, 0.5, 1)
    gap = described(np.array([1.0, np.inf, 1.0]), np.ones(3))
    assert gap.windows[1].mean_rel_diff is None


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60), st.integers(1, 70))
def test_running_mean_is_the_mean_of_the_neighbours(values: list[float], width: int) -> None:
    means = running_mean(np.array(values), width)
    for i, mean in enumerate(means):
        near = (
            values[max(0, i - (width - 1) // 2) : i + width // 2 + 1] if width > 1 else [values[i]]
        )
        assert mean == pytest.approx(np.mean(near), abs=1e-6)
