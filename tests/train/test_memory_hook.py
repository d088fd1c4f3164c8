"""When memory is read, and its events."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slurmllm.core.run.host_memory import Memory
from slurmllm.core.run.worker_files import EventLog
from slurmllm.train.hooks import StepEnd
from slurmllm.train.hooks.monitoring import MemoryHook

from .gang import control_planes
from .test_hooks import moment

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
        first_step=first_step,
        backend=SimpleNamespace(memory=memory),
        events=EventLog(path, 0),
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
