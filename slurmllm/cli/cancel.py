"""`slurmllm cancel` and `delete`: the jobs of runs and sweeps, and their directories."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from slurmllm.cli import options
from slurmllm.core.errors import RunError, SlurmllmError, StorageError, UserError
from slurmllm.core.format import Texts, format_bytes, format_plural
from slurmllm.core.run.rundir import RunDir, SweepDir, find_run_or_sweep
from slurmllm.core.run.safe_files import untrusted_error

if TYPE_CHECKING:
    from slurmllm.core.run.records import Submission
    from slurmllm.core.slurm.client import SlurmClient

_runs = options.run_argument("runs", nargs=-1, required=True, metavar="RUN...")


@click.command()
@_runs
@options.runs_dir
def cancel(runs: Texts, runs_dir: Path) -> None:
    """Cancel the jobs of each RUN, or of a sweep.

    The workers save a checkpoint before they exit, if Slurm gives them the time. Nothing is
    cancelled if a name is wrong; if one run cannot be cancelled, the others still are.
    """
    from slurmllm.core.slurm.client import SlurmClient
    from slurmllm.launch.supervise.run_lock import locked

    client, errors = SlurmClient(), list[SlurmllmError]()
    targets = [find_run_or_sweep(run, runs_dir) for run in dict.fromkeys(runs)]
    for target in targets:
        try:
            with ExitStack() as locks:
                try:
                    locks.enter_context(locked(RunDir(target.path), "cancel"))
                except StorageError as error:  # a full disk must not keep its jobs
                    options.warn(f"{error}; cancelling without the lock")
                _cancel(target, client)
        except SlurmllmError as error:
            errors.append(error)
    for earlier in errors[:-1]:
        options.note(f"error: {earlier}")
    if errors:
        raise errors[-1]


def _record(run: RunDir) -> None:
    """Record the cancellation, if the directory takes it: without accounting only that tells."""
    from slurmllm.core.run.records import JobsRecord

    try:
        JobsRecord.change_last(run, cancelled_at=time.time())
    except StorageError as error:
        options.warn(f"the cancellation is not recorded: {error}")


def _require_own_record(run: RunDir) -> None:
    """Raise RunError if others may have written what is to be cancelled."""
    if why := untrusted_error(run.jobs.stat()):
        raise RunError(
            f"{run.jobs}: {why}; it may name any job or process of yours. Whose run it is can "
            "cancel it; an administrator uses `scancel`"
        )


def _cancel(target: RunDir | SweepDir, client: SlurmClient) -> None:
    """Cancel all jobs of a run or a sweep, those that run last: no lane may start another one."""
    from slurmllm.core.run.records import JobsRecord, SweepRecord
    from slurmllm.launch.supervise.run_state import is_active, process_elsewhere

    runs = [target] if isinstance(target, RunDir) else target.graph_runs()
    if isinstance(target, SweepDir):
        cases = SweepRecord.load(target.record).cases
        runs = [*runs, *(target.run(case.run) for case in cases)]
    jobs, is_local = dict[str, RunDir](), False
    for run in runs:
        last = JobsRecord.of(run).last
        if last is None:
            continue
        if process := process_elsewhere(run, client):
            raise RunError(f"{run.name}: {process} may run it; `slurmllm cancel {run.name}` there")
        if not last.local or last.pid is None:
            jobs |= dict.fromkeys(last.own_jobs, run)
        elif is_active(run, client):
            _require_own_record(run)
            is_local = True
            _cancel_process(run, last)
    queue = client.queue(list(jobs)) if jobs else {}
    active = [job for job in reversed(jobs) if job in queue and queue[job].active]
    active.sort(key=lambda job: queue[job].state != "PENDING")
    if not active:
        if not is_local:
            click.echo(f"{target.name} has no pending or running jobs; nothing to cancel")
        return
    for job in active:
        _require_own_record(jobs[job])
    client.cancel(active)
    for run in dict.fromkeys(jobs[job] for job in active):
        _record(run)
    click.echo(f"cancelled {format_plural(len(active), 'job')}: {', '.join(active)}")
    if isinstance(target, RunDir):
        click.echo(f"`slurmllm resume {target.name}` continues from the newest checkpoint")


def _cancel_process(run: RunDir, submission: Submission) -> None:
    """Ask the process of a local run to save and exit, once: a second signal would end it."""
    from slurmllm.train.checkpoint.foreign import command_of

    pid = submission.pid
    assert pid is not None, "recorded with a local run"
    _signal(pid, 0)
    if submission.cancelled_at is not None:
        click.echo(
            f"process {pid} was asked to save and exit before, and is still running; `kill {pid}` "
            "ends it at once, without a checkpoint"
        )
        return
    _record(run)  # before the signal: the process reads the reason when it ends
    _signal(pid, signal.SIGTERM)
    command = command_of(run)
    saves = command is None or command.stop_signal is not None
    click.echo(f"asked process {pid} to {'save and exit' if saves else 'exit'}")
    click.echo(f"`slurmllm resume {run.name}` continues from the newest checkpoint")


def _signal(pid: int, number: int) -> None:
    """Send a signal to a local run's process; 0 only checks the permission."""
    try:
        with suppress(ProcessLookupError):  # it has ended meanwhile
            os.kill(pid, number)
    except PermissionError as error:
        raise UserError(
            f"process {pid} belongs to another user; only who started a local run can cancel it"
        ) from error


@click.command()
@_runs
@options.flag("--checkpoints", "Delete the checkpoints too.")
@options.flag("--yes", "Do not ask.")
@options.runs_dir
@options.as_json
def delete(runs: Texts, checkpoints: bool, yes: bool, runs_dir: Path, as_json: bool) -> None:
    """Delete the folders of runs, but for their checkpoints.

    Shows what goes and how many bytes that frees, and asks. Nothing is deleted if one of the names
    is no run, or the run is pending or running. Replicas of checkpoints, what trackers have, and
    caches on the nodes' own disks stay.
    """
    from slurmllm.core.slurm.client import SlurmClient
    from slurmllm.launch.submit.deletion import delete_planned, find_deletable, plan_deletion
    from slurmllm.launch.supervise.run_lock import locked

    client = SlurmClient()
    deletable = (find_deletable(run, runs_dir) for run in runs)
    named = {target.path.resolve(): target for target in deletable}
    # A run goes with its sweep.
    targets = [target for path, target in named.items() if not named.keys() & {*path.parents}]
    plans = [plan_deletion(target, checkpoints, client) for target in targets]
    for plan in [] if as_json else plans:
        count = format_plural(plan.checkpoints, "checkpoint")
        description = f"including {count}"
        count = count if plan.checkpoints else "the trainer's outputs"
        if plan.keeps_checkpoints:
            size = format_bytes(plan.checkpoint_bytes)
            description = f"not {count} ({size}), for which add --checkpoints"
        click.echo(f"{plan.target.path}: deletes {format_bytes(plan.bytes)}, {description}")
    total = f"{', '.join(plan.target.name for plan in plans)}: "
    total += format_bytes(sum(plan.bytes for plan in plans))
    if not yes and not sys.stdin.isatty():
        raise UserError(f"nothing was deleted: --yes deletes {total}")
    if not yes:
        click.confirm(f"delete {total}?", abort=True, err=True)
    for plan in plans:
        with locked(RunDir(plan.target.path), "delete"):
            # Again, under the lock: a `resume` may have come between.
            latest = plan_deletion(plan.target, checkpoints, client)
            if latest[3:] != plan[3:]:
                raise RunError(f"{plan.target.path} has changed meanwhile; it was not deleted")
            delete_planned(latest)
    if as_json:
        options.echo_json({"deleted": [plan.to_json() for plan in plans]})
    else:
        click.echo(f"deleted {total}")
