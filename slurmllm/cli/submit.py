"""`slurmllm submit` and `resume`: start and continue a run."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from slurmllm.cli import options
from slurmllm.cli import sweep as sweeps
from slurmllm.cli.nodes import include_nodes, include_option

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from slurmllm.cli.options import RunOptions
    from slurmllm.cli.sweep import SweepOptions
    from slurmllm.run.records import Submission
    from slurmllm.run.rundir import RunDir
    from slurmllm.slurm.client import SlurmClient
    from slurmllm.submit.prepare import PreparedRun, RunRequest


@click.command(
    cls=options.GroupedCommand,
    common="nodes name set cluster data fetch dry-run local",
)
@click.argument("recipe", shell_complete=options.complete_recipe)
@options.nodes(
    help="Nodes of the train job; 2-4: at least 2, at most 4.", default="1", show_default=True
)
@click.option("-J", "--name", help="The run's name.  [default: RECIPE-001, -002, …]")
@options.set_value
@options.cluster
@click.option(
    "--data",
    metavar="builtin|NAME",
    help="builtin: train on the source files of this machine's Python, for a first trial; else a "
    "published data set (`slurmllm data fetch --list`).",
)
@click.option("--fetch", is_flag=True, help="First download the recipe's data if they are missing.")
@sweeps.sweep_options
@options.run_options("the recipe's")
@click.pass_context
def submit(
    ctx: click.Context,
    recipe: str,
    nodes: tuple[int | None, int],
    name: str | None,
    overrides: tuple[str, ...],
    cluster: str | None,
    data: str | None,
    fetch: bool,
    sweep: SweepOptions,
    shared: RunOptions,
) -> None:
    """Train RECIPE on N nodes.

    Submits a precompile job, then a train job that depends on it.

    RECIPE is a name from `slurmllm recipes` or a .yaml file. With --local, N launcher
    processes on this machine stand in for nodes; Ctrl-C saves a checkpoint and exits.

    With --sweep or --sweep-file several runs are submitted, in a directory of their own; NAME is
    the sweep's.
    """
    from slurmllm.cli.fetch import fetch_sources
    from slurmllm.config.resolve import resolve
    from slurmllm.slurm.client import SlurmClient
    from slurmllm.submit.prepare import RunRequest
    from slurmllm.submit.sweep import resolve_cases

    if shared.local and nodes[0] is not None:
        raise click.UsageError("--nodes M-N: a range is for Slurm's jobs; give one number")
    settings = {**shared.settings, "slurm.min_nodes": ("--nodes M-N", nodes[0])}
    if sweep.max_running is not None and settings["slurm.dependency"][1] is not None:
        raise click.UsageError("--dependency and --max-running exclude each other; give one")
    cases = sweeps.read_cases(sweep, shared.local)
    if not shared.dry_run:
        sweeps.confirm(len(cases), sweep.yes)
        options.ignore_output_errors()
    allocation, count = None, nodes[1]
    if shared.in_allocation:
        refused = {"--local": shared.local, "--sweep": cases, **dict(settings.values())}
        is_default = ctx.get_parameter_source("nodes") is click.core.ParameterSource.DEFAULT
        allocation, count = _held_nodes(None if is_default else count, refused)
    sources = (recipe, cluster, overrides, {**settings, **_data_settings(data, fetch)})
    configs = resolve_cases(cases, *sources) if cases else [resolve(*sources)]
    request = RunRequest(
        config=configs[0],
        nodes=count,
        root=shared.runs_dir,
        name=name,
        local=shared.local,
        precompile=shared.precompile,
        force=shared.force,
        dry_run=shared.dry_run,
        fetch=fetch_sources if fetch else None,
        slurm=None if shared.local or shared.in_allocation else SlurmClient(),
    )
    if cases:
        ctx.exit(sweeps.submit(request, cases, configs, sweep.max_running, shared.as_json))
    _submit_run(ctx, request, shared, allocation)


def _submit_run(
    ctx: click.Context, request: RunRequest, shared: RunOptions, allocation: str | None
) -> None:
    """Prepare a new run, then submit its jobs, run it here, or show what would be submitted."""
    from slurmllm.submit.prepare import prepare
    from slurmllm.supervise.run_lock import locked

    with contextlib.ExitStack() as locks:
        claimed = lambda run: locks.enter_context(locked(run, "submit"))  # noqa: E731
        prepared = prepare(replace(request, claimed=claimed))
        print_warnings(prepared)
        if request.dry_run:
            _print_dry_run(prepared, shared.as_json)
            return
        sent = _start(prepared, shared.local or shared.in_allocation, allocation)
    _finish(ctx, prepared, sent, shared.as_json)


def _start(prepared: PreparedRun, at_once: bool, allocation: str | None) -> Submission:
    """Submit the jobs of a run, or record that this process runs its stages."""
    from slurmllm.submit.launch import record_local, submit_jobs

    options.ignore_output_errors()
    if at_once:
        return record_local(prepared, allocation=allocation)
    return submit_jobs(prepared)


def _finish(ctx: click.Context, prepared: PreparedRun, sent: Submission, as_json: bool) -> None:
    """Run a recorded run's stages here, or print the jobs that were submitted."""
    if sent.local:
        ctx.exit(run_and_report(prepared, as_json, sent.allocation))
    print_submission(prepared, sent, as_json)


def _data_settings(data: str | None, fetch: bool) -> dict[str, tuple[str, Any]]:
    """Return the settings of --data."""
    from slurmllm.config.resolve import TRIAL
    from slurmllm.submit.inputs import STDLIB

    if data != "builtin":
        return {} if data is None else {"data.source": ("--data", data.split(","))}
    if fetch:
        raise click.UsageError("--data builtin and --fetch exclude each other; give one of them")
    return {f"data.{name}": (TRIAL, STDLIB) for name in ("corpus", "tokenizer")}


def _held_nodes(nodes: int | None, refused: Mapping[str, object]) -> tuple[str, int]:
    """Return the allocation of this command, and the nodes to use; `refused`: option → value."""
    from slurmllm.errors import UserError
    from slurmllm.slurm.client import SlurmClient
    from slurmllm.supervise.allocation import held_allocation

    if names := [name for name, value in refused.items() if value]:
        raise UserError(f"--in-allocation and {names[0]} exclude each other; give one of them")
    return held_allocation(SlurmClient(), nodes)


def print_warnings(prepared: PreparedRun) -> None:
    fit_warnings = prepared.fit.warnings if prepared.fit is not None else ()
    for warning in (*fit_warnings, *prepared.warnings):
        click.echo(f"warning: {warning}", err=True)
    for reason in prepared.rederived:
        click.echo(f"warning: {reason}; written again from config.yaml", err=True)
    if prepared.excluded:
        names = " ".join(prepared.excluded)
        click.echo(f"excluded: {names}, which failed the run; see status", err=True)


def _print_dry_run(prepared: PreparedRun, as_json: bool) -> None:
    """Print what a resume changes, scripts, workers' environment, and backend's arguments."""
    from slurmllm.backends.environment import load_environment, worker_environment
    from slurmllm.checkpoint.catalogue import usable_steps

    run, config, mesh = prepared.run, prepared.config, prepared.mesh
    variables = worker_environment(config, run)
    arguments = load_environment(config.backend).arguments(config, mesh)
    for reason in prepared.refusals:
        click.echo(f"warning: submit would refuse this: {reason}", err=True)
    # Of the user's shell: nothing else of it is an option of a job.
    sources = ((source, path.removeprefix("slurm.")) for path, _, source in config.rows())
    defaults = {source: name for source, name in sources if source.startswith("SBATCH_")}
    from_step = 0 if prepared.from_scratch else max(usable_steps(run), default=0)
    if as_json:
        environment = [{"name": name, **value._asdict()} for name, value in variables.items()]
        summary = {
            "run_dir": str(run.path),
            "from_step": from_step,
            "changes": prepared.changes,
            "config": config.values(),
            "mesh": mesh.to_json(),
            "scripts": prepared.scripts,
            "defaults": defaults,
            "environment": environment,
            "backend_arguments": arguments,
            "planner": _planner_json(prepared),
            "refusals": prepared.all_refusals,
        }
        options.echo_json(summary, indent=None)
        prepared.require_startable()
        return
    import yaml

    from slurmllm.display.tables import print_table

    if prepared.fit is not None and prepared.fit.chosen:
        click.echo(f"# ── the planner's choice\n{prepared.fit.line()}\n")
    if run.jobs.is_file():
        click.echo(f"# ── the run continues from step {from_step}")
    for path, (before, after) in prepared.changes.items():
        click.echo(f"# ── changed: {path}, from {before} to {after}")
    for variable, name in defaults.items():
        click.echo(f"# ── default of this shell, which nothing else sets: {variable} is --{name}")
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
    prepared.require_startable()


def print_submission(prepared: PreparedRun, sent: Submission, as_json: bool) -> None:
    """Print job ids, directory, mesh and the next commands."""
    run, mesh = prepared.run, prepared.mesh
    if as_json:
        jobs = {"precompile": sent.precompile_job, "train": sent.train_job}
        _echo_run_json(prepared, jobs=jobs, mesh=mesh.to_json())
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


def _echo_run_json(prepared: PreparedRun, **more: Any) -> None:
    run = {"run": prepared.run.name, "run_dir": str(prepared.run.path), **more}
    planner = _planner_json(prepared)
    options.echo_json({**run, "graphs_from": prepared.graphs_from, "planner": planner}, indent=None)


def _print_choice(prepared: PreparedRun) -> None:
    if prepared.fit is not None and prepared.fit.chosen:
        click.echo(f"planner    {prepared.fit.line()}")


def _print_graphs(prepared: PreparedRun) -> None:
    source = prepared.graphs_from
    if source is not None:
        owner = "this run" if source == prepared.run.name else f"run {source}"
        click.echo(f"graphs     compiled by {owner} already; no precompile stage")
    elif "precompile" not in prepared.stages:
        from slurmllm.backends.environment import needs_precompile

        what = "compiled in training" if needs_precompile(prepared.config) else "none to compile"
        click.echo(f"graphs     {what}; no precompile stage")


def run_and_report(prepared: PreparedRun, as_json: bool, allocation: str | None = None) -> int:
    """Run the stages on this machine, or in an allocation; returns the exit code."""
    from slurmllm.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_REQUEUE
    from slurmllm.submit.launch import run_locally

    run = prepared.run
    if not as_json:
        click.echo(f"run        {run.name}\ndirectory  {run.path}")
        _print_choice(prepared)
        _print_graphs(prepared)
    code = run_locally(prepared, quiet=as_json, allocation=allocation)
    if as_json:
        _echo_run_json(prepared, exit_code=code)
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


@click.command(
    cls=options.GroupedCommand, common="nodes cluster set from-scratch include dry-run local"
)
@click.argument("run", shell_complete=options.complete_run)
@options.nodes(help="Number of nodes, or a range.  [default: as before]")
@click.option("--cluster", help="Cluster profile: a name or a YAML file.  [default: as before]")
@options.set_option(
    help="Change a value, such as parallel.tensor=8; repeatable. Model, data, seed and global "
    "batch cannot change: the checkpoints depend on them."
)
@click.option(
    "--from-scratch", is_flag=True, help="Start again from step 0, without the checkpoints."
)
@include_option
@options.run_options("as before")
@click.pass_context
def resume(
    ctx: click.Context,
    run: str,
    nodes: tuple[int | None, int] | None,
    cluster: str | None,
    overrides: tuple[str, ...],
    from_scratch: bool,
    included: tuple[str, ...],
    shared: RunOptions,
) -> None:
    """Continue RUN after it was cancelled or stopped.

    Training continues in the same directory, as its next attempt. The number of nodes, the cluster
    profile (and with it the backend) and the mesh may change: any checkpoint can be loaded on any
    of them. --set parallel=auto lets the planner choose a new mesh.

    The precompile stage runs again if compiled graphs are missing or would change. A run that was
    started with --local continues locally.
    """
    from slurmllm.config.load import load
    from slurmllm.run.rundir import find_run
    from slurmllm.slurm.client import SlurmClient
    from slurmllm.submit.prepare import RunRequest
    from slurmllm.submit.resume import Changes, prepare_resume, require_ended
    from slurmllm.supervise.run_lock import locked

    if shared.dry_run and included:
        raise click.UsageError("--include changes the run's jobs; leave out --dry-run")
    run_dir, client, settings = find_run(run, shared.runs_dir), SlurmClient(), shared.settings
    if nodes is not None:
        settings["slurm.min_nodes"] = ("--nodes M-N", nodes[0])
    if included and _include_in_pending(run_dir, client, included, shared.as_json):
        return
    with contextlib.nullcontext() if shared.dry_run else locked(run_dir, "resume"):
        last = require_ended(run_dir, client, shared.force)
        most, allocation = None if nodes is None else nodes[1], None
        count, local = options.nodes_and_mode(last, most, shared.local)
        if shared.in_allocation:
            before = most or (last.nodes if last else None)
            local, (allocation, count) = False, _held_nodes(before, {"--local": shared.local})
        at_once = local or shared.in_allocation
        request = RunRequest(
            config=load(run_dir.config, trusted=True),
            nodes=count,
            root=shared.runs_dir,
            run=run_dir,
            local=local,
            precompile=shared.precompile,
            force=shared.force,
            dry_run=shared.dry_run,
            slurm=None if at_once else client,
        )
        changes = Changes(cluster, overrides, settings, from_scratch)
        prepared = prepare_resume(request, changes, last)
        print_warnings(prepared)
        if shared.dry_run:
            _print_dry_run(prepared, shared.as_json)
            return
        sent = _start(prepared, at_once, allocation)
    _finish(ctx, prepared, sent, shared.as_json)


def _include_in_pending(
    run: RunDir, client: SlurmClient, names: Sequence[str], as_json: bool
) -> bool:
    """End the exclusion of nodes; return whether a pending job uses them, so none is submitted."""
    from slurmllm.status.runs import is_active

    include_nodes(run, client, names)
    if not is_active(run, client):
        return False
    if as_json:
        fields = {"run": run.name, "run_dir": str(run.path), "included": names}
        options.echo_json(fields, indent=None)
    return True
