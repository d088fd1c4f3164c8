"""When the profiling hook starts and writes, and that it never ends the training."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slurmllm.backends.base import Backend, Worker
from slurmllm.profile.trace import RankProfile
from slurmllm.run.rundir import RunDir
from slurmllm.train.hooks.profiling import ProfilingHook

from .gang import small_config


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
    ((files,),) = job.run.profiled().values()
    summary = RankProfile.load(files.summary)
    assert (summary.rank, summary.node) == (1, "n1")
    assert summary.parts["forward"] > 0
    return summary.first_step, summary.last_step


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
    assert job.run.profiled() == {}
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
