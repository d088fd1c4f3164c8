"""When a run saves: fixed and automatic intervals, and the time left at a stop."""

import json
import math
import re
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from made_records import save_attempt
from training_rows import make_row

from slurmllm.core.config.recipe import OptimConfig
from slurmllm.core.config.resolve import RunConfig
from slurmllm.core.errors import ConfigError, StorageError
from slurmllm.core.run.records import EndingClass, MetricsRow
from slurmllm.core.run.rundir import RunDir
from slurmllm.core.run.worker_files import EventLog, PhaseWriter
from slurmllm.launch.supervise import attempt_monitor
from slurmllm.train import exits as stopping
from slurmllm.train.exits import StopRequest
from slurmllm.train.hooks import StepEnd
from slurmllm.train.hooks.checkpoint import CheckpointHook
from slurmllm.train.job import Start
from slurmllm.train.schedules import SaveSchedule, check_decay_start, learning_rate, moved_decay_end
from train.checkpoint.pretend import PretendBackend, PretendGang, state
from train.gang import small_config

Events = list[dict[str, Any]]


class Steps:
    """A job of one worker that makes steps of so many seconds, as far as the hook sees."""

    def __init__(self, run: RunDir, attempt: int, config: RunConfig) -> None:
        backend = PretendBackend(PretendGang(1), 0)
        backend.config = config
        self.job: Any = SimpleNamespace(
            run=run,
            attempt=attempt,
            step=0,
            first_step=0,
            last_step=10**6,
            config=config,
            worker=backend.worker,
            backend=backend,
            control=backend.control,
            save=None,
            mesh=backend.mesh,
            start=Start(time.time()),
            stop=StopRequest(),
            phases=PhaseWriter(None),
            saves=SaveSchedule(config.recipe.checkpoint),
            events=EventLog(run.events(attempt), attempt),
            guard=SimpleNamespace(protected_steps=lambda: ()),
            train_state=lambda: state(self.job.step),
        )
        self.hook = CheckpointHook(self.job)

    def make(self, steps: int, step_s: float = 2.0, *, leaving: bool = False) -> list[int]:
        """Make steps; those after which a save was due."""
        due = []
        for _ in range(steps):
            self.job.step += 1
            saving = leaving or self.job.saves.due(self.job.step)
            if saving:
                due.append(self.job.step)
            row = MetricsRow(**make_row(self.job.step, step_time_s=step_s))
            self.job.writing = self.job.save is not None and not self.job.save.written()
            self.hook.after_step(StepEnd(row, last=False, saving=saving, leaving=leaving))
        return due

    def events(self, kind: str) -> Events:
        lines = self.job.run.events(self.job.attempt).read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["kind"] == kind]


@pytest.fixture
def steps(tmp_path: Path) -> Callable[..., Steps]:
    return lambda *overrides, attempt=0: Steps(
        RunDir(tmp_path), attempt, small_config("checkpoint.keep=2", *overrides)
    )


AUTO = "checkpoint.every_steps=auto"


def test_every_so_many_steps(steps: Callable[..., Steps]) -> None:
    made = steps("checkpoint.every_steps=10")
    assert made.make(35) == [10, 20, 30]
    made.hook.close()
    assert made.job.run.checkpoint_steps() == [20, 30]
    saves = made.events("save")
    assert [event["step"] for event in saves] == [10, 20, 30]
    assert all(event["bytes"] > 1000 and event["waited_s"] > 0 for event in saves)
    assert 0 < saves[0]["values"]["cost_s"] <= saves[0]["waited_s"]


def test_auto_saves_soon_and_then_by_the_cost_of_a_save(
    steps: Callable[..., Steps], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "slurmllm")
    made = steps(AUTO)
    assert made.make(33) == [33], "a minute of steps after the third"
    assert caplog.messages[0] == (
        "next checkpoint in 30 steps (every 60 s: the first, to measure the cost of a save)"
    )
    chosen = made.events("interval")[-1]["values"]
    assert chosen["step_s"] == 2.0
    assert chosen["mtbf_s"] == pytest.approx(3300 * 3600, rel=1e-3)
    cost = chosen["cost_s"]
    assert chosen["interval_s"] == pytest.approx((2 * cost * chosen["mtbf_s"]) ** 0.5, rel=0.01)
    assert f"in {chosen['steps']:.0f} steps" in caplog.messages[-1]
    num_steps = int(chosen["steps"])
    assert made.make(num_steps + 5) == [33 + num_steps]


def test_auto_chooses_later_where_the_third_step_is_read_late(steps: Callable[..., Steps]) -> None:
    made = steps(AUTO)
    made.make(2)
    made.job.step += 1  # its metrics are read with the next step's
    assert made.make(2) == []
    assert [event["step"] for event in made.events("interval")] == [4]


def test_auto_remembers_earlier_attempts(steps: Callable[..., Steps]) -> None:
    made = steps(AUTO)
    made.make(40)
    (save,) = made.events("save")
    for number, ending in enumerate(["node_failure", "hang", "advance_signal"]):
        record(made.job.run, number, ending)
    resumed = steps(AUTO, attempt=3)
    resumed.make(5)
    (first,) = resumed.events("interval")
    assert first["step"] == 3
    assert first["values"]["cost_s"] == save["values"]["cost_s"]
    assert first["values"]["failures"] == 2
    hours = (3300 + 3 * 2) / 3
    assert first["values"]["mtbf_s"] == pytest.approx(hours * 3600, rel=1e-3)


def record(run: RunDir, number: int, ending: EndingClass) -> None:
    save_attempt(run, number, ended_at=7200.0, ending=ending)


def test_an_interval_is_never_shorter_than_a_save(steps: Callable[..., Steps]) -> None:
    made = steps(AUTO)
    interval = made.hook._interval
    interval.add_step(1.0, saving=False)
    for _ in range(3):
        interval.add_step(1.5, saving=True)
    assert interval.add_save(1e6, waited_s=0.5, waited_in_steps_s=0.2) == pytest.approx(2.0)
    assert interval.choose(10).step == 10 + 10**6


def stopped(made: Steps, monkeypatch: pytest.MonkeyPatch, name: str, ago_s: float) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    made.job.stop.signal_name = name
    made.job.stop._signalled_at = time.monotonic() - ago_s


@pytest.mark.parametrize(
    ("name", "ago_s", "last_save_s", "saved"),
    [
        ("SIGUSR2", 10.0, 200.0, True),
        ("SIGUSR2", 60.0, 200.0, False),
        ("SIGTERM", 60.0, 200.0, True),
        ("SIGUSR2", 60.0, None, True),
    ],
)
def test_a_save_that_does_not_fit_is_not_begun(
    steps: Callable[..., Steps],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    name: str,
    ago_s: float,
    last_save_s: float | None,
    saved: bool,
) -> None:
    made = steps("checkpoint.every_steps=10", "slurm.signal_lead_s=300")
    made.make(12)
    made.hook._save_s = last_save_s
    stopped(made, monkeypatch, name, ago_s)
    made.make(1, leaving=True)
    assert made.job.run.checkpoint_steps() == ([10, 13] if saved else [10])
    if not saved:
        (event,) = made.events("save_skipped")
        assert event["values"]["needed_s"] == 200
        assert 200 < event["values"]["left_s"] < 211
        assert "step 13 is not saved: the last save took 200.0 s" in caplog.messages[-1]


def test_the_time_that_a_signal_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    assert stopping.leaving_s is attempt_monitor.leaving_s, "the supervisor ends workers by it"
    stop = StopRequest()
    assert stop.left_s(300) is None
    stop._handle(12, None)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert stop.left_s(300) is None, "nobody ends it outside Slurm"
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    time.sleep(0.01)
    stop._handle(12, None)
    assert stop.left_s(300) == pytest.approx(270, abs=1)
    assert stop.left_s(40) == pytest.approx(20, abs=1)
    assert (stop.left_s(300) or 0) <= 270 - 0.01, "from the first of them"


def test_copies_to_the_second_tier(
    steps: Callable[..., Steps],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    began = time.monotonic()
    made = steps("checkpoint.every_steps=10", f"checkpoint.replica={tmp_path / 'second'}")
    made.make(25)
    made.make(1, leaving=True)
    assert made.hook._copier is not None
    copied = [event["step"] for event in made.events("copied")]
    assert copied[-1] == 26
    assert all(event["bytes"] > 1000 for event in made.events("copied"))
    assert sum(event["seconds"] for event in made.events("copied")) < time.monotonic() - began
    second = tmp_path / "second" / tmp_path.name
    assert (second / "step_00000026" / "manifest.json").is_file()

    def refuse(*_: object) -> int:
        raise StorageError("no route to host")

    monkeypatch.setattr("slurmllm.train.checkpoint.replicas.Replica.put", refuse)
    made.make(4)
    made.make(1, leaving=True)
    assert "no route to host; retrying at the next save" in caplog.messages
    assert "no route to host" in [event.get("message") for event in made.events("copied")]


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


CONSTANT, STEPS = "optim.decay=constant", "train.steps=100"


@pytest.mark.parametrize(
    ("before", "after", "trained", "message"),
    [
        ((), ("train.steps=200",), 70, r"train.steps: .* after step 4, .* from step 100 to 200"),
        ((), ("train.steps=80",), 70, "keep the planned rates .*--set optim.decay_steps=100;"),
        ((), ("train.steps=200",), 100, "learning rate of step 101 is"),  # it was done
        ((), ("train.steps=200", "optim.decay_steps=100"), 70, None),
        (("optim.decay_steps=90",), ("optim.decay_steps=95",), 70, "decay_steps: .* 90 to 95"),
        (("optim.decay_steps=90",), ("optim.decay_steps=90", "train.steps=200"), 70, None),
        (("optim.decay_start=60",), ("optim.decay_start=60", "train.steps=200"), 60, None),
        (("optim.decay_start=60",), ("optim.decay_start=60", "train.steps=200"), 61, "step 60"),
        ((CONSTANT,), (CONSTANT, "train.steps=200"), 61, None),
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
