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
@click.option("--nodes", type=int, help="Nodes from now on.  [default: as before]")
@click.option("--cluster", help="Profile from now on: a name or a YAML file.  [default: as before]")
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="PATH=VALUE",
    help="Change a value from now on, such as parallel.tensor=8; may be repeated. Model, data, "
    "seed and global batch are the checkpoints' and stay.",
)
@click.option("--local", is_flag=True, help="Go on on this machine, without Slurm.")
@click.option("--force", is_flag=True, help="Submit what the planner predicts not to fit.")
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

    On other nodes, on another cluster (and so through another backend), on another mesh: the
    checkpoints are read by all of them. --set parallel=auto has the planner choose a mesh anew.

    The precompile stage runs again where the graphs are not all compiled, or would be others by
    now. A run that was started with --local goes on locally.
    """
    from dataclasses import replace

    from slurmllm.cli.submit import print_submission, run_and_report
    from slurmllm.config.load import load
    from slurmllm.config.resolve import change
    from slurmllm.errors import RunError
    from slurmllm.rundir import find_run, runs_root
    from slurmllm.slurm.client import SlurmCommands
    from slurmllm.status.runs import is_active, run_state
    from slurmllm.submit import prepare
    from slurmllm.supervise.exclusion import to_avoid

    root = runs_root(runs_dir)
    found = find_run(run, root)
    client = SlurmCommands()
    submissions = prepare.jobs_of(found).submissions
    before = submissions[-1] if submissions else None
    if before is not None and is_active(found, client):
        raise RunError(
            f"{found.name} still waits or runs; follow it with `slurmllm status {found.name}` or "
            f"`slurmllm cancel {found.name}` first"
        )
    config = held = load(found.config)
    steps, init_from = config.recipe.train.steps, config.recipe.train.init_from
    if cluster is not None or overrides:
        config = change(config, cluster, overrides)
    if run_state(found, client).state == "done" and config.recipe.train.steps <= steps:
        raise RunError(
            f"{found.name} is done: it has trained all its {steps} steps; --set train.steps=… with "
            "more of them goes on"
        )
    wanted = nodes if nodes is not None else before.nodes if before else 1
    chosen = config.recipe.parallel.auto
    config = prepare.settled(config, wanted)
    prepare.check_trainable(config)
    # Nothing is touched where the mesh does not fit.
    prepared = prepare.prepare(config, wanted, found)
    if before is None or wanted != before.nodes or _layout(config) != _layout(held):
        prepared = prepare.with_outlook(prepared, chosen, force)
        prepare.check_fits(prepared)
    outlook = prepared.outlook
    if config.recipe.train.init_from != init_from:
        config = prepare.with_weights(config)
    config = prepare.with_inputs(config, root, build=True)
    here = local or (before is not None and before.local)
    graphs_from = prepare.take_graphs(config, wanted, here, found, precompile)
    stages = prepare.stages(graphs_from)
    avoid = [] if here else to_avoid(client, found, config, wanted)
    if avoid:
        click.echo(f"keeps off {' '.join(avoid)}, which failed the run; see status", err=True)
    prepared = replace(prepare.prepare(config, wanted, found, avoid), outlook=outlook)
    prepare.write_run(prepared)
    if here:
        ctx.exit(run_and_report(prepared, stages, as_json, graphs_from))
    sent = prepare.submit_jobs(prepared, stages, client)
    print_submission(prepared, sent, as_json, graphs_from)


def _layout(config: RunConfig) -> tuple[Any, ...]:
    """What a run's memory and speed follow from, beside its nodes and what checkpoints settle.

    Where that stays, the run has shown already whether it fits.
    """
    train = config.recipe.train
    return (
        config.cluster, config.backend, config.recipe.parallel, train.micro_batch,
        train.activation_checkpointing, train.precision,
    )  # fmt: skip
