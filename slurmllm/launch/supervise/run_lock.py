"""The lock of a run: one command at a time changes it; a job checks that no other runs its stage.

Commands hold `lock.json` while they submit or cancel jobs and record that, never while a run
trains. It is made by O_EXCL, which NFS and Lustre have without flock, and renewed by its time of
change. The next command removes a lock that was left behind: of this machine if its process has
ended, of another one if it has not been renewed for two minutes.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from slurmllm.core.errors import RunError, SlurmError
from slurmllm.core.run.records import (
    AttemptRecord,
    Heartbeat,
    LockRecord,
    last_submission,
)
from slurmllm.core.run.rundir import RunDir, Stage, storage_errors
from slurmllm.core.run.safe_files import open_regular, user_name
from slurmllm.core.slurm.client import (
    ADOPTION_S,
    COMMAND_TIMEOUT_S,
    retry_unreachable,
    wait_for,
)
from slurmllm.launch.supervise.allocation import Allocation, SlurmAllocation, is_requeued
from slurmllm.launch.supervise.attempts import (
    another_runs,
    load_attempts,
    process_identity,
    this_process,
)
from slurmllm.launch.supervise.watchdog import HEARTBEAT_S

WAIT_S = 10.0  # for another command to end, before this one is refused
RENEW_S = 3.0
EXPIRES_S = 120.0  # a lock of another machine that was not renewed for so long
_POLL_S = 0.1
_MAX_BYTES = 4096


@contextmanager
def locked(run: RunDir, verb: str, wait_s: float | None = None) -> Iterator[None]:
    """Hold the lock of a run; SIGTERM and SIGHUP without a handler then act as Ctrl-C does.

    `wait_s` (None: WAIT_S) is for another command to end. Raises a RunError if that holds the lock
    for longer, a StorageError if it cannot be made.
    """
    descriptor = _acquire(run, verb, WAIT_S if wait_s is None else wait_s)
    released = threading.Event()

    def renew() -> None:
        while not released.wait(RENEW_S):
            with suppress(OSError):
                os.utime(descriptor)

    thread = threading.Thread(target=renew, daemon=True)
    thread.start()
    previous = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:
                previous[number] = signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        released.set()
        thread.join()
        with suppress(OSError):
            # Not the lock of another command that has found this one expired.
            unchanged = os.path.samestat(os.fstat(descriptor), run.lock.lstat())
            os.close(descriptor)
            if unchanged:
                run.lock.unlink()


class _Holder(NamedTuple):
    """A lock file and who made it."""

    identity: tuple[int, int, int]  # device, inode, time of change, ns
    changed_at: float  # Unix time, s
    user: str
    record: LockRecord | None  # None if it cannot be read, or is being written


def _acquire(run: RunDir, verb: str, wait_s: float) -> int:
    record = LockRecord(verb=verb, since=time.time(), **this_process())
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    began = seen_at = time.monotonic()
    seen = None
    while True:
        fix = f"`slurmllm {verb}` must be able to write to the run's directory"
        with storage_errors(f"cannot write {run.lock}", fix), suppress(FileExistsError):
            descriptor = os.open(run.lock, flags, 0o644)
            try:
                os.write(descriptor, record.model_dump_json().encode())
                os.fsync(descriptor)
            except BaseException:
                os.close(descriptor)
                run.lock.unlink()
                raise
            return descriptor
        holder = _read(run.lock)
        now = time.monotonic()
        if holder is None:
            continue  # released meanwhile
        if holder.identity != seen:
            seen = holder.identity
            seen_at = now
        if _is_left_behind(holder, unchanged_s=now - seen_at):
            _remove(run.lock, holder)
        elif now - began > wait_s:
            raise RunError(_refusal(run, verb, holder))
        time.sleep(_POLL_S)


def _read(path: Path) -> _Holder | None:
    """Return the lock file's holder; None if there is none."""
    record = None
    try:
        # Opened, because NFS asks the server for the times of a file only then.
        with open_regular(path, follow=False) as stream:
            info = os.fstat(stream.fileno())
            with suppress(ValueError):
                record = LockRecord.model_validate_json(stream.read(_MAX_BYTES))
    except OSError:
        try:
            info = path.lstat()
        except FileNotFoundError:
            return None
    return _Holder(
        (info.st_dev, info.st_ino, info.st_mtime_ns), info.st_mtime, user_name(info.st_uid), record
    )


def _is_left_behind(holder: _Holder, unchanged_s: float) -> bool:
    record = holder.record
    if record is not None and record.host == socket.gethostname():
        if process_identity(record.pid) == record.process:
            return False
        with suppress(PermissionError):  # a process that /proc hides from other users
            with suppress(ProcessLookupError):
                os.kill(record.pid, 0)
            return True
    # The clocks of two machines differ: it must also stay unchanged while this process looks.
    return abs(time.time() - holder.changed_at) > EXPIRES_S and unchanged_s > 2 * RENEW_S


def _remove(path: Path, holder: _Holder) -> None:
    """Remove a lock that was left behind, unless another command has done so and made its own."""
    guard = path.with_name(f"{path.name}.removing")
    with storage_errors(
        f"cannot remove {path}, a lock of {holder.user} that was left behind",
        f"ask {holder.user} to remove it",
    ):
        try:
            guard.touch(exist_ok=False)
        except FileExistsError:  # of a command that removes it now, or was killed meanwhile
            with suppress(FileNotFoundError):
                if abs(time.time() - guard.lstat().st_mtime) > EXPIRES_S:
                    guard.unlink()
            return
        try:
            newest = _read(path)
            if newest is not None and newest.identity == holder.identity:
                path.unlink()
        finally:
            guard.unlink(missing_ok=True)


def _refusal(run: RunDir, verb: str, holder: _Holder) -> str:
    record = holder.record
    fix = f"repeat `slurmllm {verb} {run.name}` when that has ended"
    if record is None:
        return (
            f"{run.name} is locked: {run.lock} of {holder.user} holds no record of a command; it "
            f"expires {EXPIRES_S:.0f} s after its last change, or remove it: `rm {run.lock}`"
        )
    if record.host != socket.gethostname():
        fix += (
            f"; if that process is gone, its lock expires {EXPIRES_S:.0f} s after its last renewal"
        )
    return (
        f"{run.name} is being changed: `slurmllm {record.verb}` of {holder.user}, process "
        f"{record.pid} on {record.host}, since {max(time.time() - record.since, 0):.0f} s; {fix}"
    )


# For sbatch to return, or its job to be looked for, and the job to be recorded.
RECORDED_S = COMMAND_TIMEOUT_S + ADOPTION_S + 10.0

log = logging.getLogger(__name__)


def still_runs(run: RunDir, record: AttemptRecord, allocation: Allocation) -> str | None:
    """Return why the supervisor of an unfinished attempt may still run; None if it does not.

    Slurm can requeue a job while its previous incarnation still runs on a node that lost contact
    with slurmctld. If that incarnation ran on this node, its process is looked up; on another node,
    its heartbeats are watched. For another job Slurm is queried; while it does not respond, the
    attempt counts as running.
    """
    job_id = record.job_id
    here = record.host == socket.gethostname()
    if here and another_runs(record, b"supervise"):
        return f"process {record.pid} on {record.host} is its supervisor"
    if job_id is None:
        return None
    if not isinstance(allocation, SlurmAllocation):
        return f"it belongs to job {job_id}, and there is no Slurm here"
    if job_id == allocation.job_id:
        beats = not here and _has_heartbeat(run, record)
        return f"{record.nodes[0]} still writes heartbeats" if beats else None
    try:
        job = allocation.client.queue([job_id]).get(job_id)
    except SlurmError as error:
        return f"the state of job {job_id} is unknown: {error}"
    if job is not None and job.has_nodes:
        return f"job {job_id} is {job.state}"
    return None


def other_supervisor(run: RunDir, stage: Stage, allocation: Allocation) -> str | None:
    """Return which process of this node supervises this start of the job already; None if none.

    A second one must leave: if it superseded the first, Slurm would end the job with the first.
    """
    this_start = allocation.job_id, allocation.restart_count, socket.gethostname()
    for record in load_attempts(run, stage):
        same = (record.job_id, record.restart_count, record.host) == this_start
        is_open = record.ended_at is None and record.job_id is not None
        if same and is_open and another_runs(record, b"supervise"):
            return (
                f"attempt {record.attempt} of job {record.job_id} is supervised by {record.pid}; "
                "this supervisor leaves"
            )
    return None


def _has_heartbeat(run: RunDir, record: AttemptRecord) -> bool:
    """Return whether the supervisor's node writes heartbeats; wait for the next if it is due."""
    path = record.files(run).heartbeat(record.nodes[0])
    if (first := Heartbeat.find_readable(path)) is None:
        return False
    # 2 s: until a shared file system shows what another node has written.
    patience_s = HEARTBEAT_S + 2.0 - max(time.time() - first.written_at, 0.0)
    # None: being written.
    return wait_for(lambda: Heartbeat.find_readable(path) not in (first, None), patience_s, 0.5)


def was_restarted(allocation: SlurmAllocation) -> bool:
    """Whether the job runs as a later incarnation: Slurm had lost contact with this one."""
    job = retry_unreachable(lambda: allocation.client.batch_job(allocation.job_id))
    return job.state == "RUNNING" and (
        job.restarts > allocation.restart_count or job.host != allocation.nodes[0]
    )


def lost_start(allocation: Allocation) -> str | None:
    """Return why slurmctld does not know of this start of its job; None if it does.

    It saves its state with some seconds of delay. Killed right after it has started a job, it shows
    the job as pending again while the batch script runs, and starts it once more: on another node,
    or on this one, which refuses a second copy and is drained ("Duplicate jobid").
    """
    if not is_requeued(allocation):
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

    def is_recorded() -> bool:
        last = last_submission(run)
        return last is None or allocation.job_id in (*last.own_jobs, last.allocation)

    if allocation.job_id is None or wait_for(is_recorded, RECORDED_S, 0.5):
        return None
    return (
        f"job {allocation.job_id} is not of the last submission in {run.jobs}: a later command "
        "submitted another, or its own was killed before it recorded it; "
        f"`slurmllm resume {run.name}` submits one"
    )
