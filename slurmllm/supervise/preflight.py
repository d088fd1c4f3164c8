"""Preflight: every node checks itself before an attempt, and a failing one ends the attempt."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from slurmllm.config.resolve import RunConfig
from slurmllm.control.rendezvous import free_port
from slurmllm.diagnose.bandwidth import with_bandwidth
from slurmllm.diagnose.probe import check_nodes
from slurmllm.run.records import AttemptRecord, NodeHealth
from slurmllm.run.rundir import RunDir
from slurmllm.supervise.allocation import SLURMLLM, Allocation
from slurmllm.supervise.classify import Ending

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
    found = check_nodes(allocation, config, run.path, SLURMLLM, stop)
    if found is not None and config.cluster.health.bandwidth == "always":
        found = with_bandwidth(
            found, allocation, allocation.job_id, config, SLURMLLM, free_port(), stop
        )
    if found is None or stop():  # interrupted checks are incomplete: ignore them
        return Preflight(None, ())
    paths = run.attempt(record.stage, record.attempt)
    with ThreadPoolExecutor(WRITERS) as pool:
        list(pool.map(lambda health: health.save(paths.health(health.node)), found.values()))
    return Preflight(preflight_ending(found), tuple(lines(found, "warn")))


def preflight_ending(found: Mapping[str, NodeHealth]) -> Ending | None:
    """The ending if a node failed its checks.

    A check that fails on all of several nodes is a fault of the profile, and blames none of them.
    The shared file system is never a node's fault if all nodes fail with it.
    """
    failed = {name: health.of("fail") for name, health in found.items() if health.of("fail")}
    if not failed:
        return None
    common = set.intersection(*({f.check for f in health.of("fail")} for health in found.values()))
    of_first = next(iter(failed.values()))
    if SHARED in common:
        message = next(f.message for f in of_first if f.check == SHARED)
        nodes = "all nodes" if len(found) > 1 else next(iter(found))
        return Ending("storage_failure", (f"preflight: {nodes}: {message}",), started=False)
    evidence = []
    if common and len(found) > 1:
        evidence += [f"preflight: all nodes: {f.message}" for f in of_first if f.check in common]
        failed = {
            name: own
            for name, findings in failed.items()
            if (own := tuple(f for f in findings if f.check not in common))
        }
    evidence += [f"preflight: {name}: {f.message}" for name, fs in failed.items() for f in fs]
    return Ending("node_failure", tuple(evidence), tuple(failed), started=False)


def lines(found: Mapping[str, NodeHealth], status: str) -> list[str]:
    """`n3: 0.4 GB free in /scratch, …`, for the findings of a status."""
    return [f"{name}: {f.message}" for name, health in found.items() for f in health.of(status)]
