"""Gradient norms that are spikes, and spikes that are divergences."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterable, Iterator

import pytest
from amounts import amount
from hypothesis import given, settings
from hypothesis import strategies as st

from slurmllm.core.config.operation import GuardConfig
from slurmllm.train.guard import SpikeDetector

SMALL = GuardConfig(smoothing_steps=4, window_steps=6)


def changes(
    norms: Iterable[float], config: GuardConfig = SMALL, warmup_steps: int = 0
) -> list[tuple[str, int]]:
    """Return the changes, each with its step."""
    watch = SpikeDetector(config, warmup_steps)
    results = []
    for step, norm in enumerate(norms, start=1):
        if change := watch.update(step, step + 1000, norm):
            assert change.spike.batch == change.spike.onset + 1000
            results.append((change.kind, step))
    return results


@pytest.mark.parametrize(
    ("norms", "expected"),
    [
        pytest.param([1.0] * 60, [], id="steady"),
        pytest.param([50.0, 60.0, 40.0], [], id="no smoothed norm yet"),
        pytest.param([1.0] * 10 + [3.0], [], id="factor itself is none"),
        pytest.param([1.0] * 10 + [3.1] + [1.0] * 8, [("began", 11), ("over", 16)], id="one step"),
        pytest.param(
            [1.0] * 10 + [9.0, 1.0] * 3 + [1.0] * 5, [("began", 11), ("over", 20)], id="ragged"
        ),
        pytest.param(
            [1.0] * 10 + [9.0] * 8, [("began", 11), ("stays", 17), ("stays", 18)], id="divergence"
        ),
        pytest.param(
            [1.0] * 10 + [2.0**i for i in range(9)],
            [("began", 13), ("stays", 19)],
            id="ever faster",
        ),
        pytest.param([1.01**i for i in range(1000)], [], id="slow growth, 20,000-fold in all"),
        pytest.param([40 * 0.9**i + 1 for i in range(200)], [], id="falls from a height"),
    ],
)
def test_curves(norms: list[float], expected: list[tuple[str, int]]) -> None:
    assert changes(norms) == expected


def test_nothing_is_judged_while_the_learning_rate_warms_up() -> None:
    rises = [1.0] * 10 + [5.0] * 10
    assert changes(rises, warmup_steps=20) == []
    assert changes([*rises, 5.0], warmup_steps=20) == [("began", 21)], "still high when it ends"
    assert changes([*rises, 2.0], warmup_steps=20) == []


def test_a_run_that_settles_on_a_higher_level_goes_on() -> None:
    spikes = changes([1.0] * 10 + [5.0] * 200)
    assert spikes[0] == ("began", 11)
    assert spikes[-1][0] == "over"
    assert spikes[-1][1] < 110


def noisy(seed: int, sigma: float, lone_spikes: float = 0.0) -> Iterator[float]:
    """1,500 norms: down from 8 to 0.25, a hump after the warm-up, log-normal noise."""
    rng = random.Random(seed)
    for step in range(1, 1501):
        level = 0.25 + 8 * math.exp(-step / 60) + 0.3 * math.exp(-(((step - 300) / 120) ** 2))
        lone = rng.uniform(3, 20) if rng.random() < lone_spikes else 1.0
        yield level * lone * math.exp(rng.gauss(0, sigma))


@pytest.mark.parametrize(
    ("curve", "allowed"),
    [
        (lambda seed: noisy(seed, 0.2), set()),
        (lambda seed: noisy(seed, 0.3, lone_spikes=0.005), {"began", "over"}),
    ],
    ids=["20 % noise", "30 % noise, one lone spike in 200 steps"],
)
def test_no_false_alarm(curve: Callable[[int], Iterator[float]], allowed: set[str]) -> None:
    kinds = {
        kind
        for seed in range(amount(40, of=200))
        for kind, _ in changes(curve(seed), GuardConfig(), warmup_steps=100)
    }
    assert kinds == allowed


@settings(deadline=None)  # the first example may wait for a busy machine
@given(
    st.lists(st.floats(0.01, 100.0), min_size=1, max_size=120),
    st.integers(1, 120),
    st.integers(1, 6),
    st.integers(1, 6),
)
def test_a_resume_judges_as_the_unbroken_run(
    norms: list[float], at: int, smoothing: int, window: int
) -> None:
    config = GuardConfig(smoothing_steps=smoothing, window_steps=window)
    unbroken, resumed = SpikeDetector(config, 3), SpikeDetector(config, 3)
    for step, norm in enumerate(norms, start=1):
        if step == at:
            resumed.load_state(json.loads(json.dumps(unbroken.state())))
        change = unbroken.update(step, step, norm)
        if step >= at:
            assert resumed.update(step, step, norm) == change
            assert resumed.state() == unbroken.state()
