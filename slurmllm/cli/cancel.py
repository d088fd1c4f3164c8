"""`slurmllm cancel RUN`: end a run's jobs."""

from __future__ import annotations

import click

from slurmllm.cli import options


@click.command()
@click.argument("run")
@options.runs_dir
def cancel(run: str, runs_dir: str | None) -> None:
    """Cancel RUN's jobs; the workers save before they leave, as far as Slurm gives them time."""
    import os
    import signal

    from slurmllm.cli.submission import jobs_of
    from slurmllm.rundir import find_run, runs_root
    from slurmllm.slurm.client import SlurmCommands
    from slurmllm.supervise.state import is_active

    found = find_run(run, runs_root(runs_dir))
    client = SlurmCommands()
    submissions = jobs_of(found).submissions
    if not submissions or not is_active(found, client):
        click.echo(f"{found.name} has no jobs that wait or run; nothing to cancel")
        return
    sent = submissions[-1]
    if sent.local and sent.pid is not None:
        os.kill(sent.pid, signal.SIGTERM)
        click.echo(f"asked process {sent.pid} to save and leave")
    else:
        ids = [job for job in (sent.train_job, sent.precompile_job) if job is not None]
        client.cancel(ids)
        click.echo(f"cancelled {', '.join(ids)}")
    click.echo(f"`slurmllm resume {found.name}` continues from the newest checkpoint")
