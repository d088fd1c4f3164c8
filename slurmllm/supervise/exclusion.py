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
from slurmllm.supervise.requeue import enough_others

HOUR_S = 3600.0


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
    now = time.time()
    hours_s = config.recipe.slurm.exclude_hours * HOUR_S
    lost = lost_nodes(run, closed)
    new = []
    for name in closed.blamed_nodes:
        reason = _blamed_twice(run, name, now - hours_s)
        if name in lost:
            reason = _evidence(closed, name)
        if reason is not None:
            new.append(ExcludedNode(node=name, reason=reason, since=now, until=now + hours_s))
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


def _evidence(closed: AttemptRecord, name: str) -> str:
    naming = [line for line in closed.evidence if name in line]
    return (naming or [*closed.evidence, str(closed.ending)])[0]


def _blamed_twice(run: RunDir, name: str, since: float) -> str | None:
    stages: tuple[Stage, ...] = ("precompile", "train")
    blaming = [
        f"{attempt.stage} {attempt.attempt}"
        for stage in stages
        for attempt in load_attempts(run, stage)
        if name in attempt.blamed_nodes and (attempt.ended_at or 0.0) >= since
    ]
    if len(blaming) < 2:
        return None
    return f"{len(blaming)} attempts were put down to it: {', '.join(blaming)}"
