"""`slurmllm submit`, `resume` and `cancel`: start, continue and end a run."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import click

from slurmllm.cli import options

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from slurmllm.config.recipe import Recipe
    from slurmllm.config.resolve import RunConfig
    from slurmllm.run.records import Submission
    from slurmllm.submit.prepare import Precompile, PreparedRun


log = logging.getLogger(__name__)


@click.command()
@click.argument("recipe", shell_complete=options.complete_recipe)
@options.sbatch_options
@options.nodes("Nodes of the train job; 2-4: as many as Slurm has.", default="1")
@click.option("--name", help="The run's name.  [default: RECIPE-001, -002, …]")
@options.set_value
@options.cluster
@options.job_options(
    f"{options.FIELDS} {options.DIRECTIVES}",
    time="Time limit: minutes, H:MM:SS or D-HH:MM:SS.  [default: the recipe's]",
)
@click.option(
    "--data", "data", metavar="builtin|NAME",
    help="builtin: train on the source files of this machine's Python, for a first trial; else a "
    "published data set (`slurmllm data fetch --list`).",
)  # fmt: skip
@click.option("--fetch", is_flag=True, help="First download the recipe's data if they are missing.")
@options.precompile
@options.runs_dir
@click.option("--dry-run", is_flag=True, help="Print scripts and environment; submit nothing.")
@click.option("--local", is_flag=True, help="Run both stages on this machine, without Slurm.")
@options.in_allocation
@click.option(
    "--sweep", multiple=True, metavar="PATH=V1,V2",
    help="Submit a run for each value, such as optim.lr=1e-4,3e-4; repeatable: for each "
    "combination.",
)  # fmt: skip
@click.option(
    "--sweep-file",
    metavar="FILE.yaml",
    help="Submit a run for each case of the file, such as `low: {optim.lr: 1e-4}`.",
)
@click.option(
    "--max-running", type=int, help="Runs of a sweep that train at a time.  [default: all]"
)
@click.option("--yes", is_flag=True, help="Do not ask before a sweep of more than 100 runs.")
@options.force
@options.as_json
@click.pass_context
def submit(
    ctx: click.Context, /, recipe: str, sbatch: tuple[str, ...],
    nodes: tuple[int | None, int], name: str | None, overrides: tuple[str, ...],
    cluster: str | None, data: str | None, fetch: bool, precompile: Precompile, runs_dir: Path,
    dry_run: bool, local: bool,
    in_allocation: bool, sweep: tuple[str, ...], sweep_file: str | None,
    max_running: int | None, yes: bool,
    force: bool, as_json: bool, **slurm: str | None,
) -> None:  # fmt: skip
    """Train RECIPE on N nodes.

    Submits a precompile job, then a train job that depends on it.

    RECIPE is a name from `slurmllm recipes` or a .yaml file. With --local, N launcher
    processes on this machine stand in for nodes; Ctrl-C saves a checkpoint and exits.

    With --sweep or --sweep-file several runs are submitted, in a directory of their own; NAME is
    the sweep's.
    """
    import contextlib
    from dataclasses import replace

    from slurmllm.cli import sweep as sweeps
    from slurmllm.cli.fetch import fetch_sources
    from slurmllm.config.resolve import resolve
    from slurmllm.submit.launch import record_local, submit_jobs
    from slurmllm.submit.prepare import RunRequest, prepare
    from slurmllm.submit.sweep import resolve_cases
    from slurmllm.supervise.run_lock import locked

    given = options.slurm_settings(slurm, sbatch)
    given["slurm.min_nodes"], most = ("--nodes M-N", nodes[0]), nodes[1]
    given |= _data_settings(data, fetch)
    if local and nodes[0] is not None:
        raise click.UsageError("--nodes M-N: a range is for Slurm's jobs; give one number")
    if max_running is not None and slurm["dependency"] is not None:
        raise click.UsageError("--dependency and --max-running exclude each other; give one")
    cases = sweeps.read_cases(sweep, sweep_file, max_running, local)
    if cases and not dry_run:
        sweeps.confirm(len(cases), yes)
    allocation = None
    if in_allocation:
        refused = {"--local": local, "--sweep": cases, **dict(given.values())}
        given_nodes = ctx.get_parameter_source("nodes") is not click.core.ParameterSource.DEFAULT
        allocation, most = _held_nodes(most if given_nodes else None, refused)
    configs = (
        resolve_cases(cases, recipe, cluster, overrides, given)
        if cases
        else [resolve(recipe, cluster, overrides, given)]
    )
    if not dry_run:
        options.ignore_output_errors()
    request = RunRequest(
        config=configs[0],
        nodes=most,
        root=runs_dir,
        name=name,
        local=local,
        precompile=precompile,
        force=force,
        dry_run=dry_run,
        fetch=fetch_sources if fetch else None,
    )
    if cases:
        ctx.exit(sweeps.submit(request, cases, configs, max_running, as_json))
    with contextlib.ExitStack() as held:
        prepared = prepare(
            replace(request, claimed=lambda run: held.enter_context(locked(run, "submit")))
        )
        print_warnings(prepared)
        if dry_run:
            _print_dry_run(prepared, as_json)
            prepared.require_data()
            return
        here = local or in_allocation
        sent = record_local(prepared, allocation=allocation) if here else submit_jobs(prepared)
    if here:
        ctx.exit(run_and_report(prepared, as_json, allocation))
    print_submission(prepared, sent, as_json)


def _data_settings(data: str | None, fetch: bool) -> dict[str, tuple[str, Any]]:
    """Return what --data sets: dotted path → (option, value)."""
    from slurmllm.config.resolve import TRIAL
    from slurmllm.submit.inputs import STDLIB

    if data != "builtin":
        return {} if data is None else {"data.source": ("--data", data.split(","))}
    if fetch:
        raise click.UsageError("--data builtin and --fetch exclude each other; give one of them")
    return {f"data.{name}": (TRIAL, STDLIB) for name in ("corpus", "tokenizer")}


def _held_nodes(nodes: int | None, refused: Mapping[str, object]) -> tuple[str, int]:
    """The allocation that this command runs in and the nodes to use; `refused`: option → value."""
    from slurmllm.errors import UserError
    from slurmllm.slurm.client import SlurmClient
    from slurmllm.supervise.allocation import held_allocation

    if names := [name for name, value in refused.items() if value]:
        raise UserError(f"--in-allocation and {names[0]} exclude each other; give one of them")
    return held_allocation(SlurmClient(), nodes)


def print_warnings(prepared: PreparedRun) -> None:
    for warning in prepared.fit.warnings if prepared.fit is not None else ():
        click.echo(f"warning: {warning}", err=True)
    for reason in prepared.rederived:
        click.echo(f"warning: {reason}; written again from config.yaml", err=True)


def _print_dry_run(prepared: PreparedRun, as_json: bool) -> None:
    """Print scripts, the workers' environment, and the backend's arguments."""
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
            "refusals": [*prepared.refusals, *prepared.missing_data],
        }
        options.echo_json(shown, indent=None)
        return
    import yaml

    from slurmllm.display.tables import print_table

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


@click.command()
@click.argument("run", shell_complete=options.complete_run)
@options.sbatch_options
@options.nodes("Number of nodes, or a range.  [default: as before]")
@click.option("--cluster", help="Cluster profile: a name or a YAML file.  [default: as before]")
@options.set_option(
    "Change a value, such as parallel.tensor=8; repeatable. Model, data, seed and global "
    "batch cannot change: the checkpoints depend on them."
)
@options.job_options(
    f"{options.FIELDS} {options.DIRECTIVES}",
    time="Time limit: minutes, H:MM:SS or D-HH:MM:SS.  [default: as before]",
)
@click.option("--local", is_flag=True, help="Continue on this machine, without Slurm.")
@options.in_allocation
@click.option(
    "--from-scratch", is_flag=True, help="Start again from step 0, without the checkpoints."
)
@options.force
@options.precompile
@options.runs_dir
@options.as_json
@click.pass_context
def resume(
    ctx: click.Context, /, run: str, sbatch: tuple[str, ...],
    nodes: tuple[int | None, int] | None, cluster: str | None, overrides: tuple[str, ...],
    local: bool, in_allocation: bool, from_scratch: bool, force: bool, precompile: Precompile,
    runs_dir: Path, as_json: bool,
    **slurm: str | None,
) -> None:  # fmt: skip
    """Continue RUN after it was cancelled or stopped.

    Training continues in the same directory, as its next attempt. The number of nodes, the cluster
    profile (and with it the backend) and the mesh may change: any checkpoint can be loaded on any
    of them. --set parallel=auto lets the planner choose a new mesh.

    The precompile stage runs again if compiled graphs are missing or would change. A run that was
    started with --local continues locally.
    """
    from dataclasses import replace

    from slurmllm.checkpoint.catalogue import require_recorded, usable_steps
    from slurmllm.checkpoint.state import require_same_settings
    from slurmllm.config.load import load
    from slurmllm.config.resolve import change, changed_settings
    from slurmllm.errors import RunError
    from slurmllm.run.records import JobsRecord
    from slurmllm.run.rundir import find_run
    from slurmllm.slurm.client import SlurmClient
    from slurmllm.status.runs import is_active, run_state
    from slurmllm.submit.launch import record_local, submit_jobs
    from slurmllm.submit.prepare import RunRequest, prepare
    from slurmllm.supervise.exclusion import to_avoid
    from slurmllm.supervise.run_lock import locked
    from slurmllm.train.schedules import check_decay_start, moved_decay_end

    found = find_run(run, runs_dir)
    client = SlurmClient()
    with locked(found, "resume"):
        last = JobsRecord.of(found).last
        if last is not None and is_active(found, client):
            raise RunError(
                f"{found.name} is pending or running; follow it with `slurmllm status "
                f"{found.name}` or `slurmllm cancel {found.name}` first"
            )
        config = before = load(found.config, trusted=True)
        # The job that the last submission waited for has ended.
        if config.recipe.slurm.dependency is not None:
            overrides = ("slurm.dependency=null", *overrides)
        given = options.slurm_settings(slurm, sbatch)
        least, most = nodes or (None, None)
        given["slurm.min_nodes"] = ("--nodes M-N", least)
        if most is not None and config.recipe.slurm.min_nodes is not None:
            overrides = ("slurm.min_nodes=null", *overrides)
        overrides = _keep_warmup(before.recipe, overrides, from_scratch)
        if cluster is not None or overrides or any(value for _, value in given.values()):
            config = change(config, cluster, overrides, given)
        trained, train = before.recipe.train, config.recipe.train
        usable = set() if from_scratch else usable_steps(found)
        if not from_scratch:
            newest = found.checkpoint(max(usable)) if usable else None
            require_same_settings(found, config.recipe, newest)
        if usable:
            check_decay_start(before.recipe, config.recipe, max(usable))
            if warning := moved_decay_end(before.recipe, config.recipe, max(usable)):
                log.warning("%s", warning)
            earlier, later = before.recipe.eval, config.recipe.eval
            if later.every_steps and earlier.every_steps and earlier.sequences != later.sequences:
                log.warning(
                    "eval.sequences: changed from %d to %d; losses of evaluations before and after "
                    "are means over different sequences", earlier.sequences, later.sequences,
                )  # fmt: skip
        if run_state(found, client).state == "done" and train.steps <= trained.steps:
            raise RunError(
                f"{found.name} is done: it has trained all its {trained.steps} steps; --set "
                "train.steps=… with more of them continues it"
            )
        if not from_scratch and config.recipe.checkpoint.replica is None:
            require_recorded(found)  # a worker finds out too, hours in the queue later
        allocation = None
        wanted, here = options.as_before(last, most, local)
        if in_allocation:
            as_before = most or (last.nodes if last else None)
            here, (allocation, wanted) = False, _held_nodes(as_before, {"--local": local})
        at_once = here or in_allocation
        excluded = [] if at_once else to_avoid(client, found, config, wanted)
        prepared = prepare(
            RunRequest(
                config=config,
                nodes=wanted,
                root=runs_dir,
                run=found,
                local=here,
                precompile=precompile,
                force=force,
                # A layout that has trained before has shown that it fits.
                check_layout=last is None
                or wanted != last.nodes
                or _layout(config) != _layout(before),
                check_weights=train.init_from != trained.init_from,
                exclude=excluded,
            )
        )
        changes = changed_settings(before, prepared.config)
        prepared = replace(prepared, from_scratch=from_scratch, changes=changes)
        print_warnings(prepared)
        if excluded:
            click.echo(
                f"excluded: {' '.join(excluded)}, which failed the run; see status", err=True
            )
        options.ignore_output_errors()
        sent = (
            record_local(prepared, allocation=allocation)
            if at_once
            else submit_jobs(prepared, client)
        )
    if at_once:
        ctx.exit(run_and_report(prepared, as_json, allocation))
    print_submission(prepared, sent, as_json)


def _keep_warmup(recipe: Recipe, overrides: tuple[str, ...], from_scratch: bool) -> tuple[str, ...]:
    """The overrides, with the warm-up's number of steps if another train.steps would change it."""
    optim = recipe.optim
    names = {override.partition("=")[0].strip() for override in overrides}
    own = names & {"optim", "optim.warmup_ratio", "optim.warmup_steps"}
    if optim.warmup_ratio is None or from_scratch or own or "train.steps" not in names:
        return overrides
    steps = optim.warmup(recipe.train.steps)
    return ("optim.warmup_ratio=null", f"optim.warmup_steps={steps}", *overrides)


def _layout(config: RunConfig) -> tuple[Any, ...]:
    """The settings that a run's memory and speed depend on and that a resume may change."""
    train = config.recipe.train
    return (
        config.cluster, config.backend, config.recipe.parallel, train.micro_batch,
        train.activation_checkpointing, train.precision,
    )  # fmt: skip
