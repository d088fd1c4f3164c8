"""Preflight: every node checks itself before an attempt, and a failing one ends the attempt."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from slurmllm.config.resolve import RunConfig
from slurmllm.control.rendezvous import free_port
from slurmllm.diagnose.bandwidth import with_bandwidth
from slurmllm.diagnose.probe import LaunchError, check_nodes
from slurmllm.run.records import AttemptRecord, NodeHealth
from slurmllm.run.rundir import RunDir
from slurmllm.supervise.allocation import SLURMLLM, Allocation
from slurmllm.supervise.classify import Ending, launch_ending

SHARED = "shared file system"
WRITERS = 16  # threads that write the nodes' records: a write waits for the file system's fsync


class Preflight(NamedTuple):
    """The result of the checks: the attempt's ending, None if it can begin, and warnings."""

    ending: Ending | None
    warnings: tuple[str, ...]


def preflight(
    run: RunDir,
    record: AttemptRecord,
    config: RunConfig,
    allocation: Allocation,
    stop: Callable[[], bool],
) -> Preflight:
    """Check the nodes of an attempt and record the findings.

    Raises a StorageError if the run directory is not writable from here, a SlurmError without srun.
    """
    try:
        nodes = check_nodes(allocation, config, run.path, SLURMLLM, stop)
    except LaunchError as error:
        return Preflight(launch_ending(error.failure, record.nodes), ())
    if nodes is not None and config.cluster.health.bandwidth == "always":
        nodes = with_bandwidth(
            nodes, allocation, allocation.job_id, config, SLURMLLM, free_port(), stop
        )
    if nodes is None or stop():  # interrupted checks are incomplete: ignore them
        return Preflight(None, ())
    paths = run.attempt(record.stage, record.attempt)
    with ThreadPoolExecutor(WRITERS) as pool:
        list(pool.map(lambda health: health.save(paths.health(health.node)), nodes.values()))
    return Preflight(preflight_ending(nodes), preflight_warnings(nodes))


def preflight_warnings(nodes: Mapping[str, NodeHealth]) -> tuple[str, ...]:
    """Return `n3: 0.4 GB free in /scratch, …` for each warning."""
    return tuple(f"{name}: {f.message}" for name, node in nodes.items() for f in node.of("warn"))


def preflight_ending(nodes: Mapping[str, NodeHealth]) -> Ending | None:
    """Return the ending if a node failed its checks.

    A check that fails on all of several nodes is a fault of the profile, and blames none of them.
    The shared file system is never a node's fault if all nodes fail with it.
    """
    failed = {name: health.of("fail") for name, health in nodes.items() if health.of("fail")}
    if not failed:
        return None
    common = set.intersection(*({f.check for f in health.of("fail")} for health in nodes.values()))
    of_first = next(iter(failed.values()))
    if SHARED in common:
        message = next(f.message for f in of_first if f.check == SHARED)
        names = "all nodes" if len(nodes) > 1 else next(iter(nodes))
        return Ending("storage_failure", (f"preflight: {names}: {message}",), started=False)
    evidence = []
    if common and len(nodes) > 1:
        evidence += [f"preflight: all nodes: {f.message}" for f in of_first if f.check in common]
        rest = {n: [f for f in fs if f.check not in common] for n, fs in failed.items()}
        failed = {name: tuple(findings) for name, findings in rest.items() if findings}
    evidence += [f"preflight: {name}: {f.message}" for name, fs in failed.items() for f in fs]
    return Ending("node_failure", tuple(evidence), tuple(failed), started=False)
