"""Excluded nodes: recorded with a reason and an end, kept out of requeued and new jobs.

A node is excluded at once if it failed its checks, stopped responding or has a broken device, and
after two attempts that failed because of it otherwise.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from slurmllm.config.resolve import RunConfig
from slurmllm.errors import SlurmError
from slurmllm.run.records import AttemptRecord, ExcludedNode, ExcludedNodes
from slurmllm.run.rundir import STAGES, RunDir
from slurmllm.slurm.client import SlurmClient, retry_unreachable
from slurmllm.supervise.attempts import load_attempts, lost_nodes
from slurmllm.supervise.policy import HOUR_S, failing_nodes

POLL_S = 2.0
SLURM_NOTICE_S = 330.0  # Slurm's default SlurmdTimeout (300 s) and a margin
_UNUSABLE = ("down", "drain", "fail", "maint", "power", "reboot", "unknown", "*")

log = logging.getLogger(__name__)


def excluded(run: RunDir) -> list[ExcludedNode]:
    now, record = time.time(), ExcludedNodes.find(run.excluded) or ExcludedNodes()
    return [node for node in record.nodes if node.until > now]


def failing(run: RunDir, closed: AttemptRecord, config: RunConfig) -> dict[str, str]:
    """Return node → reason of the nodes that an attempt lost, or that were blamed twice."""
    if not closed.blamed_nodes:
        return {}
    earlier = [
        attempt
        for stage in STAGES
        for attempt in load_attempts(run, stage)
        if (attempt.stage, attempt.attempt) != (closed.stage, closed.attempt)
    ]
    hours = config.recipe.slurm.exclude_hours
    return failing_nodes(closed, earlier, lost_nodes(run, closed), hours)


def exclude_failed(run: RunDir, closed: AttemptRecord, config: RunConfig) -> list[ExcludedNode]:
    """Record the nodes that an attempt lost (none if local); returns those that are new.

    Raises a StorageError if the run directory cannot be read or written.
    """
    if closed.job_id is None or not closed.blamed_nodes:
        return []
    now, hours = time.time(), config.recipe.slurm.exclude_hours
    new = [
        ExcludedNode(node=name, reason=reason, since=now, until=now + hours * HOUR_S)
        for name, reason in failing(run, closed, config).items()
    ]
    if new:
        names = {node.node for node in new}
        # A node that is excluded again gets the new reason and the later end.
        others = [node for node in excluded(run) if node.node not in names]
        ExcludedNodes(nodes=(*others, *new)).save(run.excluded)
    return new


def drain(client: SlurmClient, nodes: Sequence[ExcludedNode]) -> None:
    """Drain nodes; a refusal by Slurm is only logged."""
    for node in nodes:
        try:
            client.drain(node.node, f"slurmllm: {node.reason}"[:200])
            log.info("%s is drained: %s", node.node, node.reason)
        except SlurmError as error:
            log.warning("%s is not drained (slurm.drain): %s", node.node, error)


def to_avoid(client: SlurmClient, run: RunDir, config: RunConfig, count: int) -> list[str]:
    """Return the excluded nodes, if a new job of `count` nodes can start without them."""
    names = sorted(node.node for node in excluded(run))
    partition = config.recipe.slurm.partition or config.cluster.partition
    return names if names and enough_others(client, count, names, partition) else []


def usable(state: str) -> bool:
    """Whether Slurm would start a job on a node in this state (sinfo's long form)."""
    return not any(fault in state for fault in _UNUSABLE)


def enough_others(
    client: SlurmClient, count: int, avoid: Sequence[str], partition: str | None
) -> bool:
    """Whether `count` usable nodes remain; `partition` None is Slurm's default."""
    names = partition.split(",") if partition else None  # sbatch takes several
    spare = {
        node.name
        for node in retry_unreachable(client.partition_nodes)
        if (node.partition in names if names else node.default) and usable(node.state)
    }
    return len(spare - set(avoid)) >= count


def nodes_to_avoid(
    client: SlurmClient,
    count: int,
    lost: Sequence[str],
    excluded_before: Sequence[str],
    partition: str | None = None,
    job_id: str | None = None,
) -> list[str]:
    """Return the nodes to exclude from a requeued job: those lost, if there are spare nodes.

    Without spare nodes none is excluded; the function then waits until Slurm itself has noticed the
    loss, or returns at once if the nodes respond: then only the launcher was lost. Nodes in
    `excluded_before` are used again if there are no others. `job_id` is this process's job, which
    holds the nodes; without it they are not asked.
    """
    for avoid in (sorted({*lost, *excluded_before}), sorted(lost)):
        if avoid and enough_others(client, count, avoid, partition):
            return avoid
    if not lost:
        return []
    names = " ".join(lost)
    if job_id is not None and all(client.responds(job_id, name) for name in lost):
        log.info("no spare node for %s, which still responds: not excluded", names)
        return []
    log.info("no spare node for %s: waiting until Slurm notices the loss", names)
    deadline = time.monotonic() + SLURM_NOTICE_S
    while time.monotonic() < deadline:
        states = (retry_unreachable(client.node_states).get(name, "unknown") for name in lost)
        if not all(map(usable, states)):
            break
        time.sleep(POLL_S)
    return []


def requeue(
    client: SlurmClient,
    job_id: str,
    avoid: Sequence[str],
    excluded: str | None,
    avoided_before: bool = False,
    backoff_s: float = 0.0,
) -> None:
    """Requeue this process's job, away from some nodes, in `backoff_s` seconds or later.

    Slurm refuses a new ExcNodeList or start time while the job runs and accepts them once the
    requeue has begun; the caller must ignore the SIGTERM that comes with it. `excluded` is the
    recipe's exclusion, which the new list replaces; `avoided_before`: the job may have a list
    already. Raises a SlurmError if Slurm refuses, or does not respond for some minutes.
    """
    try:
        retry_unreachable(lambda: client.requeue(job_id))
    except SlurmError as error:
        # The job is pending if Slurm noticed the dead node first and requeued it.
        if "pending" not in str(error):
            raise
        log.info("job %s: Slurm has already requeued it", job_id)
    if avoid or avoided_before:
        names = [*([excluded] if excluded else []), *avoid]
        retry_unreachable(lambda: client.exclude(job_id, names))
    if avoid:
        log.info("job %s excludes %s from now on", job_id, " ".join(avoid))
    if backoff_s:
        retry_unreachable(lambda: client.delay(job_id, backoff_s))
        log.info("job %s waits at least %.0f s", job_id, backoff_s)
