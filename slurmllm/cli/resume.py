"""`slurmllm resume RUN`: submit a run again, from its newest checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from slurmllm.cli import options

if TYPE_CHECKING:
    from slurmllm.config.resolve import RunConfig
    from slurmllm.submit.prepare import Precompile


@click.command()
@click.argument("run")
@click.option("--nodes", type=int, help="Number of nodes.  [default: as before]")
@click.option("--cluster", help="Cluster profile: a name or a YAML file.  [default: as before]")
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="PATH=VALUE",
    help="Change a value, such as parallel.tensor=8; may be repeated. Model, data, seed and global "
    "batch belong to the checkpoints and cannot change.",
)
@click.option("--local", is_flag=True, help="Continue on this machine, without Slurm.")
@click.option(
    "--force", is_flag=True, help="Submit even if the planner predicts that it does not fit."
)
@options.precompile
@options.runs_dir
@options.as_json
@click.pass_context
def resume(
    ctx: click.Context,
    run: str,
    nodes: int | None,
    cluster: str | None,
    overrides: tuple[str, ...],
    local: bool,
    force: bool,
    precompile: Precompile,
    runs_dir: str | None,
    as_json: bool,
) -> None:
    """Continue RUN after it was cancelled or stopped: same directory, next attempt.

    Nodes, cluster (and so the backend) and mesh may change: every checkpoint can be read by all of
    them. --set parallel=auto lets the planner choose a new mesh.

    The precompile stage runs again if graphs are missing or would differ. A run that was started
    with --local continues locally.
    """
    from slurmllm.cli.submit import print_submission, print_warnings, run_and_report
    from slurmllm.config.load import load
    from slurmllm.config.resolve import change
    from slurmllm.errors import RunError
    from slurmllm.rundir import find_run, runs_root
    from slurmllm.slurm.client import SlurmCommands
    from slurmllm.status.runs import is_active, run_state
    from slurmllm.submit.launch import read_jobs, submit_jobs
    from slurmllm.submit.prepare import RunRequest, prepare
    from slurmllm.supervise.exclusion import to_avoid

    root = runs_root(runs_dir)
    found = find_run(run, root)
    client = SlurmCommands()
    submissions = read_jobs(found).submissions
    last = submissions[-1] if submissions else None
    if last is not None and is_active(found, client):
        raise RunError(
            f"{found.name} is pending or running; follow it with `slurmllm status {found.name}` or "
            f"`slurmllm cancel {found.name}` first"
        )
    config = before = load(found.config)
    if cluster is not None or overrides:
        config = change(config, cluster, overrides)
    trained, train = before.recipe.train, config.recipe.train
    if run_state(found, client).state == "done" and train.steps <= trained.steps:
        raise RunError(
            f"{found.name} is done: it has trained all its {trained.steps} steps; --set "
            "train.steps=… with more of them continues it"
        )
    wanted = nodes if nodes is not None else last.nodes if last else 1
    here = local or (last is not None and last.local)
    excluded = [] if here else to_avoid(client, found, config, wanted)
    prepared = prepare(
        RunRequest(
            config=config,
            nodes=wanted,
            root=root,
            run=found,
            local=here,
            precompile=precompile,
            force=force,
            # A layout that has trained before has shown that it fits.
            check_layout=last is None or wanted != last.nodes or _layout(config) != _layout(before),
            check_weights=train.init_from != trained.init_from,
            exclude=excluded,
        )
    )
    print_warnings(prepared)
    if excluded:
        click.echo(f"excluded: {' '.join(excluded)}, which failed the run; see status", err=True)
    if here:
        ctx.exit(run_and_report(prepared, as_json))
    print_submission(prepared, submit_jobs(prepared, client), as_json)


def _layout(config: RunConfig) -> tuple[Any, ...]:
    """The settings that a run's memory and speed depend on and that a resume may change."""
    train = config.recipe.train
    return (
        config.cluster, config.backend, config.recipe.parallel, train.micro_batch,
        train.activation_checkpointing, train.precision,
    )  # fmt: skip
