"""Memory, the node's own disk, the shared file system; and a check that raises an error."""

from __future__ import annotations

from pathlib import Path

import pytest

from diagnose.conftest import Profile
from slurmllm.diagnose import storage
from slurmllm.diagnose.node import memory_findings, node_findings
from slurmllm.diagnose.storage import node_local_findings, shared_findings


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    path = tmp_path / "run" / ".health-marker-1"
    path.touch()
    return path


def test_memory(profile: Profile, tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000000 kB\nMemAvailable:  1953125 kB\n")
    (finding,) = memory_findings(profile("local"), tmp_path)
    assert (finding.status, finding.value) == ("ok", 2.0)
    (finding,) = memory_findings(profile("local", "cluster.health.min_memory_gb=3"), tmp_path)
    assert finding.message == "2.0 GB available; profile local requires 3"


def test_the_nodes_own_disk(
    profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (finding,) = node_local_findings(profile("local", "cluster.health.min_node_local_gb=0"))
    assert finding.status == "ok"
    assert float(finding.value) > 0
    (finding,) = node_local_findings(profile("local", "cluster.health.min_node_local_gb=1000000"))
    assert "GB free in" in finding.message
    assert finding.message.endswith("requires 1e+06")
    monkeypatch.setattr(storage, "file_system", lambda path: ("lustre", "/fsx"))
    (finding,) = node_local_findings(profile("local", "cluster.health.min_node_local_gb=0"))
    assert (finding.status, "all nodes share" in finding.message) == ("warn", True)
    missing = profile("local").model_copy(update={"node_local": str(tmp_path / "no")})
    (finding,) = node_local_findings(missing)
    assert "is the disk mounted?" in finding.message


def test_the_shared_file_system(
    profile: Profile, marker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (finding,) = shared_findings(profile("local"), marker, "n1")
    assert finding.status in ("ok", "warn")  # this machine may be slow
    assert 0 < float(finding.value) < 60
    assert [path.name for path in marker.parent.iterdir()] == [marker.name]
    (finding,) = shared_findings(profile("local", "cluster.health.max_write_s=1e-9"), marker, "n1")
    assert (finding.status, "a fsynced write to" in finding.message) == ("fail", True)
    monkeypatch.setattr(storage, "VISIBLE_S", 0.0)
    (finding,) = shared_findings(profile("local"), marker.with_name("elsewhere"), "n1")
    assert "is not the shared file system here" in finding.message


def test_folders_in_which_others_may_exchange_files(
    profile: Profile, marker: Path, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    (disk / "cache").mkdir(parents=True)
    disk.chmod(0o777)
    minimum = "cluster.health.min_node_local_gb=0"
    cluster = profile("local", minimum).model_copy(update={"node_local": str(disk / "cache")})
    (finding,) = node_local_findings(cluster)
    assert (finding.status, "no sticky bit" in finding.message) == ("fail", True)
    marker.parent.chmod(0o777)
    (finding,) = shared_findings(cluster, marker, "n1")
    assert finding.status == "warn"
    assert "no sticky bit" in finding.message or "fsynced write" in finding.message


def test_a_check_that_raises_an_error_fails(profile: Profile, marker: Path) -> None:
    disk = Path("/proc/self/attr")  # a folder in which nobody makes files
    broken = profile("local").model_copy(update={"node_local": str(disk)})
    finding = {f.check: f for f in node_findings("n1", broken, marker)}
    assert finding["node-local disk"].status == "fail"
    assert str(disk) in finding["node-local disk"].message
    assert finding["shared file system"].status in ("ok", "warn")
