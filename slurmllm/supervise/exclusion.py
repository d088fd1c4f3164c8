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
from slurmllm.slurm.client import SlurmClient, patiently
from slurmllm.supervise.attempts import load_attempts, lost_nodes
from slurmllm.supervise.policy import HOUR_S, failing_nodes


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


POLL_S = 2.0
NOTICE_S = 330.0  # Slurm's default SlurmdTimeout and a little
_UNUSABLE = ("down", "drain", "fail", "maint", "power", "reboot", "unknown", "*")


def usable(state: str) -> bool:
    """Whether Slurm would start a job on a node in this state (sinfo's long form)."""
    return not any(word in state for word in _UNUSABLE)


def enough_others(
    client: SlurmClient, wanted: int, avoid: Sequence[str], partition: str | None
) -> bool:
    """Whether a job finds its nodes without some of them.

    Args:
        client: Slurm.
        wanted: Nodes of the job.
        avoid: Nodes to do without.
        partition: The job's, or several with commas between; None: Slurm's default.
    """
    names = partition.split(",") if partition else None
    spare = {
        node.name
        for node in patiently(client.partition_nodes)
        if (node.partition in names if names else node.default) and usable(node.state)
    }
    return len(spare - set(avoid)) >= wanted


def nodes_to_avoid(
    client: SlurmClient,
    wanted: int,
    lost: Sequence[str],
    lost_before: Sequence[str],
    partition: str | None = None,
    job_id: str | None = None,
) -> list[str]:
    """The nodes to exclude: those lost, where others can take their place.

    Where none can, exclude nothing, and wait until Slurm itself has noticed; but not for nodes that
    answer: there the launcher alone was lost.

    Args:
        client: Slurm.
        wanted: Nodes of the job.
        lost: Nodes that failed their checks, fell silent, or whose device broke, in the attempt
            that just ended.
        lost_before: Those that the run keeps off; taken again where there are no others.
        partition: See enough_others.
        job_id: This process's own job, which holds the nodes; None: nobody is asked.
    """
    for avoid in (sorted({*lost, *lost_before}), sorted(lost)):
        if avoid and enough_others(client, wanted, avoid, partition):
            return avoid
    if not lost:
        return []
    if job_id is not None and all(client.answers(job_id, name) for name in lost):
        print(f"no node to take the place of {' '.join(lost)}, and they answer", flush=True)
        return []
    print(f"no node to take the place of {' '.join(lost)}: waiting for Slurm", flush=True)
    deadline = time.monotonic() + NOTICE_S
    while time.monotonic() < deadline:
        if any(not usable(patiently(client.node_states).get(name, "unknown")) for name in lost):
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
    """Put this process's own job back into the queue, away from nodes.

    Slurm refuses a new ExcNodeList or start time while the job runs and takes them once the
    requeue has begun; the caller must ignore the SIGTERM that comes with it.

    Args:
        client: Slurm.
        job_id: The job.
        avoid: Nodes to keep it off.
        excluded: What the recipe excludes anyway; the new list replaces it.
        avoided_before: Whether the job may have a list that is to go.
        backoff_s: Seconds that it waits, at least.

    Raises:
        SlurmError: Slurm refuses, or does not answer for some minutes.
    """
    try:
        patiently(lambda: client.requeue(job_id))
    except SlurmError as error:
        if "pending" not in str(error):
            raise
        print(f"job {job_id}: Slurm requeues it already", flush=True)
    if avoid or avoided_before:
        names = [*([excluded] if excluded else []), *avoid]
        patiently(lambda: client.exclude(job_id, names))
    if avoid:
        print(f"job {job_id} keeps off {' '.join(avoid)} from now on", flush=True)
    if backoff_s:
        patiently(lambda: client.delay(job_id, backoff_s))
        print(f"job {job_id} waits {backoff_s:.0f} s at least", flush=True)
