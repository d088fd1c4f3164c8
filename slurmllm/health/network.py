"""The network devices for collectives between nodes: EFA."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from slurmllm.config.cluster import Cluster
from slurmllm.health.findings import fail, ok
from slurmllm.health.tools import ask, find
from slurmllm.records import HealthFinding


def efa_findings(cluster: Cluster, root: Path = Path("/")) -> Iterator[HealthFinding]:
    """The EFA interfaces that libfabric can use; nothing where the profile asks for none.

    Args:
        cluster: The profile.
        root: Where /sys lies.

    Raises:
        NodeError: libfabric's `fi_info` finds none.
    """
    wanted = cluster.health.efa_interfaces
    if wanted == 0:
        return
    found = fabric_interfaces() if find("fi_info") else kernel_interfaces(root)
    if found < wanted:
        words = f"{found} EFA interfaces, profile {cluster.name} says {wanted}"
        yield fail("EFA", found, wanted, words)
    else:
        yield ok("EFA", found, wanted)


def fabric_interfaces() -> int:
    """Interfaces by libfabric: every one is a domain (`domain: rdmap16s27-rdm`).

    Raises:
        NodeError: fi_info fails, which it does where there is none.
    """
    words = ask("fi_info", "-p", "efa", "-t", "FI_EP_RDM")
    return len(set(re.findall(r"^\s*domain: (\S+)$", words, re.MULTILINE)))


def kernel_interfaces(root: Path) -> int:
    """RDMA devices of the kernel whose driver is EFA's."""
    devices = (root / "sys/class/infiniband").glob("*/device/driver")
    return sum(driver.resolve().name == "efa" for driver in devices)
