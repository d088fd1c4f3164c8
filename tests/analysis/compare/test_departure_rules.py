"""The rule that tells a departure from noise, on made-up differences with known answers."""

from itertools import accumulate

import numpy as np
import pytest
from amounts import amount
from hypothesis import given, settings
from hypothesis import strategies as st

from slurmllm.analysis.compare.divergence import detect_divergence, extrapolated, shared_noise
from slurmllm.core.metrics.curves import Floats

TAU = 1.0


def noise(random: np.random.Generator, points: int, shape: str, slowness: float) -> Floats:
    """Noise of standard deviation 1."""
    count = points + 300
    if shape == "normal":
        white = random.standard_normal(count)
    elif shape == "laplace":
        white = random.laplace(size=count) / np.sqrt(2)
    else:
        degrees = int(shape[1:])
        white = random.standard_t(degrees, count) / np.sqrt(degrees / (degrees - 2))
    if slowness:
        slow = accumulate(white.tolist(), lambda last, new: slowness * last + new)
        white = np.fromiter(slow, float, count) * np.sqrt(1 - slowness**2)
    return np.asarray(white[300:])


@pytest.mark.parametrize("shape", ["laplace", "t3"])
@pytest.mark.parametrize(
    ("points", "slowness", "seeds"),
    [(50, 0, 100), (300, 0, 100), (300, 0.9, 100), (3000, 0.99, 50)],
)
def test_noise_of_a_third_of_the_tolerance_is_no_departure(
    shape: str, points: int, slowness: float, seeds: int
) -> None:
    random = np.random.default_rng(3)
    alarms = sum(
        detect_divergence(noise(random, points, shape, slowness) / 3, TAU).rule is not None
        for _ in range(seeds)
    )
    assert alarms <= 1


def test_a_shock_that_slow_noise_takes_its_time_to_forget() -> None:
    r = noise(np.random.default_rng(9), 5000, "normal", 0.9) / 3
    r[2000:] += 10 * 0.9 ** np.arange(3000)
    assert detect_divergence(r, TAU).rule is None
    r[2000:2128] += 3
    assert detect_divergence(r, TAU).rule == "lasting"


@pytest.mark.parametrize(("points", "count"), [(40, 1), (400, 3), (400, 7), (5000, 80)])
def test_points_that_do_not_belong_to_the_noise(points: int, count: int) -> None:
    r = noise(np.random.default_rng(10), points, "t5", 0.0) / 10
    places = np.linspace(5, points - 5, count).astype(int)
    r[places] = 20
    result = detect_divergence(r, TAU)
    assert (result.rule, result.onset) == ("outlier", places[0])


@pytest.mark.parametrize("points", [50, 400, 5000])
@pytest.mark.parametrize(("sigma", "size"), [(0.0, 1.05), (0.1, 2.0), (1 / 3, 3.0), (0.5, 5.0)])
def test_a_step_is_found_where_it_is(points: int, sigma: float, size: float) -> None:
    random = np.random.default_rng(5)
    off = []
    for _ in range(8):
        place = int(random.integers(points // 4, 3 * points // 4))
        r = sigma * random.standard_normal(points)
        r[place:] -= size
        result = detect_divergence(r, TAU)
        assert result.rule == "lasting"
        assert result.lasting
        assert result.lasting.last == points - 1
        assert result.lasting.size == pytest.approx(size, abs=3 * sigma)
        assert result.onset is not None
        off.append(abs(result.onset - place))
    assert max(off) <= (0 if sigma == 0 else 6)
    assert np.median(off) == 0


def test_other_batches_and_a_drift_begin_at_their_first_point() -> None:
    random = np.random.default_rng(6)
    for place in (300, 555, 700):
        r = 0.1 * random.standard_normal(1000)
        r[place:] = 10 * random.standard_normal(1000 - place)
        result = detect_divergence(r, TAU)
        assert result.rule == "noise"
        assert result.onset == pytest.approx(place, abs=3)
    r = np.concatenate((np.zeros(400), 1e-4 * 1.05 ** np.arange(300)))
    result = detect_divergence(r, TAU)
    assert (result.rule, result.onset) == ("lasting", 400)


def test_few_points_no_tolerance_and_points_on_one_side() -> None:
    r = np.full(19, 0.5)
    assert detect_divergence(r, TAU).rule is None
    r[7:10] = -1.01
    result = detect_divergence(r, TAU)
    assert (result.rule, result.onset) == ("pointwise", 7)
    assert result.lasting
    assert (result.lasting.first, result.lasting.last) == (7, 9)
    r = np.zeros(100)
    assert detect_divergence(r, 0.0).rule is None
    r[50] = 1e-16
    assert detect_divergence(r, 0.0).onset == 50
    r[50:] = 1e-16
    assert detect_divergence(r, 0.0).rule == "lasting"
    r = np.full(11, 1.2)
    r[5] = 40.0  # which hides the mean in its own error
    assert detect_divergence(r, TAU, shared=0.0).rule == "lasting"
    r[::2] = 0.8
    assert detect_divergence(r, TAU, shared=0.0).rule != "lasting"


@settings(max_examples=amount(25, of=100))
@given(st.lists(st.floats(-2, 2), min_size=1, max_size=200), st.floats(0, 1))
def test_any_differences_are_judged(values: list[float], tolerance: float) -> None:
    r = np.array(values)
    result, mirrored = (detect_divergence(values, tolerance) for values in (r, -r))
    figures = (mirrored.rule, mirrored.onset, mirrored.noise)
    assert (result.rule, result.onset, result.noise) == figures
    if not (np.abs(r) > tolerance).any():
        assert result.rule is None
    if result.rule is not None:
        assert result.onset in range(len(r))
    if result.lasting is not None:
        assert 0 <= result.lasting.first <= result.lasting.last < len(r)


@pytest.mark.parametrize("points", [20, 21, 64, 200])
def test_a_bias_of_twice_the_tolerance_is_found(points: int) -> None:
    random = np.random.default_rng(11)
    results = [
        detect_divergence(2 + 0.7 * random.standard_normal(points), TAU, shared=0.0)
        for _ in range(100)
    ]
    assert sum(result.rule == "lasting" for result in results) >= 95
    assert sum(result.onset == 0 for result in results if result.rule) >= 90
    assert np.median([result.power for result in results]) < 2


def test_after_a_bit_identical_beginning_nothing_is_noise() -> None:
    random = np.random.default_rng(12)
    r = np.zeros(160)
    r[80:] = 1.3 * np.linspace(0, 1, 80) + 0.5 * random.standard_normal(80)
    assert detect_divergence(r, TAU, identical=0).rule is None
    result = detect_divergence(r, TAU, identical=80)
    assert result.rule == "lasting"
    assert result.onset is not None
    assert result.onset >= 80
    assert detect_divergence(r / 10, TAU, identical=80).rule is None
    r[80:] = 0
    r[100] = 5  # less than the tolerance in a mean over 8
    assert detect_divergence(r, TAU, identical=80).rule is None


@pytest.mark.parametrize("points", [60, 160, 20_000])
@pytest.mark.parametrize("size", [1.5, 4.0, 14.0])
def test_independent_scatter_is_equivalent(points: int, size: float) -> None:
    random = np.random.default_rng(13)
    rounds = 100 if points < 1000 else 3
    results = [
        detect_divergence(size * random.standard_normal(points), TAU, shared=0.0)
        for _ in range(rounds)
    ]
    assert sum(result.rule is not None for result in results) <= rounds // 100
    assert all(result.scattered for result in results if result.rule is None)


def test_scatter_beyond_the_tolerance_on_shared_noise_differs() -> None:
    random = np.random.default_rng(14)
    steady = 4 * random.standard_normal(160)
    for r in (steady, steady * np.linspace(0, 1, 160)):
        assert detect_divergence(r, TAU, shared=0.95).rule == "noise"
        assert detect_divergence(r, TAU, shared=0.1).rule is None


CHANCE = 0.05


@pytest.mark.parametrize("index", [3.0, 6.0])
@pytest.mark.parametrize("points", [50, 800])
def test_a_power_law_goes_beyond_as_often_as_was_asked(index: float, points: int) -> None:
    random = np.random.default_rng(1)
    beyond = 0
    for _ in range(1000):
        top = np.sort(random.pareto(index, points) + 1)[::-1][:512]
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
    assert correlation == pytest.approx(0, abs=0.4)
    same = a * (1 + noise[2] / 10)
    correlation = shared_noise(a, same, (same - a) / a)
    assert correlation is not None
    assert correlation > 0.95
    assert shared_noise(np.ones(9), np.ones(9), np.zeros(9)) is None
