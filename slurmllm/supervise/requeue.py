"""Before a requeue: keep a job off the node that it has just lost.

Slurm notices a dead node only after SlurmdTimeout (300 s by default). A job requeued before
that may get the same node again and use up an attempt on it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from slurmllm.errors import SlurmError
from slurmllm.slurm.client import SlurmClient, patiently

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
