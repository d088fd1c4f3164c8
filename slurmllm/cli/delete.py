"""`slurmllm delete`: the directories of runs and sweeps."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from slurmllm.cli import options

if TYPE_CHECKING:
    from pathlib import Path


@click.command()
@click.argument(
    "runs", nargs=-1, required=True, metavar="RUN...", shell_complete=options.complete_run
)
@click.option("--checkpoints", is_flag=True, help="Delete the checkpoints too.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@options.runs_dir
@options.as_json
def delete(
    runs: tuple[str, ...], checkpoints: bool, yes: bool, runs_dir: Path, as_json: bool
) -> None:
    """Delete the directory of each RUN, or of a sweep, but for its checkpoints.

    Shows what goes and how many bytes that frees, and asks. Nothing is deleted if one of the names
    is no run, or the run is pending or running. Replicas of checkpoints, what trackers have, and
    caches on the nodes' own disks stay.
    """
    from slurmllm.errors import RunError, UserError
    from slurmllm.format import format_bytes, format_plural
    from slurmllm.run.rundir import RunDir
    from slurmllm.slurm.client import SlurmClient
    from slurmllm.submit.deletion import delete_planned, find_deletable, plan_deletion
    from slurmllm.supervise.run_lock import locked

    client = SlurmClient()
    targets = dict.fromkeys(find_deletable(run, runs_dir) for run in runs)
    plans = [plan_deletion(target, checkpoints, client) for target in targets]
    for plan in [] if as_json else plans:
        count = format_plural(plan.checkpoints, "checkpoint")
        what = f"including {count}"
        count = count if plan.checkpoints else "the trainer's outputs"
        if plan.keeps_checkpoints:
            size = format_bytes(plan.checkpoint_bytes)
            what = f"not {count} ({size}), for which add --checkpoints"
        click.echo(f"{plan.target.path}: deletes {format_bytes(plan.bytes)}, {what}")
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
