"""The chain of jobs of a run whose site refuses requeues: each job has a successor that waits.

    job 12 ──afterany── job 13 ──afterany── job 14
    trains  submits 13          records itself in jobs.json, trains, submits 14

The successor is submitted when an attempt starts, not when it ends: if the node of the supervisor
dies, nobody is left to submit one. It is cancelled when the run is done or stops. A supervisor that
is killed before it could cancel leaves a successor that starts, reads the records, and exits.
"""

from __future__ import annotations

import logging
import os
import time
from contextlib import suppress

from slurmllm.core.config.operation import RestartSetting
from slurmllm.core.errors import SlurmError, SlurmllmError
from slurmllm.core.run.records import JobsRecord, Restart, Submission, last_submission
from slurmllm.core.run.rundir import RunDir
from slurmllm.core.slurm.client import Names, SlurmClient, retry_unreachable
from slurmllm.core.slurm.setup import PREDECESSOR
from slurmllm.launch.supervise import attempts
from slurmllm.launch.supervise.allocation import Allocation, SlurmAllocation, accounted_state
from slurmllm.launch.supervise.classify import Ending
from slurmllm.launch.supervise.run_lock import EXPIRES_S, locked

LOCK_S = EXPIRES_S + 30.0  # for the lock of a supervisor that died with it

log = logging.getLogger(__name__)


def restart_of(run: RunDir, allocation: Allocation) -> Restart:
    """How the run continues after the end of this job."""
    last = last_submission(run)
    return last.restart if last is not None and allocation.job_id is not None else "requeue"


def choose_restart(
    setting: RestartSetting, before: Submission | None, client: SlurmClient
) -> Restart:
    """Return `slurm.restart` of a new submission, with `auto` resolved.

    If a requeue was refused in an earlier submission of the run, it stays a chain.
    """
    if setting != "auto":
        return setting
    if before is not None and before.restart == "chain":
        return "chain"
    with suppress(SlurmError):
        return "chain" if client.settings().get("JobRequeue") == "0" else "requeue"
    return "requeue"


def register_train_job(run: RunDir, allocation: Allocation) -> str | None:
    """Record this job as its run's train job if it is the successor of that.

    Returns why it must not train: the run has ended, or a user has cancelled the job before.
    """
    predecessor = os.environ.get(PREDECESSOR)
    if not isinstance(allocation, SlurmAllocation) or predecessor is None:
        return None
    client = allocation.client
    this_job = allocation.job_id
    with locked(run, "supervise", LOCK_S):
        last = JobsRecord.last_of(run)
        if last.train_job != predecessor:
            return None  # it is recorded already, or of an earlier submission
        client.cancel(
            [job for job in client.successors(predecessor, _name(run, last)) if job != this_job]
        )
        if reason := _ended(run, last, client):
            return reason
        JobsRecord.change_last(
            run,
            train_job=this_job,
            successor_job=None,
            earlier_jobs=(*last.earlier_jobs, predecessor),
        )
    log.info("job %s continues the run after job %s", this_job, predecessor)
    return None


def _ended(run: RunDir, last: Submission, client: SlurmClient) -> str | None:
    """Return why nothing follows the last train job; None if its successor continues the run."""
    if last.cancelled_at is not None:
        return "the run was cancelled"
    records = attempts.load_attempts(run, "train")
    record = records[-1] if records and records[-1].attempt >= last.first_attempt else None
    if record is not None and record.action in ("finish", "stop"):
        return f"the run has ended: {record.ending} → {record.action}"
    # A supervisor may have no time to see that its job was cancelled, and not only preempted.
    job_id = str(last.train_job)
    job = retry_unreachable(lambda: client.queue([job_id])).get(job_id)
    # slurmctld forgets an ended job.
    if (job.state if job else accounted_state(client, job_id)) != "CANCELLED":
        return None
    reason = f"Slurm: job {job_id} CANCELLED"
    if record is not None:
        attempts.close_attempt(
            run, record, Ending("cancelled", (reason, *record.evidence)), ended_at=record.ended_at
        )
    JobsRecord.change_last(run, cancelled_at=time.time())
    return reason


def ensure_successor(
    run: RunDir, allocation: SlurmAllocation, script: str, exclude: Names
) -> str | None:
    """Submit the successor of this train job unless it has one; returns its job id.

    Returns None if the job is not its run's train job, or was cancelled. Raises a SlurmError if
    sbatch refuses it, or slurmctld is unreachable.
    """
    client = allocation.client
    this_job = allocation.job_id
    with locked(run, "supervise", LOCK_S):
        last = JobsRecord.last_of(run)
        if last.train_job != this_job or last.cancelled_at is not None:
            return None
        name = _name(run, last)
        # Also one whose supervisor was killed before it could record it.
        jobs = client.successors(this_job, name)
        job = last.successor_job if last.successor_job in jobs else next(iter(jobs), None)
        client.cancel([other for other in jobs if other != job])
        if job is None:
            job = client.submit(script, exclude=exclude, requeue=False, after=this_job, name=name)
            log.info("job %s continues the run when this job ends (its successor)", job)
        JobsRecord.change_last(run, restart="chain", successor_job=job)
    return job


def cancel_successor(run: RunDir, allocation: Allocation) -> None:
    """Cancel the successor of this train job; an error is only logged: it would exit by itself."""
    assert isinstance(allocation, SlurmAllocation)
    client = allocation.client
    this_job = allocation.job_id
    try:
        with locked(run, "supervise", LOCK_S):
            last = JobsRecord.last_of(run)
            if last.train_job != this_job:
                return
            recorded = [] if last.successor_job is None else [last.successor_job]
            client.cancel(
                list(dict.fromkeys([*recorded, *client.successors(this_job, _name(run, last))]))
            )
            JobsRecord.change_last(run, successor_job=None)
    except SlurmllmError as error:
        log.warning("cannot cancel the successor job, which exits when it starts: %s", error)


def _name(run: RunDir, last: Submission) -> str:
    """Return the name of all successors in a chain: its lane's, else one of no other run."""
    return last.lane or f"{run.name}-train-{(*last.earlier_jobs, last.train_job)[0]}"
