"""The page of `compare --html`: verdicts, curves and their differences, in the report's style."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from slurmllm.analysis.compare.comparison import Comparison
from slurmllm.analysis.compare.plot import LABELS, Drawn, align
from slurmllm.analysis.report.document import (
    Block,
    Bullets,
    Paragraph,
    causes_table,
    filled,
    plots_of,
    settings_table,
)
from slurmllm.analysis.report.facts import RunFacts
from slurmllm.analysis.report.figures import (
    CurveFigure,
    CurvePositions,
    PlotData,
    figures,
    run_line,
)
from slurmllm.analysis.report.tables import Table
from slurmllm.analysis.report.write import write_page
from slurmllm.core.format import format_names
from slurmllm.core.metrics.curves import Curve, relative_difference, thin_rows

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
    labelled = [("A", a), *((each.label, each.curve) for each in drawn)]
    runs = [
        RunFacts(f"{label}: {curve.name}", curve.path, curve.kind, curve=curve)
        for label, curve in labelled
    ]
    of_runs = figures(runs)
    names = {name for each in comparisons for name in each.metrics}
    differences: list[Block] = []
    for name in (name for name in LABELS if name in names):
        of_metric = [c.metrics[name] for c in comparisons if name in c.metrics]
        bit_identical = all(metric.bit_identical for metric in of_metric)
        differences.append(_difference(runs, a, drawn, name, bit_identical))
    differences.sort(key=lambda block: isinstance(block, Paragraph))
    settings = settings_table(
        {f.name: c.settings for f, (_, c) in zip(runs, labelled, strict=True)}
    )
    sections = filled(
        {
            "verdict": ("Verdict", _verdicts(runs, comparisons, metrics)),
            "loss": ("Loss", plots_of("loss", of_runs)),
            "differences": ("Relative differences", differences),
            "settings": ("Settings that differ", [settings] if settings else []),
            "curves": ("Curves", plots_of("curves", of_runs)),
        }
    )
    title = "Comparison of " + format_names([curve.name for curve in curves], 4)
    write_page(page, title, sections)


def _verdicts(
    runs: Sequence[RunFacts], comparisons: Sequence[Comparison], metrics: Sequence[Table]
) -> Iterator[Block]:
    for facts, comparison, table in zip(runs[1:], comparisons, metrics, strict=True):
        title = f"{facts.name} compared with {runs[0].name}"
        yield Paragraph(f"{comparison.verdict}: {comparison.reason}", strong=title)
        yield table
        if comparison.causes:
            yield causes_table(comparison)
        if comparison.data is not None:
            same = "the same in both runs"
            yield Paragraph("; ".join(comparison.data.differences) or same, strong="data")
        if comparison.warnings:
            yield Bullets(comparison.warnings)


def _difference(
    runs: Sequence[RunFacts], a: Curve, drawn: Sequence[Drawn], metric: str, bit_identical: bool
) -> Block:
    """Return the plot of a metric's relative differences; or a sentence, if none."""
    first = drawn[0].comparison
    limit = first.metrics[metric].tolerance if metric in first.metrics else 0.0
    if first.band is not None:
        limit = 0.0
    figure = CurveFigure("relative difference", log=True, limit=limit)
    for number, each in enumerate(drawn, 1):
        points = each.alignment.points_of(metric)
        values = relative_difference(points.a, points.b)
        rows = thin_rows(values, _MAX_ROWS)
        # 0 has no place on a logarithmic axis.
        positive = np.where(values[rows] > 0, values[rows], np.nan)
        if np.isfinite(positive).any():
            axes = CurvePositions(a).select_steps(a, points.steps[rows])
            figure.add(run_line(runs, number, len(rows)), axes, positive)
    title = LABELS[metric].split(" (")[0].capitalize()
    if not figure:
        reason = "every difference is 0" if bit_identical else "none is a finite number above 0"
        return Paragraph(reason, strong=title)
    note = f"Dashed: the tolerance, {limit:.2g}." if limit else ""
    return PlotData(f"difference-{metric}", title, "curves", figure.finish(), note)
