"""The nodes that a run keeps off: written down with a reason, until their time is over.

A node gets there at once where it failed its checks, fell silent or has a broken device, and
where two attempts were put down to it otherwise: workers on it that failed for reasons of the
machine.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from slurmllm.config.resolve import RunConfig
from slurmllm.errors import SlurmError
from slurmllm.records import AttemptRecord, ExcludedNode, ExcludedNodes
from slurmllm.rundir import RunDir, Stage
from slurmllm.slurm.client import SlurmClient
from slurmllm.supervise.attempts import load_attempts, lost_nodes
from slurmllm.supervise.policy import HOUR_S, failing_nodes
from slurmllm.supervise.requeue import enough_others


def excluded(run: RunDir) -> list[ExcludedNode]:
    """The nodes that the run keeps off now."""
    if not run.excluded.is_file():
        return []
    now = time.time()
    return [node for node in ExcludedNodes.load(run.excluded).nodes if node.until > now]


def exclude_failed(run: RunDir, closed: AttemptRecord, config: RunConfig) -> list[ExcludedNode]:
    """Write down the nodes that an attempt has lost; returns those that are new.

    Of --local none: there is one machine.

    Raises:
        StorageError: the run directory cannot be read or written.
    """
    if closed.job_id is None or not closed.blamed_nodes:
        return []
    now, hours = time.time(), config.recipe.slurm.exclude_hours
    stages: tuple[Stage, ...] = ("precompile", "train")
    earlier = [
        attempt
        for stage in stages
        for attempt in load_attempts(run, stage)
        if (attempt.stage, attempt.attempt) != (closed.stage, closed.attempt)
    ]
    failing = failing_nodes(closed, earlier, lost_nodes(run, closed), hours)
    new = [
        ExcludedNode(node=name, reason=reason, since=now, until=now + hours * HOUR_S)
        for name, reason in failing.items()
    ]
    if new:
        names = {node.node for node in new}
        kept = [node for node in excluded(run) if node.node not in names]
        ExcludedNodes(nodes=(*kept, *new)).save(run.excluded)
    return new


def drain(client: SlurmClient, nodes: Sequence[ExcludedNode]) -> None:
    """Have Slurm start nothing more on nodes; a refusal is printed and does no harm."""
    for node in nodes:
        try:
            client.drain(node.node, f"slurmllm: {node.reason}"[:200])
            print(f"{node.node} is drained: {node.reason}", flush=True)
        except SlurmError as error:
            print(f"{node.node} is not drained (slurm.drain): {error}", flush=True)


def to_avoid(client: SlurmClient, run: RunDir, config: RunConfig, wanted: int) -> list[str]:
    """The excluded nodes that a new job of the run can do without.

    Raises:
        SlurmError: Slurm does not answer.
    """
    names = sorted(node.node for node in excluded(run))
    partition = config.recipe.slurm.partition or config.cluster.partition
    return names if names and enough_others(client, wanted, names, partition) else []
