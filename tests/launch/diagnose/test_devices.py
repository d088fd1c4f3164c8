"""Devices, drivers, error counters and EFA interfaces, by stand-ins for the vendors' programs."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from launch.diagnose.conftest import Profile, Program

from slurmllm.core.errors import NodeError
from slurmllm.core.run.records import Finding
from slurmllm.launch.diagnose import node, storage
from slurmllm.launch.diagnose.node import (
    device_findings,
    efa_findings,
    memory_findings,
    node_findings,
)
from slurmllm.launch.diagnose.storage import node_local_findings, shared_findings


def chips(count: int) -> str:
    """What neuron-ls --json-output prints on a trn1 node."""
    listed = [{"neuron_device": n, "nc_count": 2, "connected_to": None} for n in range(count)]
    return f"cat <<'end'\n{json.dumps(listed)}\nend"


def driver(root: Path, **errors: str) -> Path:
    (root / "sys/module/neuron").mkdir(parents=True)
    (root / "sys/module/neuron/version").write_text("2.24.7.0\n")
    for number in range(16):
        folder = root / f"sys/devices/virtual/neuron_device/neuron{number}/stats/hardware"
        folder.mkdir(parents=True)
        for name in ("mem_ecc_uncorrected", "sram_ecc_uncorrected"):
            (folder / name).write_text(f"{errors.get(name, 0) if number == 3 else 0}\n")
    return root


def by_check(findings: object) -> dict[str, Finding]:
    return {f.check: f for f in findings}  # type: ignore[attr-defined]


def test_a_whole_trn1_node(program: Program, profile: Profile, tmp_path: Path) -> None:
    program("neuron-ls", chips(16))
    checks_made = by_check(device_findings(profile("trn1"), driver(tmp_path)))
    assert (checks_made["devices"].status, checks_made["devices"].value) == ("ok", 32)
    assert (checks_made["driver"].status, checks_made["driver"].value) == ("ok", "2.24.7.0")
    assert checks_made["device errors"].status == "ok"


def test_a_trn1_node_that_lost_a_chip(program: Program, profile: Profile, tmp_path: Path) -> None:
    program("neuron-ls", chips(15))
    config = profile("trn1", "cluster.health.driver_version=2.25.1.0")
    checks_made = by_check(device_findings(config, driver(tmp_path, mem_ecc_uncorrected="2")))
    assert checks_made["devices"].message == "30 NeuronCores; profile trn1 requires 32"
    assert checks_made["driver"].message == "driver 2.24.7.0; profile trn1 requires 2.25.1.0"
    assert "neuron3: mem_ecc_uncorrected 2" in checks_made["device errors"].message
    assert (checks_made["device errors"].value, checks_made["device errors"].expected) == (1, 0)
    fails = [name for name, f in checks_made.items() if f.status == "fail"]
    assert fails == ["devices", "driver", "device errors"]
    assert (checks_made["CPUs"].status, checks_made["CPUs"].expected) == ("warn", 128)


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (None, "neuron-ls is neither on"),
        ("echo 'no driver' >&2; exit 1", "exit code 1: no driver"),
        ("echo '{}x'", "no list of devices"),
        ("echo '[3]'", "no list of devices"),
    ],
)
def test_a_tool_that_does_not_serve(
    program: Program, profile: Profile, script: str | None, expected: str
) -> None:
    if script is not None:
        program("neuron-ls", script)
    with pytest.raises(NodeError, match=expected):
        list(device_findings(profile("trn1")))


def fabric(count: int) -> str:
    # After AWS's EFA guide: an entry a domain, some domains with several.
    entries = "".join(
        f"provider: efa\n    fabric: efa\n    domain: rdmap{n}s27-rdm\n    version: 201.0\n"
        f"    type: FI_EP_RDM\n    protocol: FI_PROTO_EFA\n"
        for n in [0, *range(count)]
    )
    return f"cat <<'end'\n{entries}end"


def test_interfaces_by_libfabric(program: Program, profile: Profile) -> None:
    program("fi_info", fabric(8))
    (checks_made,) = efa_findings(profile("trn1"))
    assert (checks_made.status, checks_made.value, checks_made.expected) == ("ok", 8, 8)
    (checks_made,) = efa_findings(profile("trn1n"))
    assert checks_made.message == "8 EFA interfaces; profile trn1n requires 16"
    program("fi_info", "echo 'fi_getinfo: -61 (No data available)' >&2; exit 61")
    with pytest.raises(NodeError, match="No data available"):
        list(efa_findings(profile("trn1")))
    assert list(efa_findings(profile("local"))) == []


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    path = tmp_path / "run" / ".health-marker-1"
    path.touch()
    return path


def test_memory(profile: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SimpleNamespace(available=2e9)
    monkeypatch.setattr(node.psutil, "virtual_memory", lambda: memory)
    (finding,) = memory_findings(profile("local"))
    assert (finding.status, finding.value) == ("ok", 2.0)
    (finding,) = memory_findings(profile("local", "cluster.health.min_memory_gb=3"))
    assert finding.message == "2.0 GB available; profile local requires 3"


def test_the_local_disk(profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_the_shared_folder(profile: Profile, marker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
