"""Devices, drivers, error counters and EFA interfaces, by stand-ins for the vendors' programs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from diagnose.conftest import Profile, Program
from slurmllm.diagnose import node
from slurmllm.diagnose.node import device_findings, efa_findings
from slurmllm.errors import NodeError
from slurmllm.run.records import Finding


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


def test_gpus(program: Program, profile: Profile) -> None:
    rows = [f"{n}, 570.86.15, {'[N/A]' if n == 1 else 2 * (n == 5)}" for n in range(8)]
    program("nvidia-smi", f"cat <<'end'\n{chr(10).join(rows)}\nend")
    checks_made = by_check(device_findings(profile("p4d")))
    assert (checks_made["devices"].value, checks_made["driver"].value) == (8, "570.86.15")
    assert checks_made["device errors"].message == "uncorrected memory errors: GPU 5: 2"
    program("nvidia-smi", f"cat <<'end'\n{chr(10).join(rows[:7])}\nend")
    checks_made = by_check(device_findings(profile("p4d")))
    assert checks_made["devices"].message == "7 GPUs; profile p4d requires 8"


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


def test_interfaces_by_the_kernel(
    profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node, "find", lambda name: None)
    for number, driver in enumerate(("efa", "efa", "mlx5_core")):
        device = tmp_path / f"sys/class/infiniband/rdmap{number}/device"
        device.mkdir(parents=True)
        (tmp_path / "sys/bus/drivers" / driver).mkdir(parents=True, exist_ok=True)
        (device / "driver").symlink_to(tmp_path / "sys/bus/drivers" / driver)
    (checks_made,) = efa_findings(profile("p4d"), tmp_path)
    assert (checks_made.status, checks_made.value) == ("fail", 2)


def test_nothing_is_asked_where_the_profile_asks_for_none(profile: Profile) -> None:
    assert list(efa_findings(profile("local"))) == []
