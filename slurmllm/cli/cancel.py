"""`slurmllm cancel` and `delete`: the jobs of runs and sweeps, and their directories."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from slurmllm.cli import options
from slurmllm.core.errors import RunError, SlurmllmError, UserError
from slurmllm.core.format import Texts, format_bytes, format_plural
from slurmllm.core.run.rundir import RunDir, SweepDir, find_run_or_sweep

if TYPE_CHECKING:
    from slurmllm.launch.submit.deletion import CancelledJob, CancelledRun

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
    from slurmllm.launch.submit.deletion import cancel_jobs

    client = SlurmClient()
    failure = None
    for target in [find_run_or_sweep(run, runs_dir) for run in dict.fromkeys(runs)]:
        try:
            _print_cancelled(target, cancel_jobs(target, client, _print_process))
        except SlurmllmError as error:
            if failure is not None:
                options.note(f"error: {failure}")
            failure = error
    if failure is not None:
        raise failure


def _print_process(process: CancelledJob) -> None:
    if process.action == "asked before":
        click.echo(
            f"process {process.pid} was already asked to save and exit, and is still running; "
            f"`kill {process.pid}` ends it at once, without a checkpoint"
        )
    else:
        click.echo(f"asked process {process.pid} to {process.action}")
        click.echo(f"`slurmllm resume {process.run}` continues from the newest checkpoint")


def _print_cancelled(target: RunDir | SweepDir, cancelled: CancelledRun) -> None:
    jobs = [job.job for job in cancelled.jobs if job.job is not None]
    if jobs:
        click.echo(f"cancelled {format_plural(len(jobs), 'job')}: {', '.join(jobs)}")
        if isinstance(target, RunDir):
            click.echo(f"`slurmllm resume {cancelled.name}` continues from the newest checkpoint")
    elif not cancelled.jobs:
        click.echo(f"{cancelled.name} has no pending or running jobs; nothing to cancel")


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
    plans = [
        plan_deletion(target, checkpoints, client)
        for path, target in named.items()
        if named.keys().isdisjoint(path.parents)  # a run goes with its sweep
    ]
    for plan in [] if as_json else plans:
        count = format_plural(plan.checkpoints, "checkpoint")
        description = f"including {count}"
        if plan.keeps_checkpoints:
            outputs = count if plan.checkpoints else "the trainer's outputs"
            size = format_bytes(plan.checkpoint_bytes)
            description = f"not {outputs} ({size}), for which add --checkpoints"
        click.echo(f"{plan.target.path}: deletes {format_bytes(plan.bytes)}, {description}")
    names = ", ".join(plan.target.name for plan in plans)
    total = f"{names}: {format_bytes(sum(plan.bytes for plan in plans))}"
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
