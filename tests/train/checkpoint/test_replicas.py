"""Replicas of checkpoints: copied completely, verified when restored, never fatal to the run."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from made_records import save_manifest, save_skips, save_submission

from slurmllm.core.errors import CheckpointError, NodeError, StorageError
from slurmllm.core.run.rundir import RunDir
from slurmllm.train.checkpoint import replicas
from slurmllm.train.checkpoint.folder import describe, file_faults, read_manifest
from slurmllm.train.checkpoint.replicas import Replica, ReplicaCopier, open_replica
from slurmllm.train.checkpoint.resume import Resumable
from train.checkpoint import pretend
from train.checkpoint.pretend import find, save_at, state
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
    save_at(run, 10, 20)
    return run


@pytest.fixture
def replica(run: RunDir) -> Replica:
    """It has both."""
    opened = open_replica(pretend.CONFIG.recipe.checkpoint, run.name)
    assert opened is not None
    for step in (10, 20):
        assert opened.put(run.checkpoint(step)) > 2000
    return opened


def assert_sound(run: RunDir, step: int) -> None:
    assert file_faults(run.checkpoint(step), read_manifest(run.checkpoint(step)).files) == []
    hidden = [path.name for path in run.checkpoints.iterdir() if path.name.startswith(".")]
    assert hidden == []


CUT_SHORT, OTHER = "shard_0 has 7 bytes", "shard_0 does not match its checksum"


@pytest.mark.parametrize(
    ("is_gone", "harmed", "step", "faults"),
    [
        (True, {}, 20, []),
        (False, {}, 20, [CUT_SHORT]),
        (False, {"shard_0": b"\1" * 1000}, 10, [CUT_SHORT, OTHER]),
        (True, {"manifest.json": b"{"}, 10, []),
    ],
    ids=["lost", "damaged", "damaged in both places", "a cut manifest of the replica"],
)
def test_a_checkpoint_comes_back(
    run: RunDir,
    replica: Replica,
    is_gone: bool,
    harmed: dict[str, bytes],
    step: int,
    faults: list[str],
) -> None:
    assert replica.steps() == [10, 20]
    if is_gone:
        shutil.rmtree(run.checkpoints)
    else:
        (run.checkpoint(20) / "shard_0").write_bytes(b"damaged")
    for name, content in harmed.items():
        replica.file_system.pipe_file(replica.path(20, name), content)
    resumable = find(run)
    assert resumable.state == state(step)
    assert_sound(run, step)
    for fault, line in zip(faults, resumable.skipped, strict=True):
        assert fault in line
    if step == 10 and not is_gone:
        assert (run.checkpoint(20) / "shard_0").read_bytes() == b"damaged", "as it was"


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


def test_a_copy_without_manifest_is_none(run: RunDir, replica: Replica) -> None:
    replica.file_system.rm_file(replica.path(20, "manifest.json"))
    assert replica.steps() == [10]
    replica.put(run.checkpoint(20))
    assert replica.steps() == [10, 20]


def test_the_last_stay(run: RunDir, replica: Replica, caplog: pytest.LogCaptureFixture) -> None:
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
    save_at(run, 40)
    replica.put(run.checkpoint(40))
    replica.retain(keep=1, since=replica.manifest(40).saved_at)
    assert replica.steps() == [15, 30, 40], "30 is of an older run of the same name"


def test_replicas_that_a_resume_ignores(run: RunDir, replica: Replica) -> None:
    shutil.rmtree(run.checkpoints)
    save_skips(run, onset=15, last=21)
    assert find(run).state == state(10), "invalidated"
    shutil.rmtree(run.checkpoints)
    save_submission(run, submitted_at=4e9, local=True)
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

    def record(step: int, _: float, size: int, fault: str | None) -> None:
        results.append((step, fault is None))

    def copy(step: int) -> None:
        copier.copy(step)
        assert copier.finish(10.0)

    copier = ReplicaCopier(replica, run, 2, refuse_if_superseded, record)
    save_at(run, 30, 40)
    copy(30)
    copy(40)
    assert replica.steps() == [30, 40]
    shutil.rmtree(run.checkpoint(40))
    copy(40)
    ours[0] = False
    copy(30)
    assert results == [(30, True), (40, True), (40, False), (30, False)]
    assert copier.in_use == ()
    assert replica.steps() == [30, 40], "a failed copy removes nothing"


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
