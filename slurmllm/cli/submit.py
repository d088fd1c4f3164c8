"""`slurmllm submit RECIPE --nodes N`: write the run directory, submit precompile, then train."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from slurmllm.cli import options

if TYPE_CHECKING:
    from slurmllm.records import Submission
    from slurmllm.rundir import Stage
    from slurmllm.submit.prepare import Precompile, Prepared


@click.command()
@click.argument("recipe")
@click.option("--nodes", type=int, default=1, show_default=True, help="Nodes of the train job.")
@click.option("--name", help="The run's name.  [default: RECIPE-001, -002, …]")
@options.set_value
@options.cluster
@click.option("--partition", help="Slurm partition.")
@click.option("--account", help="Slurm account.")
@click.option("--qos", help="Slurm quality of service.")
@click.option("--time", help="Time limit of the train job: minutes, H:MM:SS or D-HH:MM:SS.")
@click.option("--reservation", help="Slurm reservation.")
@click.option("--exclude", help="Nodes to keep away from, as n3 or n[1-4].")
@options.precompile
@options.runs_dir
@click.option("--dry-run", is_flag=True, help="Print scripts and environment; submit nothing.")
@click.option("--local", is_flag=True, help="Run both stages on this machine, without Slurm.")
@click.option("--force", is_flag=True, help="Submit what the planner predicts not to fit.")
@options.as_json
@click.pass_context
def submit(
    ctx: click.Context,
    recipe: str,
    nodes: int,
    name: str | None,
    overrides: tuple[str, ...],
    cluster: str | None,
    precompile: Precompile,
    runs_dir: str | None,
    dry_run: bool,
    local: bool,
    force: bool,
    as_json: bool,
    partition: str | None,
    account: str | None,
    qos: str | None,
    time: str | None,
    reservation: str | None,
    exclude: str | None,
) -> None:
    """Train RECIPE on N nodes: submit a precompile job, then a train job that waits for it.

    RECIPE is a name from `slurmllm recipes` or a .yaml file. With --local, each of the N nodes
    is a launcher on this machine; Ctrl-C saves and leaves.
    """
    from dataclasses import replace

    from slurmllm.config.resolve import resolve
    from slurmllm.errors import SlurmllmError
    from slurmllm.rundir import runs_root
    from slurmllm.submit import prepare

    given = {
        "slurm.partition": ("--partition", partition),
        "slurm.account": ("--account", account),
        "slurm.qos": ("--qos", qos),
        "slurm.time": ("--time", time),
        "slurm.reservation": ("--reservation", reservation),
        "slurm.exclude": ("--exclude", exclude),
    }
    config = resolve(recipe, cluster, overrides, given)
    root = runs_root(runs_dir)
    run = prepare.new_run(root, name, config.recipe.name)
    chosen = config.recipe.parallel.auto
    config = prepare.settled(config, nodes)
    prepared = prepare.prepare(config, nodes, run)
    if not dry_run:
        prepare.check_trainable(config)
    prepared = prepare.with_outlook(prepared, chosen, force)
    if not dry_run:
        prepare.check_fits(prepared)
    outlook = prepared.outlook
    config = prepare.with_weights(config)
    config = prepare.with_inputs(config, root, build=not dry_run)
    if dry_run:
        _print_plan(prepared, as_json)
        return
    run = prepare.claim_run(root, name, config.recipe.name)
    sent = None
    try:
        graphs_from = prepare.take_graphs(config, nodes, local, run, precompile)
        stages = prepare.stages(graphs_from)
        prepared = replace(prepare.prepare(config, nodes, run), outlook=outlook)
        prepare.write_run(prepared)
        if not local:
            sent = prepare.submit_jobs(prepared, stages)
    except SlurmllmError:
        prepare.forget(run)
        raise
    if sent is None:
        ctx.exit(run_and_report(prepared, stages, as_json, graphs_from))
    print_submission(prepared, sent, as_json, graphs_from)


def _print_plan(prepared: Prepared, as_json: bool) -> None:
    """Print what a run would be: scripts, the workers' environment, the library's arguments."""
    import json

    from slurmllm.backends.environment import load_environment, worker_environment
    from slurmllm.submit.prepare import refusals

    run, config, mesh = prepared.run, prepared.config, prepared.mesh
    variables = worker_environment(config, run)
    arguments = load_environment(config.backend).arguments(config, mesh)
    planned = prepared.outlook
    reasons = [*refusals(config), *(planned.refusals if planned else ())]
    for reason in reasons:
        click.echo(f"warning: submit would refuse this: {reason}", err=True)
    if as_json:
        shown = {
            "run_dir": str(run.path),
            "config": config.values(),
            "mesh": mesh.to_json(),
            "scripts": {str(stage): text for stage, text in prepared.scripts.items()},
            "environment": [
                {"name": name, "value": variable.value, "source": variable.source}
                for name, variable in variables.items()
            ],
            "backend_arguments": arguments,
            "planner": _planner(prepared),
            "refusals": reasons,
        }
        click.echo(json.dumps(shown))
        return
    import yaml

    from slurmllm.tables import print_table

    if planned is not None and planned.chosen:
        click.echo(f"# ── the planner's choice\n{planned.line()}\n")
    for stage, text in prepared.scripts.items():
        click.echo(f"# ── {run.script(stage)}")
        click.echo(text)
    click.echo("# ── the workers' environment")
    rows = ((name, var.value or "''", var.source) for name, var in variables.items())
    print_table(("variable", "value", "source"), rows, fold="value")
    if arguments:
        click.echo(f"\n# ── arguments of backend {config.backend}")
        click.echo(yaml.safe_dump(arguments, sort_keys=False), nl=False)
    click.echo("dry run: nothing was written, nothing submitted", err=True)


def print_submission(
    prepared: Prepared, sent: Submission, as_json: bool, graphs_from: str | None
) -> None:
    """Print job ids, directory, mesh and the next commands."""
    import json

    run, mesh = prepared.run, prepared.mesh
    if as_json:
        jobs = {"precompile": sent.precompile_job, "train": sent.train_job}
        text = {"run": run.name, "run_dir": str(run.path), "jobs": jobs, "mesh": mesh.to_json()}
        planned = {"graphs_from": graphs_from, "planner": _planner(prepared)}
        click.echo(json.dumps({**text, **planned}))
        return
    first = f"precompile job {sent.precompile_job}, then " if sent.precompile_job else ""
    click.echo(f"run        {run.name}")
    click.echo(f"directory  {run.path}")
    click.echo(f"jobs       {first}train job {sent.train_job}")
    _print_graphs(graphs_from, run.name)
    batch = f"{mesh.accumulation} × micro batch {mesh.micro_batch} a step"
    if mesh.unmeasured:
        batch = "micro batch auto: measured by the precompile stage"
    click.echo(
        f"mesh       {mesh.nodes} node(s) × {mesh.devices_per_node}: tensor {mesh.tensor}, "
        f"pipeline {mesh.pipeline}, data {mesh.data}; {batch}"
    )
    _print_choice(prepared)
    click.echo("next       " + f"slurmllm status {run.name}")
    for verb in ("logs -f", "cancel"):
        click.echo(f"           slurmllm {verb} {run.name}")


def _planner(prepared: Prepared) -> dict[str, Any] | None:
    """What the planner predicts, for JSON; None where it cannot."""
    return None if prepared.outlook is None else prepared.outlook.to_json()


def _print_choice(prepared: Prepared) -> None:
    if prepared.outlook is not None and prepared.outlook.chosen:
        click.echo(f"planner    {prepared.outlook.line()}")


def _print_graphs(graphs_from: str | None, run: str) -> None:
    if graphs_from is not None:
        owner = "this run" if graphs_from == run else f"run {graphs_from}"
        click.echo(f"graphs     compiled by {owner} already; no precompile stage")


def run_and_report(
    prepared: Prepared, stages: Sequence[Stage], as_json: bool, graphs_from: str | None
) -> int:
    """Run the stages on this machine; returns the exit code."""
    from slurmllm.submit import prepare
    from slurmllm.submit.local import run_locally

    prepare.local_submission(prepared)
    run = prepared.run
    if not as_json:
        click.echo(f"run        {run.name}\ndirectory  {run.path}")
        _print_choice(prepared)
        _print_graphs(graphs_from, run.name)
    code = run_locally(run, stages, prepared.mesh.nodes, quiet=as_json)
    _print_local_end(prepared, code, as_json, graphs_from)
    return code


def _print_local_end(prepared: Prepared, code: int, as_json: bool, graphs_from: str | None) -> None:
    import json

    from slurmllm.errors import EXIT_INTERRUPTED, EXIT_REQUEUE

    name, path = prepared.run.name, str(prepared.run.path)
    if as_json:
        ended = {"run": name, "run_dir": path, "exit_code": code, "graphs_from": graphs_from}
        click.echo(json.dumps({**ended, "planner": _planner(prepared)}))
    elif code == 0:
        click.echo(f"done       slurmllm status {name}; curves in {path}/metrics, /tensorboard")
    elif code in (EXIT_INTERRUPTED, EXIT_REQUEUE):
        kept = "saved; " if prepared.run.checkpoint_steps() else ""
        click.echo(f"stopped    {kept}slurmllm resume {name} continues", err=True)
    else:
        words = f"see the reason above, mend it, then slurmllm resume {name}"
        click.echo(f"stopped    exit code {code}; {words}", err=True)
