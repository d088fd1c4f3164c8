"""`slurmllm submit` and `resume`: start and continue a run."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import click
from click.exceptions import Exit

from slurmllm.cli import commands, options
from slurmllm.cli import sweep as sweeps
from slurmllm.cli.nodes import include_nodes, include_option
from slurmllm.core.display.tables import print_table
from slurmllm.core.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_REQUEUE, UserError
from slurmllm.core.format import Texts, Values
from slurmllm.core.run.rundir import find_run

if TYPE_CHECKING:
    from slurmllm.cli.options import RunOptions
    from slurmllm.cli.sweep import SweepOptions
    from slurmllm.core.config.resolve import RunConfig
    from slurmllm.core.run.records import Submission
    from slurmllm.core.run.rundir import RunDir
    from slurmllm.core.slurm.client import Names, SlurmClient
    from slurmllm.launch.submit.launch import SubmittedRun
    from slurmllm.launch.submit.prepare import PreparedRun, RunRequest

# In the order in which they are printed
_FACTS = "run directory jobs graphs command mesh planner data next"


@commands.grouped(
    common="nodes name set cluster data fetch smoke steps dry-run local",
)
@options.recipe_argument("recipe")
@click.option("--command", hidden=True)  # what follows `--`, if it is no option
@options.nodes(help="Nodes of the train job; 2-4: at least 2, at most 4.", default="1")
@click.option("-J", "--name", help="The run's name.  [default: RECIPE-001, -002, …]")
@options.set_value
@options.cluster
@click.option(
    "--data",
    metavar="builtin|NAME",
    help="builtin: train on the source files of this machine's Python, for a first trial; else a "
    "published data set (`slurmllm data fetch --list`).",
)
@options.flag("--fetch", "First download the recipe's data if they are missing.")
@options.flag("--smoke", "Train 20 steps only, the schedule scaled: a test.")
@options.count("--steps", help="As --smoke, with this many steps.")
@sweeps.sweep_options
@options.run_options("the recipe's")
def submit(
    recipe: str,
    command: str | None,
    nodes: tuple[int | None, int],
    name: str | None,
    overrides: Texts,
    cluster: str | None,
    data: str | None,
    fetch: bool,
    smoke: bool,
    steps: int | None,
    sweep: SweepOptions,
    shared: RunOptions,
) -> None:
    """Train RECIPE on N nodes.

    Submits a precompile job, then a train job that depends on it. RECIPE is a name from
    `slurmllm recipes` or a .yaml file. With --local, N launcher processes on this machine stand
    in for nodes; Ctrl-C saves a checkpoint and exits. With --sweep or --sweep-file several runs
    are submitted, in a directory of their own; --name then names the sweep.

    Options after `--` go to sbatch. `-- COMMAND …` in place of RECIPE, or after a recipe
    trainers/…, supervises a trainer of another project, such as `-- torchrun train.py`.
    """
    from slurmllm.cli.fetch import fetch_sources
    from slurmllm.core.config.resolve import local_cluster, resolve, shorten
    from slurmllm.launch.submit.inputs import data_settings
    from slurmllm.launch.submit.launch import start_run
    from slurmllm.launch.submit.prepare import check_mode
    from slurmllm.launch.submit.sweep import resolve_cases

    if sweep.max_running is not None and shared.settings["slurm.dependency"][1] is not None:
        raise click.UsageError("--dependency and --max-running exclude each other; give one")
    if data == "builtin" and fetch:
        raise click.UsageError("--data builtin and --fetch exclude each other; give one of them")
    settings = {**shared.settings, "slurm.min_nodes": ("--nodes M-N", nodes[0])}
    check_mode(shared.local, settings)
    settings |= {**data_settings(data), "command.run": ("command line", command)}
    cases = sweeps.read_cases(sweep, shared.local)
    if not shared.dry_run:
        sweeps.confirm(len(cases), sweep.yes)
        commands.ignore_output_errors()
    allocation = None
    count = nodes[1]
    if shared.in_allocation:
        refused = {"--local": shared.local, "--sweep": cases, **dict(shared.settings.values())}
        refused["--nodes M-N"] = nodes[0]
        allocation, count = _held_nodes(count if "-N" in options.given() else None, refused)
    sources = (recipe, local_cluster(cluster, shared.local), overrides, settings)
    configs = resolve_cases(cases, *sources) if cases else [resolve(*sources)]
    if fetch:
        configs[0].recipe.require_training("--fetch", "leave it out")
    if smoke or steps:
        configs = [shorten(config, steps) for config in configs]
    request = _request(configs[0], count, shared, name=name, fetch=fetch_sources if fetch else None)
    if cases:
        raise Exit(sweeps.submit(request, cases, configs, sweep.max_running, shared.as_json))
    raise Exit(_print_run(start_run(request, allocation, print_warnings), shared))


def _request(config: RunConfig, nodes: int, shared: RunOptions, **more: Any) -> RunRequest:
    from slurmllm.core.slurm.client import SlurmClient
    from slurmllm.launch.submit.prepare import RunRequest

    return RunRequest(
        config=config,
        nodes=nodes,
        root=shared.runs_dir,
        local=shared.local,
        precompile=shared.precompile,
        force=shared.force,
        dry_run=shared.dry_run,
        slurm=None if shared.local or shared.in_allocation else SlurmClient(),
        **more,
    )


def _print_run(run: SubmittedRun, shared: RunOptions) -> int:
    """Print a dry run, submitted jobs, or a run here, which it runs; returns the exit code."""
    if run.sent is not None and run.sent.local:
        return _run_and_report(run, shared.as_json)
    summary = run.to_dict()
    for reason in chain.from_iterable(error.faults for error in run.prepared.refused):
        options.warn(f"{click.get_current_context().info_name} would refuse this: {reason}")
    if shared.as_json:
        options.echo_json(summary, indent=None)
    elif run.sent is not None:
        _print_submission(run.prepared, run.sent)
    else:
        for error in run.prepared.unstartable:
            options.note(f"dry run; would be refused: {error.title}")
        _print_scripts(run.prepared, summary)
        options.note("dry run: nothing was written, nothing submitted")
    for error in run.prepared.unstartable:
        raise error
    return EXIT_OK


def _include(
    run_dir: RunDir,
    client: SlurmClient,
    included: Names,
    unused: dict[str, object],
    as_json: bool,
) -> bool:
    """Let a run use nodes again; return whether it is active, so that nothing else is to do."""
    from slurmllm.launch.supervise.run_state import is_active

    active = is_active(run_dir, client)  # then its jobs will use the nodes
    if active and (names := [name for name, value in unused.items() if value]):
        raise UserError(
            f"run {run_dir.name} is queued or running, so only --include can change it: leave out "
            f"{names[0]}, or cancel the run first"
        )
    include_nodes(run_dir, client, included)
    if active and as_json:
        options.echo_json(
            {"run": run_dir.name, "run_dir": str(run_dir.path), "included": included}, indent=None
        )
    return active


def _held_nodes(nodes: int | None, refused: Mapping[str, object]) -> tuple[str, int]:
    """Return the allocation of this command, and the nodes to use; `refused`: option → value."""
    from slurmllm.core.slurm.client import SlurmClient
    from slurmllm.launch.supervise.allocation import held_allocation

    if names := [name for name, value in refused.items() if value]:
        raise UserError(f"--in-allocation and {names[0]} exclude each other; give one of them")
    return held_allocation(SlurmClient(), nodes)


def print_warnings(prepared: PreparedRun) -> None:
    for warning in prepared.warnings:
        options.warn(warning)


def _print_scripts(prepared: PreparedRun, summary: Values) -> None:
    """Print what a resume changes, scripts, workers' environment, and backend's arguments."""
    import yaml

    echo = click.echo
    if prepared.fit is not None and prepared.fit.chosen:
        echo(f"# ── the planner's choice\n{prepared.fit.line()}\n")
    if prepared.run.jobs.is_file():
        echo(f"# ── the run continues from step {summary['from_step']}")
    for path, (before, after) in prepared.changes.items():
        echo(f"# ── changed: {path}, from {before} to {after}")
    for variable, name in summary["defaults"].items():
        echo(f"# ── default of this shell, which nothing else sets: {variable} is --{name}")
    if (line := prepared.command_line) is not None:
        echo(f"# ── the command, {prepared.config.workers_per_node} on each node\n{line}\n")
    if (epochs := _epochs_text(prepared)) is not None:
        echo(f"# ── data: {epochs}")
    if "precompile" not in prepared.stages:
        echo("# ── no precompile stage")
    for stage in prepared.stages:
        echo(f"# ── {prepared.run.script(stage)}")
        echo(prepared.scripts[stage])
    echo("# ── the workers' environment")
    rows = ((row["name"], row["value"] or "''", row["source"]) for row in summary["environment"])
    print_table(("variable", "value", "source"), rows, fold="value")
    if arguments := summary["backend_arguments"]:
        echo(f"\n# ── arguments of backend {prepared.config.backend}")
        echo(yaml.safe_dump(arguments, sort_keys=False), nl=False)


def _print_facts(prepared: PreparedRun, **more: str | None) -> None:
    """Print what is known of a run, and `more`, a fact a line."""
    facts = {
        "run": prepared.run.name,
        "directory": str(prepared.run.path),
        "graphs": _graphs_text(prepared),
        "data": _epochs_text(prepared),
        **more,
    }
    if prepared.fit is not None and prepared.fit.chosen:
        facts["planner"] = prepared.fit.line()
    for name in _FACTS.split():
        if (fact := facts.get(name)) is not None:
            click.echo(f"{name:<10} {fact}")


def _print_submission(prepared: PreparedRun, submission: Submission) -> None:
    """Print job ids, directory, mesh and the next commands."""
    name = prepared.run.name
    mesh = prepared.mesh
    command = prepared.command_line
    batch = f"{mesh.accumulation} × micro batch {mesh.micro_batch} a step"
    if mesh.unmeasured:
        batch = "micro batch auto: measured by the precompile stage"
    degrees = f"{mesh.description}; {batch}"
    if command is not None:
        degrees = f"{prepared.config.workers_per_node} of the command on each node"
    jobs = f"train job {submission.train_job}"
    if submission.precompile_job:
        jobs = f"precompile job {submission.precompile_job}, then {jobs}"
    _print_facts(
        prepared,
        jobs=jobs,
        command=command,
        mesh=f"{mesh.nodes} node(s) × {mesh.devices_per_node}: {degrees}",
        next=f"slurmllm status {name}",
    )
    for verb in ("logs -f", "cancel"):
        click.echo(f"           slurmllm {verb} {name}")


def _epochs_text(prepared: PreparedRun) -> str | None:
    recipe = prepared.config.recipe
    if not recipe.worker.has_model:
        return None
    from slurmllm.core.config.data_sources import epochs_text

    tokens = recipe.train.steps * recipe.train.global_batch * recipe.model.seq_len
    return epochs_text(recipe.data, tokens, prepared.config.origins.get("data.corpus", ""))


def _graphs_text(prepared: PreparedRun) -> str | None:
    """Return why there is no precompile stage; None if there is one, or never is."""
    if not prepared.config.recipe.worker.has_model:
        return None
    if (source := prepared.graphs_from) is not None:
        owner = "this run" if source == prepared.run.name else f"run {source}"
        return f"compiled by {owner} already; no precompile stage"
    if "precompile" in prepared.stages:
        return None
    from slurmllm.train.backends.environment import needs_precompile

    state = "compiled in training" if needs_precompile(prepared.config) else "none to compile"
    return f"{state}; no precompile stage"


def _run_and_report(submitted: SubmittedRun, as_json: bool) -> int:
    """Run the stages on this machine, or in an allocation; returns the exit code."""
    from slurmllm.core.config.command import STEPS_NOT_PASSED
    from slurmllm.launch.supervise.attempts import load_attempts

    prepared = submitted.prepared
    run = prepared.run
    if not as_json:
        _print_facts(prepared)
    submitted = submitted.run_to_end(quiet=as_json)
    code = submitted.exit_code or EXIT_OK
    resume = f"slurmllm resume {run.name}"
    if as_json:
        options.echo_json(submitted.to_dict(), indent=None)
    elif code == EXIT_OK:
        more = ", /tensorboard" if prepared.config.recipe.worker.has_model else ""
        early = load_attempts(run, "train")[-1].early_text
        if early:
            options.warn(STEPS_NOT_PASSED)
        click.echo(
            f"{early or 'done':<9}  slurmllm status {run.name}; curves in {run.path}/metrics{more}"
        )
    elif code in (EXIT_INTERRUPTED, EXIT_REQUEUE):
        state = "interrupted" if code == EXIT_INTERRUPTED else "stopped    "
        saved = " from its checkpoint" if run.checkpoint_steps() else ""
        options.note(f"{state}  {resume} continues{saved}")
    else:
        options.note(f"stopped    exit code {code}; fix the reason above, then {resume}")
    return code


@commands.grouped(common="nodes cluster set from-scratch include dry-run local")
@options.run_argument("run")
@options.nodes(help="Number of nodes, or a range.  [default: as before]")
@click.option("--cluster", help="Cluster profile: a name or a YAML file.  [default: as before]")
@options.set_option(
    help="Change a value, such as parallel.tensor=8 (which alone works too); repeatable. Model, "
    "data, seed and global batch cannot change, except with --from-scratch: the checkpoints depend "
    "on them."
)
@options.flag("--from-scratch", "Start again from step 0, without the checkpoints.")
@include_option
@options.run_options("as before")
def resume(
    run: str,
    nodes: tuple[int | None, int] | None,
    cluster: str | None,
    overrides: Texts,
    from_scratch: bool,
    included: Texts,
    shared: RunOptions,
) -> None:
    """Continue RUN after it was cancelled or stopped.

    Training continues in the same directory, as its next attempt. The number of nodes, the cluster
    profile (and with it the backend) and the mesh may change: any checkpoint can be loaded on any
    of them. --set parallel=auto lets the planner choose a new mesh.

    The precompile stage runs again if compiled graphs are missing or would change. A run that was
    started with --local continues locally.
    """
    from slurmllm.core.config.load import load
    from slurmllm.core.slurm.client import SlurmClient
    from slurmllm.launch.submit.resume import Changes, continue_run

    if shared.dry_run and included:
        raise click.UsageError("--include changes the run's jobs; leave out --dry-run")
    run_dir = find_run(run, shared.runs_dir)
    client = SlurmClient()
    settings = shared.settings
    if nodes is not None:
        settings["slurm.min_nodes"] = ("--nodes M-N", nodes[0])
    if included:
        unused: dict[str, object] = {"--nodes": nodes, "--cluster": cluster, "--set": overrides}
        unused |= {"--from-scratch": from_scratch, **dict(settings.values())}
        if _include(run_dir, client, included, unused, shared.as_json):
            return
    if not shared.dry_run:
        commands.ignore_output_errors()
    hold = None
    if shared.in_allocation:
        hold = partial(_held_nodes, refused={"--local": shared.local, **dict(settings.values())})
    config = load(run_dir.config, trusted=True)
    request = _request(config, nodes[1] if nodes else 0, shared, run=run_dir)
    changes = Changes(cluster, overrides, settings, from_scratch)
    raise Exit(_print_run(continue_run(request, changes, client, hold, print_warnings), shared))
