"""`slurmllm report`: results, throughput and cost of runs, as tables and as a page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from slurmllm.cli import options
from slurmllm.core.display.tables import print_table
from slurmllm.core.errors import StorageError, UserError
from slurmllm.core.format import Texts, format_names, format_number, format_percent, format_plural
from slurmllm.core.run.rundir import find_run, find_sweep

if TYPE_CHECKING:
    from slurmllm.analysis.report.facts import Runs
    from slurmllm.analysis.report.tables import Table
    from slurmllm.analysis.status.runs import RankedRun, SweepState
    from slurmllm.core.slurm.client import SlurmClient

    Rankings = Sequence[tuple[SweepState, list[RankedRun]]]

_MOST_OF_SWEEP = 20  # runs in the page of a sweep


@click.command()
@options.run_argument("sources", nargs=-1, required=True, metavar="SOURCE…")
@options.price
@click.option(
    "--out",
    metavar="FILE.html",
    help="Page (default: reports/report.html of the run; of several runs report-A-B.html of A).",
)
@options.flag("--no-files", "Write no page; only print the tables.")
@options.log_options
@options.flag("--prediction", "Only compare a run with what `plan` predicts for it.")
@click.option(
    "--cluster",
    metavar="PROFILE",
    shell_complete=options.complete_recipe,
    help="With --prediction: the profile of the hardware figures.  [default: the run's]",
)
@options.runs_dir
@options.as_json
def report(
    *,
    sources: Texts,
    price: str | None,
    out: str | None,
    no_files: bool,
    prediction: bool,
    cluster: str | None,
    runs_dir: Path,
    as_json: bool,
    of_logs: options.LogOptions,
) -> None:
    """Report curves, throughput, utilization and cost of runs.

    SOURCE is a run's name or directory (a partial copy is enough), another framework's log
    (TensorBoard, JSON lines, CSV, text), or a sweep: a table of its runs, the lowest loss first,
    and a page of the best 20. Writes an HTML page, and the script of its plots beside it.

    Exit codes: 0 success; 2 run not found or invalid options; 4 a file cannot be written.
    """
    from slurmllm.analysis.report.sources import name_and_compare, read_run_facts
    from slurmllm.analysis.report.write import default_path, to_json
    from slurmllm.cli.sweep import print_ranking, ranking_json
    from slurmllm.core.slurm.client import SlurmClient
    from slurmllm.plan.prices import parse_price

    if prediction or cluster is not None:
        alone = prediction and not any((price, out, *of_logs))
        _print_prediction(sources if alone else (), runs_dir, cluster, as_json)
        return
    choice = None if price is None else parse_price(price)
    if out is not None and no_files:
        raise UserError("--out and --no-files exclude each other; give one of them")
    options.check_page("--out", out)
    client = SlurmClient()
    rankings, paths = _locate(sources, runs_dir, client)
    logs = zip(paths, of_logs.arguments(len(paths)), strict=True)
    runs = name_and_compare([read_run_facts(*log, choice, client) for log in logs])
    only_sweeps = len(rankings) == len(sources)
    if not as_json:  # before the page, which may fail
        for state, ranked in rankings:
            print_ranking(state, ranked)
            if len(ranked) > _MOST_OF_SWEEP:
                click.echo(f"the report has the best {_MOST_OF_SWEEP} of {len(ranked)} runs")
        if not only_sweeps:
            _print(runs)
    page = default_path(runs) if out is None else Path(out)
    if out is None and only_sweeps and len(rankings) == 1:
        page = rankings[0][0].sweep.reports / "report.html"
    failure = None if no_files else _write(runs, page, rankings)
    written = None if no_files or failure else page
    if as_json:
        tables = {"sweeps": [ranking_json(*ranking) for ranking in rankings]} if rankings else {}
        click.echo(to_json(runs, written, **tables))
    elif written is not None:
        click.echo(f"report: {written}")
    if failure is not None:  # after the JSON, which has everything but the page
        raise failure


def _write(runs: Runs, page: Path, rankings: Rankings) -> StorageError | None:
    """Write the page; return the error if that fails."""
    from slurmllm.analysis.report.tables import Table
    from slurmllm.analysis.report.write import write_report
    from slurmllm.cli.sweep import ranking_rows

    loss = "loss: mean over the last tenth of a run's steps"
    sweeps = [
        Table(*ranking_rows(state, ranked), f"{state.sweep.name}, {state.summary}; {loss}")
        for state, ranked in rankings
    ]
    heading = None
    if rankings:
        heading = f"Report of {format_names([state.sweep.name for state, _ in rankings])}"
    try:
        write_report(runs, page, sweeps, heading)
    except StorageError as error:
        return StorageError(f"{error}; name another place with --out FILE.html, or --no-files")
    return None


def _locate(
    sources: Sequence[str], runs_dir: Path, client: SlurmClient
) -> tuple[Rankings, list[Path]]:
    """Return the sweeps with their runs by rank, and the paths of all sources of the page."""
    from slurmllm.analysis.report.sources import find_run_directory
    from slurmllm.analysis.status.runs import rank, read_sweep
    from slurmllm.core.metrics.source import locate

    rankings, paths = [], []
    for name in sources:
        if (sweep := find_sweep(name, runs_dir)) is not None:
            state = read_sweep(sweep, client)
            rankings.append((state, rank(state)))
        else:
            paths.append(find_run_directory(name, runs_dir) or locate(name, runs_dir))
    for _, ranked in rankings:
        paths += [Path(run.state.run_dir) for run in ranked[:_MOST_OF_SWEEP]]
    # A run named twice, by its name and its directory, is one.
    return rankings, list(dict.fromkeys(paths))


def _print(runs: Runs) -> None:
    """Print the tables, and each run's warnings."""
    from slurmllm.analysis.report import tables
    from slurmllm.analysis.report.facts import scaling_rows
    from slurmllm.analysis.report.write import compared_runs

    def show(table: Table, before: str = "") -> None:
        click.echo(before)
        print_table(table.headings, table.rows)
        if table.caption:
            click.echo(table.caption)

    for facts in runs:
        click.echo(f"{facts.name}: {tables.verdict(facts)}")
    for title, verdict, _ in compared_runs(runs):
        click.echo(f"{title}: {verdict}")
    # Logs of other frameworks have no node hours.
    used = {facts.name: facts.used for facts in runs if facts.used is not None}
    if used:
        show(tables.parts_table(used))
    if any(facts.rates for facts in runs):
        show(tables.by_column(runs, tables.throughput))
    rows = scaling_rows(runs)
    if len(rows) > 1:  # a single row repeats the table above
        show(tables.scaling_table(rows))
    for facts in runs:
        if facts.lost:
            show(
                tables.recoveries_table(facts.lost), f"\n{facts.name}: {tables.RECOVERIES_CAPTION}"
            )
            show(tables.endings_table(facts.lost))
        for warning in facts.warnings:
            click.echo(f"warning: {facts.name}: {warning}")


def _print_prediction(
    sources: Sequence[str], runs_dir: Path, cluster: str | None, as_json: bool
) -> None:
    """Print predicted and measured figures of the only run."""
    from slurmllm.analysis.report.prediction import check_run_prediction

    if len(sources) != 1:
        raise UserError(
            "--prediction is of one run, alone or with --cluster PROFILE, and writes no files"
        )
    check = check_run_prediction(find_run(sources[0], runs_dir), cluster)
    if as_json:
        click.echo(check.model_dump_json(indent=2))
        return
    attempts = "attempt" if len(check.attempts) <= 1 else "attempts"
    numbers = ", ".join(map(str, check.attempts))
    nodes = format_plural(check.nodes, "node")
    click.echo(
        f"{check.run}: {format_plural(check.steps, 'step')} of {attempts} {numbers} on {nodes}; "
        f"profile {check.cluster}"
    )
    rows = []
    for row in check.rows:
        figures = [_measure(row.unit, value) for value in (row.predicted, row.measured)]
        ratio = "-" if row.ratio is None else f"{row.ratio:.3f}"
        rows.append((row.name, *figures, ratio, row.note))
    headings = ("", "predicted", "measured", "measured / predicted", "what it is")
    print_table(headings, rows, fold="what it is")
    for warning in check.warnings:
        click.echo(f"warning: {warning}")


def _measure(unit: str, value: float | None) -> str:
    if value is None or unit == "":
        return format_percent(value)
    return f"{value / 1e9:.2f} GB" if unit == "bytes" else f"{format_number(value)} {unit}"
