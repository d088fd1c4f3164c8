"""`slurmllm drill RUN|RECIPE`: inject faults into copies of a run and check that they recover."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.exceptions import Exit

from slurmllm.cli import options
from slurmllm.core.display.tables import Column, fitted
from slurmllm.core.errors import EXIT_NEGATIVE, EXIT_NOT_TESTED, EXIT_OK, RunError
from slurmllm.core.format import Texts
from slurmllm.core.run.rundir import RunDir, find_run, is_run

if TYPE_CHECKING:
    from slurmllm.analysis.drill.checks import DrillReport, DrillResult
    from slurmllm.analysis.drill.drill import Drill
    from slurmllm.analysis.drill.plan import DrillPlan
    from slurmllm.core.config.resolve import RunConfig
    from slurmllm.core.run.records import Submission

_HEADINGS = ("kind", "at step", "class", "lost", "to next step")
_PHASES = ("requeue", "detection", "preflight", "cache", "launch", "start-up", "first step")


@click.command()
@options.run_argument("run", metavar="RUN|RECIPE")
@click.option("--command", hidden=True)  # what follows `--`
@click.option(
    "--kinds",
    default="all",
    help="worker, node, first_node, time_limit, save, hang, and of other projects' trainers "
    "terminate, full_disk, separated by commas; or all.",
)
@click.option(
    "--steps",
    type=int,
    help="Steps of each copy, which saves three checkpoints; another project's trainer is ended "
    "there.  [default: from the run's step time]",
)
@options.cluster
@options.num_nodes(help="Nodes of each copy.  [default: as the run]")
@options.flag("--local", "Run the copies on this machine, without Slurm.")
@click.option("--seed", default=0, help="Seed by which the faults' steps and workers are chosen.")
@options.flag("--keep", "Keep the copies; those that failed are always kept.")
@click.option(
    "--tolerance",
    type=float,
    help="Relative tolerance of loss and gradient norm, for hardware whose results are not "
    "reproducible.  [default: bit-identical]",
)
@options.set_value
@options.runs_dir
@options.as_json
def drill(
    run: str,
    command: str | None,
    cluster: str | None,
    nodes: int | None,
    local: bool,
    kinds: str,
    keep: bool,
    tolerance: float | None,
    overrides: Texts,
    runs_dir: Path,
    as_json: bool,
    **planned: Any,  # steps and seed
) -> None:
    """Test that RUN recovers exactly from failures.

    Injects faults into short copies of RUN. The copies are runs in the same folder, with RUN's
    configuration and number of nodes, one after the other; their curves must be bit-identical
    to that of a copy without a fault. RUN gets a report, and is otherwise only read.

    With RECIPE or `-- COMMAND …` of a trainer of another project in place of RUN, it tells whether
    that trainer resumes exactly, and how many steps it loses.

    Exit codes: 0 all copies recovered exactly, 1 one did not, 2 invalid input or configuration,
    5 the others recovered, and some got no fault before their last step: not tested.
    """
    from slurmllm.analysis.compare.result import Tolerances, check_tolerances
    from slurmllm.analysis.drill.drill import Drill, LocalRunner, SlurmRunner
    from slurmllm.analysis.drill.plan import make_plan, parse_kinds, why_no_reference
    from slurmllm.core.slurm.client import SlurmClient
    from slurmllm.launch.submit.resume import nodes_and_mode

    client = SlurmClient()
    tolerances = Tolerances(exact=True)
    if tolerance is not None:
        check_tolerances({"--tolerance": tolerance})
        tolerances = Tolerances(loss=tolerance, grad_norm=tolerance)
    drilled, config, last, overrides = _find(run, runs_dir, cluster, local, command, overrides)
    count, here = nodes_and_mode(last, nodes, local)
    chosen = parse_kinds(kinds, count, not config.recipe.worker.has_model)
    plan = make_plan(drilled, config, count, here, chosen, overrides=overrides, **planned)
    reason = why_no_reference(plan, overrides)
    runner = LocalRunner() if plan.local else SlurmRunner(client)
    if not as_json:
        _print_plan(plan, reason)
    passed = "exact" if tolerance is None else f"within {tolerance:g}"
    echo_row = partial(_echo_row, of_trainer=plan.trainer is not None, passed=passed)
    echo = (lambda result: None) if as_json else echo_row
    report = _run(Drill(plan, runner, client, tolerances, reason is None, _progress(), echo), keep)
    if as_json:
        summary = {"passed": report.passed, **report.model_dump(mode="json")}
        options.echo_json({**summary, "results": str(plan.results)})
    else:
        _print(report)
        click.echo(f"results: {plan.results}")
    untested = EXIT_OK if report.passed else EXIT_NOT_TESTED
    raise Exit(EXIT_NEGATIVE if report.failed else untested)


def _print_plan(plan: DrillPlan, reason: str | None) -> None:
    source = f"a separate run, because {reason}" if reason else f"{plan.run.name} itself"
    extent = f"{plan.steps or 'all'} steps each"
    if plan.trainer is not None:
        source = "two separate runs, for their noise"
    else:
        extent += f", a checkpoint every {plan.every_steps}"
    click.echo(f"drill      {', '.join(plan.kinds)}: {extent}, {plan.nodes} node(s)")
    click.echo(f"reference  {source}")
    _echo_row(None, plan.trainer is not None)


def _find(
    name: str,
    runs_dir: Path,
    cluster: str | None,
    local: bool,
    command: str | None,
    overrides: Texts,
) -> tuple[RunDir, RunConfig, Submission | None, Texts]:
    """Return the run, or the recipe with a command, of which copies are made.

    The directory of a recipe does not exist. The overrides are those not in the configuration.
    """
    from slurmllm.core.config.load import load
    from slurmllm.core.config.profiles import TRAINERS, available
    from slurmllm.core.config.resolve import local_cluster, recipes_dir, resolve
    from slurmllm.core.run.records import JobsRecord
    from slurmllm.launch.submit.inputs import with_folder

    is_file = name.startswith(f"{TRAINERS}/") or name.endswith((".yaml", ".yml"))
    is_recipe = is_file or name in available(recipes_dir())
    if command is None and (not is_recipe or is_run(runs_dir / name)):
        run = find_run(name, runs_dir)
        if cluster is not None:
            raise RunError(f"--cluster {cluster}: {name} is a run, with a profile; leave it out")
        return run, load(run.config, trusted=True), JobsRecord.of(run).last, overrides
    config = resolve(
        name, local_cluster(cluster, local), overrides, {"command.run": ("command line", command)}
    )
    if config.recipe.worker.has_model:
        raise RunError(
            f"{name} is a recipe without a command: `slurmllm submit {name} --smoke`, then "
            "`slurmllm drill` with the name of that run"
        )
    return RunDir(runs_dir / config.recipe.name), with_folder(config), None, ()


def _run(drilling: Drill, keep: bool) -> DrillReport:
    # As Ctrl-C: the active copy is cancelled.
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return drilling.run(keep)
    except BaseException:
        if names := ", ".join(copy.name for copy in drilling.copies):
            options.note(f"runs of the drill that were not removed: {names}")
        if drilling.plan.results.is_file():
            options.note(f"results so far: {drilling.plan.results}")
        raise
    finally:
        signal.signal(signal.SIGTERM, previous)


def _progress() -> Callable[[str], None]:
    """Return a function that prints the status of a copy when it changes."""
    last = ""

    def echo(status: str) -> None:
        nonlocal last
        status = status.partition(", step")[0]  # not a line for every step
        if status != last:
            options.note(status)
        last = status

    return echo


def _print(report: DrillReport) -> None:
    if report.kept:
        click.echo(f"kept: {', '.join(report.kept)}")
    tested = [result for result in report.drills if result.tested]
    failed = report.failed
    count = len(tested)
    if tested and report.repeat is not None:
        lost = max(result.steps_lost or 0 for result in tested)
        times = [result.recovery.total_s for result in tested if result.recovery]
        click.echo(
            f"{report.run} {_how_resumed(tested)} of {count} faults: up to {lost} steps "
            f"lost, {max(times, default=0.0):.1f} s to the next step"
        )
    elif tested and not failed:
        click.echo(f"{report.run} recovers from {count} of {count}: curves match the reference")
    if untested := [result.kind for result in report.drills if not result.tested]:
        click.echo(f"not tested: {', '.join(untested)}")
    if failed:
        click.echo(f"failed: see `slurmllm status {failed[0]}` and `slurmllm logs {failed[0]}`")


def _how_resumed(tested: Sequence[DrillResult]) -> str:
    """Return how a trainer of another project resumed: `resumes exactly after 2`."""
    passed = [result.resume for result in tested if result.passed and result.resume]
    if not passed:
        return f"does not resume exactly after {len(tested)}"
    how = "exactly in the digits printed"
    if any(resume.verdict != "exact" for resume in passed):
        how = "within the noise"
    elif all(resume.text == "exact" for resume in passed):
        how = "exactly"
    return f"resumes {how} after {len(passed)}"


def _echo_row(result: DrillResult | None, of_trainer: bool = False, passed: str = "exact") -> None:
    """Print the row of a copy that has ended, with its faults; None: the headings."""
    # The widths are those of the longest usual row: the later rows are not known yet.
    headings = (*_HEADINGS, *(("from step", "resume") if of_trainer else (*_PHASES, "verdict")))
    longest = ["first_node", "", "storage_failure" if of_trainer else "advance_signal"]
    rows: list[Sequence[str]] = [longest + [""] * len(headings[3:])]
    if result is not None:
        rows.append(_row(result, of_trainer, passed))
    heading, _, *lines = fitted([*map(Column, headings)], rows, 0).lines
    if result is None:
        click.secho(heading, bold=True)
        return
    head = result.kind if result.tested else f"{result.kind}: not tested"
    for line in (*lines, *(f"{head}: {fault}" for fault in result.faults)):
        click.echo(line)


def _row(result: DrillResult, of_trainer: bool, passed: str) -> Texts:
    def number(value: int | None) -> str:
        return "" if value is None else str(value)

    seconds = [""] * 8
    if result.recovery is not None:
        total_s, *phases = result.recovery.model_dump().values()  # in the order of the columns
        seconds = [f"{total_s:.1f} s", *(f"{phase:.1f}" for phase in phases)]
    verdict = passed if result.passed else "failed" if result.tested else "not tested"
    if of_trainer:
        seconds = [seconds[0], ""]
    if (resume := result.resume) is not None:
        seconds[1] = number(resume.from_step)
        by_hand = ", resumed by hand" if resume.by_hand else ""
        verdict = f"{resume.text} ({resume.confidence}){by_hand}"
    return (
        result.kind,
        number(result.at_step),
        result.ending or "",
        number(result.steps_lost),
        *seconds,
        verdict,
    )
