"""Hooks of the training loop, the profiler's among them."""

import gzip
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from command_line import call
from training_rows import make_row

from slurmllm.core.run.host_memory import Memory
from slurmllm.core.run.records import MetricsRow
from slurmllm.core.run.rundir import RunDir
from slurmllm.core.run.worker_files import EventLog
from slurmllm.train.backends.base import Backend, Worker
from slurmllm.train.hooks import StepEnd
from slurmllm.train.hooks.monitoring import MemoryHook, MetricsHook, ProgressHook
from slurmllm.train.hooks.profiling import ProfilingHook

from .gang import Gang, control_planes, curve, make_data, make_run, small_config


def moment(step: int, *, last: bool = False, saving: bool = False) -> StepEnd:
    figures = {"loss": 5.0, "grad_norm": 1.5, "lr": 1e-3}
    row = MetricsRow(**make_row(step, **figures))
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
    with gzip.open(job.run.trace(2, 1)) as stream:
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


def test_after_them_and_on_others(job: Any, train: Callable[[int, int], ProfilingHook]) -> None:
    train(13, 15).close()
    assert job.barriers == []
    job.worker = Worker(0, 2, 0, "n1")
    train(9, 13).close()
    assert job.barriers == [10]
    assert not job.run.profiles.exists()


def test_an_error_is_not_delayed(job: Any, train: Callable[[int, int], ProfilingHook]) -> None:
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


TWO = ("cluster.devices_per_node=2", "train.steps=6", "checkpoint.every_steps=3")


def test_training_is_bit_identical_and_each_rank_has_a_trace(tmp_path: Path) -> None:
    data = make_data(tmp_path)
    plain = Gang(make_run(tmp_path / "plain", data, *TWO), world=2)
    profile = ("profile.steps=[3, 4]", "profile.ranks=[0, 1]", "profile.memory=true")
    profiled = Gang(make_run(tmp_path / "run", data, *TWO, *profile), world=2)
    run, reference = profiled.finish(), plain.finish()
    assert curve(run) == curve(reference)
    assert len(curve(run)) == 6
    assert not reference.profiles.exists()
    for rank in (0, 1):
        with gzip.open(run.trace(0, rank)) as stream:
            names = {event.get("name") for event in json.load(stream)["traceEvents"]}
        parts = ("step 3", "step 4", "data", "forward", "backward", "optimizer")
        assert {"aten::mm", "[memory]", *(f"slurmllm.{part}" for part in parts)} <= names
        assert not {"slurmllm.step 2", "slurmllm.step 5"} & names


def test_ranks_that_do_not_exist_are_refused_before_submission(tmp_path: Path) -> None:
    verb = f"submit tiny_neox --nodes 2 --dry-run --runs-dir {tmp_path}".split()
    result = call(*verb, "profile.steps=[3, 4]", "profile.ranks=[1, 2]")
    assert "profile.ranks: 2: the run has 2 workers; choose ranks from 0 to 1" in result.output


GB = 10**9


def unreadable() -> Memory:
    raise KeyError("VmHWM")


def memory_events(
    folder: Path, steps: Sequence[StepEnd], *, first_step: int = 0, fails: bool = False
) -> tuple[list[dict[str, Any]], list[int]]:
    """The events of rank 0 of two workers, and after which steps memory was read."""
    path, read_after, at = folder / "events.jsonl", [], [0]

    def memory() -> Memory:
        read_after.append(at[0])
        if fails:
            unreadable()
        return Memory(at[0] * GB, 20 * GB)

    job: Any = SimpleNamespace(
        first_step=first_step, backend=SimpleNamespace(memory=memory), events=EventLog(path, 0)
    )
    with control_planes(2) as controls:
        job.control, other = controls
        hook = MemoryHook(job)
        peer: Any = SimpleNamespace(
            first_step=first_step,
            control=other,
            events=EventLog(None, 0),
            backend=SimpleNamespace(memory=lambda: Memory((at[0] + 1) * GB, 19 * GB)),
        )
        if fails:
            peer.backend.memory = unreadable
        peer_hook = MemoryHook(peer)
        for step in steps:
            at[0] = step.row.step
            with ThreadPoolExecutor(1) as pool:
                done = pool.submit(peer_hook.after_step, step)
                hook.after_step(step)
                done.result()
    lines = path.read_text().splitlines() if path.is_file() else []
    return [json.loads(line) for line in lines], read_after


def test_steps_first_then_all_with_their_saves(tmp_path: Path) -> None:
    steps = [moment(step, saving=step == 20, last=step == 23) for step in range(11, 24)]
    events, read_after = memory_events(tmp_path, steps, first_step=10)
    assert read_after == [12, 15, 23]
    assert [event["step"] for event in events] == [15, 23]
    assert events[0]["values"] == {"peak_bytes": 16 * GB, "limit_bytes": 19 * GB, "rank": 1}
    assert events[0]["message"] == "rank 1 used 16.00 of 19.00 GB at most"
    assert events[1]["message"].endswith("24.00 of 19.00 GB at most, saves included")


@pytest.mark.parametrize(
    ("saves", "last", "read_after"),
    [
        ((4,), 9, [2, 4, 9]),  # before the save takes some
        ((2, 3), 6, [4, 6]),
        ((1, 2, 3), 3, []),
        ((), 2, [2]),
        ((), 3, [2, 3]),
    ],
)
def test_no_save_is_counted_before(
    tmp_path: Path, saves: tuple[int, ...], last: int, read_after: list[int]
) -> None:
    steps = [moment(s, saving=s in saves, last=s == last) for s in range(1, last + 1)]
    assert memory_events(tmp_path, steps)[1] == read_after


def test_no_event_if_memory_cannot_be_read(tmp_path: Path) -> None:
    events, read_after = memory_events(
        tmp_path, [moment(s, last=s == 9) for s in range(1, 10)], fails=True
    )
    assert not events
    assert read_after == [2, 5, 9]
