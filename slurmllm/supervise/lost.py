"""An attempt whose supervisor is gone: whether another one may close it, and as what."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

from slurmllm.errors import SlurmError
from slurmllm.records import AttemptRecord, NodeRecord
from slurmllm.slurm.client import AccountingRow
from slurmllm.supervise.allocation import Allocation, SlurmAllocation
from slurmllm.supervise.classify import Ending, reported_all


def still_runs(record: AttemptRecord, allocation: Allocation) -> str | None:
    """Why an open attempt may have a supervisor that lives; None where it has none.

    An earlier start of the same job has none: Slurm starts a job again only after it has ended
    it. Of another job, Slurm says so; where it does not answer, the attempt is left alone.
    """
    if record.job_id is None:
        return _process_runs(record)
    if not isinstance(allocation, SlurmAllocation):
        return f"it belongs to job {record.job_id}, and there is no Slurm here"
    if record.job_id == allocation.job_id:
        return None
    try:
        job = allocation.client.queue([record.job_id]).get(record.job_id)
    except SlurmError as error:
        return f"Slurm does not say whether job {record.job_id} runs: {error}"
    if job is not None and job.state in ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED"):
        return f"job {record.job_id} is {job.state}"
    return None


def _process_runs(record: AttemptRecord) -> str | None:
    if record.pid is None or record.host != socket.gethostname() or record.pid == os.getpid():
        return None
    try:
        alive = b"supervise" in Path(f"/proc/{record.pid}/cmdline").read_bytes()
    except OSError:
        return None
    return f"process {record.pid} on {record.host} is its supervisor" if alive else None


def incarnation(record: AttemptRecord, rows: Sequence[AccountingRow]) -> AccountingRow | None:
    """The row of the job's start that an attempt belongs to, of all rows that sacct has."""
    of_job = [row for row in rows if row.job_id == record.job_id]
    return of_job[record.restart_count] if record.restart_count < len(of_job) else None


def ended_at(row: AccountingRow | None) -> float | None:
    """Unix time of an incarnation's end; None where Slurm knows none."""
    try:
        return datetime.fromisoformat(row.end).timestamp() if row is not None else None
    except ValueError:  # "Unknown", "None"
        return None


def ending_of_lost(
    record: AttemptRecord, reported: Mapping[str, NodeRecord], row: AccountingRow | None
) -> Ending:
    """How an attempt ended whose supervisor died with its node, by Slurm's accounting.

    Args:
        record: The attempt, still open.
        reported: What its launchers wrote before the end.
        row: sacct's row of its incarnation of the job, where there is accounting.
    """
    state = row.state if row is not None else "UNKNOWN"
    evidence = (
        f"Slurm: {state}; the supervisor on {record.nodes[0]} ended without a word"
        if record.job_id is not None
        else "the supervisor ended without a word",
    )
    if state == "CANCELLED":
        return Ending("cancelled", evidence)
    if state in ("TIMEOUT", "PREEMPTED"):
        return Ending("advance_signal", evidence)
    silent = tuple(name for name in record.nodes if not reported_all(reported.get(name)))
    # With Slurm's word for it one of the silent nodes is to blame; which one is not known.
    return Ending("node_failure", evidence, silent if len(silent) == 1 else ())
