"""All checks of the node that this process runs on: the probe that `health` and preflight start."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from slurmllm.core.config.cluster import Cluster
from slurmllm.core.errors import NodeError, SlurmllmError
from slurmllm.core.run.records import Finding
from slurmllm.core.run.safe_files import os_error_text
from slurmllm.launch.diagnose import Findings, fail, ok, warn
from slurmllm.launch.diagnose.probe import report
from slurmllm.launch.diagnose.storage import GB, node_local_findings, shared_findings
from slurmllm.train.backends.environment import load_environment

# Where AWS's packages install their tools: not on a batch job's $PATH by default.
FOLDERS = ("/opt/aws/neuron/bin", "/opt/amazon/efa/bin", "/usr/sbin")
TIMEOUT_S = 20.0  # nvidia-smi takes some seconds if the driver has to wake the GPUs up


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
    """The findings of each check; a check that raises an error fails."""
    checks = {  # generators: none has begun yet
        "devices": device_findings(cluster),
        "EFA": efa_findings(cluster),
        "memory": memory_findings(cluster),
        "node-local disk": node_local_findings(cluster),
        # Last: a process that waits for a dead file system cannot be killed (state D).
        "shared file system": shared_findings(cluster, marker, node),
    }
    for check, findings in checks.items():
        try:
            yield from findings
        except SlurmllmError as error:
            yield fail(check, "unusable", "", str(error).splitlines()[0])
        except OSError as error:
            path = f"{error.filename}: " if error.filename else ""
            yield fail(check, "unusable", "", f"{path}{os_error_text(error)}")


def memory_findings(cluster: Cluster) -> Findings:
    """Host memory that is free or can be freed at once (MemAvailable), GB."""
    yield _at_least(
        "memory",
        round(psutil.virtual_memory().available / GB, 1),
        cluster.health.min_memory_gb,
        "GB available",
        cluster,
    )


def device_findings(cluster: Cluster, root: Path = Path("/")) -> Findings:
    """Devices, driver, error counters and CPUs; /sys is read under `root`."""
    if cluster.device != "cpu":
        if cluster.device == "neuron":
            kind = "NeuronCores"
            count = neuron_cores()
            driver = _read(root / "sys/module/neuron/version")
            errors = neuron_errors(root)
        else:
            gpus = nvidia_gpus()
            kind = "GPUs"
            count = len(gpus)
            driver = gpus[0][1] if gpus else ""
            errors = [f"GPU {gpu}: {number}" for gpu, _, number in gpus if number > 0]
        yield _at_least("devices", count, cluster.devices_per_node, kind, cluster)
        version = cluster.health.driver_version
        if version is not None and driver != version:
            message = f"driver {driver or 'unknown'}; profile {cluster.name} requires {version}"
            yield fail("driver", driver, version, message)
        elif driver:
            yield ok("driver", driver, version or "")
        if errors:
            more = f" and {len(errors) - 3} more" if len(errors) > 3 else ""
            message = f"uncorrected memory errors: {', '.join(errors[:3])}{more}"
            yield fail("device errors", len(errors), 0, message)
        else:
            yield ok("device errors", 0)
    cpus = os.cpu_count() or 1
    yield _at_least("CPUs", cpus, cluster.cpus_per_node or 0, "CPUs", cluster, warn)


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
            count = _read(device / "stats/hardware" / name)
            if count not in ("", "0"):
                errors.append(f"{device.name}: {name} {count}")
    return errors


def nvidia_gpus() -> list[tuple[str, str, int]]:
    """Return (index, driver, uncorrected memory errors since it was loaded) of every GPU."""
    output = output_of(
        "nvidia-smi",
        "--query-gpu=index,driver_version,ecc.errors.uncorrected.volatile.total",
        "--format=csv,noheader",
    )
    gpus = []
    for line in output.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != 3:
            raise NodeError(f"nvidia-smi printed {line!r}")
        index, driver, errors = fields
        gpus.append((index, driver, int(errors) if errors.isdigit() else 0))  # "[N/A]": no ECC
    return gpus


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8").strip()
    except OSError:
        return ""


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


def find(name: str) -> str | None:
    """Return a program's path, on $PATH or in the vendors' folders."""
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), *FOLDERS]))


def output_of(name: str, *arguments: str) -> str:
    """Return a program's output; NodeError if it is not installed, too slow or fails."""
    path = find(name)
    if path is None:
        raise NodeError(f"{name} is neither on $PATH nor in {', '.join(FOLDERS)}")
    try:
        done = subprocess.run(
            [path, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
        )
    except OSError as error:
        raise NodeError(f"{path} cannot be started: {os_error_text(error)}") from error
    except subprocess.TimeoutExpired as error:
        raise NodeError(f"{name} did not end within {TIMEOUT_S:.0f} s") from error
    if done.returncode != 0:
        lines = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()
        raise NodeError(f"{name} failed with exit code {done.returncode}: {lines[-1]}")
    return done.stdout
