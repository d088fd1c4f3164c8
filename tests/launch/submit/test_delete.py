"""`delete`: what goes, what stays, and whose runs are left alone."""

import os
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from command_line import call, call_json, fails
from fake_slurm import FakeSlurm
from launch.submit.commands import Inputs, submitted, submitted_run
from made_records import save_manifest

from slurmllm.core.run.rundir import RunDir


@pytest.fixture
def run(fake: FakeSlurm, inputs: Inputs) -> RunDir:
    """A cancelled run with two checkpoints of 1,000 bytes each."""
    run = submitted_run(inputs, "--name", "r")
    call("cancel", "r")
    for step in (10, 20):
        save_manifest(run, step)
        (run.checkpoint(step) / "weights").write_bytes(bytes(1000))
    return run


def size(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())


def test_the_checkpoints_stay(run: RunDir) -> None:
    checkpoints, everything = size(run.checkpoints), size(run.path)
    assert "--yes deletes r: " in fails(2, "delete", "r")
    assert size(run.path) == everything
    (deleted,) = call_json("delete", "r", "--yes")["deleted"]
    assert deleted == {
        **{"run": "r", "run_dir": str(run.path), "bytes": everything - checkpoints},
        **{"checkpoints": 2, "checkpoint_bytes": checkpoints, "checkpoints_deleted": False},
    }
    assert sorted(run.path.parent.iterdir()) == [run.path]
    assert sorted(run.path.iterdir()) == [run.checkpoints]
    assert size(run.checkpoints) == checkpoints
    assert call_json("status")["runs"] == []
    # What is left has no record of a run, and can be deleted all the same.
    assert call("delete", "r", "--yes", "--checkpoints").exit_code == 0
    assert not run.path.exists()


def test_with_checkpoints_nothing_stays(run: RunDir) -> None:
    everything = size(run.path)
    shown = call("delete", "r", "--checkpoints", "--yes")
    assert "including 2 checkpoints" in shown.stdout
    assert [*run.path.parent.iterdir()] == []
    assert f"{everything / 1000:.1f} kB" in shown.stdout


def test_shared_graphs_free_nothing(run: RunDir, tmp_path: Path) -> None:
    before = call_json("delete", "r", "--yes", "--checkpoints")["deleted"][0]["bytes"]
    run.path.mkdir()
    run.config.write_text("")
    (tmp_path / "shared").write_bytes(bytes(5000))
    os.link(tmp_path / "shared", run.path / "graphs.tar")
    assert before > 0
    assert call_json("delete", "r", "--yes")["deleted"][0]["bytes"] == 0
    assert (tmp_path / "shared").stat().st_size == 5000


def test_linked_checkpoints_are_not_counted(run: RunDir, tmp_path: Path) -> None:
    run.checkpoint(20).rename(tmp_path / "elsewhere")
    run.checkpoint(20).symlink_to(tmp_path / "elsewhere")
    assert "including 1 checkpoint\n" in call("delete", "r", "--checkpoints", "--yes").stdout
    assert (tmp_path / "elsewhere" / "weights").exists()


@pytest.mark.parametrize("trap", ["dangling link", "link", "file"])
@pytest.mark.parametrize("options", [(), ("--checkpoints",)])
def test_advice_of_a_deletion_costs_no_checkpoints(
    run: RunDir, tmp_path: Path, trap: str, options: tuple[str, ...]
) -> None:
    hidden, precious = run.path.with_name(".r.removed"), tmp_path / "precious"
    if trap == "file":
        hidden.touch()
    else:
        hidden.symlink_to(precious)
    if trap == "link":
        precious.mkdir()
    everything = size(run.path)
    message = fails(4, "delete", "r", "--yes", *options)
    assert f"rm -r {run.path}`" not in message
    assert ("nothing was deleted" in message) is (trap != "file")
    assert (size(run.path), precious.exists()) == (everything, trap == "link")


@pytest.mark.parametrize("name", ["mnt", "a b"])
def test_a_mounted_folder_is_not_deleted(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    everything = size(run.path)
    mount = SimpleNamespace(mountpoint=f"{run.path}/{name}")
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: [mount])
    assert f"{run.path}/{name} is mounted in" in fails(2, "delete", "r", "--yes")
    assert size(run.path) == everything


def test_living_runs_stay(fake: FakeSlurm, inputs: Inputs, run: RunDir, tmp_path: Path) -> None:
    living = submitted_run(inputs, "--name", "living")
    message = fails(2, "delete", "r", "living", "--yes", "--checkpoints")
    assert "living is pending or running; " in message
    assert "`slurmllm cancel living` first" in message
    assert (run.config.is_file(), living.config.is_file()) == (True, True)
    precious = tmp_path / "precious"
    (precious / "checkpoints").mkdir(parents=True)
    (precious / "checkpoints" / "notes").touch()
    for name in ("precious", str(precious), ".", "/"):
        fails(2, "delete", name, "--yes", "--checkpoints")
    assert (precious / "checkpoints" / "notes").is_file()
    (tmp_path / "runs" / "link").symlink_to(run.path)
    assert "is a link to" in fails(2, "delete", "link", "--yes")
    fake.cancel(list(fake.jobs))
    assert call("delete", "living", "r", "--yes").exit_code == 0
    assert not living.path.exists()


def test_a_folder_that_cannot_be_deleted(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    before, access = size(run.path), os.access
    refused = str(run.logs)
    monkeypatch.setattr(
        os, "access", lambda path, mode: str(path) != refused and access(path, mode)
    )
    assert f"{run.logs} is not writable for you" in fails(2, "delete", "r", "--yes")
    monkeypatch.setattr(os, "geteuid", lambda: run.path.stat().st_uid + 1)
    assert "who can delete it" in fails(2, "delete", "r", "--yes")
    assert size(run.path) == before


def test_sweeps(fake: FakeSlurm, inputs: Inputs) -> None:
    submitted(inputs, "--name", "s", "--sweep", "train.seed=1,2")
    sweep = Path("runs/s").absolute()
    assert "pending or running" in fails(2, "delete", "s", "--yes")
    assert "compiles graphs for a sweep" in fails(2, "delete", str(sweep / "graphs/s-graphs-1"))
    call("cancel", "s")
    first = RunDir(sweep / "s-seed1")
    save_manifest(first, 10)
    assert call_json("delete", "s", str(first.path), "--yes")["deleted"][0]["checkpoints"] == 1
    assert [path for path in sweep.rglob("*") if path.is_file()] == [
        first.checkpoint(10) / "manifest.json"
    ]
    # What is left is deleted only if that is asked for.
    assert call("delete", "s", "--yes").exit_code == 0
    assert first.checkpoint(10).is_dir()
    assert call("delete", "s", "--yes", "--checkpoints").exit_code == 0
    assert not sweep.exists()
    submitted(inputs, "--name", "t", "--sweep", "train.seed=1,2")
    call("cancel", "t")
    save_manifest(RunDir(Path("runs/t/t-seed1").absolute()), 10)
    assert call("delete", "runs/t/t-seed1", "--yes").exit_code == 0
    assert [run["name"] for run in call_json("status", "t")["runs"]] == ["t-seed2"]
    assert call("delete", "runs/t/t-seed1", "--yes", "--checkpoints").exit_code == 0
    assert call("delete", "t", "--yes").exit_code == 0
    assert not Path("runs/t").exists()
