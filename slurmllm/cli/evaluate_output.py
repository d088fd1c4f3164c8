"""Output of `slurmllm evaluate`: tables, JSON and pictures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from slurmllm.cli import options
from slurmllm.core.display.tables import print_table
from slurmllm.core.errors import SlurmllmError, StorageError
from slurmllm.core.format import Json, Texts, format_plural

if TYPE_CHECKING:
    from slurmllm.analysis.evaluate.evaluate import EvaluationPlan, EvaluationResult
    from slurmllm.analysis.evaluate.request import Selection
    from slurmllm.analysis.evaluate.scores import ScoreRow, ScoreTable

_MAX_COLUMNS = 8


def report(
    selection: Selection,
    plan: EvaluationPlan,
    result: EvaluationResult,
    plot: str | None,
    as_json: bool,
    seconds: float,
) -> None:
    """Draw the pictures; print the tables or the JSON."""
    from slurmllm.analysis.evaluate.evaluate import select_steps, suite_tables
    from slurmllm.core.metrics.source import read_curve

    target = plan.target
    tables, warnings = suite_tables(selection.models, plan)
    curve = None
    if plot is not None and target.run is not None:
        # The picture shows the training loss too, if the run has metrics (a copy may have none).
        with suppress(SlurmllmError):
            curve = read_curve(target.run.path, lenient=True)
    plots = {}
    for table in tables:
        if plot is None or not table.steps:
            continue
        from slurmllm.analysis.evaluate.plot import default_path, draw  # matplotlib takes a second

        path = Path(plot) if plot else default_path(target.store, table.suite)
        try:
            draw(table, target.store.name, path, curve)
        except StorageError as error:
            # The run of another user may be read-only; a picture that was named must be written.
            if plot:
                raise
            warnings.append(str(error))
        else:
            plots[table.suite] = str(path)
    steps = [model.step for model in selection.models]
    selected = [select_steps(table, steps) for table in tables]
    if as_json:
        values = _values(selection, plan, selected, plots, result)
        values |= {"limit": plan.settings.limit, "warnings": [*selection.warnings, *warnings]}
        options.echo_json({**values, "seconds": round(seconds, 3)})
        return
    for table in selected:
        _print(table)
        if table.suite in plots:
            click.echo(f"picture: {plots[table.suite]}")
    evaluated = format_plural(result.evaluated, "task")
    click.echo(f"{evaluated} evaluated, {result.cached} cached, {len(result.failed)} failed")
    for warning in warnings:
        options.warn(warning)


def _values(
    selection: Selection,
    plan: EvaluationPlan,
    tables: Sequence[ScoreTable],
    plots: dict[str, str],
    result: EvaluationResult,
) -> Json:
    tasks = {
        (group.name, row.title): row.task
        for located in plan.suites
        for group in located.suite.groups
        for row in group.tasks
    }
    return {
        "run": plan.target.store.name,
        "checkpoints": [
            {"step": m.step, "tokens": m.tokens, "checksum": m.checksum, "path": str(m.directory)}
            for m in selection.models
            if m.step not in result.damaged
        ],
        "suites": [
            {
                "suite": table.suite,
                "rows": [
                    {
                        **vars(row),
                        "task": tasks.get((row.group, row.name.partition(" (first ")[0])),
                        "metric": row.metric or None,
                        "differences": {
                            model: {step: difference}
                            for model in row.references
                            for step in table.steps[-1:]
                            if (difference := row.difference(model, step)) is not None
                        },
                    }
                    for row in table.rows
                ],
                "sources": table.sources,
                "plot": plots.get(table.suite),
            }
            for table in tables
        ],
        "evaluated": result.evaluated,
        "cached": result.cached,
        "failed": [failure._asdict() for failure in result.failed],
        "damaged": [{"step": s, "faults": list(f)} for s, f in result.damaged.items()],
        "skipped": [{"task": t, "reason": why} for t, why in plan.skipped.items()],
        "harness": plan.harness,
        "plot": next(iter(plots.values()), None),
    }


def _print(table: ScoreTable) -> None:
    """Print the newest checkpoints, and the published models that have a score."""

    steps = table.steps[-_MAX_COLUMNS:]
    models = [m for m in table.sources if any(m in row.references for row in table.rows)]
    omitted = len(table.steps) - len(steps)
    more = f"; {format_plural(omitted, 'older checkpoint')} in --json" if omitted else ""
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
) -> Iterator[Texts]:
    group = ""
    for row in rows:
        yield (
            row.group if row.group != group else "",
            row.name,
            "" if row.shots is None else str(row.shots),
            row.metric,
            *(_figure(row.scores.get(step), row.errors.get(step)) for step in steps),
            *(row.published(model, steps, lambda score: _figure(score, None)) for model in models),
        )
        group = row.group  # the heading is printed only in its first row


def _figure(value: float | None, error: float | None) -> str:
    if value is None:
        return "-"
    digits = 4 if abs(value) < 100 else 1
    return f"{value:.{digits}f}" + ("" if error is None else f" ±{error:.{digits}f}")
