"""All checks of the node that this process runs on: the probe that `health` and preflight start."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path

import psutil

from slurmllm.core.config.cluster import Cluster
from slurmllm.core.errors import NodeError, SlurmllmError
from slurmllm.core.run.records import Finding
from slurmllm.core.run.safe_files import os_error_text
from slurmllm.launch.diagnose import Findings, fail, ok, warn
from slurmllm.launch.diagnose.dcgm import dcgm_findings
from slurmllm.launch.diagnose.gpus import (
    Gpu,
    gpu_findings,
    needs_no_reset,
    read_gpus,
)
from slurmllm.launch.diagnose.ports import port_findings, read_text
from slurmllm.launch.diagnose.probe import report
from slurmllm.launch.diagnose.programs import UnknownStateError, output_of
from slurmllm.launch.diagnose.storage import (
    GB,
    node_local_findings,
    shared_findings,
    shm_findings,
)
from slurmllm.launch.diagnose.xid import xid_findings
from slurmllm.train.backends.environment import load_environment

# What may be another job's, where the job has not the whole node.
_OF_THE_NODE = ("GPU memory", "GPU processes", "Xid", "DCGM")


def check_node(
    node: str, cluster: Cluster, backend: str, marker: Path, with_dcgm: bool = False
) -> None:
    """Run all checks and report their findings; `marker` is a new file in the shared folder."""
    started = time.monotonic()
    report(node)  # the clock, before the checks take time
    for finding in node_findings(node, cluster, marker, with_dcgm):
        report(node, finding=finding)
    for version in load_environment(backend).node_versions().items():
        report(node, version=version)
    report(node, took_s=time.monotonic() - started)


def node_findings(node: str, cluster: Cluster, marker: Path, with_dcgm: bool = False) -> Findings:
    """The findings of each check; a check that raises an error fails."""
    checks = {  # generators: none has begun yet
        "devices": device_findings(cluster, with_dcgm=with_dcgm),
        "EFA": efa_findings(cluster),
        "network ports": port_findings(cluster),
        "memory": memory_findings(cluster),
        "shared memory": shm_findings(),
        "node-local disk": node_local_findings(cluster),
    }
    with ThreadPoolExecutor(len(checks)) as pool:  # they wait for the vendors' programs
        for finding in chain.from_iterable(pool.map(_findings, checks, checks.values())):
            yield _relaxed(finding, cluster)
    # Last: a process that waits for a dead file system cannot be killed (state D).
    yield from _findings("shared file system", shared_findings(cluster, marker, node))


def _relaxed(finding: Finding, cluster: Cluster) -> Finding:
    """Return a warning in the place of a failure that the profile permits, or of another job's."""
    unshared = cluster.exclusive and "SLURM_JOB_ID" in os.environ
    if finding.check in cluster.health.warn_only or (
        finding.check in _OF_THE_NODE and not unshared
    ):
        status = "warn" if finding.status == "fail" else finding.status
        return finding.model_copy(update={"status": status, "blame": None})
    return finding


def _findings(check: str, findings: Findings) -> list[Finding]:
    results: list[Finding] = []
    try:
        results.extend(findings)
    except SlurmllmError as error:
        results.append(fail(check, "unusable", "", str(error).splitlines()[0]))
    except OSError as error:
        path = f"{error.filename}: " if error.filename else ""
        results.append(fail(check, "unusable", "", f"{path}{os_error_text(error)}"))
    return results


def memory_findings(cluster: Cluster) -> Findings:
    """Host memory that is free or can be freed at once (MemAvailable), GB."""
    yield _at_least(
        "memory",
        round(psutil.virtual_memory().available / GB, 1),
        cluster.health.min_memory_gb,
        "GB available",
        cluster,
    )


def device_findings(cluster: Cluster, root: Path = Path("/"), with_dcgm: bool = False) -> Findings:
    """Devices, driver, error counters and CPUs; /sys is read under `root`."""
    if cluster.device == "neuron":
        driver = read_text(root / "sys/module/neuron/version")
        yield from _count_and_driver(cluster, "NeuronCores", neuron_cores(), driver)
        if errors := neuron_errors(root):
            more = f" and {len(errors) - 3} more" if len(errors) > 3 else ""
            message = f"uncorrected memory errors: {', '.join(errors[:3])}{more}"
            yield fail("device errors", len(errors), 0, message)
        else:
            yield ok("device errors", 0)
    elif cluster.device == "cuda":
        yield from _nvidia_findings(cluster, with_dcgm)
    cpus = os.cpu_count() or 1
    yield _at_least("CPUs", cpus, cluster.cpus_per_node or 0, "CPUs", cluster, warn)


def _nvidia_findings(cluster: Cluster, with_dcgm: bool) -> Findings:
    gpus: list[Gpu] = []
    try:
        driver, gpus = read_gpus()
    except UnknownStateError as error:
        yield warn("devices", "unknown", cluster.devices_per_node, f"not checked: {error}")
    except NodeError as error:
        yield fail("devices", "unusable", "", str(error).splitlines()[0])
    else:
        yield from _count_and_driver(cluster, "GPUs", len(gpus), driver)
        yield from gpu_findings(gpus)
    yield from xid_findings(needs_no_reset(gpus))
    if with_dcgm and gpus:  # afterwards: its processes would be found on the GPUs
        yield from dcgm_findings()


def _count_and_driver(cluster: Cluster, kind: str, count: int, driver: str) -> Findings:
    yield _at_least("devices", count, cluster.devices_per_node, kind, cluster)
    version = cluster.health.driver_version
    if version is not None and driver != version:
        message = f"driver {driver or 'unknown'}; profile {cluster.name} requires {version}"
        yield fail("driver", driver, version, message)
    elif driver:
        yield ok("driver", driver, version or "")


def _at_least(
    check: str,
    value: float,
    required: float,
    unit: str,
    cluster: Cluster,
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


def neuron_errors(root: Path) -> list[str]:
    errors = []
    for device in sorted((root / "sys/devices/virtual/neuron_device").glob("neuron[0-9]*")):
        # Counters since the driver was loaded (Neuron Sysfs User Guide, "hardware/"): those that
        # the runtime calls uncorrectable; AWS advises to replace the instance.
        for name in ("mem_ecc_uncorrected", "sram_ecc_uncorrected"):
            count = read_text(device / "stats/hardware" / name)
            if count not in ("", "0"):
                errors.append(f"{device.name}: {name} {count}")
    return errors


def efa_findings(cluster: Cluster) -> Findings:
    """The EFA interfaces that libfabric can use; no finding if the profile requires none."""
    required = cluster.health.efa_interfaces
    if required == 0:
        return
    # Each interface is a domain (`domain: rdmap16s27-rdm`), listed once or several times.
    yield _at_least(
        "EFA",
        len(
            set(
                re.findall(
                    r"^\s*domain: (\S+)$",
                    output_of("fi_info", "-p", "efa", "-t", "FI_EP_RDM"),
                    re.MULTILINE,
                )
            )
        ),
        required,
        "EFA interfaces",
        cluster,
    )
