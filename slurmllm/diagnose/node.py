"""All checks of the node that this process runs on: the probe that `health` and preflight start."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from slurmllm.backends.environment import load_environment
from slurmllm.config.cluster import Cluster
from slurmllm.diagnose.devices import device_findings, efa_findings
from slurmllm.diagnose.finding import fail, ok
from slurmllm.diagnose.probe import report
from slurmllm.diagnose.storage import GB, node_local_findings, shared_findings
from slurmllm.errors import SlurmllmError
from slurmllm.records import Finding


def check_node(node: str, cluster: Cluster, backend: str, marker: Path) -> None:
    """Run all checks and report their findings.

    Args:
        node: This node's name.
        cluster: The profile with the requirements.
        backend: Whose library versions to report.
        marker: A new file in the shared folder.
    """
    started = time.monotonic()
    report(node)  # the clock, before the checks take time
    for finding in node_findings(node, cluster, marker):
        report(node, finding=finding)
    for version in load_environment(backend).node_versions().items():
        report(node, version=version)
    report(node, took_s=time.monotonic() - started)


def node_findings(node: str, cluster: Cluster, marker: Path) -> Iterator[Finding]:
    """The findings of each check; a check that raises an error fails."""
    checks: dict[str, Callable[[], Iterator[Finding]]] = {
        "devices": lambda: device_findings(cluster),
        "EFA": lambda: efa_findings(cluster),
        "memory": lambda: memory_findings(cluster),
        "node-local disk": lambda: node_local_findings(cluster),
        # Last: a process that waits for a dead file system cannot be killed (state D).
        "shared file system": lambda: shared_findings(cluster, marker, node),
    }
    for check, findings in checks.items():
        try:
            yield from findings()
        except SlurmllmError as error:
            yield fail(check, "unusable", "", str(error).splitlines()[0])
        except OSError as error:
            path = f"{error.filename}: " if error.filename else ""
            yield fail(check, "unusable", "", f"{path}{error.strerror or error}")


def memory_findings(cluster: Cluster, root: Path = Path("/")) -> Iterator[Finding]:
    """Host memory that is free or can be freed at once (MemAvailable), GB."""
    required = cluster.health.min_memory_gb
    lines = (root / "proc/meminfo").read_text(encoding="utf-8").splitlines()
    kib = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    available = round(kib * 1024 / GB, 1)
    if available < required:
        message = f"{available} GB available; profile {cluster.name} requires {required:g}"
        yield fail("memory", available, required, message)
    else:
        yield ok("memory", available, required or "")
