"""`slurmllm nodes`: the nodes that runs exclude, and the end of their exclusion."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import click

from slurmllm.cli import options
from slurmllm.core.errors import SlurmError, StorageError, UserError
from slurmllm.core.format import Texts, Values, format_time
from slurmllm.core.run.rundir import RunDir, find_run

if TYPE_CHECKING:
    from slurmllm.core.slurm.client import Names, SlurmClient

LONGEST_HOURS = 720.0  # `site_nodes.LONGEST_HOURS`, without its imports
include_option = options.repeatable(
    "--include included", "NODE", "Use an excluded node again, in pending jobs too; repeatable."
)


@click.command()
@options.run_argument("run", required=False)
@options.repeatable(
    "--exclude excluding", "NODES", "Exclude nodes, such as n[1-4], from new jobs; repeatable."
)
@click.option("--reason", help="With --exclude: the reason.")
@click.option(
    "--hours",
    type=click.FloatRange(0.0, LONGEST_HOURS, min_open=True),
    default=24.0,
    show_default=True,
    help=f"With --exclude: hours until it ends, {LONGEST_HOURS:g} at most.",
)
@options.repeatable(
    "--clear cleared", "NODES", "End the exclusion of nodes for all runs; repeatable."
)
@include_option
@options.runs_dir
@options.as_json
def nodes(
    run: str | None,
    excluding: Texts,
    reason: str | None,
    hours: float,
    cleared: Texts,
    included: Texts,
    runs_dir: Path,
    as_json: bool,
) -> None:
    """List excluded nodes, exclude nodes, or end exclusions.

    Shows the reason, evidence and end of each exclusion. New jobs of all runs in this folder avoid
    a node that one run excludes. A node whose exclusion has expired is shown while a pending job
    still excludes it. --include without RUN is --clear.
    """
    from slurmllm.analysis.status.runs import list_runs
    from slurmllm.core.slurm.client import SlurmClient
    from slurmllm.launch.supervise.site_nodes import change_by_user, site_rows

    cleared = cleared if run is not None else (*cleared, *included)
    if run is not None and (excluding or cleared):
        raise UserError("--exclude and --clear are for all runs; leave out RUN")
    if bool(excluding) != bool(reason):
        raise UserError("--exclude and --reason belong together: `--exclude n7 --reason TEXT`")
    if math.isnan(hours):
        raise UserError("--hours nan: write a number of hours")
    client = SlurmClient()
    runs = [*filter(_readable, list_runs(runs_dir))] if run is None else [find_run(run, runs_dir)]
    if run is not None and included:
        include_nodes(runs[0], client, included)
    if excluding:
        records = change_by_user(runs_dir, client, excluding, str(reason), hours)
        names = " ".join(record.node for record in records)
        until = format_time(records[0].until)
        options.note(f"{names}: excluded until {until} from new and requeued jobs of all runs")
    if cleared:
        names = " ".join(r.node for r in change_by_user(runs_dir, client, cleared))
        options.note(f"{names}: no longer excluded from new jobs; pending jobs keep their lists")
    rows = _rows(runs, client)
    site: Sequence[Values] = []
    try:
        site = site_rows(runs_dir, client)
    except SlurmError as error:
        options.warn(f"cannot list the excluded nodes of the site: {error}")
    if as_json:
        options.echo_json({"excluded": rows, "site": site})
    elif rows or site:
        _print(rows, site)
    else:
        click.echo("no node is excluded")


def _readable(run: RunDir) -> bool:
    """Whether a run's records can be read; warns if not, as for another user's run."""
    from slurmllm.core.run.records import JobsRecord

    try:
        JobsRecord.of(run)
    except StorageError as error:
        options.warn(error)
        return False
    return True


def _rows(runs: Sequence[RunDir], client: SlurmClient) -> Sequence[Values]:
    """Return the nodes that runs exclude, and those that their pending jobs exclude."""
    from slurmllm.core.run.records import last_submission
    from slurmllm.launch.supervise.exclusion import excluded, excluded_by_jobs

    jobs_of = {run.name: last.own_jobs for run in runs if (last := last_submission(run))}
    lists: dict[str, list[str]] = {}
    try:  # one query for the jobs of all runs
        lists = excluded_by_jobs(client, [*chain.from_iterable(jobs_of.values())])
    except SlurmError as error:
        options.warn(f"the lists of pending jobs are unknown: {error}")
    unknown = dict.fromkeys(("reason", "evidence", "exclusions", "since", "until"))
    rows = []
    for run in runs:
        recorded = {node.node: node.model_dump() for node in excluded(run)}
        jobs = {job: lists[job] for job in jobs_of.get(run.name, ()) if job in lists}
        for name in sorted({*recorded}.union(*jobs.values())):
            row = {"run": run.name, "node": name, **unknown, **recorded.get(name, {})}
            rows.append({**row, "jobs": [job for job, names in jobs.items() if name in names]})
    return rows


def _print(rows: Sequence[Values], site: Sequence[Values]) -> None:
    def time_of(key: str) -> Callable[[Values], str]:
        return lambda row: format_time(row[key]) if row[key] else ""

    columns: options.Columns = {
        "run": "run",
        "node": "node",
        "evidence": lambda row: row["evidence"] or "",
        "since": time_of("since"),
        "until": time_of("until"),
    }
    if rows:
        of_runs: options.Columns = {
            **columns,
            "pending jobs": lambda row: " ".join(row["jobs"]),
            "reason": lambda row: row["reason"] or "slurm.exclude or the site, or expired",
        }
        options.print_rows(False, "", rows, of_runs, "reason")
        options.note("excluded from the run's jobs; `slurmllm nodes RUN --include NODE` ends it")
    if site:
        of_site = {**columns, "user": "user", "avoided": "avoided", "reason": "reason"}
        options.print_rows(False, "", site, of_site, "reason")
        options.note(
            "new jobs of all runs avoid them, but at most a quarter of a partition; "
            "`slurmllm nodes --clear NODE` ends it"
        )


def include_nodes(run: RunDir, client: SlurmClient, names: Names) -> None:
    """End the exclusion of nodes and print what changed; UserError if one is not excluded."""
    from slurmllm.launch.supervise.exclusion import include
    from slurmllm.launch.supervise.run_lock import locked

    with locked(run, "nodes"):
        jobs = include(run, client, names)
    jobs_text = f"; job {', '.join(jobs)} may start there" if jobs else ""
    options.note(f"{run.name} uses {' '.join(names)} again{jobs_text}")
