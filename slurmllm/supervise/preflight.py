"""Before the start of an attempt: every node checks itself, and one that fails ends the attempt."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from slurmllm.backends.rendezvous import free_port
from slurmllm.config.resolve import RunConfig
from slurmllm.diagnose.bandwidth import with_bandwidth
from slurmllm.diagnose.probe import check_nodes
from slurmllm.records import AttemptRecord, NodeHealth
from slurmllm.rundir import RunDir
from slurmllm.supervise.allocation import SLURMLLM, Allocation
from slurmllm.supervise.classify import Ending

SHARED = "shared file system"
WRITERS = 16  # of the nodes' records: a write takes as long as the file system's fsync


class Preflight(NamedTuple):
    """What the checks came to.

    Attributes:
        ending: How the attempt ends, None where it can begin.
        warnings: A line each.
    """

    ending: Ending | None
    warnings: tuple[str, ...]


def preflight(
    run: RunDir,
    record: AttemptRecord,
    config: RunConfig,
    allocation: Allocation,
    stop: Callable[[], bool],
) -> Preflight:
    """Check the nodes of an attempt and write down what was found.

    Raises:
        StorageError: the run directory cannot be written from here.
        SlurmError: srun is absent.
    """
    found = check_nodes(allocation, config, run.path, SLURMLLM, stop)
    if found is not None and config.cluster.health.bandwidth == "always":
        found = with_bandwidth(
            found, allocation, allocation.job_id, config, SLURMLLM, free_port(), stop
        )
    if found is None or stop():  # whoever has not answered by then was told to end
        return Preflight(None, ())
    paths = run.attempt(record.stage, record.attempt)
    with ThreadPoolExecutor(WRITERS) as pool:
        list(pool.map(lambda health: health.save(paths.health(health.node)), found.values()))
    return Preflight(verdict(found), tuple(lines(found, "warn")))


def verdict(found: Mapping[str, NodeHealth]) -> Ending | None:
    """The ending, where a node failed.

    What all nodes fail alike is no node's fault but the profile's: of two nodes and more, nobody is
    blamed for that. The shared file system is never a node's where all nodes fail with it.
    """
    failed = {name: health.of("fail") for name, health in found.items() if health.of("fail")}
    if not failed:
        return None
    common = set.intersection(*({f.check for f in health.of("fail")} for health in found.values()))
    if SHARED in common:
        of_first = next(iter(failed.values()))
        words = next(f.message for f in of_first if f.check == SHARED)
        who = "all nodes" if len(found) > 1 else next(iter(found))
        return Ending("storage_failure", (f"preflight: {who}: {words}",), started=False)
    evidence = []
    if common and len(found) > 1:
        of_first = next(iter(failed.values()))
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
