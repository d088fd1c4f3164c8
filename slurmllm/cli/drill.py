"""`slurmllm drill RUN`: will this run survive? Break copies of it and see."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import click

from slurmllm.cli import options

if TYPE_CHECKING:
    from slurmllm.compare.comparison import Tolerances
    from slurmllm.drill.kinds import Drilled, DrillReport
    from slurmllm.records import JobsRecord

_HEADINGS = (
    "kind", "at step", "class", "lost", "to next step", "requeue", "detection", "preflight",
    "cache", "launch", "start-up", "first step", "verdict",
)  # fmt: skip


@click.command()
@click.argument("run")
@click.option(
    "--kinds",
    default="all",
    show_default=True,
    help="worker, node, first_node, time_limit, save, hang: some with commas between, or all.",
)
@click.option(
    "--steps",
    type=int,
    help="Steps of each run, three checkpoints in them.  [default: by the run's pace]",
)
@click.option("--nodes", type=int, help="Nodes of each run.  [default: as the run]")
@click.option("--local", is_flag=True, help="On this machine, without Slurm.")
@click.option(
    "--seed", type=int, default=0, show_default=True, help="Decides the moments and who is struck."
)
@click.option("--keep", is_flag=True, help="Keep the drill's runs; those that failed stay anyway.")
@click.option(
    "--tolerance",
    type=float,
    help="Relative tolerance of loss and gradient norm, where the hardware does not repeat "
    "itself.  [default: bit-identical]",
)
@options.set_value
@options.runs_dir
@options.as_json
@click.pass_context
def drill(
    ctx: click.Context,
    *,
    run: str,
    kinds: str,
    steps: int | None,
    nodes: int | None,
    local: bool,
    seed: int,
    keep: bool,
    tolerance: float | None,
    overrides: tuple[str, ...],
    runs_dir: str | None,
    as_json: bool,
) -> None:
    """Prove that RUN would go on exactly after a failure: break short copies of it.

    The copies are runs beside RUN with RUN's configuration, on as many nodes, broken one after the
    other; their curves must be those of an unbroken one, bit by bit. RUN itself is only read.

    Exit codes: 0 all went on exactly, 1 one did not, 2 to be put right.
    """
    import signal

    from slurmllm.config.load import load
    from slurmllm.drill.drill import Drill
    from slurmllm.drill.kinds import chosen
    from slurmllm.drill.plan import make_plan, why_no_reference
    from slurmllm.drill.runner import LocalRunner, SlurmRunner
    from slurmllm.errors import EXIT_NEGATIVE
    from slurmllm.rundir import find_run, runs_root
    from slurmllm.slurm.client import SlurmCommands
    from slurmllm.submit.prepare import jobs_of

    tolerances = _tolerances(tolerance)
    found = find_run(run, runs_root(runs_dir))
    wanted, here = _place(jobs_of(found), nodes, local)
    plan = make_plan(
        found, load(found.config), wanted, here, chosen(kinds, wanted), steps=steps, seed=seed,
        overrides=overrides,
    )  # fmt: skip
    why = why_no_reference(plan, overrides)
    client = SlurmCommands()
    runner = LocalRunner() if here else SlurmRunner(client)
    if not as_json:
        source = f"a run of its own, since {why}" if why else f"{found.name} itself"
        click.echo(
            f"drill      {', '.join(plan.kinds)}: {plan.steps} steps each, a checkpoint every "
            f"{plan.every_steps}, {wanted} node(s)\nreference  {source}"
        )
    with _progress() as tell:
        drilling = Drill(plan, runner, client, tolerances, not why, tell)
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # cancels what runs
        try:
            report = drilling.run(keep)
        except BaseException:
            _tell_kept([made.name for made in drilling.made])
            raise
        finally:
            signal.signal(signal.SIGTERM, before)
    if as_json:
        click.echo(_as_json(report))
    else:
        _print(report)
    ctx.exit(0 if report.passed else EXIT_NEGATIVE)


def _tolerances(tolerance: float | None) -> Tolerances:
    from slurmllm.compare.comparison import Tolerances
    from slurmllm.errors import RunError

    if tolerance is None:
        return Tolerances(exact=True)
    if not 0 <= tolerance < float("inf"):
        raise RunError(f"--tolerance {tolerance:g}: a tolerance is 0 or more, such as 1e-3")
    return Tolerances(loss=tolerance, grad_norm=tolerance)


def _place(jobs: JobsRecord, nodes: int | None, local: bool) -> tuple[int, bool]:
    """Nodes, and whether they are launchers on this machine: as the run has it, if not said."""
    from slurmllm.errors import RunError

    if nodes is not None and nodes < 1:
        raise RunError(f"--nodes {nodes}: must be 1 or more")
    last = jobs.submissions[-1] if jobs.submissions else None
    wanted = nodes if nodes is not None else last.nodes if last else 1
    return wanted, local or (last is not None and last.local)


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """A line on the terminal that changes; where there is none, a line for each run begun."""
    from rich.console import Console
    from rich.markup import escape

    terminal = Console(stderr=True, highlight=False)
    if terminal.is_terminal:
        with terminal.status("") as status:
            yield lambda words: status.update(escape(words))
        return
    before = [""]

    def tell(words: str) -> None:
        begun = words.partition(", step")[0]  # not a line a step
        if begun != before[0]:
            before[0] = begun
            click.echo(begun, err=True)

    yield tell


def _tell_kept(names: list[str]) -> None:
    if names:
        click.echo(f"runs of the drill that are left: {', '.join(names)}", err=True)


def _as_json(report: DrillReport) -> str:
    import json

    return json.dumps({"passed": report.passed, **report.model_dump(mode="json")}, indent=2)


def _print(report: DrillReport) -> None:
    from slurmllm.tables import print_table

    print_table(_HEADINGS, (_row(one) for one in report.drills), fold="verdict")
    for one in report.drills:
        for fault in one.faults:
            click.echo(f"{one.kind}: {fault}")
    if report.kept:
        click.echo(f"kept: {', '.join(report.kept)}")
    if report.passed:
        words = "curves as those of the unbroken run"
        click.echo(f"{report.run} survives {len(report.drills)} of {len(report.drills)}: {words}")
    else:
        failed = [one.run for one in report.drills if not one.passed]
        click.echo(f"failed: see `slurmllm status {failed[0]}` and `slurmllm logs {failed[0]}`")


def _row(one: Drilled) -> tuple[str, ...]:
    took = one.recovery
    parts = (
        (took.requeue_s, took.detection_s, took.preflight_s, took.cache_s, took.launch_s,
         took.start_up_s, took.first_step_s)
        if took is not None else ()
    )  # fmt: skip
    seconds = [f"{part:.1f}" for part in parts] or [""] * 7
    return (
        one.kind,
        "" if one.at_step is None else str(one.at_step),
        one.ending or "",
        "" if one.steps_lost is None else str(one.steps_lost),
        "" if took is None else f"{took.total_s:.1f} s",
        *seconds,
        "exact" if one.passed else "failed",
    )
