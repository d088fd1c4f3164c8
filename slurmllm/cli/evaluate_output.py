"""What `slurmllm evaluate` prints: tables for people, JSON for programs, pictures."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from slurmllm.evaluate.checkpoints import Chosen, Target
    from slurmllm.evaluate.evaluate import Answer, Question
    from slurmllm.evaluate.request import Settings
    from slurmllm.evaluate.scores import ScoreRow, ScoreTable

_MOST_COLUMNS = 8


def report(
    target: Target,
    chosen: Chosen,
    question: Question,
    settings: Settings,
    answer: Answer,
    *,
    plot: str | None,
    as_json: bool,
    seconds: float,
) -> None:
    """Draw the pictures; print the tables or the JSON."""
    from slurmllm.evaluate.evaluate import of_steps, tables

    found, warnings = tables(target, chosen.candidates, question, settings)
    plots: dict[str, str] = {}
    for table in found:
        if plot is not None and table.steps:
            path, warning = _draw(target, table, plot)
            plots |= {table.suite: path} if path else {}
            warnings += [warning] if warning else []
    steps = [candidate.step for candidate in chosen.candidates]
    shown = [of_steps(table, steps) for table in found]
    if as_json:
        values = _values(target, chosen, question, shown, plots, answer)
        values |= {"limit": settings.limit, "warnings": [*chosen.warnings, *warnings]}
        click.echo(json.dumps({**values, "seconds": round(seconds, 3)}, indent=2))
        return
    for table in shown:
        _print(table)
        if table.suite in plots:
            click.echo(f"picture: {plots[table.suite]}")
    click.echo(
        f"{answer.evaluated} task(s) evaluated, {answer.cached} known before, "
        f"{len(answer.failed)} failed"
    )
    for warning in warnings:
        click.echo(f"warning: {warning}", err=True)


def _draw(target: Target, table: ScoreTable, plot: str) -> tuple[str | None, str | None]:
    """The picture, or why there is none; one that was asked for must succeed."""
    from slurmllm.errors import StorageError
    from slurmllm.evaluate.plot import default_path, draw

    path = Path(plot) if plot else default_path(target.store, table.suite)
    try:
        draw(table, target.store.name, path)
    except StorageError as error:
        if plot:
            raise
        return None, str(error)
    return str(path), None


def _values(
    target: Target,
    chosen: Chosen,
    question: Question,
    shown: Sequence[ScoreTable],
    plots: dict[str, str],
    answer: Answer,
) -> dict[str, Any]:
    tasks = {
        (group.name, row.title): row.task
        for one in question.placed
        for group in one.suite.groups
        for row in group.tasks
    }
    return {
        "run": target.store.name,
        "checkpoints": [
            {
                "step": one.step,
                "tokens": one.tokens,
                "checksum": one.checksum,
                "path": str(one.directory),
            }
            for one in chosen.candidates
            if one.step not in answer.unsound
        ],
        "suites": [
            {
                "suite": table.suite,
                "rows": [
                    {
                        "group": row.group,
                        "name": row.name,
                        "task": tasks.get((row.group, row.name.partition(" (first ")[0])),
                        "shots": row.shots,
                        "metric": row.metric or None,
                        "scores": dict(row.scores),
                        "errors": dict(row.errors),
                        "references": dict(row.references),
                    }
                    for row in table.rows
                ],
                "sources": dict(table.sources),
                "plot": plots.get(table.suite),
            }
            for table in shown
        ],
        "evaluated": answer.evaluated,
        "cached": answer.cached,
        "failed": [
            {"step": one.step, "task": one.task, "shots": one.shots, "error": one.why}
            for one in answer.failed
        ],
        "unsound": [{"step": s, "faults": list(f)} for s, f in answer.unsound.items()],
        "skipped": [{"task": t, "reason": why} for t, why in question.skipped.items()],
        "harness": question.version,
        "plot": next(iter(plots.values()), None),
    }


def _print(table: ScoreTable) -> None:
    """The newest checkpoints, and the published models that have a figure."""
    from slurmllm.tables import print_table

    steps = table.steps[-_MOST_COLUMNS:]
    models = [m for m in table.sources if any(m in row.references for row in table.rows)]
    left_out = len(table.steps) - len(steps)
    more = f"; {left_out} older checkpoint(s) in --json" if left_out else ""
    click.echo(f"suite {table.suite}{more}")
    if not table.rows:
        click.echo("no score yet")
        return
    print_table(
        ("group", "task", "shots", "metric", *(f"step {step}" for step in steps), *models),
        _cells(table.rows, steps, models),
        fold="task",
    )
    for model in models:
        click.echo(f"{model}: {table.sources[model]}")


def _cells(
    rows: Sequence[ScoreRow], steps: Sequence[int], models: Sequence[str]
) -> Iterator[tuple[str, ...]]:
    group = ""
    for row in rows:
        yield (
            row.group if row.group != group else "",
            row.name,
            "" if row.shots is None else str(row.shots),
            row.metric,
            *(_figure(row.scores.get(step), row.errors.get(step)) for step in steps),
            *(_figure(row.references.get(model), None) for model in models),
        )
        group = row.group


def _figure(value: float | None, error: float | None) -> str:
    if value is None:
        return "-"
    digits = 4 if abs(value) < 100 else 1
    return f"{value:.{digits}f}" + ("" if error is None else f" ±{error:.{digits}f}")
