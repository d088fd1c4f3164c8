"""Checks of Slurm and its nodes, on the fake and on a real Slurm, and of the folders."""

import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_slurm import FakeSlurm

from slurmllm.core.config.cluster import Cluster
from slurmllm.core.config.resolve import resolve
from slurmllm.core.run.records import Finding
from slurmllm.core.run.rundir import RunDir
from slurmllm.core.slurm.client import COMMANDS, SlurmClient
from slurmllm.launch.diagnose import exit_code, storage
from slurmllm.launch.diagnose.login_node import slurm_findings


def profile(name: str = "local", *overrides: str) -> Cluster:
    return resolve("tiny_neox", name, overrides).cluster


def look(
    client: SlurmClient, cluster: Cluster | None = None, partition: str | None = None
) -> dict[str, Finding]:
    return {f.check: f for f in slurm_findings(client, cluster or profile(), partition)}


def states(findings: dict[str, Finding], *but: str) -> set[str]:
    return {finding.status for name, finding in findings.items() if name not in but}


@pytest.fixture(params=["fake", pytest.param("real", marks=pytest.mark.slurm)])
def client(request: pytest.FixtureRequest) -> SlurmClient:
    if request.param == "fake":
        return FakeSlurm(("n1", "n2", "n3", "n4", "n5"))
    request.getfixturevalue("slurm")
    return SlurmClient()


def test_a_sound_cluster_and_profiles_that_do_not_fit_it(client: SlurmClient) -> None:
    findings = look(client)
    assert states(findings) == {"ok"}, findings
    assert findings["partition"].value == "main, the default"
    assert findings["nodes"].value == "5 of 5 usable"
    findings = look(client, partition="nosuch")
    assert findings["partition"].status == "fail"
    assert "partitions: main" in str(findings["partition"].value)
    assert {findings[name].status for name in ("nodes", "CPUs", "devices")} == {"skipped"}
    assert exit_code(findings.values()) == 2
    findings = look(client, profile("local", "cluster.partition=main"))
    assert findings["partition"].value == "main"
    assert look(client, profile("local", "cluster.partition=x"))["partition"].status == "fail"
    findings = look(client, profile("local", "cluster.cpus_per_node=96"))
    assert findings["CPUs"].status == "warn"
    assert states(findings, "CPUs") == {"ok"}
    findings = look(client, profile("p4d"))
    assert (findings["devices"].status, findings["devices"].blame) == ("fail", "user")


def test_without_slurm_everything_is_skipped_and_nothing_fails() -> None:
    slurm = FakeSlurm()
    slurm.missing = list(COMMANDS)
    findings = look(slurm)
    assert findings["slurm commands"].status == "warn"
    assert "--local" in findings["slurm commands"].fix
    assert states(findings, "slurm commands") == {"skipped"}
    assert exit_code(findings.values()) == 0


def test_the_same_checks_are_listed_whatever_is_broken() -> None:
    sound, absent, silent, empty = FakeSlurm(), FakeSlurm(), FakeSlurm(), FakeSlurm(())
    absent.missing, silent.config = list(COMMANDS), None
    assert set(look(absent)) == set(look(silent)) == set(look(empty)) == set(look(sound))
    assert exit_code(look(silent).values()) == 3
    assert look(silent)["slurm controller"].status == "fail"
    sound.missing = ["sbcast"]
    assert look(sound)["slurm commands"].status == "fail"
    assert exit_code([*look(sound).values(), *look(empty).values()]) == 2  # the user's own first


@pytest.mark.parametrize(
    ("setting", "value", "check", "state"),
    [
        ("SLURM_VERSION", "21.08.8-2", "slurm version", "fail"),
        ("SLURM_VERSION", "24.11.6", "slurm version", "ok"),
        ("JobRequeue", "0", "requeue", "warn"),
        ("AccountingStorageType", "accounting_storage/none", "accounting", "warn"),
        ("AccountingStorageType", "accounting_storage/filetxt", "accounting", "fail"),
    ],
)
def test_settings(setting: str, value: str, check: str, state: str) -> None:
    slurm = FakeSlurm()
    assert slurm.config is not None
    slurm.config[setting] = value
    findings = look(slurm)
    assert findings[check].status == state
    assert states(findings, check) == {"ok"}


def test_lost_nodes_warn_and_a_partition_of_lost_nodes_fails() -> None:
    slurm = FakeSlurm(("n1", "n2", "n3", "n4"))
    slurm.states.update(n1="down*", n2="drained", n3="idle~")  # ~: powered down, Slurm starts it
    findings = look(slurm)["nodes"]
    assert (findings.status, findings.value) == ("warn", "2 of 4 usable; n1 down*, n2 drained")
    slurm.states.update(dict.fromkeys(slurm.states, "down"))
    assert look(slurm)["nodes"].status == "fail"
    slurm = FakeSlurm(("n1", "n2"))
    slurm.states["n2"], slurm.reasons["n2"] = "drained", "Duplicate jobid"
    findings = look(slurm)["nodes"]
    assert "`scontrol update NodeName=n2 State=RESUME`" in findings.fix
    slurm.reasons["n2"] = "bad disk"
    assert look(slurm)["nodes"].fix == "`sinfo --list-reasons`"


def test_gpus_are_counted_and_neuron_cores_are_not() -> None:
    slurm = FakeSlurm()
    slurm.cpus, slurm.gres = 96, "gpu:a100:8(S:0-1)"
    assert look(slurm, profile("p4d"))["devices"].status == "ok"
    slurm.gres = "craynetwork:4,gpu:h100:2,gpu:1"
    assert look(slurm, profile("p4d"))["devices"].status == "fail"
    slurm.cpus, slurm.gres = 128, ""
    findings = look(slurm, profile("trn1"))
    assert (findings["devices"].status, findings["CPUs"].status) == ("skipped", "ok")
    slurm.gres, unasked = "gpu:8", profile("p4d", "cluster.directives=[]")
    assert look(slurm, unasked)["devices"].status == "warn"


def test_a_partition_of_several_kinds_is_judged_by_the_nodes_that_the_profile_requests() -> None:
    slurm = FakeSlurm()
    slurm.gres = "gpu:h100:8"
    slurm.unequal = {"n1": {"gres": "gpu:h100:4", "cpus": 2}}
    findings = look(slurm, profile("p5", "cluster.cpus_per_node=4", "cluster.directives=[]"))
    assert (findings["devices"].status, findings["equal nodes"].status) == ("fail", "warn")
    findings = look(slurm, profile("p5", "cluster.cpus_per_node=4"))
    assert states({name: findings[name] for name in ("devices", "equal nodes", "CPUs")}) == {"ok"}


MOUNTS = {"/": "ext4", "/fsx": "lustre", "/home": "nfs4", "/my disk": "xfs"}


def look_at(runs: Path, with_slurm: bool = True) -> dict[str, Finding]:
    return {f.check: f for f in storage.storage_findings(runs, profile(), with_slurm, 2 * 2**30)}


def test_the_file_system_of_a_path(monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = [*MOUNTS.items(), ("/", "overlay")]  # the later one of a mount point counts
    rows = [SimpleNamespace(mountpoint=point, fstype=kind) for point, kind in mounts]
    monkeypatch.setattr(storage.psutil, "disk_partitions", lambda all: rows)
    paths = ("/fsx/runs", "/fsxy", "/home/ana/runs", "/my disk/x")
    kinds = [storage.file_system(Path(path))[0] for path in paths]
    assert kinds == ["lustre", "overlay", "nfs4", "xfs"]


def test_a_sound_folder_leaves_nothing_behind(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    findings = look_at(runs)
    assert findings["runs folder"].status == "ok"
    assert "created by submit" in str(findings["runs folder"].value)
    assert {findings[name].status for name in ("fsynced write", "clock")} == {"ok"}
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_of_one_machine_matters_only_with_slurm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "file_system", lambda path: ("ext4", "/"))
    assert look_at(tmp_path)["file system"].status == "warn"
    assert look_at(tmp_path, with_slurm=False)["file system"].status == "ok"
    monkeypatch.setattr(storage, "file_system", lambda path: ("lustre", "/fsx"))
    assert look_at(tmp_path)["file system"].status == "ok"


def test_a_refusing_file_system_fails_and_the_rest_is_skipped() -> None:
    findings = look_at(Path("/proc/runs"))  # takes no files, root's neither
    assert (findings["runs folder"].status, findings["runs folder"].blame) == ("fail", "user")
    names = ("file system", "free space", "fsynced write", "clock")
    assert {findings[name].status for name in names} == {"skipped"}


@pytest.mark.parametrize(
    ("free_gib", "state", "blame"),
    [(0.5, "fail", "infrastructure"), (1.5, "warn", None), (5000, "ok", None)],
)
def test_free_space(
    free_gib: float, state: str, blame: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage:
        free = free_gib * 2**30

    monkeypatch.setattr(storage.shutil, "disk_usage", lambda place: Usage)
    findings = look_at(tmp_path)["free space"]
    assert (findings.status, findings.blame) == (state, blame)


def test_a_slow_write_warns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = storage.write_atomic

    def slow(path: Path, text: str) -> None:
        time.sleep(storage.SLOW_WRITE_S)
        write(path, text)

    monkeypatch.setattr(storage, "write_atomic", slow)
    monkeypatch.setattr(storage, "NUM_WRITES", 1)
    assert look_at(tmp_path)["fsynced write"].status == "warn"


def test_a_file_server_s_other_time_warns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = storage.write_atomic

    def elsewhere(path: Path, text: str) -> None:
        write(path, text)
        os.utime(path, (time.time() + 60, time.time() + 60))

    monkeypatch.setattr(storage, "write_atomic", elsewhere)
    findings = look_at(tmp_path)["clock"]
    assert findings.status == "warn"
    assert "+60.0 s" in str(findings.value) or "+59.9 s" in str(findings.value)


def test_folders_in_which_others_may_exchange_files(tmp_path: Path) -> None:
    runs = tmp_path / "outer" / "runs"
    run = RunDir(runs / "mine")
    run.path.mkdir(parents=True)
    run.config.touch()
    assert look_at(runs)["runs folder"].status == "ok"
    run.path.chmod(0o777)
    findings = look_at(runs)["runs folder"]
    assert (findings.status, findings.value) == ("warn", "others may write to 1 of your runs: mine")
    assert findings.fix == f"`chmod -R go-w {run.path}`, which has mode 777"
    for folder in (runs, runs.parent):
        folder.chmod(0o777)
        findings = look_at(runs)["runs folder"]
        assert findings.status == "warn"
        assert f"mode 777 and no sticky bit (`chmod +t {folder}`)" in str(findings.value)
        folder.chmod(0o1777)
    run.path.chmod(0o755)
    assert look_at(runs)["runs folder"].status == "ok"
