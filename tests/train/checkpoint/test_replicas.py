"""Replicas of checkpoints: copied completely, verified when restored, never fatal to the run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from made_records import save_manifest

from slurmllm.core.errors import CheckpointError, NodeError, StorageError
from slurmllm.core.run.records import JobsRecord, SkippedBatches, SkipsRecord, Submission
from slurmllm.core.run.rundir import RunDir
from slurmllm.train.checkpoint import replicas
from slurmllm.train.checkpoint.folder import describe, file_faults, read_manifest
from slurmllm.train.checkpoint.replicas import Replica, ReplicaCopier, open_replica
from slurmllm.train.checkpoint.resume import Resumable, find_resumable
from train.checkpoint import pretend
from train.checkpoint.pretend import FINGERPRINT, PretendGang, save, state
from train.gang import small_config


@pytest.fixture(params=["folder", "memory"])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "folder":
        yield str(tmp_path / "second")
        return
    import fsspec

    yield "memory://second"
    fsspec.filesystem("memory").store.clear()


@pytest.fixture
def run(location: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """Checkpoints at steps 10 and 20."""
    config = small_config("checkpoint.keep=2", f"checkpoint.replica={location}")
    monkeypatch.setattr(pretend, "CONFIG", config)
    run = RunDir(tmp_path / "run")
    for step in (10, 20):
        save_at(run, step)
    return run


@pytest.fixture
def replica(run: RunDir) -> Replica:
    """It has both."""
    opened = open_replica(pretend.CONFIG.recipe.checkpoint, run.name)
    assert opened is not None
    for step in (10, 20):
        assert opened.put(run.checkpoint(step)) > 2000
    return opened


def save_at(run: RunDir, step: int, attempt: int = 0) -> None:
    done = PretendGang().all(lambda backend: save(run, backend, state(step), attempt))
    assert all(isinstance(seconds, float) for seconds in done), done


def find(run: RunDir) -> Resumable:
    answers = PretendGang(3).all(lambda b: find_resumable(run, b.config, b.control, FINGERPRINT))
    assert len({str(answer) for answer in answers}) == 1, answers
    if isinstance(answers[0], Exception):
        raise answers[0]
    return answers[0]


def assert_sound(run: RunDir, step: int) -> None:
    assert file_faults(run.checkpoint(step), read_manifest(run.checkpoint(step)).files) == []
    hidden = [path.name for path in run.checkpoints.iterdir() if path.name.startswith(".")]
    assert hidden == []


def test_a_lost_folder_comes_back(run: RunDir, replica: Replica) -> None:
    assert replica.steps() == [10, 20]
    shutil.rmtree(run.checkpoints)
    assert find(run) == Resumable(state(20), ())
    assert_sound(run, 20)


def test_folders_of_a_restored_one_are_durable(
    run: RunDir, replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders: list[str] = []
    monkeypatch.setattr(replicas, "fsync_dir", lambda folder: folders.append(folder.name))
    (run.checkpoint(30) / "model").mkdir(parents=True)
    (run.checkpoint(30) / "model" / "shard").write_bytes(b"shard")
    save_manifest(run, 30, files=(describe(run.checkpoint(30), "model/shard"),))
    replica.put(run.checkpoint(30))
    shutil.rmtree(run.checkpoint(30))
    replica.fetch(30, run)
    assert_sound(run, 30)
    assert folders == ["model"]


def test_a_damaged_one_is_replaced(run: RunDir, replica: Replica) -> None:
    (run.checkpoint(20) / "shard_0").write_bytes(b"damaged")
    resumable = find(run)
    assert resumable.state == state(20)
    assert "shard_0 has 7 bytes" in resumable.skipped[0]
    assert_sound(run, 20)


def test_one_damaged_in_both_places(run: RunDir, replica: Replica) -> None:
    (run.checkpoint(20) / "shard_0").write_bytes(b"damaged")
    replica.file_system.pipe_file(replica.path(20, "shard_0"), b"\1" * 1000)
    resumable = find(run)
    assert resumable.state == state(10)
    assert "shard_0 does not match its checksum" in resumable.skipped[1]
    assert (run.checkpoint(20) / "shard_0").read_bytes() == b"damaged", "as it was"


def test_a_copy_without_manifest_is_none(run: RunDir, replica: Replica) -> None:
    replica.file_system.rm_file(replica.path(20, "manifest.json"))
    assert replica.steps() == [10]
    replica.put(run.checkpoint(20))
    assert replica.steps() == [10, 20]


def test_the_last_saved_are_kept(
    run: RunDir, replica: Replica, caplog: pytest.LogCaptureFixture
) -> None:
    save_at(run, 15)
    replica.put(run.checkpoint(15))
    replica.retain(keep=2)
    assert replica.steps() == [15, 20], "not by step"
    replica.file_system.rm_file(replica.path(20, "manifest.json"))
    replica.retain(keep=2)
    assert not replica.file_system.exists(replica.path(20))
    save_at(run, 30)
    replica.put(run.checkpoint(30))
    replica.file_system.pipe_file(replica.path(15, "manifest.json"), b"damaged")
    replica.retain(keep=1)
    assert replica.steps() == [15, 30], "what cannot be read stays, and the others are retained"
    assert "a replica is not removed" in caplog.text
    assert "is damaged" in caplog.text


def test_replicas_that_a_resume_ignores(run: RunDir, replica: Replica) -> None:
    shutil.rmtree(run.checkpoints)
    skip = SkippedBatches(first=15, last=21, roll_back_to=10, onset=15, attempt=0, reason="spike")
    SkipsRecord(skips=(skip,)).save(run.skips)
    assert find(run).state == state(10), "invalidated"
    shutil.rmtree(run.checkpoints)
    later = Submission(submitted_at=4e9, nodes=1, local=True, first_attempt=0)
    JobsRecord(submissions=(later,)).save(run.jobs)
    assert find(run) == Resumable(None, ()), "of an older run of the same name"


def test_an_unreadable_replica_is_a_warning(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(self: Replica) -> list[int]:
        raise StorageError("cannot list: no route to host")

    monkeypatch.setattr(Replica, "steps", refuse)
    assert find(run) == Resumable(state(20), ())
    assert "no route to host" in caplog.text
    (run.checkpoint(10) / "shard_0").unlink()
    (run.checkpoint(20) / "shard_0").unlink()
    with pytest.raises(CheckpointError, match="none of the checkpoints"):
        find(run)


def test_copies_during_training(run: RunDir, replica: Replica) -> None:
    results: list[tuple[int, bool]] = []
    ours = [True]

    def refuse_if_superseded() -> None:
        if not ours[0]:
            raise NodeError("attempt 0 was superseded by attempt 1")

    copier = ReplicaCopier(
        replica,
        run,
        2,
        refuse_if_superseded,
        lambda step, _, size, fault: results.append((step, fault is None)),
    )
    for step in (30, 40):
        save_at(run, step)
        copier.copy(step)
        assert copier.finish(10.0)
    assert replica.steps() == [30, 40]
    shutil.rmtree(run.checkpoint(40))
    copier.copy(40)
    assert copier.finish(10.0)
    ours[0] = False
    copier.copy(30)
    assert copier.finish(10.0)
    assert results == [(30, True), (40, True), (40, False), (30, False)]
    assert copier.in_use == ()
    assert replica.steps() == [30, 40], "a failed copy removes nothing"


def test_one_with_a_cut_manifest_does_not_hide_the_others(run: RunDir, replica: Replica) -> None:
    replica.file_system.pipe_file(replica.path(20, "manifest.json"), b"{")
    shutil.rmtree(run.checkpoints)
    assert find(run).state == state(10)


@pytest.mark.parametrize("name", ["../../outside", "/tmp/outside", "a/../../outside", "", "a//b"])
def test_a_replica_that_names_files_outside(run: RunDir, replica: Replica, name: str) -> None:
    """Restoring it wrote there."""
    path = replica.path(20, "manifest.json")
    shard = read_manifest(run.checkpoint(20)).files[0].path
    content = replica.file_system.cat_file(path).replace(
        f'"{shard}"'.encode(), f'"{name}"'.encode()
    )
    replica.file_system.pipe_file(path, content)
    before = sorted(run.path.parent.rglob("*"))
    with pytest.raises(StorageError, match=r"files\.0\.path: .* is no file inside the folder"):
        replica.fetch(20, run)
    assert sorted(run.path.parent.rglob("*")) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
@pytest.mark.parametrize("location", ["folder"], indirect=True)
def test_replicas_that_another_user_planted_are_not_restored(run: RunDir, replica: Replica) -> None:
    shutil.rmtree(run.checkpoint(20))
    os.chown(replica.folder, 65534, 65534)
    resumable = find(run).state
    assert (resumable and resumable.step, run.checkpoint(20).exists()) == (10, False)
