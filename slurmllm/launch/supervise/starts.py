"""Checks whether another process already runs the stage of this start of a job."""

from __future__ import annotations

import logging
import os
import socket
import time
from contextlib import suppress

from slurmllm.core.errors import SlurmError, StorageError
from slurmllm.core.run.records import AttemptRecord, Heartbeat, JobsRecord
from slurmllm.core.run.rundir import RunDir, Stage
from slurmllm.core.slurm.client import ADOPTION_S, COMMAND_TIMEOUT_S, retry_unreachable
from slurmllm.launch.supervise.allocation import Allocation, SlurmAllocation
from slurmllm.launch.supervise.attempts import is_running, load_attempts
from slurmllm.launch.supervise.watchdog import HEARTBEAT_S

# For sbatch to return, or its job to be looked for, and the job to be recorded.
RECORDED_S = COMMAND_TIMEOUT_S + ADOPTION_S + 10.0
_LAG_S = 2.0  # until a shared file system shows what another node has written

log = logging.getLogger(__name__)


def still_runs(run: RunDir, record: AttemptRecord, allocation: Allocation) -> str | None:
    """Return why the supervisor of an unfinished attempt may still run; None if it does not.

    Slurm can requeue a job while its previous incarnation still runs on a node that lost contact
    with slurmctld. If that incarnation ran on this node, its process is looked up; on another node,
    its heartbeats are watched. For another job Slurm is queried; while it does not respond, the
    attempt counts as running.
    """
    here = record.host == socket.gethostname()
    pid = record.pid if here and record.pid != os.getpid() else None
    if pid is not None and is_running(pid, record.process, b"supervise"):
        return f"process {pid} on {record.host} is its supervisor"
    if record.job_id is None:
        return None
    if not isinstance(allocation, SlurmAllocation):
        return f"it belongs to job {record.job_id}, and there is no Slurm here"
    if record.job_id == allocation.job_id:
        beats = not here and _has_heartbeat(run, record)
        return f"{record.nodes[0]} still writes heartbeats" if beats else None
    try:
        job = allocation.client.queue([record.job_id]).get(record.job_id)
    except SlurmError as error:
        return f"the state of job {record.job_id} is unknown: {error}"
    if job is not None and job.has_nodes:
        return f"job {record.job_id} is {job.state}"
    return None


def other_supervisor(run: RunDir, stage: Stage, allocation: Allocation) -> str | None:
    """Return which process of this node supervises this start of the job already; None if none.

    A second one must leave: if it superseded the first, Slurm would end the job with the first.
    """
    this_start = allocation.job_id, allocation.restart_count, socket.gethostname()
    for record in load_attempts(run, stage):
        same = (record.job_id, record.restart_count, record.host) == this_start
        if record.ended_at is None and record.job_id is not None and same:
            pid = record.pid
            if pid not in (None, os.getpid()) and is_running(pid, record.process, b"supervise"):
                return (
                    f"attempt {record.attempt} of job {record.job_id} is supervised by {pid}; this "
                    "supervisor leaves"
                )
    return None


def _has_heartbeat(run: RunDir, record: AttemptRecord) -> bool:
    """Return whether the supervisor's node writes heartbeats; wait for the next if it is due."""
    path = run.attempt(record.stage, record.attempt).heartbeat(record.nodes[0])
    with suppress(StorageError):
        first = latest = Heartbeat.find(path)
        if first is None:
            return False
        age_s = max(time.time() - first.written_at, 0.0)
        deadline = time.monotonic() + HEARTBEAT_S + _LAG_S - age_s
        while latest == first and time.monotonic() < deadline:
            time.sleep(0.5)
            with suppress(StorageError):  # being written
                latest = Heartbeat.find(path)
        return latest != first
    return False


def was_restarted(allocation: SlurmAllocation) -> bool:
    """Whether the job runs as a later incarnation: Slurm had lost contact with this one."""
    job = retry_unreachable(lambda: allocation.client.batch_job(allocation.job_id))
    later = job.restarts > allocation.restart_count or job.host != allocation.nodes[0]
    return job.state == "RUNNING" and later


def lost_start(allocation: Allocation) -> str | None:
    """Return why slurmctld does not know of this start of its job; None if it does.

    It saves its state with some seconds of delay. Killed right after it has started a job, it shows
    the job as pending again while the batch script runs, and starts it once more: on another node,
    or on this one, which refuses a second copy and is drained ("Duplicate jobid").
    """
    if not isinstance(allocation, SlurmAllocation) or not allocation.requeues:
        return None
    job_id = allocation.job_id
    try:
        job = retry_unreachable(lambda: allocation.client.batch_job(job_id))
    except SlurmError as error:
        log.warning("the state of job %s is unknown: %s", job_id, error)
        return None
    if job.restarts > allocation.restart_count:  # known, and requeued since
        return None
    if job.state == "PENDING":
        return f"slurmctld shows job {job_id} as pending: it has lost this start of the job"
    if job.state == "RUNNING" and job.host != allocation.nodes[0]:
        return f"slurmctld has lost this start of job {job_id} and started it on {job.host}"
    return None


def not_recorded(run: RunDir, allocation: Allocation) -> str | None:
    """Return why this job is not in its run's last submission; None if it is.

    `submit` or `resume` was killed after sbatch and before it recorded the job. No command knows
    such a job: it could not be cancelled, and would supersede the job of a later `resume`.
    """
    deadline = time.monotonic() + RECORDED_S
    while allocation.job_id is not None:
        last = JobsRecord.of(run).last
        if last is None or allocation.job_id in (*last.own_jobs, last.allocation):
            break
        if time.monotonic() > deadline:
            return (
                f"job {allocation.job_id} is not of the last submission in {run.jobs}: a later "
                "command submitted another, or its own was killed before it recorded it; "
                f"`slurmllm resume {run.name}` submits one"
            )
        time.sleep(0.5)
    return None
