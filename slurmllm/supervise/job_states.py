"""What Slurm says of the jobs of runs: one squeue call for all of them, sacct where it must be."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from slurmllm.errors import SlurmError
from slurmllm.records import Submission
from slurmllm.slurm.client import QueuedJob, SlurmClient


@dataclass(frozen=True)
class JobState:
    """One of the two jobs of a submission."""

    job_id: str
    state: str
    reason: str = ""


@dataclass(frozen=True)
class Queue:
    """Slurm's answer.

    Attributes:
        jobs: The jobs that it still holds, by id.
        silent: Why it did not answer; empty where it did.
    """

    jobs: Mapping[str, QueuedJob] = field(default_factory=dict)
    silent: str = ""


def job_ids(sent: Submission | None) -> dict[str, str]:
    """Stage → job id of a submission to Slurm."""
    if sent is None or sent.local:
        return {}
    ids = {"precompile": sent.precompile_job, "train": sent.train_job}
    return {stage: job for stage, job in ids.items() if job is not None}


def ask(submissions: Iterable[Submission | None], client: SlurmClient) -> Queue:
    """Ask Slurm once for the jobs of many submissions."""
    wanted = [job for sent in submissions for job in job_ids(sent).values()]
    if not wanted:
        return Queue()
    try:
        return Queue(client.queue(wanted))
    except SlurmError as error:
        return Queue(silent=str(error))


def job_states(
    sent: Submission | None, queue: Queue, client: SlurmClient, brief: bool = False
) -> dict[str, JobState]:
    """Stage → state of the jobs of a submission.

    Args:
        sent: The submission.
        queue: What `ask` found.
        client: Slurm.
        brief: Whether to leave out jobs that it holds no more while it holds another, which tells
            where the run stands: accounting must be asked for each of them.
    """
    jobs, ids = {}, job_ids(sent)
    enough = brief and any(job in queue.jobs and queue.jobs[job].active for job in ids.values())
    for stage, job in ids.items():
        if queue.silent:
            jobs[stage] = JobState(job, "UNKNOWN", queue.silent)
        elif job in queue.jobs:
            reason = queue.jobs[job].reason
            jobs[stage] = JobState(job, queue.jobs[job].state, "" if reason == "None" else reason)
        elif not enough:
            rows = [row for row in client.accounting(job) if row.job_id == job]
            jobs[stage] = JobState(job, rows[-1].state if rows else "UNKNOWN")
    return jobs
