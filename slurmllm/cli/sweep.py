"""What submit, status, compare and report do with a sweep."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from slurmllm.cli import options
from slurmllm.core.display.tables import print_table
from slurmllm.core.errors import EXIT_INTERRUPTED, EXIT_OK, UserError
from slurmllm.core.format import Json, Texts, format_hours, format_plural
from slurmllm.core.run.rundir import SweepDir

if TYPE_CHECKING:
    from slurmllm.analysis.status.runs import RankedRun, SweepState
    from slurmllm.core.config.resolve import RunConfig
    from slurmllm.core.slurm.client import Names
    from slurmllm.launch.submit.prepare import RunRequest
    from slurmllm.launch.submit.sweep import Case, PreparedSweep

MANY = 100  # cases that are submitted without a question


class SweepOptions(NamedTuple):
    """The options of `submit` for sweeps."""

    sweep: Texts
    sweep_file: str | None
    max_running: int | None
    yes: bool


sweep_options = options.grouped(
    "sweep",
    SweepOptions,
    SweepOptions._fields,
    options.repeatable(
        "--sweep",
        "PATH=V1,V2",
        "Submit a run for each value, such as optim.lr=1e-4,3e-4; repeatable: for each "
        "combination.",
    ),
    click.option(
        "--sweep-file",
        metavar="FILE.yaml",
        help="Submit a run for each case of the file, such as `low: {optim.lr: 1e-4}`.",
    ),
    click.option(
        "--max-running", type=int, help="Runs of a sweep that train at a time.  [default: all]"
    ),
    options.flag("--yes", "Do not ask before a sweep of more than 100 runs."),
)


def read_cases(requested: SweepOptions, local: bool) -> list[Case]:
    """Return the cases of --sweep or --sweep-file; none without these options."""
    from slurmllm.launch.submit.sweep import grid, read_cases

    sweep, sweep_file, max_running, _ = requested
    if sweep and sweep_file is not None:
        raise UserError("--sweep and --sweep-file exclude each other; give one of them")
    if not sweep and sweep_file is None:
        if max_running is not None:
            raise UserError(f"--max-running {max_running} is for sweeps; add --sweep PATH=VALUES")
        return []
    if max_running is not None and (local or max_running < 1):
        why = "the runs of a local sweep are one after the other" if local else "must be 1 or more"
        raise UserError(f"--max-running {max_running}: {why}")
    return grid(sweep) if sweep_file is None else read_cases(Path(sweep_file))


def confirm(count: int, yes: bool) -> None:
    """Ask before many runs are submitted."""
    if count <= MANY or yes:
        return
    if not sys.stdin.isatty():
        raise UserError(f"the sweep has {count:,} runs, more than {MANY}; --yes submits them")
    click.confirm(f"submit {count:,} runs?", abort=True, err=True)


def submit(
    request: RunRequest,
    cases: Sequence[Case],
    configs: Sequence[RunConfig],
    max_running: int | None,
    as_json: bool,
) -> int:
    """Submit a sweep or run it here; returns the exit code."""
    from slurmllm.core.slurm.client import SlurmClient
    from slurmllm.launch.submit.sweep import prepare_sweep, run_sweep_locally, submit_sweep

    prepared = prepare_sweep(request, cases, configs, max_running)
    for warning in dict.fromkeys(chain.from_iterable(run.warnings for run in prepared.runs)):
        options.warn(warning)
    for run in prepared.runs:
        for refusal in chain.from_iterable(error.faults for error in run.refused):
            options.warn(f"submit would refuse {run.run.name}: {refusal}")
    if request.dry_run:
        _print_prepared(prepared, [], as_json)
        options.note("dry run: nothing was written, nothing submitted")
        for error in chain.from_iterable(run.unstartable for run in prepared.runs):
            raise error
        return EXIT_OK
    if not request.local:
        _print_prepared(prepared, list(submit_sweep(prepared, SlurmClient())), as_json)
        return EXIT_OK
    if not as_json:
        _print_prepared(prepared, [], as_json)
    codes = run_sweep_locally(prepared, quiet=as_json)
    if as_json:
        _print_prepared(prepared, [], as_json, exit_codes=codes)
    else:
        _print_end(prepared, codes)
    return next((code for code in codes.values() if code != EXIT_OK), EXIT_OK)


def _print_end(prepared: PreparedSweep, codes: Mapping[str, int]) -> None:
    """Print how a sweep on this machine has ended, the runs that it did not start, and what next.

    `codes`: run → exit code, of those that were started.
    """
    from slurmllm.launch.supervise.run_state import start_command

    if EXIT_INTERRUPTED not in codes.values():
        state, verb = ("stopped", "status") if any(codes.values()) else ("done", "compare")
        click.echo(f"{state:<10} slurmllm {verb} {prepared.sweep.name}")
        return
    for state, code in (("not started", None), ("interrupted", EXIT_INTERRUPTED)):
        for run in prepared.runs:
            if codes.get(run.run.name) == code:
                options.note(f"{state}  {start_command(run.run)}")


def _print_prepared(prepared: PreparedSweep, jobs: Names, as_json: bool, **more: Any) -> None:
    """Print the runs of a sweep with their jobs, as `submit_sweep` yields them, and graphs."""
    names = [graphs.run.name for graphs in prepared.precompiles]
    train_jobs: list[str | None] = [*jobs[len(names) :]] or [None] * len(prepared.runs)
    precompile_jobs = dict(zip(names, jobs, strict=False))
    name = prepared.sweep.name
    record = prepared.record
    rows = list(zip(prepared.runs, record.cases, train_jobs, strict=True))
    if as_json:
        graphs_of_runs = [
            {
                "run_dir": str(graphs.run.path),
                "graphs_from": graphs.graphs_from,
                "precompile_job": precompile_jobs.get(graphs.run.name),
            }
            for graphs in prepared.graphs
        ]
        runs = [
            {
                "run": run.run.name,
                "run_dir": str(run.run.path),
                "values": case.values,
                "graphs": run.graphs_from,
                "lane": prepared.lane(number),
                "train_job": job,
                "refusals": run.refusals,
            }
            for number, (run, case, job) in enumerate(rows)
        ]
        summary: Json = {"sweep": name, "sweep_dir": str(prepared.sweep.path)}
        summary |= {"max_running": record.max_running, "graphs": graphs_of_runs, "runs": runs}
        options.echo_json({**summary, **more}, indent=None)
        return
    at_a_time = "" if record.max_running is None else f", {record.max_running} at a time"
    click.echo(f"sweep      {name}: {format_plural(len(prepared.runs), 'run')}{at_a_time}")
    click.echo(f"directory  {prepared.sweep.path}")
    for graphs in prepared.graphs:
        source = f"compiled by run {graphs.graphs_from} already"
        if graphs.graphs_from is None:
            job = precompile_jobs.get(graphs.run.name)
            source = f"precompile job {job}" if job else "one precompile stage"
        users = sum(run.graphs_from == graphs.run.name for run in prepared.runs)
        click.echo(f"graphs     {source}, for {format_plural(users, 'run')}")
    labels = record.labels
    cells = (
        (run.run.name, *(case.values.get(path, "") for path in labels), *([job] if job else []))
        for run, case, job in rows
    )
    print_table(("run", *labels.values(), *(["train job"] if jobs else [])), cells)
    if jobs:
        for number, verb in enumerate(("status", "compare", "cancel")):
            click.echo(f"{'' if number else 'next':<10} slurmllm {verb} {name}")


def print_table_of(sweep: SweepDir, as_json: bool) -> None:
    """Print the runs of a sweep, the best first."""
    from slurmllm.analysis.status.runs import rank, read_sweep
    from slurmllm.core.slurm.client import SlurmClient

    state = read_sweep(sweep, SlurmClient())
    ranked = rank(state)
    if as_json:
        options.echo_json(ranking_json(state, ranked))
    else:
        print_ranking(state, ranked)


def ranking_json(state: SweepState, ranked: Sequence[RankedRun]) -> Json:
    runs = [{"rank": number, **run.to_json()} for number, run in enumerate(ranked, 1)]
    return {**state.to_json(), "runs": runs}


def ranking_rows(state: SweepState, ranked: Sequence[RankedRun]) -> tuple[Texts, list[Texts]]:
    """Return the headings and the rows of a sweep's runs, with the values that differ."""
    labels = state.record.labels
    has_price = any(run.state.usd is not None for run in ranked)

    def figure(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    rows = [
        (
            str(number),
            run.state.name,
            *(run.values.get(path, "") for path in labels),
            run.state.state_text,
            run.state.step_text,
            figure(run.loss, ".4f"),
            figure(run.state.loss, ".4f"),
            figure(run.state.seq_per_s, ".1f"),
            format_hours(run.state.node_hours),
            str(run.state.restarts),
            *([figure(run.state.usd, ",.2f")] if has_price else []),
        )
        for number, run in enumerate(ranked, 1)
    ]
    headings = ("rank", "run", *labels.values(), "state", "step", "loss", "last loss", "seq/s")
    return (*headings, "node h", "restarts", *(["usd"] if has_price else [])), rows


def print_ranking(state: SweepState, ranked: Sequence[RankedRun]) -> None:
    click.echo(f"sweep {state.sweep.name}, {state.summary}")
    print_table(*ranking_rows(state, ranked))
    click.echo("loss: mean over the last tenth of a run's steps")
    for run in ranked:
        if run.state.reason and run.state.state in ("stopped", "interrupted", "damaged"):
            click.echo(f"{run.state.name}: {run.state.reason}")
