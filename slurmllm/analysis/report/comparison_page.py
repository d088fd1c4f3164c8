"""The page of `compare --html`: verdicts, curves and their differences, in the report's style."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from slurmllm.analysis.compare.plot import LABELS, Drawn, align
from slurmllm.analysis.compare.result import Comparison
from slurmllm.analysis.report.facts import RunFacts, Runs
from slurmllm.analysis.report.figures import (
    CurveFigure,
    DrawnRun,
    PlotData,
    figures,
)
from slurmllm.analysis.report.tables import Table
from slurmllm.analysis.report.write import (
    Block,
    Blocks,
    Paragraph,
    causes_tables,
    filled,
    plots_of,
    settings_tables,
    write_page,
)
from slurmllm.core.format import format_names
from slurmllm.core.metrics.curves import Curve, thin_rows

_MAX_ROWS = 3000  # of a line of differences


def write_comparison(
    curves: Sequence[Curve],
    comparisons: Sequence[Comparison],
    metrics: Sequence[Table],
    page: Path,
    *,
    from_step: int | None = None,
    to_step: int | None = None,
) -> None:
    """Write the page of A and the curves that it was compared with.

    `metrics` has a table for each comparison; steps are those of the comparisons.

    Raises:
        StorageError: the page cannot be written.
    """
    a, drawn = align(curves[0], curves[1:], comparisons, from_step, to_step)
    runs = [RunFacts(f"A: {a.name}", a.path, a.kind, curve=a)]
    for each in drawn:
        curve = each.curve
        onsets = {name: metric.onset_step for name, metric in each.comparison.metrics.items()}
        runs.append(
            RunFacts(
                f"{each.label}: {curve.name}",
                curve.path,
                curve.kind,
                curve=curve,
                diverges_at={name: step for name, step in onsets.items() if step is not None},
            )
        )
    of_runs = figures(runs)
    differences = []
    for name in LABELS:
        if of_metric := [c.metrics[name] for c in comparisons if name in c.metrics]:
            bit_identical = all(metric.bit_identical for metric in of_metric)
            differences.append(_difference(runs, drawn, name, bit_identical))
    differences.sort(key=lambda block: isinstance(block, Paragraph))
    sections = filled(
        {
            "verdict": ("Verdict", _verdicts(runs, comparisons, metrics)),
            "loss": ("Loss", plots_of("loss", of_runs)),
            "differences": ("Relative differences", differences),
            "settings": ("Settings", settings_tables(runs)),
            "curves": ("Curves", plots_of("curves", of_runs)),
        }
    )
    title = "Comparison of " + format_names([curve.name for curve in curves], 4)
    write_page(page, title, sections)


def _verdicts(runs: Runs, comparisons: Sequence[Comparison], metrics: Sequence[Table]) -> Blocks:
    for facts, comparison, table in zip(runs[1:], comparisons, metrics, strict=True):
        yield Paragraph(
            f"{comparison.verdict}: {comparison.reason}",
            strong=f"{facts.name} compared with {runs[0].name}",
        )
        yield table
        yield from causes_tables(comparison)
        if comparison.data:
            yield Paragraph(
                "; ".join(comparison.data.differences) or "the same in both runs", strong="data"
            )
        if comparison.warnings:
            yield comparison.warnings


def _difference(runs: Runs, drawn: Sequence[Drawn], metric: str, bit_identical: bool) -> Block:
    """Return the plot of a metric's relative differences; or a sentence, if none."""
    limit = drawn[0].tolerance(metric)
    figure = CurveFigure("relative difference", log=True, limit=limit)
    for number, each in enumerate(drawn, 1):
        points, values = each.differences(metric)
        if not np.isnan(values).all():
            rows = thin_rows(values, _MAX_ROWS)
            figure.add(
                DrawnRun(runs, number).line(len(rows)),
                DrawnRun(runs, 0).select_steps(points.steps[rows]),
                values[rows],
            )
    title = LABELS[metric].split(" (")[0].capitalize()
    if not figure.traces:
        reason = "every difference is 0" if bit_identical else "none is a finite number above 0"
        return Paragraph(reason, strong=title)
    note = f"Dashed: the tolerance, {limit:.2g}." if limit else ""
    return PlotData(f"difference-{metric}", title, "curves", figure.finish(), note)
