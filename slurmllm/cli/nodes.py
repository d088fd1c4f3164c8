"""`slurmllm nodes`: the nodes that runs exclude, and the end of their exclusion."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from slurmllm.cli import options
from slurmllm.core.errors import SlurmError, UserError
from slurmllm.core.format import Texts, Values, format_time
from slurmllm.core.run.rundir import RunDir, find_run

if TYPE_CHECKING:
    from slurmllm.core.slurm.client import SlurmClient

include_option = options.repeatable(
    "--include included", "NODE", "Use an excluded node again, in pending jobs too; repeatable."
)


@click.command()
@options.run_argument("run", required=False)
@include_option
@options.runs_dir
@options.as_json
def nodes(run: str | None, included: Texts, runs_dir: Path, as_json: bool) -> None:
    """List the nodes that runs exclude, and end an exclusion.

    Shows why, on which evidence and until when. A node whose exclusion has expired is shown while
    a pending job still excludes it.
    """
    from slurmllm.analysis.status.runs import list_runs
    from slurmllm.core.run.records import JobsRecord
    from slurmllm.core.slurm.client import SlurmClient
    from slurmllm.launch.supervise.exclusion import excluded, excluded_by_jobs

    if included and run is None:
        raise UserError("--include needs the run: `slurmllm nodes RUN --include NODE`")
    client = SlurmClient()
    runs: list[RunDir] = list_runs(runs_dir) if run is None else [find_run(run, runs_dir)]
    if included:
        include_nodes(runs[0], client, included)
    jobs_of = {run.name: last.own_jobs for run in runs if (last := JobsRecord.of(run).last)}
    lists: dict[str, list[str]] = {}
    try:  # one query for the jobs of all runs
        lists = excluded_by_jobs(client, [job for jobs in jobs_of.values() for job in jobs])
    except SlurmError as error:
        options.warn(f"the lists of pending jobs are unknown: {error}")
    rows = []
    for run_dir in runs:
        recorded = {node.node: node.model_dump() for node in excluded(run_dir)}
        jobs = {job: lists[job] for job in jobs_of.get(run_dir.name, ()) if job in lists}
        for name in sorted({*recorded}.union(*jobs.values())):
            unknown = dict.fromkeys(("reason", "evidence", "exclusions", "since", "until"))
            listed = [job for job, names in jobs.items() if name in names]
            row = {"run": run_dir.name, "node": name, **unknown, **recorded.get(name, {})}
            rows.append({**row, "jobs": listed})
    if not rows and not as_json:
        click.echo("no node is excluded")
        return

    def time_of(key: str) -> Callable[[Values], str]:
        return lambda row: format_time(row[key]) if row[key] else ""

    columns: options.Columns = {
        "run": "run",
        "node": "node",
        "evidence": lambda row: row["evidence"] or "",
        "since": time_of("since"),
        "until": time_of("until"),
        "pending jobs": lambda row: " ".join(row["jobs"]),
        "reason": lambda row: row["reason"] or "slurm.exclude, or its time is over",
    }
    options.print_rows(as_json, "excluded", rows, columns, "reason")
    if as_json:
        return
    options.note("excluded from the jobs of the run; `slurmllm nodes RUN --include NODE` ends it")


def include_nodes(run: RunDir, client: SlurmClient, names: Sequence[str]) -> None:
    """End the exclusion of nodes and print what changed; UserError if one is not excluded."""
    from slurmllm.launch.supervise.exclusion import include
    from slurmllm.launch.supervise.run_lock import locked

    with locked(run, "nodes"):
        jobs = include(run, client, names)
    jobs_text = f"; job {', '.join(jobs)} may start there" if jobs else ""
    options.note(f"{run.name} uses {' '.join(names)} again{jobs_text}")
