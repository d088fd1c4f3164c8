"""Checkpoints that a roll-back invalidated are skipped."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpoint.pretend import FINGERPRINT, PretendGang, save, state
from slurmllm.checkpoint.catalogue import invalidation_reason, newest_verified
from slurmllm.checkpoint.resume import Resumable, find_resumable
from slurmllm.errors import StorageError
from slurmllm.run.records import SkippedBatches, SkipsRecord
from slurmllm.run.rundir import RunDir


def skip(onset: int, attempt: int) -> SkippedBatches:
    return SkippedBatches(
        first=onset, last=onset + 5, roll_back_to=None, onset=onset, attempt=attempt, reason="nan"
    )


SKIPS = (skip(20, 1), skip(30, 3))


@pytest.mark.parametrize(
    ("step", "attempt", "aside"),
    [
        (19, 1, False),  # before the onset
        (20, 1, True),
        (25, 0, True),  # of an earlier attempt, and as late
        (25, 2, False),  # made again
        (30, 2, True),
        (30, 4, False),
    ],
)
def test_which(step: int, attempt: int, aside: bool) -> None:
    assert (invalidation_reason(step, attempt, SKIPS) is not None) == aside


def find(run: RunDir) -> Resumable:
    first, second = PretendGang(2).all(lambda b: find_resumable(run, b, FINGERPRINT))
    if isinstance(first, Exception):
        raise first
    assert first == second
    return first


def saved(run: RunDir, step: int, attempt: int) -> None:
    PretendGang(2).all(lambda backend: save(run, backend, state(step), attempt))


def test_resume_goes_behind_the_onset(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for step in (10, 20):
        saved(run, step, attempt=0)
    SkipsRecord(skips=(skip(15, 0),)).save(run.skips)
    message = "attempt 0 saved it after the divergence from step 15 on, which attempt 0 rolled back"
    assert find(run) == Resumable(state(10), (), (f"step 20: {message}",))
    assert newest_verified(run) == (run.checkpoint(10), [f"step_00000020: {message}"])
    saved(run, 20, attempt=1)
    assert find(run) == Resumable(state(20), ()), "made again, it replaced the other"


def test_where_none_is_left_training_starts_from_step_0(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    saved(run, 10, attempt=0)
    SkipsRecord(skips=(skip(8, 0),)).save(run.skips)
    assert find(run).state is None
    assert len(find(run).invalidated) == 1


def test_a_damaged_list_of_skips(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.skips.write_text("{")
    (answer,) = PretendGang(1).all(lambda b: find_resumable(run, b, FINGERPRINT))
    assert isinstance(answer, StorageError)
    assert "skips.json" in str(answer)
