"""`slurmllm report RUN --prediction`: predicted and measured figures of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from slurmllm.plan.estimate import LayoutEstimate
    from slurmllm.report.prediction import ExpectedOverheads, PredictionCheck


def print_prediction(
    sources: Sequence[str], cluster: str | None, runs_dir: Path, as_json: bool
) -> None:
    """Print predicted and measured figures of the run that `sources` names."""
    from slurmllm.errors import UserError
    from slurmllm.report.prediction import check_run_prediction
    from slurmllm.run.rundir import find_run

    if len(sources) != 1:
        raise UserError(
            "--prediction is of one run, alone or with --cluster PROFILE, and writes no files"
        )
    check = check_run_prediction(find_run(sources[0], runs_dir), cluster, _expected_overheads)
    if as_json:
        click.echo(check.model_dump_json(indent=2))
        return
    _print_check(check)
    for warning in check.warnings:
        click.echo(f"warning: {warning}")


def _print_check(check: PredictionCheck) -> None:
    from slurmllm.display.tables import print_table
    from slurmllm.format import format_plural

    steps = format_plural(check.steps, "step")
    steps = f"{steps} of attempt{'s' * (len(check.attempts) > 1)} "
    attempts = ", ".join(str(attempt) for attempt in check.attempts)
    nodes = format_plural(check.nodes, "node")
    click.echo(f"{check.run}: {steps}{attempts} on {nodes}; profile {check.cluster}")
    rows = []
    for row in check.rows:
        figures = [_measure(row.unit, value) for value in (row.predicted, row.measured)]
        ratio = "-" if row.ratio is None else f"{row.ratio:.3f}"
        rows.append((row.name, *figures, ratio, row.note))
    headings = ("", "predicted", "measured", "measured / predicted", "what it is")
    print_table(headings, rows, fold="what it is")


def _measure(unit: str, value: float | None) -> str:
    from slurmllm.format import format_number, format_percent

    if value is None or unit == "":
        return format_percent(value)
    return f"{value / 1e9:.2f} GB" if unit == "bytes" else f"{format_number(value)} {unit}"


def _expected_overheads(candidate: LayoutEstimate) -> ExpectedOverheads:
    """Return the expected overheads of a run outside its steps."""
    from slurmllm.errors import ConfigError
    from slurmllm.plan.lost_time import assumed, lost_time
    from slurmllm.plan.parameters import parameters
    from slurmllm.report.prediction import ExpectedOverheads

    config, nodes = candidate.config, candidate.mesh.nodes
    asynchronous = config.recipe.checkpoint.asynchronous
    size = parameters(config.recipe.model)
    durations, save = assumed(size, nodes, config.cluster.device, asynchronous)
    try:
        effective = lost_time(config, nodes, candidate.step.total).effective
    except ConfigError:  # no progress by the assumptions, but the run made some
        effective = None
    return ExpectedOverheads(
        start_up_s=durations.start_up[0],
        first_step_s=durations.first_step[0],
        save_waited_s=save.waited_s,
        effective=effective,
    )
