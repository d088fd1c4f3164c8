"""`slurmllm delete`: the directories of runs and sweeps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from slurmllm.cli import options

if TYPE_CHECKING:
    from pathlib import Path

    from slurmllm.submit.deletion import Deletion


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
    from slurmllm.run.rundir import RunDir
    from slurmllm.slurm.client import SlurmClient
    from slurmllm.submit import deletion as deleting
    from slurmllm.supervise.run_lock import locked

    client = SlurmClient()
    targets = [deleting.find_deletable(run, runs_dir) for run in runs]
    plans = [deleting.plan_deletion(t, checkpoints, client) for t in dict.fromkeys(targets)]
    if not as_json:
        for plan in plans:
            click.echo(_line(plan))
    _confirm(plans, yes)
    for plan in plans:
        with locked(RunDir(plan.target.path), "delete"):
            # Again, under the lock: a `resume` may have come between.
            deleting.delete(deleting.plan_deletion(plan.target, checkpoints, client))
    if as_json:
        options.echo_json({"deleted": [_json(plan) for plan in plans]})
    else:
        click.echo(f"deleted {_total(plans)}")


def _line(plan: Deletion) -> str:
    from slurmllm.format import format_bytes, format_plural

    checkpoints = format_plural(plan.num_checkpoints, "checkpoint")
    text = f"{plan.target.path}: {format_bytes(plan.num_bytes)}"
    if plan.keeps_checkpoints:
        size = format_bytes(plan.checkpoint_bytes)
        return f"{text}, without {checkpoints} ({size}), which --checkpoints deletes too"
    return f"{text}, with {checkpoints}"


def _total(plans: list[Deletion]) -> str:
    from slurmllm.format import format_bytes

    names = ", ".join(plan.target.name for plan in plans)
    return f"{names}: {format_bytes(sum(plan.num_bytes for plan in plans))}"


def _confirm(plans: list[Deletion], yes: bool) -> None:
    import sys

    from slurmllm.errors import UserError

    if yes:
        return
    if not sys.stdin.isatty():
        raise UserError(f"nothing was deleted: --yes deletes {_total(plans)}")
    click.confirm(f"delete {_total(plans)}?", abort=True, err=True)


def _json(plan: Deletion) -> dict[str, Any]:
    return {
        "run": plan.target.name,
        "run_dir": str(plan.target.path),
        "bytes": plan.num_bytes,
        "checkpoints": plan.num_checkpoints,
        "checkpoint_bytes": plan.checkpoint_bytes,
        "checkpoints_deleted": not plan.keeps_checkpoints,
    }
