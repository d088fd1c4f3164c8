"""`slurmllm submit RECIPE --nodes N`: write the run directory, submit precompile, then train."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from slurmllm.cli import options

if TYPE_CHECKING:
    from slurmllm.records import Submission
    from slurmllm.submit.prepare import Precompile, PreparedRun


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
@click.option("--exclude", help="Nodes to exclude, as n3 or n[1-4].")
@options.precompile
@options.runs_dir
@click.option("--dry-run", is_flag=True, help="Print scripts and environment; submit nothing.")
@click.option("--local", is_flag=True, help="Run both stages on this machine, without Slurm.")
@click.option(
    "--force", is_flag=True, help="Submit even if the planner predicts that it does not fit."
)
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
    """Train RECIPE on N nodes: submit a precompile job, then a train job that depends on it.

    RECIPE is a name from `slurmllm recipes` or a .yaml file. With --local, each of the N nodes
    is a launcher on this machine; Ctrl-C saves and exits.
    """
    from slurmllm.config.resolve import resolve
    from slurmllm.rundir import runs_root
    from slurmllm.submit.launch import submit_jobs
    from slurmllm.submit.prepare import RunRequest, prepare

    given = {
        "slurm.partition": ("--partition", partition),
        "slurm.account": ("--account", account),
        "slurm.qos": ("--qos", qos),
        "slurm.time": ("--time", time),
        "slurm.reservation": ("--reservation", reservation),
        "slurm.exclude": ("--exclude", exclude),
    }
    prepared = prepare(
        RunRequest(
            config=resolve(recipe, cluster, overrides, given),
            nodes=nodes,
            root=runs_root(runs_dir),
            name=name,
            local=local,
            precompile=precompile,
            force=force,
            dry_run=dry_run,
        )
    )
    print_warnings(prepared)
    if dry_run:
        _print_dry_run(prepared, as_json)
    elif local:
        ctx.exit(run_and_report(prepared, as_json))
    else:
        print_submission(prepared, submit_jobs(prepared), as_json)


def print_warnings(prepared: PreparedRun) -> None:
    for warning in prepared.fit.warnings if prepared.fit is not None else ():
        click.echo(f"warning: {warning}", err=True)


def _print_dry_run(prepared: PreparedRun, as_json: bool) -> None:
    """Print scripts, the workers' environment, and the backend's arguments."""
    import json

    from slurmllm.backends.environment import load_environment, worker_environment

    run, config, mesh = prepared.run, prepared.config, prepared.mesh
    variables = worker_environment(config, run)
    arguments = load_environment(config.backend).arguments(config, mesh)
    for reason in prepared.refusals:
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
            "planner": _planner_json(prepared),
            "refusals": list(prepared.refusals),
        }
        click.echo(json.dumps(shown))
        return
    import yaml

    from slurmllm.tables import print_table

    if prepared.fit is not None and prepared.fit.chosen:
        click.echo(f"# ── the planner's choice\n{prepared.fit.line()}\n")
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


def print_submission(prepared: PreparedRun, sent: Submission, as_json: bool) -> None:
    """Print job ids, directory, mesh and the next commands."""
    import json

    run, mesh = prepared.run, prepared.mesh
    if as_json:
        shown = {
            "run": run.name,
            "run_dir": str(run.path),
            "jobs": {"precompile": sent.precompile_job, "train": sent.train_job},
            "mesh": mesh.to_json(),
            "graphs_from": prepared.graphs_from,
            "planner": _planner_json(prepared),
        }
        click.echo(json.dumps(shown))
        return
    first = f"precompile job {sent.precompile_job}, then " if sent.precompile_job else ""
    click.echo(f"run        {run.name}")
    click.echo(f"directory  {run.path}")
    click.echo(f"jobs       {first}train job {sent.train_job}")
    _print_graphs(prepared)
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


def _planner_json(prepared: PreparedRun) -> dict[str, Any] | None:
    return None if prepared.fit is None else prepared.fit.to_json()


def _print_choice(prepared: PreparedRun) -> None:
    if prepared.fit is not None and prepared.fit.chosen:
        click.echo(f"planner    {prepared.fit.line()}")


def _print_graphs(prepared: PreparedRun) -> None:
    source = prepared.graphs_from
    if source is not None:
        owner = "this run" if source == prepared.run.name else f"run {source}"
        click.echo(f"graphs     compiled by {owner} already; no precompile stage")


def run_and_report(prepared: PreparedRun, as_json: bool) -> int:
    """Run the stages on this machine; returns the exit code."""
    import json

    from slurmllm.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_REQUEUE
    from slurmllm.submit.launch import run_locally

    run = prepared.run
    if not as_json:
        click.echo(f"run        {run.name}\ndirectory  {run.path}")
        _print_choice(prepared)
        _print_graphs(prepared)
    code = run_locally(prepared, quiet=as_json)
    if as_json:
        shown = {
            "run": run.name,
            "run_dir": str(run.path),
            "exit_code": code,
            "graphs_from": prepared.graphs_from,
            "planner": _planner_json(prepared),
        }
        click.echo(json.dumps(shown))
    elif code == EXIT_OK:
        click.echo(
            f"done       slurmllm status {run.name}; curves in {run.path}/metrics, /tensorboard"
        )
    elif code in (EXIT_INTERRUPTED, EXIT_REQUEUE):
        saved = "saved; " if run.checkpoint_steps() else ""
        click.echo(f"stopped    {saved}slurmllm resume {run.name} continues", err=True)
    else:
        fix = f"see the reason above, fix it, then slurmllm resume {run.name}"
        click.echo(f"stopped    exit code {code}; {fix}", err=True)
    return code
