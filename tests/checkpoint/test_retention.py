"""Which checkpoints are removed, and that a usable one always stays."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoint.pretend import PretendGang, save, state
from slurmllm.checkpoint.catalogue import RetainedCheckpoint, expired_steps, remove_expired
from slurmllm.run.records import SkippedBatches, SkipsRecord
from slurmllm.run.rundir import RunDir

HISTORIES = st.lists(st.tuples(st.integers(1, 50), st.floats(0, 1e6), st.booleans()), max_size=12)


@given(HISTORIES, st.integers(1, 5), st.floats(0, 100), st.none() | st.integers(1, 60))
def test_one_that_counts_always_stays(
    history: list[tuple[int, float, bool]], keep: int, keep_hours: float, keep_every: int | None
) -> None:
    by_step = {
        step: RetainedCheckpoint(step, saved_at, counts) for step, saved_at, counts in history
    }
    candidates = [by_step[step] for step in sorted(by_step)]
    going = expired_steps(candidates, 1e6, keep=keep, keep_hours=keep_hours, keep_every=keep_every)
    left = [c for c in candidates if c.step not in going]
    counting = [c for c in candidates if c.usable]
    assert sum(c.usable for c in left) >= min(keep, len(counting))
    assert not counting or counting[-1] in left
    for gone in (by_step[step] for step in going):
        if gone.usable:
            assert gone.saved_at + keep_hours * 3600 <= 1e6
            assert not keep_every or gone.step % keep_every


def test_by_count_by_age_and_every_nth() -> None:
    candidates = [RetainedCheckpoint(step, saved_at=step * 3600.0) for step in range(1, 13)]
    now = 12 * 3600.0
    assert expired_steps(candidates, now, keep=2) == list(range(1, 11))
    assert expired_steps(candidates, now, keep=2, keep_hours=4) == list(range(1, 9))
    assert expired_steps(candidates, now, keep=2, keep_every=5) == [1, 2, 3, 4, 6, 7, 8, 9]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Checkpoints at steps 10 and 20."""
    run = RunDir(tmp_path)
    for step in (10, 20):
        PretendGang().all(lambda backend, step=step: save(run, backend, state(step), attempt=0))
    return run


def test_nothing_is_removed_if_the_newest_is_damaged(run: RunDir) -> None:
    (run.checkpoint(20) / "shard_1").write_bytes(b"cut")
    remove_expired(run, 20, keep=1)
    assert run.checkpoint_steps() == [10, 20]


def test_one_that_is_read_stays(run: RunDir) -> None:
    remove_expired(run, 20, keep=1, in_use=[10])
    assert run.checkpoint_steps() == [10, 20]
    remove_expired(run, 20, keep=1)
    assert [path.name for path in run.checkpoints.iterdir()] == ["step_00000020"]


def test_an_invalidated_one_is_unusable(run: RunDir) -> None:
    for step in (25, 30):
        PretendGang().all(lambda backend, step=step: save(run, backend, state(step), attempt=1))
    skip = SkippedBatches(first=15, last=26, roll_back_to=10, onset=15, attempt=0, reason="spike")
    SkipsRecord(skips=(skip,)).save(run.skips)
    assert run.checkpoint_steps() == [25, 30]
    PretendGang().all(lambda backend: save(run, backend, state(22), attempt=0))
    remove_expired(run, 30, keep=2)
    assert run.checkpoint_steps() == [25, 30]


def test_a_damaged_record_of_roll_backs_keeps_all(
    run: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    run.skips.write_text("{")
    remove_expired(run, 20, keep=1)
    assert run.checkpoint_steps() == [10, 20]
    assert "no checkpoint is removed" in caplog.text
