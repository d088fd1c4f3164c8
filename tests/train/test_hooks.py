"""Hooks of the training loop, the profiler's among them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slurmllm.core.run.records import MetricsRow
from slurmllm.core.run.rundir import RunDir
from slurmllm.train.backends.base import Backend, Worker
from slurmllm.train.hooks import StepEnd
from slurmllm.train.hooks.monitoring import MetricsHook, ProgressHook
from slurmllm.train.hooks.profiling import ProfilingHook

from .gang import small_config


def moment(step: int, *, last: bool = False, saving: bool = False) -> StepEnd:
    row = MetricsRow(
        step=step,
        attempt=0,
        loss=5.0,
        grad_norm=1.5,
        param_norm=9.0,
        lr=1e-3,
        tokens=step * 256,
        seq_per_s=16.0,
        tokens_per_s=512.0,
        step_time_s=0.5,
        forward_backward_s=0.4,
        optimizer_s=0.1,
        time=1e9 + step,
    )
    return StepEnd(row, last=last, saving=saving, leaving=last)


@pytest.fixture
def job_at(tmp_path: Path) -> Callable[[int], Any]:
    """A job at a step, as far as hooks need it."""
    config = small_config("train.steps=40", "train.log_every=10")
    return lambda step: SimpleNamespace(
        run=RunDir(tmp_path), attempt=0, step=step, last_step=40, config=config
    )


def test_metrics_rows_are_there_at_once(job_at: Callable[[int], Any]) -> None:
    job = job_at(0)
    hook = MetricsHook(job)
    for step in (1, 2):
        hook.after_step(moment(step, saving=step == 2))
        lines = job.run.metrics(0).read_text().splitlines()
        assert MetricsRow.model_validate_json(lines[-1]) == moment(step).row
    hook.close()
    assert len(lines) == 2


def test_progress_lines(job_at: Callable[[int], Any], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "slurmllm")
    hook = ProgressHook(job_at(14))
    for step in range(15, 38):  # a last step that no multiple shows
        hook.after_step(moment(step, last=step == 37))
    lines = caplog.messages
    assert [line.split()[1] for line in lines] == [
        f"{step}/40" for step in (15, 16, 17, 20, 30, 37)
    ]
    assert lines[0].endswith("eta ?"), "the first step compiles"
    assert lines[1] == (
        "step 16/40  loss 5.0000  grad norm 1.500  lr 1.00e-03  16.0 seq/s  512 tokens/s  "
        "eta 0:00:12"
    )


class Parts:
    part = Backend.__dict__["part"]
    worker_device = None


@pytest.fixture
def job(tmp_path: Path) -> Any:
    """A job, as far as the hook needs it."""
    barriers: list[int] = []
    made = SimpleNamespace(
        run=RunDir(tmp_path),
        attempt=2,
        step=0,
        worker=Worker(1, 2, 1, "n1"),
        backend=Parts(),
        config=small_config("train.steps=40", "profile.steps=[10, 12]", "profile.ranks=[1]"),
        control=SimpleNamespace(barrier=lambda: barriers.append(made.step)),
        barriers=barriers,
        phases=SimpleNamespace(begin=lambda phase, step: None),
    )
    return made


@pytest.fixture
def train(job: Any) -> Callable[[int, int], ProfilingHook]:
    """First and last step → the hook after them, not closed."""

    def run(first: int, last: int) -> ProfilingHook:
        hook = ProfilingHook(job)
        for step in range(first, last + 1):
            job.step = step
            hook.before_step(step)
            with job.backend.part("forward"):
                pass
        return hook

    return run


def profiled(job: Any) -> tuple[int, int]:
    with gzip.open(job.run.profile(2, 1).trace) as stream:
        names = {event.get("name", "") for event in json.load(stream)["traceEvents"]}
    assert "slurmllm.forward" in names
    steps = [int(name.split()[1]) for name in names if name.startswith("slurmllm.step ")]
    return min(steps), max(steps)


def test_from_the_first_to_the_last(job: Any, train: Callable[[int, int], ProfilingHook]) -> None:
    hook = train(8, 13)
    assert profiled(job) == (10, 12)
    assert job.barriers == [10], "all workers begin together, once"
    assert job.backend.part("forward") is Backend.part("forward"), "annotations cost nothing again"
    hook.close()


def test_an_attempt_that_begins_or_ends_within_them(
    job: Any, train: Callable[[int, int], ProfilingHook]
) -> None:
    hook = train(11, 11)
    assert not job.run.profiles.exists()
    hook.close()
    assert profiled(job) == (11, 11)


def test_after_them_and_on_other_workers(
    job: Any, train: Callable[[int, int], ProfilingHook]
) -> None:
    train(13, 15).close()
    assert job.barriers == []
    job.worker = Worker(0, 2, 0, "n1")
    train(9, 13).close()
    assert job.barriers == [10]
    assert not job.run.profiles.exists()


def test_an_error_of_the_training_is_not_delayed(
    job: Any, train: Callable[[int, int], ProfilingHook]
) -> None:
    hook = train(10, 11)
    with pytest.raises(RuntimeError, match="lost"), closing(hook):
        raise RuntimeError("a peer is lost")
    assert not job.run.profiles.exists()


def test_files_that_cannot_be_written(
    job: Any, train: Callable[[int, int], ProfilingHook], caplog: pytest.LogCaptureFixture
) -> None:
    job.run.profiles.write_text("a file in the folder's place")
    train(10, 13).close()
    assert "the profile of rank 1 failed: " in caplog.text
