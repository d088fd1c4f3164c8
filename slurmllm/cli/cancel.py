"""`slurmllm cancel RUN`: end a run's jobs."""

from __future__ import annotations

import click

from slurmllm.cli import options


@click.command()
@click.argument("run")
@options.runs_dir
def cancel(run: str, runs_dir: str | None) -> None:
    """Cancel RUN's jobs; the workers save before they exit, if Slurm gives them the time."""
    import signal

    from slurmllm.rundir import find_run, runs_root
    from slurmllm.slurm.client import SlurmCommands
    from slurmllm.status.runs import is_active
    from slurmllm.submit.launch import read_jobs, record_cancellation

    found = find_run(run, runs_root(runs_dir))
    client = SlurmCommands()
    submissions = read_jobs(found).submissions
    if not submissions or not is_active(found, client):
        click.echo(f"{found.name} has no pending or running jobs; nothing to cancel")
        return
    sent = submissions[-1]
    if sent.local and sent.pid is not None:
        _signal(sent.pid, 0)
        if sent.cancelled_at is not None:  # a second signal would end it before it has saved
            click.echo(
                f"process {sent.pid} was asked to save and exit before, and is still running; "
                f"`kill {sent.pid}` ends it at once, without a checkpoint"
            )
            return
        record_cancellation(found)  # before the signal: the process reads the reason when it ends
        _signal(sent.pid, signal.SIGTERM)
        click.echo(f"asked process {sent.pid} to save and exit")
    else:
        ids = [job for job in (sent.train_job, sent.precompile_job) if job is not None]
        client.cancel(ids)
        record_cancellation(found)
        click.echo(f"cancelled {', '.join(ids)}")
    click.echo(f"`slurmllm resume {found.name}` continues from the newest checkpoint")


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
