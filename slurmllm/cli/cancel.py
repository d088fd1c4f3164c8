"""`slurmllm cancel`: the jobs of runs, or of all runs of a sweep."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import click

from slurmllm.cli import options

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from slurmllm.run.rundir import RunDir, SweepDir
    from slurmllm.slurm.client import SlurmClient


@click.command()
@click.argument(
    "runs", nargs=-1, required=True, metavar="RUN...", shell_complete=options.complete_run
)
@options.runs_dir
def cancel(runs: tuple[str, ...], runs_dir: Path) -> None:
    """Cancel the jobs of each RUN, or of a sweep.

    The workers save a checkpoint before they exit, if Slurm gives them the time. Nothing is
    cancelled if a name is wrong; a run that cannot be cancelled does not keep the others.
    """
    from slurmllm.errors import SlurmllmError
    from slurmllm.run.rundir import RunDir, find_run_or_sweep
    from slurmllm.slurm.client import SlurmClient

    client, errors = SlurmClient(), list[SlurmllmError]()
    targets = [find_run_or_sweep(run, runs_dir) for run in dict.fromkeys(runs)]
    for target in targets:
        try:
            if isinstance(target, RunDir):
                with _locked(target):
                    _cancel_run(target, client)
            else:
                _cancel_sweep(target, client)
        except SlurmllmError as error:
            errors.append(error)
    for earlier in errors[:-1]:
        click.echo(f"error: {earlier}", err=True)
    if errors:
        raise errors[-1]


@contextmanager
def _locked(run: RunDir) -> Iterator[None]:
    """Hold the lock of a run; a full disk, which does not take it, must not keep its jobs."""
    from slurmllm.errors import StorageError
    from slurmllm.supervise.run_lock import locked

    with ExitStack() as locks:
        try:
            locks.enter_context(locked(run, "cancel"))
        except StorageError as error:
            click.echo(f"warning: {error}; cancelling without the lock", err=True)
        yield


def _record(run: RunDir) -> None:
    """Record the cancellation of a run, if its directory takes it."""
    from slurmllm.errors import StorageError
    from slurmllm.submit.launch import record_cancellation

    try:
        record_cancellation(run)
    except StorageError as error:
        click.echo(f"warning: the cancellation is not recorded: {error}", err=True)


def _require_own_record(run: RunDir) -> None:
    """Raise RunError if others may have written what is to be cancelled."""
    from slurmllm.errors import RunError
    from slurmllm.run.safe_files import untrusted_error

    if why := untrusted_error(run.jobs.stat()):
        raise RunError(
            f"{run.jobs}: {why}; it may name any job or process of yours. Whose run it is can "
            "cancel it; an administrator uses `scancel`"
        )


def _cancel_run(run: RunDir, client: SlurmClient) -> None:
    import signal

    from slurmllm.checkpoint.foreign import command_of
    from slurmllm.errors import RunError
    from slurmllm.run.records import JobsRecord
    from slurmllm.status.runs import is_active, process_elsewhere

    submission = JobsRecord.of(run).last
    if submission is not None:
        _require_own_record(run)
    if process := process_elsewhere(run, client):
        raise RunError(f"{run.name}: {process} may run it; `slurmllm cancel {run.name}` there")
    if submission is None or not is_active(run, client):
        click.echo(f"{run.name} has no pending or running jobs; nothing to cancel")
        return
    if submission.local and submission.pid is not None:
        _signal(submission.pid, 0)
        if submission.cancelled_at is not None:  # a second signal would end it before it has saved
            click.echo(
                f"process {submission.pid} was asked to save and exit before, and is still "
                f"running; `kill {submission.pid}` ends it at once, without a checkpoint"
            )
            return
        _record(run)  # before the signal: the process reads the reason when it ends
        _signal(submission.pid, signal.SIGTERM)
        command = command_of(run)
        saves = command is None or command.stop_signal is not None
        click.echo(f"asked process {submission.pid} to {'save and ' * saves}exit")
    else:
        client.cancel(submission.own_jobs)
        _record(run)
        click.echo(f"cancelled {', '.join(submission.own_jobs)}")
    click.echo(f"`slurmllm resume {run.name}` continues from the newest checkpoint")


def _signal(pid: int, number: int) -> None:
    """Send a signal to a local run's process; 0 only checks the permission.

    Raises:
        UserError: the process is another user's.
    """
    import os
    from contextlib import suppress

    from slurmllm.errors import UserError

    try:
        with suppress(ProcessLookupError):  # it has ended meanwhile
            os.kill(pid, number)
    except PermissionError as error:
        raise UserError(
            f"process {pid} belongs to another user; only who started a local run can cancel it"
        ) from error


def _cancel_sweep(sweep: SweepDir, client: SlurmClient) -> None:
    """Cancel all jobs of a sweep, those that run last: no lane may start another one meanwhile."""
    from slurmllm.run.records import JobsRecord, SweepRecord
    from slurmllm.run.rundir import RunDir
    from slurmllm.status.runs import is_active

    with _locked(RunDir(sweep.path)):
        cases = (sweep.run(case.run) for case in SweepRecord.load(sweep.record).cases)
        submissions = {
            run: last for run in (*sweep.graph_runs(), *cases) if (last := JobsRecord.of(run).last)
        }
        for run, last in submissions.items():
            if last.local and is_active(run, client):
                _cancel_run(run, client)
        by_slurm = [(run, last) for run, last in submissions.items() if not last.local]
        jobs = {job: run for run, last in by_slurm for job in last.own_jobs}
        queue = client.queue(list(jobs))
        active = [job for job in reversed(jobs) if job in queue and queue[job].active]
        active.sort(key=lambda job: queue[job].state != "PENDING")
        for job in active:
            _require_own_record(jobs[job])
        if not active:
            click.echo(f"{sweep.name} has no pending or running jobs; nothing to cancel")
            return
        client.cancel(active)
        for run in dict.fromkeys(jobs[job] for job in active):
            _record(run)
        click.echo(f"cancelled {len(active)} jobs: {', '.join(active)}")
