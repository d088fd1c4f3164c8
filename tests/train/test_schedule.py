"""The learning rate of each step."""

from __future__ import annotations

import math

import pytest

from slurmllm.config.recipe import OptimConfig
from slurmllm.train.schedules import learning_rate


def optim(**fields: object) -> OptimConfig:
    defaults = {"lr": 1.0, "min_lr": 0.1, "warmup_steps": 10, "decay": "cosine"}
    return OptimConfig.model_validate({**defaults, **fields})


def test_warm_up_reaches_lr_at_its_last_step() -> None:
    assert [learning_rate(optim(), 110, step) for step in (1, 5, 10)] == [0.1, 0.5, 1.0]


def test_cosine() -> None:
    assert learning_rate(optim(), 110, 60) == pytest.approx(0.55)  # half-way
    quarter = 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4))
    assert learning_rate(optim(), 110, 35) == pytest.approx(quarter)
    assert learning_rate(optim(), 110, 110) == 0.1


def test_linear() -> None:
    assert learning_rate(optim(decay="linear"), 110, 35) == pytest.approx(0.775)
    assert learning_rate(optim(decay="linear"), 110, 110) == pytest.approx(0.1)


def test_constant() -> None:
    assert {learning_rate(optim(decay="constant"), 110, step) for step in (10, 60, 110)} == {1.0}


def test_no_warm_up() -> None:
    assert learning_rate(optim(warmup_steps=0, decay="constant"), 100, 1) == 1.0
    assert learning_rate(optim(warmup_steps=0), 100, 100) == 0.1


def test_decay_may_end_before_training_and_after_it() -> None:
    early = optim(decay_steps=50)
    assert learning_rate(early, 110, 30) == pytest.approx(0.55)
    assert [learning_rate(early, 110, step) for step in (50, 51, 110)] == [0.1, 0.1, 0.1]
    # HLAT: decay over 480,000 of 500,000 steps, and the other way round where a run is cut short.
    assert learning_rate(optim(decay_steps=210), 110, 110) == pytest.approx(0.55)
