"""Ports of the network between nodes: InfiniBand, RoCE and EFA, as /sys shows them."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from slurmllm.core.config.cluster import Cluster
from slurmllm.launch.diagnose import Findings, fail, ok

_RATE = re.compile(r"(\d+) × ([\d.]+) Gb/s")


def port_findings(cluster: Cluster, root: Path = Path("/")) -> Findings:
    """Rates of the active ports; no finding without ports, unless the profile requires a rate.

    A port that is down accuses nobody, it may have no cable: `compare_nodes` compares the nodes.
    """
    required = cluster.health.network_gb_s or 0.0
    # Linux, Documentation/ABI/stable/sysfs-class-infiniband: `4: ACTIVE`, `400 Gb/sec (4X NDR)`
    rates = Counter(
        read_text(port / "rate").partition("b/sec")[0] + "b/s"
        if read_text(port / "state").endswith("ACTIVE")
        else "down"
        for port in (root / "sys/class/infiniband").glob("*/ports/*")
    )
    value = ", ".join(f"{count} × {rate}" for rate, count in sorted(rates.items()))
    gb_s = sum(int(count) * float(gbit_s) / 8 for count, gbit_s in _RATE.findall(value))
    if gb_s < required:
        message = f"{value or 'none'}: {gb_s:g} GB/s; profile {cluster.name} requires {required:g}"
        yield fail("network ports", value, required, f"network ports: {message}")
    elif rates:
        yield ok("network ports", value, required)


def read_text(path: Path) -> str:
    """Return the text of a file of /sys; empty if it cannot be read."""
    try:
        return path.read_text("utf-8", errors="replace").strip()
    except OSError:
        return ""
