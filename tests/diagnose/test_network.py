"""EFA interfaces, by libfabric's tool and by the kernel."""

from __future__ import annotations

from pathlib import Path

import pytest

from diagnose.conftest import Profile, Program
from slurmllm.diagnose import node
from slurmllm.diagnose.node import efa_findings
from slurmllm.errors import NodeError


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
    (found,) = efa_findings(profile("trn1"))
    assert (found.status, found.value, found.expected) == ("ok", 8, 8)
    (found,) = efa_findings(profile("trn1n"))
    assert found.message == "8 EFA interfaces; profile trn1n requires 16"
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
    (found,) = efa_findings(profile("p4d"), tmp_path)
    assert (found.status, found.value) == ("fail", 2)


def test_nothing_is_asked_where_the_profile_asks_for_none(profile: Profile) -> None:
    assert list(efa_findings(profile("local"))) == []
