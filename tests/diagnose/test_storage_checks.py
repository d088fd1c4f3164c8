"""Checks of the runs folder and of the node-local disk, on the login node."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from slurmllm.config.resolve import resolve
from slurmllm.diagnose import storage
from slurmllm.run.records import Finding
from slurmllm.run.rundir import RunDir

MOUNTS = """\
/dev/root / ext4 rw,relatime 0 0
10.0.0.7@tcp:/abcdbmev /fsx lustre rw,flock 0 0
head:/home /home nfs4 rw 0 0
/dev/md0 /my\\040disk xfs rw 0 0
overlay / overlay rw 0 0
"""


def look(runs: Path, *overrides: str, with_slurm: bool = True) -> dict[str, Finding]:
    cluster = resolve("tiny_neox", "local", overrides).cluster
    return {f.check: f for f in storage.storage_findings(runs, cluster, with_slurm)}


def test_the_file_system_of_a_path() -> None:
    paths = ("/fsx/runs", "/fsxy", "/home/ana/runs", "/my disk/x")
    kinds = [storage.file_system(Path(path), MOUNTS)[0] for path in paths]
    assert kinds == ["lustre", "overlay", "nfs4", "xfs"]


def test_a_sound_folder_leaves_nothing_behind(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    findings = look(runs)
    assert findings["runs folder"].status == "ok"
    assert "created by submit" in str(findings["runs folder"].value)
    assert {findings[name].status for name in ("fsynced write", "clock")} == {"ok"}
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_of_one_machine_matters_only_with_slurm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "file_system", lambda path: ("ext4", "/"))
    assert look(tmp_path)["file system"].status == "warn"
    assert look(tmp_path, with_slurm=False)["file system"].status == "ok"
    monkeypatch.setattr(storage, "file_system", lambda path: ("lustre", "/fsx"))
    findings = look(tmp_path, "cluster.node_local=/var/tmp")
    assert findings["file system"].status == "ok"
    assert findings["node-local disk"].status == "warn"  # the shared one is not the node's own


def test_a_refusing_file_system_fails_and_the_rest_is_skipped() -> None:
    findings = look(Path("/proc/runs"))  # takes no files, root's neither
    assert (findings["runs folder"].status, findings["runs folder"].blame) == ("fail", "user")
    names = ("file system", "free space", "fsynced write", "clock")
    assert {findings[name].status for name in names} == {"skipped"}


@pytest.mark.parametrize(
    ("free_gib", "state", "blame"),
    [(0.5, "fail", "infrastructure"), (50, "warn", None), (5000, "ok", None)],
)
def test_free_space(
    free_gib: float, state: str, blame: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage:
        free = free_gib * 2**30

    monkeypatch.setattr(storage.shutil, "disk_usage", lambda place: Usage)
    findings = look(tmp_path)["free space"]
    assert (findings.status, findings.blame) == (state, blame)


def test_a_slow_write_warns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = storage.write_atomic

    def slow(path: Path, text: str) -> None:
        time.sleep(storage.SLOW_WRITE_S)
        write(path, text)

    monkeypatch.setattr(storage, "write_atomic", slow)
    monkeypatch.setattr(storage, "NUM_WRITES", 1)
    assert look(tmp_path)["fsynced write"].status == "warn"


def test_a_file_server_with_another_time_warns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = storage.write_atomic

    def elsewhere(path: Path, text: str) -> None:
        write(path, text)
        os.utime(path, (time.time() + 60, time.time() + 60))

    monkeypatch.setattr(storage, "write_atomic", elsewhere)
    findings = look(tmp_path)["clock"]
    assert findings.status == "warn"
    assert "+60.0 s" in str(findings.value) or "+59.9 s" in str(findings.value)


def test_folders_in_which_others_may_exchange_files(tmp_path: Path) -> None:
    runs, disk = tmp_path / "outer" / "runs", tmp_path / "disk"
    run = RunDir(runs / "mine")
    run.path.mkdir(parents=True)
    run.config.touch()
    disk.mkdir()
    chosen = f"cluster.node_local={disk}"
    assert look(runs, chosen)["runs folder"].status == "ok"
    assert look(runs, chosen)["node-local disk"].status == "ok"
    run.path.chmod(0o777)
    findings = look(runs, chosen)["runs folder"]
    assert (findings.status, findings.value) == ("warn", "others may write to 1 of your runs: mine")
    assert findings.fix == f"`chmod -R go-w {run.path}`, which has mode 777"
    for folder in (runs, runs.parent, disk):
        folder.chmod(0o777)
        findings = look(runs, chosen)["node-local disk" if folder == disk else "runs folder"]
        assert findings.status == "warn"
        assert f"mode 777 and no sticky bit (`chmod +t {folder}`)" in str(findings.value)
        folder.chmod(0o1777)
    run.path.chmod(0o755)
    assert look(runs, chosen)["runs folder"].status == "ok"
