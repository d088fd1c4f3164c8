"""What submit, status, compare and report do with a sweep."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from slurmllm.cli import options

if TYPE_CHECKING:
    from slurmllm.config.resolve import RunConfig
    from slurmllm.run.rundir import SweepDir
    from slurmllm.status.sweeps import RankedRun, SweepState
    from slurmllm.submit.prepare import RunRequest
    from slurmllm.submit.sweep import Case, PreparedSweep

MANY = 100  # cases that are submitted without a question


def read_cases(
    sweep: Sequence[str], sweep_file: str | None, max_running: int | None, local: bool
) -> list[Case]:
    """The cases of --sweep or --sweep-file; none without these options."""
    from slurmllm.errors import UserError
    from slurmllm.submit import sweep as stage

    if sweep and sweep_file is not None:
        raise UserError("--sweep and --sweep-file exclude each other; give one of them")
    if not sweep and sweep_file is None:
        if max_running is not None:
            raise UserError(f"--max-running {max_running} is for sweeps; add --sweep PATH=VALUES")
        return []
    if max_running is not None and (local or max_running < 1):
        why = "the runs of a local sweep are one after the other" if local else "must be 1 or more"
        raise UserError(f"--max-running {max_running}: {why}")
    return stage.grid(sweep) if sweep_file is None else stage.read_cases(Path(sweep_file))


def confirm(count: int, yes: bool) -> None:
    """Ask before many runs are submitted."""
    import sys

    from slurmllm.errors import UserError

    if count <= MANY or yes:
        return
    if not sys.stdin.isatty():
        raise UserError(f"the sweep has {count:,} runs, more than {MANY}; --yes submits them")
    click.confirm(f"submit {count:,} runs?", abort=True, err=True)


def submit(
    request: RunRequest, cases: Sequence[Case], configs: Sequence[RunConfig],
    max_running: int | None, as_json: bool,
) -> int:  # fmt: skip
    """Submit a sweep or run it here; returns the exit code."""
    from slurmllm.errors import EXIT_OK
    from slurmllm.slurm.client import SlurmClient
    from slurmllm.submit.sweep import prepare_sweep, run_sweep_locally, submit_sweep

    prepared = prepare_sweep(request, cases, configs, max_running)
    for warning in dict.fromkeys(w for run in prepared.runs if run.fit for w in run.fit.warnings):
        click.echo(f"warning: {warning}", err=True)
    for run in prepared.runs:
        for reason in run.refusals:
            click.echo(f"warning: submit would refuse {run.run.name}: {reason}", err=True)
    if request.dry_run:
        _print_prepared(prepared, [], as_json)
        click.echo("dry run: nothing was written, nothing submitted", err=True)
        for run in prepared.runs:
            run.require_data()
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
        click.echo(f"done       slurmllm compare {prepared.sweep.name}")
    return next((code for code in codes.values() if code != EXIT_OK), EXIT_OK)


def _print_prepared(
    prepared: PreparedSweep, jobs: Sequence[str], as_json: bool, **more: Any
) -> None:
    """Print the runs of a sweep with their jobs, as `submit_sweep` yields them, and graphs."""
    name = prepared.sweep.name
    train_jobs: list[str | None] = [*jobs[len(prepared.precompiles) :]]
    train_jobs = train_jobs or [None] * len(prepared.runs)
    by_graphs = {g.run.name: job for g, job in zip(prepared.precompiles, jobs, strict=False)}
    labels = prepared.record.labels
    if as_json:
        found = {
            "sweep": name,
            "sweep_dir": str(prepared.sweep.path),
            "max_running": prepared.record.max_running,
            "graphs": [
                {
                    "run_dir": str(g.run.path),
                    "graphs_from": g.graphs_from,
                    "precompile_job": by_graphs.get(g.run.name),
                }
                for g in prepared.graphs
            ],
            "runs": [
                {
                    "run": run.run.name,
                    "run_dir": str(run.run.path),
                    "values": case.values,
                    "graphs": run.graphs_from,
                    "lane": prepared.lane(place),
                    "train_job": job,
                    "refusals": [*run.refusals, *run.missing_data],
                }
                for place, (run, case, job) in enumerate(
                    zip(prepared.runs, prepared.record.cases, train_jobs, strict=True)
                )
            ],
            **more,
        }
        options.echo_json(found, indent=None)
        return
    from slurmllm.display.tables import print_table

    limit = prepared.record.max_running
    click.echo(
        f"sweep      {name}: {len(prepared.runs)} runs" + f", {limit} at a time" * bool(limit)
    )
    click.echo(f"directory  {prepared.sweep.path}")
    for graphs in prepared.graphs:
        source = f"compiled by run {graphs.graphs_from} already"
        if graphs.graphs_from is None:
            job = by_graphs.get(graphs.run.name)
            source = f"precompile job {job}" if job else "one precompile stage"
        users = sum(run.graphs_from == graphs.run.name for run in prepared.runs)
        click.echo(f"graphs     {source}, for {users} runs")
    rows = [
        (run.run.name, *(case.values.get(path, "") for path in labels), *([job] if job else []))
        for run, case, job in zip(prepared.runs, prepared.record.cases, train_jobs, strict=True)
    ]
    print_table(("run", *labels.values(), *(["train job"] if jobs else [])), rows)
    if jobs:
        for number, verb in enumerate(("status", "compare", "cancel")):
            click.echo(f"{'' if number else 'next':<10} slurmllm {verb} {name}")


def print_table_of(sweep: SweepDir, as_json: bool) -> None:
    """Print the runs of a sweep, the best first."""
    from slurmllm.slurm.client import SlurmClient
    from slurmllm.status.sweeps import rank, read_sweep

    state = read_sweep(sweep, SlurmClient())
    ranked = rank(state)
    if as_json:
        options.echo_json(ranking_json(state, ranked))
    else:
        print_ranking(state, ranked)


def ranking_json(state: SweepState, ranked: Sequence[RankedRun]) -> dict[str, Any]:
    runs = [{"rank": place, **one.to_json()} for place, one in enumerate(ranked, 1)]
    return {**state.to_json(), "runs": runs}


def print_ranking(state: SweepState, ranked: Sequence[RankedRun]) -> None:
    from slurmllm.display.tables import print_table
    from slurmllm.format import format_hours

    labels = state.record.labels
    click.echo(f"sweep {state.sweep.name}, {state.summary}")
    has_price = any(one.state.usd is not None for one in ranked)

    def shown(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    rows = [
        (
            *(str(place), one.state.name, *(one.values.get(path, "") for path in labels)),
            *(one.state.state, f"{one.state.step}/{one.state.steps}", shown(one.loss, ".4f")),
            *(shown(one.state.loss, ".4f"), shown(one.state.seq_per_s, ".1f")),
            *(format_hours(one.state.node_hours), str(one.state.restarts)),
            *([shown(one.state.usd, ",.2f")] if has_price else []),
        )
        for place, one in enumerate(ranked, 1)
    ]
    headings = ("rank", "run", *labels.values(), "state", "step", "loss", "last loss", "seq/s")
    print_table((*headings, "node h", "restarts", *(["usd"] if has_price else [])), rows)
    click.echo("loss: mean over the last tenth of a run's steps")
    for one in ranked:
        if one.state.reason and one.state.state in ("stopped", "interrupted", "damaged"):
            click.echo(f"{one.state.name}: {one.state.reason}")
