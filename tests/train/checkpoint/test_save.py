"""A checkpoint is published completely or not at all, and the others stay."""

import errno
import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_records import save_skips

from slurmllm.core.config.operation import CheckpointConfig
from slurmllm.core.errors import CheckpointError, NodeError, StorageError
from slurmllm.core.run.rundir import RunDir
from slurmllm.train.checkpoint import save as saving
from slurmllm.train.checkpoint.catalogue import RetainedCheckpoint, expired_steps, remove_expired
from slurmllm.train.checkpoint.folder import file_faults, read_manifest
from slurmllm.train.checkpoint.save import remove_leftovers
from slurmllm.train.checkpoint.state import TrainState, fingerprint_digest
from train.checkpoint.pretend import FINGERPRINT, PretendGang, save, save_at, state

STEPS = ["step_00000010", "step_00000020"]


def save_all(gang: PretendGang, run: RunDir, step: int) -> list[float | Exception]:
    return gang.all(lambda backend: save(run, backend, state(step), attempt=3))


def folders(run: RunDir) -> list[str]:
    return sorted(path.name for path in run.checkpoints.iterdir())


def test_files_and_manifest(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    save_at(run, 20, attempt=3)
    directory = run.checkpoint(20)
    manifest = read_manifest(directory)
    assert [file.path for file in manifest.files] == ["shard_0", "shard_1", "train_state.json"]
    assert file_faults(directory, manifest.files) == []
    assert (manifest.step, manifest.tokens, manifest.world_size) == (20, 20 * 256, 2)
    assert (manifest.attempt, manifest.recipe) == (3, "tiny_neox")
    assert manifest.fingerprint == fingerprint_digest(FINGERPRINT)
    assert TrainState.load(directory / "train_state.json") == state(20)
    assert folders(run) == ["step_00000020"]


def test_later_damaged_ones_do_not_count_and_are_replaced(run: RunDir) -> None:
    save_at(run, 30, attempt=3)
    (run.checkpoint(30) / "shard_0").write_text("damaged")
    save_at(run, 25, attempt=3)
    assert run.checkpoint_steps() == [20, 25, 30], "two that count and the damaged one"
    save_at(run, 30, attempt=3)
    assert run.checkpoint_steps() == [25, 30]
    assert file_faults(run.checkpoint(30), read_manifest(run.checkpoint(30)).files) == []
    assert folders(run) == ["step_00000025", "step_00000030"]


def test_a_failed_removal_is_a_warning(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(path: Path) -> None:
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(shutil, "rmtree", refuse)
    saving.remove_expired(run, 20, CheckpointConfig(keep=1))
    assert "cannot remove" in caplog.text
    assert run.checkpoint_steps() == [20]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), StorageError("no space left")]
)
def test_a_refusal_at_a_worker_ends_the_save(run: RunDir, rank: int, error: Exception) -> None:
    gang = PretendGang()
    gang.refuse[rank] = error
    errors = save_all(gang, run, 30)
    assert [type(raised) for raised in errors] == [CheckpointError, CheckpointError]
    assert "pace left" in str(errors[1])
    assert (f"(rank {rank} on n{rank})" in str(errors[0])) == isinstance(error, OSError)
    for part in ("step_00000030", "MB are free", "free space", "resume"):
        assert part in str(errors[0])
    assert folders(run) == STEPS, "no temporary folder is left"
    assert file_faults(run.checkpoint(20), read_manifest(run.checkpoint(20)).files) == []


def test_leftovers_of_dead_attempts_go(run: RunDir) -> None:
    newer = ".step_00000020.004.tmp"
    for name in (".step_00000020.003.tmp", newer, ".step_00000010.replaced", "notes"):
        (run.checkpoints / name).mkdir()
    remove_leftovers(run, attempt=3)
    assert folders(run) == [newer, "notes", *STEPS]
    remove_leftovers(run)
    assert folders(run) == ["notes", *STEPS]
    remove_leftovers(RunDir(run.path / "nothing"))


def test_an_attempt_that_was_taken_over_publishes_nothing(run: RunDir) -> None:
    run.attempt("train", 4).path.mkdir(parents=True)
    errors = save_all(PretendGang(), run, 30)
    assert [type(error) for error in errors] == [NodeError, NodeError]
    assert "attempt 3 was superseded by attempt 4" in str(errors[1])
    assert folders(run) == STEPS


def test_all_is_on_disk_before_the_manifest_and_that_before_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is fsynced and renamed, in order, by the paths that the descriptors had."""
    run, done = RunDir(tmp_path), list[str]()
    fsync, rename = os.fsync, Path.rename

    def recording_fsync(descriptor: int) -> None:
        fsync(descriptor)
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        done.append(f"fsync {path.relative_to(run.path)}")

    def recording_rename(self: Path, target: Path) -> Path:
        done.append(f"rename {self.relative_to(run.path)}")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", recording_fsync)
    monkeypatch.setattr(Path, "rename", recording_rename)
    save_at(run, 20, attempt=3)
    folder = "checkpoints/.step_00000020.003.tmp"
    manifest = next(n for n, line in enumerate(done) if f"{folder}/.manifest.json" in line)
    named = done.index(f"rename {folder}")
    for name in ("/shard_0", "/shard_1", "/train_state.json", ""):
        assert f"fsync {folder}{name}" in done[:manifest]
    assert f"fsync {folder}" in done[manifest:named]
    assert "fsync checkpoints" in done[named:]
    assert "fsync ." in done, "the folder of the checkpoints in the run's"


HISTORIES = st.lists(st.tuples(st.integers(1, 50), st.floats(0, 1e6), st.booleans()), max_size=12)


@given(HISTORIES, st.integers(1, 5), st.floats(0, 100), st.none() | st.integers(1, 60))
def test_one_that_counts_always_stays(
    history: list[tuple[int, float, bool]], keep: int, keep_hours: float, keep_every: int | None
) -> None:
    by_step = {
        step: RetainedCheckpoint(step, saved_at, counts) for step, saved_at, counts in history
    }
    candidates = [by_step[step] for step in sorted(by_step)]
    config = CheckpointConfig(keep=keep, keep_hours=keep_hours, keep_every=keep_every)
    going = expired_steps(candidates, 1e6, config)
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
    for settings, steps in (
        ({}, [*range(1, 11)]),
        ({"keep_hours": 4.0}, [*range(1, 9)]),
        ({"keep_every": 5}, [1, 2, 3, 4, 6, 7, 8, 9]),
    ):
        config = CheckpointConfig.model_validate({"keep": 2, **settings})
        assert expired_steps(candidates, now, config) == steps


def test_nothing_is_removed_if_the_newest_is_damaged(run: RunDir) -> None:
    (run.checkpoint(20) / "shard_1").write_bytes(b"cut")
    remove_expired(run, 20, CheckpointConfig(keep=1))
    assert run.checkpoint_steps() == [10, 20]


def test_one_that_is_read_stays(run: RunDir) -> None:
    remove_expired(run, 20, CheckpointConfig(keep=1), in_use=[10])
    assert run.checkpoint_steps() == [10, 20]
    remove_expired(run, 20, CheckpointConfig(keep=1))
    assert [path.name for path in run.checkpoints.iterdir()] == ["step_00000020"]


def test_an_invalidated_one_is_unusable(run: RunDir) -> None:
    save_at(run, 25, 30, attempt=1)
    save_skips(run, onset=15, last=26)
    assert run.checkpoint_steps() == [25, 30]
    save_at(run, 22)
    remove_expired(run, 30, CheckpointConfig(keep=2))
    assert run.checkpoint_steps() == [25, 30]


def test_a_damaged_roll_back_keeps_all(run: RunDir, caplog: pytest.LogCaptureFixture) -> None:
    run.skips.write_text("{")
    remove_expired(run, 20, CheckpointConfig(keep=1))
    assert run.checkpoint_steps() == [10, 20]
    assert "no checkpoint is removed" in caplog.text
