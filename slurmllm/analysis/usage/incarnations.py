"""The node hours that Slurm itself counted for a run's jobs."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from datetime import datetime

from slurmllm.analysis.usage.history import Incarnation
from slurmllm.errors import SlurmError
from slurmllm.records import Submission
from slurmllm.rundir import Stage
from slurmllm.slurm.client import AccountingRow, SlurmClient

_SLACK_S = 60.0  # between the clocks of the login node and Slurm's


def incarnations(submissions: Sequence[Submission], client: SlurmClient) -> list[Incarnation]:
    """Every start of every job of a run, oldest first; empty without accounting or Slurm."""
    found = []
    sizes: dict[str, int] = {}
    for job_id, stage in _jobs(submissions):
        for row in client.accounting(job_id):
            if row.job_id != job_id:
                continue  # a step
            if row.nodes not in sizes:
                sizes[row.nodes] = _count(row.nodes, client)
            started = _unix(row.start)
            if started is None or not sizes[row.nodes]:
                continue  # cancelled in the queue, or there still
            if started < submissions[0].submitted_at - _SLACK_S:
                continue  # another job, before Slurm began to count anew
            found.append(_incarnation(row, stage, sizes[row.nodes], started))
    return sorted(found, key=lambda incarnation: incarnation.start)


def _incarnation(row: AccountingRow, stage: Stage, nodes: int, start: float) -> Incarnation:
    end = _unix(row.end)
    running = end is None
    return Incarnation(
        row.job_id, stage, nodes, start, max(start, time.time() if end is None else end), running
    )


def _jobs(submissions: Sequence[Submission]) -> Iterator[tuple[str, Stage]]:
    for sent in submissions:
        if sent.precompile_job is not None:
            yield sent.precompile_job, "precompile"
        if sent.train_job is not None:
            yield sent.train_job, "train"


def _count(nodelist: str, client: SlurmClient) -> int:
    """How many nodes a list names; 0 for `None assigned`."""
    if not nodelist or nodelist.startswith("None"):
        return 0
    if "[" not in nodelist:
        return nodelist.count(",") + 1
    try:
        return len(client.hostnames(nodelist))
    except SlurmError:
        return 0


def _unix(moment: str) -> float | None:
    """sacct's local time as Unix time; None for `Unknown` and `None`."""
    try:
        return datetime.fromisoformat(moment).timestamp()
    except ValueError:
        return None
