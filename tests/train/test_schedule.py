"""The learning rate of each step."""

from __future__ import annotations

import math
import re

import pytest

from slurmllm.core.config.recipe import OptimConfig
from slurmllm.core.errors import ConfigError
from slurmllm.train.schedules import check_decay_start, learning_rate, moved_decay_end
from train.gang import small_config


def optim(**fields: object) -> OptimConfig:
    defaults = {"lr": 1.0, "min_lr": 0.1, "warmup_steps": 10, "decay": "cosine"}
    return OptimConfig.model_validate({**defaults, **fields})


QUARTER = 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4))


@pytest.mark.parametrize(
    ("fields", "rates"),
    [
        ({}, {1: 0.1, 5: 0.5, 10: 1.0, 35: QUARTER, 60: 0.55, 110: 0.1}),
        ({"decay": "linear"}, {35: 0.775, 110: 0.1}),
        ({"decay": "constant"}, {10: 1.0, 60: 1.0, 110: 1.0}),
        ({"warmup_steps": 0, "decay": "constant"}, {1: 1.0}),
        ({"warmup_steps": 0}, {110: 0.1}),
        ({"decay_steps": 50}, {30: 0.55, 50: 0.1, 51: 0.1, 110: 0.1}),
        # HLAT: decay over 480,000 of 500,000 steps, and the other way round in a run cut short.
        ({"decay_steps": 210}, {110: 0.55}),
    ],
    ids=str,
)
def test_rates(fields: dict[str, object], rates: dict[int, float]) -> None:
    computed = {step: learning_rate(optim(**fields), 110, step) for step in rates}
    assert computed == pytest.approx(rates, rel=1e-12)


def test_step_counts_of_nemo_and_of_transformers() -> None:
    """Both frameworks' formulas, with their count of finished steps, from 0 to 109."""

    def nemo(done: int) -> float:  # CosineAnnealing of nemo/core/optim/lr_scheduler.py
        if done <= 10:
            return (done + 1) / (10 + 1)
        return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (done - 10) / (110 - 10)))

    def transformers(done: int) -> float:  # get_linear_schedule_with_warmup
        return done / 10 if done < 10 else (110 - done) / (110 - 10)

    rates = [learning_rate(optim(step_count="nemo"), 110, done + 1) for done in range(110)]
    assert rates == pytest.approx([nemo(done) for done in range(110)], rel=1e-14)
    linear = optim(step_count="transformers", decay="linear", min_lr=0.0)
    rates = [learning_rate(linear, 110, done + 1) for done in range(110)]
    assert rates == pytest.approx([transformers(done) for done in range(110)], rel=1e-13, abs=1e-15)
    for count in ("nemo", "transformers"):
        assert learning_rate(optim(step_count=count, warmup_steps=0), 110, 1) == 1.0
        late = optim(step_count=count, decay_start=70, decay_steps=90)
        assert [learning_rate(late, 110, step) for step in (71, 91, 110)] == [1.0, 0.1, 0.1]
        assert learning_rate(late, 110, 72) < 1.0


@pytest.mark.parametrize(
    ("decay", "left"),
    [
        ("linear", 1 - 0.25),
        ("1-sqrt", 1 - math.sqrt(0.25)),
        ("cosine", 0.5 * (1 + math.cos(math.pi * 0.25))),
    ],
)
def test_warm_up_stable_decay(decay: str, left: float) -> None:
    wsd = optim(decay=decay, decay_start=70)
    assert {learning_rate(wsd, 110, step) for step in range(10, 71)} == {1.0}
    assert learning_rate(wsd, 110, 71) < 1.0
    assert learning_rate(wsd, 110, 80) == pytest.approx(0.1 + 0.9 * left)
    assert learning_rate(wsd, 110, 110) == 0.1
    shorter = optim(decay=decay, decay_start=70, decay_steps=110)
    assert learning_rate(shorter, 200, 80) == learning_rate(wsd, 110, 80)
    assert learning_rate(shorter, 200, 200) == 0.1


def test_a_decay_that_is_set_later_has_the_same_rates() -> None:
    planned = optim(decay="1-sqrt", decay_start=70)
    open_phases = (
        (optim(decay="constant"), 1000),
        (optim(decay="1-sqrt", decay_start=90), 90),
        (optim(decay="linear", decay_start=75, decay_steps=80), 100),
    )
    for open_phase, total in open_phases:
        for step in range(1, 71):
            assert learning_rate(open_phase, total, step) == learning_rate(planned, 110, step)


def test_warm_up_by_ratio() -> None:
    ratio = optim(warmup_steps=0, warmup_ratio=0.1)
    for step in (1, 5, 11, 12, 60, 110):
        assert learning_rate(ratio, 110, step) == learning_rate(optim(warmup_steps=11), 110, step)
    assert optim(warmup_steps=0, warmup_ratio=0.07).warmup(100) == 7, "0.07 · 100 is above 7"


@pytest.mark.parametrize(
    ("before", "after", "trained", "message"),
    [
        ((), ("train.steps=200",), 70, r"train.steps: .* after step 4, .* from step 100 to 200"),
        ((), ("train.steps=80",), 70, "keep the planned rates .*--set optim.decay_steps=100;"),
        ((), ("train.steps=200",), 100, "learning rate of step 101 is"),  # it was done
        ((), ("train.steps=200", "optim.decay_steps=100"), 70, None),
        (
            ("optim.decay_steps=90",),
            ("optim.decay_steps=95",),
            70,
            "optim.decay_steps: .* 90 to 95",
        ),
        (("optim.decay_steps=90",), ("optim.decay_steps=90", "train.steps=200"), 70, None),
        (("optim.decay_start=60",), ("optim.decay_start=60", "train.steps=200"), 60, None),
        (("optim.decay_start=60",), ("optim.decay_start=60", "train.steps=200"), 61, "step 60"),
        (("optim.decay=constant",), ("optim.decay=constant", "train.steps=200"), 61, None),
    ],
)
def test_the_end_of_a_decay_that_has_begun(
    before: tuple[str, ...], after: tuple[str, ...], trained: int, message: str | None
) -> None:
    old, new = (small_config(STEPS, *overrides).recipe for overrides in (before, after))
    warning = moved_decay_end(old, new, trained)
    same = [
        learning_rate(old.optim, old.train.steps, step)
        == learning_rate(new.optim, new.train.steps, step)
        for step in range(1, trained + 1)
    ]
    assert all(same) is (warning is None), "without a warning, as if it had been planned"
    assert warning is None if message is None else re.search(message, warning or "")


CONSTANT, STEPS = "optim.decay=constant", "train.steps=100"


@pytest.mark.parametrize(
    ("before", "after", "trained", "message"),
    [
        ((CONSTANT,), ("optim.decay=1-sqrt", "optim.decay_start=50"), 50, None),
        ((CONSTANT,), ("optim.decay=1-sqrt", "optim.decay_start=49"), 50, "is before step 50"),
        (("optim.decay_start=100",), ("optim.decay_start=60",), 50, None),
        (("optim.decay_start=100",), ("optim.decay_start=40",), 50, "is before step 50"),
        (("optim.decay_start=60",), ("optim.decay_start=80",), 60, None),
        (("optim.decay_start=60",), ("optim.decay_start=80",), 61, "began after step 60"),
        (("optim.decay_start=60",), (CONSTANT,), 61, "began after step 60"),
        ((), ("optim.decay_start=80",), 61, "began after step 4 "),
        (("optim.decay_start=60",), ("optim.decay_start=60", "optim.lr=5e-4"), 70, None),
        (("optim.decay_start=60",), ("optim.decay_start=60", "train.steps=200"), 70, None),
    ],
)
def test_the_decay_starts_among_the_steps_that_are_left(
    before: tuple[str, ...], after: tuple[str, ...], trained: int, message: str | None
) -> None:
    old, new = (small_config(STEPS, *overrides).recipe for overrides in (before, after))
    if message is None:
        check_decay_start(old, new, trained)
        return
    with pytest.raises(ConfigError) as caught:
        check_decay_start(old, new, trained)
    assert message in str(caught.value)
    assert "--from-scratch" in str(caught.value)
