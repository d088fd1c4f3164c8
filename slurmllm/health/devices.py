"""The devices of a node: how many there are, their driver, and errors that they have counted."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

from slurmllm.config.cluster import Cluster
from slurmllm.errors import NodeError
from slurmllm.health.findings import fail, ok, warn
from slurmllm.health.tools import ask
from slurmllm.records import HealthFinding

# The Neuron driver's counters since it was loaded (Neuron Sysfs User Guide, "hardware/"); those
# that the runtime calls uncorrectable and AWS's remedy for is another instance.
ECC_COUNTERS = ("mem_ecc_uncorrected", "sram_ecc_uncorrected")


def device_findings(cluster: Cluster, root: Path = Path("/")) -> Iterator[HealthFinding]:
    """Devices, driver and errors.

    Args:
        cluster: The profile.
        root: Where /sys lies.

    Raises:
        NodeError: the tool that counts them is absent or fails.
    """
    if cluster.device == "neuron":
        yield _count(neuron_cores(), "NeuronCore", cluster)
        yield from _driver(_text(root / "sys/module/neuron/version"), cluster)
        yield _errors(neuron_errors(root))
    elif cluster.device == "cuda":
        gpus = nvidia_gpus()
        yield _count(len(gpus), "GPU", cluster)
        yield from _driver(gpus[0][1] if gpus else "", cluster)
        yield _errors([f"GPU {gpu}: {count}" for gpu, _, count in gpus if count > 0])
    yield _cpus(cluster)


def neuron_cores() -> int:
    """The cores of all Neuron devices, by `neuron-ls`.

    Raises:
        NodeError: it is absent, fails, or answers something else.
    """
    words = ask("neuron-ls", "--json-output")
    try:
        return sum(int(device["nc_count"]) for device in json.loads(words))
    except (ValueError, TypeError, KeyError) as error:
        raise NodeError(f"neuron-ls answers what is no list of devices: {words[:60]!r}") from error


def neuron_errors(root: Path) -> list[str]:
    """Uncorrected memory errors that the driver has counted, a phrase each."""
    found = []
    for device in sorted((root / "sys/devices/virtual/neuron_device").glob("neuron[0-9]*")):
        for name in ECC_COUNTERS:
            count = _text(device / "stats/hardware" / name)
            if count not in ("", "0"):
                found.append(f"{device.name}: {name} {count}")
    return found


def nvidia_gpus() -> list[tuple[str, str, int]]:
    """(index, driver, uncorrected memory errors since the driver was loaded) of every GPU.

    Raises:
        NodeError: `nvidia-smi` is absent, fails, or answers something else.
    """
    words = ask(
        "nvidia-smi", "--query-gpu=index,driver_version,ecc.errors.uncorrected.volatile.total",
        "--format=csv,noheader",
    )  # fmt: skip
    found = []
    for line in words.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != 3:
            raise NodeError(f"nvidia-smi answers {line!r}")
        index, driver, errors = fields
        found.append((index, driver, int(errors) if errors.isdigit() else 0))  # "[N/A]": no ECC
    return found


def _count(found: int, what: str, cluster: Cluster) -> HealthFinding:
    wanted = cluster.devices_per_node
    if found < wanted:
        words = f"{found} {what}s, profile {cluster.name} says {wanted}"
        return fail("devices", found, wanted, words)
    return ok("devices", found, wanted)


def _driver(found: str, cluster: Cluster) -> Iterator[HealthFinding]:
    wanted = cluster.health.driver_version
    if wanted is not None and found != wanted:
        words = f"driver {found or 'unknown'}, profile {cluster.name} says {wanted}"
        yield fail("driver", found, wanted, words)
    elif found:
        yield ok("driver", found, wanted or "")


def _errors(found: list[str]) -> HealthFinding:
    if found:
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        words = f"uncorrected memory errors: {', '.join(found[:3])}{more}"
        return fail("device errors", len(found), 0, words)
    return ok("device errors", 0)


def _cpus(cluster: Cluster) -> HealthFinding:
    found = os.cpu_count() or 1
    wanted = cluster.cpus_per_node
    if wanted is not None and found < wanted:
        words = f"{found} CPUs, profile {cluster.name} says {wanted}"
        return warn("CPUs", found, wanted, words)
    return ok("CPUs", found, wanted or "")


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
