"""`slurmllm cancel RUN`: end a run's jobs."""

from __future__ import annotations

import click

from slurmllm.cli import options


@click.command()
@click.argument("run")
@options.runs_dir
def cancel(run: str, runs_dir: str | None) -> None:
    """Cancel RUN's jobs; the workers save before they leave, as far as Slurm gives them time."""
    import signal

    from slurmllm.rundir import find_run, runs_root
    from slurmllm.slurm.client import SlurmCommands
    from slurmllm.status.runs import is_active
    from slurmllm.submit.prepare import jobs_of, note_cancelled

    found = find_run(run, runs_root(runs_dir))
    client = SlurmCommands()
    submissions = jobs_of(found).submissions
    if not submissions or not is_active(found, client):
        click.echo(f"{found.name} has no jobs that wait or run; nothing to cancel")
        return
    sent = submissions[-1]
    if sent.local and sent.pid is not None:
        _signal(sent.pid, 0)
        if sent.cancelled_at is not None:  # a second signal would end it before it has saved
            click.echo(
                f"process {sent.pid} was asked to save and leave before, and has not ended yet; "
                f"`kill {sent.pid}` ends it at once, and what is not saved is lost"
            )
            return
        note_cancelled(found)  # before the process ends: it looks why
        _signal(sent.pid, signal.SIGTERM)
        click.echo(f"asked process {sent.pid} to save and leave")
    else:
        ids = [job for job in (sent.train_job, sent.precompile_job) if job is not None]
        client.cancel(ids)
        note_cancelled(found)
        click.echo(f"cancelled {', '.join(ids)}")
    click.echo(f"`slurmllm resume {found.name}` continues from the newest checkpoint")


def _signal(pid: int, number: int) -> None:
    """Send a signal to a local run's process (0: see whether it may be sent one).

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
            f"process {pid} is another user's; who started a local run is who can cancel it"
        ) from error
