"""All checks of the node that this process runs on: the probe that `health` and preflight start."""

from __future__ import annotations

import json
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path

import psutil

from slurmllm.core.config.cluster import Cluster
from slurmllm.core.errors import NodeError, SlurmllmError
from slurmllm.core.run.records import Finding
from slurmllm.core.run.safe_files import os_error_text
from slurmllm.launch.diagnose import Findings, fail, ok, warn
from slurmllm.launch.diagnose.gpus import (
    Gpu,
    dcgm_findings,
    gpu_findings,
    read_gpus,
    xid_findings,
)
from slurmllm.launch.diagnose.probe import report
from slurmllm.launch.diagnose.programs import UnknownStateError, output_of
from slurmllm.launch.diagnose.storage import (
    GB,
    node_local_findings,
    shared_findings,
    shm_findings,
)
from slurmllm.train.backends.environment import load_environment

# Checks that fail because of other jobs on a shared node.
_AFFECTED_BY_OTHERS = ("GPU memory", "GPU processes", "Xid", "DCGM")
_SEVERITY = ("skipped", "ok", "warn", "fail")


def check_node(node: str, cluster: Cluster, backend: str, marker: Path) -> None:
    """Run all checks and report their findings; `marker` is a new file in the shared folder."""
    started = time.monotonic()
    report(node)  # the clock, before the checks take time
    for finding in node_findings(node, cluster, marker):
        report(node, finding=finding)
    for version in load_environment(backend).node_versions().items():
        report(node, version=version)
    report(node, took_s=time.monotonic() - started)


def node_findings(node: str, cluster: Cluster, marker: Path) -> Findings:
    """Yield the worst finding of each check; a check that raises an error fails."""
    checks = {  # generators: none has begun yet
        "devices": device_findings(cluster),
        "EFA": efa_findings(cluster),
        "network ports": port_findings(cluster),
        "memory": memory_findings(cluster),
        "shared memory": shm_findings(),
        "node-local disk": node_local_findings(cluster),
    }
    unshared = cluster.exclusive and "SLURM_JOB_ID" in os.environ
    relaxed = (*cluster.health.warn_only, *(() if unshared else _AFFECTED_BY_OTHERS))
    with ThreadPoolExecutor(len(checks)) as pool:  # they wait for the vendors' programs
        for finding in chain.from_iterable(pool.map(_worst, checks, checks.values())):
            if finding.status == "fail" and finding.check in relaxed:
                yield finding.model_copy(update={"status": "warn", "blame": None})
            else:
                yield finding
    # Last: a process that waits for a dead file system cannot be killed (state D).
    yield from _worst("shared file system", shared_findings(cluster, marker, node))


def _worst(check: str, findings: Iterable[Finding]) -> list[Finding]:
    """Return the worst finding of each check, which says how many more there are."""
    by_check: dict[str, list[Finding]] = {}
    try:
        for finding in findings:
            by_check.setdefault(finding.check, []).append(finding)
    except (OSError, SlurmllmError) as error:
        path = f"{error.filename}: " if isinstance(error, OSError) and error.filename else ""
        message = f"{path}{os_error_text(error)}".splitlines()[0]
        by_check[check] = [fail(check, "unusable", "", message)]
    return [_with_number(same_check) for same_check in by_check.values()]


def _with_number(findings: Sequence[Finding]) -> Finding:
    finding = max(findings, key=lambda finding: (_SEVERITY.index(finding.status), finding.value))
    num_more = sum(finding.status != "ok" for finding in findings) - 1
    more = f" and {num_more} more" if num_more > 0 else ""
    return finding.model_copy(update={"message": f"{finding.message}{more}"})


def memory_findings(cluster: Cluster) -> Findings:
    """Host memory that is free or can be freed at once (MemAvailable), GB."""
    yield _at_least(
        cluster,
        "memory",
        round(psutil.virtual_memory().available / GB, 1),
        cluster.health.min_memory_gb,
        "GB available",
    )


def device_findings(cluster: Cluster, root: Path = Path("/")) -> Findings:
    """Devices, driver, error counters and CPUs; /sys is read under `root`."""
    if cluster.device == "neuron":
        yield from _count_and_driver(
            cluster, "NeuronCores", neuron_cores(), _read(root / "sys/module/neuron/version")
        )
        yield from neuron_errors(root)
    elif cluster.device == "cuda":
        yield from _nvidia_findings(cluster)
    yield _at_least(cluster, "CPUs", os.cpu_count() or 1, cluster.cpus_per_node or 0, "CPUs", warn)


def _nvidia_findings(cluster: Cluster) -> Findings:
    gpus: list[Gpu] = []
    try:
        driver, gpus = read_gpus()
        yield from _count_and_driver(cluster, "GPUs", len(gpus), driver)
    except UnknownStateError as error:
        yield warn("devices", "unknown", cluster.devices_per_node, f"not checked: {error}")
    except NodeError as error:
        yield fail("devices", "unusable", "", str(error))
    yield from gpu_findings(gpus)
    yield from xid_findings(gpus)
    # Last, as its processes on the GPUs would be findings too.
    if gpus and cluster.health.dcgm != "never":
        yield from dcgm_findings()


def _count_and_driver(cluster: Cluster, kind: str, count: int, driver: str) -> Findings:
    yield _at_least(cluster, "devices", count, cluster.devices_per_node, kind)
    required = cluster.health.driver_version or ""
    if required not in ("", driver):
        yield fail(
            "driver",
            driver,
            required,
            f"driver {driver or 'unknown'}; profile {cluster.name} requires {required}",
        )
    elif driver:
        yield ok("driver", driver, required)


def _at_least(
    cluster: Cluster,
    check: str,
    value: float,
    required: float,
    unit: str,
    status: Callable[..., Finding] = fail,
) -> Finding:
    if value >= required:
        return ok(check, value, required or "")
    return status(
        check, value, required, f"{value} {unit}; profile {cluster.name} requires {required:g}"
    )


def neuron_cores() -> int:
    """Return the number of cores of all Neuron devices, by `neuron-ls`."""
    output = output_of("neuron-ls", "--json-output")
    try:
        # A Trainium1 device has two cores, a worker each.
        return sum(int(device["nc_count"]) for device in json.loads(output))
    except (ValueError, TypeError, KeyError) as error:
        raise NodeError(f"neuron-ls printed no list of devices: {output[:60]!r}") from error


def neuron_errors(root: Path) -> Findings:
    yield ok("device errors", 0, 0)
    # Counters since the driver was loaded (Neuron Sysfs User Guide, "hardware/"): those that
    # the runtime calls uncorrectable; AWS advises to replace the instance.
    pattern = "neuron[0-9]*/stats/hardware/*_ecc_uncorrected"  # of `mem` and `sram`
    for path in sorted((root / "sys/devices/virtual/neuron_device").glob(pattern)):
        if (count := _read(path)) not in ("", "0"):
            yield fail(
                "device errors",
                1,
                0,
                f"uncorrected memory errors: {path.parts[-4]}: {path.name} {count}",
            )


def efa_findings(cluster: Cluster) -> Findings:
    """The EFA interfaces that libfabric can use; no finding if the profile requires none."""
    if required := cluster.health.efa_interfaces:
        output = output_of("fi_info", "-p", "efa", "-t", "FI_EP_RDM")
        # Each interface is a domain (`domain: rdmap16s27-rdm`), listed once or several times.
        domains = set(re.findall(r"^\s*domain: (\S+)$", output, re.MULTILINE))
        yield _at_least(cluster, "EFA", len(domains), required, "EFA interfaces")


def port_findings(cluster: Cluster, root: Path = Path("/")) -> Findings:
    """Check the rates of active ports; without ports no finding, unless the profile sets a rate.

    A port that is down is no fault in itself: it may have no cable. `compare_nodes` compares nodes.
    """
    required = cluster.health.network_gb_s or 0.0
    # Linux, Documentation/ABI/stable/sysfs-class-infiniband: `4: ACTIVE`, `400 Gb/sec (4X NDR)`
    rates = Counter(
        _read(port / "rate").partition(" (")[0]
        if _read(port / "state").endswith("ACTIVE")
        else "down"
        for port in (root / "sys/class/infiniband").glob("*/ports/*")
    )
    value = ", ".join(f"{count} × {rate}" for rate, count in sorted(rates.items()))
    gb_s = sum(n * float(rate.split()[0]) / 8 for rate, n in rates.items() if rate[:1].isdigit())
    if gb_s < required:
        yield fail(
            "network ports",
            value,
            required,
            f"network ports: {value or 'none'}: {gb_s:g} GB/s; profile {cluster.name} requires "
            f"{required:g}",
        )
    elif rates:
        yield ok("network ports", value, required)


def _read(path: Path) -> str:
    """Return the text of a file of /sys; empty if it cannot be read."""
    try:
        return path.read_text("utf-8", errors="replace").strip()
    except OSError:
        return ""
