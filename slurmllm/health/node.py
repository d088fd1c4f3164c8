"""The checks of one node, made on it: what `slurmllm check-node` says line by line."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from slurmllm.backends.environment import load_environment
from slurmllm.config.cluster import Cluster
from slurmllm.errors import SlurmllmError
from slurmllm.health.devices import device_findings
from slurmllm.health.findings import fail
from slurmllm.health.host import memory_findings, node_local_findings, shared_findings
from slurmllm.health.network import efa_findings
from slurmllm.health.report import say
from slurmllm.records import HealthFinding


def check_node(node: str, cluster: Cluster, backend: str, token: Path) -> None:
    """Make all checks and say what they found.

    The shared file system comes last: a process that waits for a dead one can no longer be ended.

    Args:
        node: This node's name.
        cluster: What it should have.
        backend: Whose versions to report.
        token: A file in the shared folder.
    """
    started = time.monotonic()
    say(node)  # the clock, before anything has taken time
    for finding in node_findings(node, cluster, token):
        say(node, finding=finding)
    for version in load_environment(backend).node_versions().items():
        say(node, version=version)
    say(node, took_s=time.monotonic() - started)


def node_findings(node: str, cluster: Cluster, token: Path) -> Iterator[HealthFinding]:
    """What each check finds; one that cannot be made fails."""
    yield from _made("devices", lambda: device_findings(cluster))
    yield from _made("EFA", lambda: efa_findings(cluster))
    yield from _made("memory", lambda: memory_findings(cluster))
    yield from _made("node-local disk", lambda: node_local_findings(cluster))
    yield from _made("shared file system", lambda: shared_findings(cluster, token, node))


def _made(check: str, make: Callable[[], Iterator[HealthFinding]]) -> Iterator[HealthFinding]:
    try:
        yield from make()
    except SlurmllmError as error:
        yield fail(check, "unusable", "", str(error).splitlines()[0])
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        yield fail(check, "unusable", "", f"{place}{error.strerror or error}")
