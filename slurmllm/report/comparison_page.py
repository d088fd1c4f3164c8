"""The page of `compare --html`: verdicts, curves and their differences, in the report's style."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from slurmllm.compare.comparison import Comparison
from slurmllm.compare.plot import LABELS, Drawn, align
from slurmllm.format import format_names, format_utc
from slurmllm.metrics.curves import Curve, relative_difference, thin_rows
from slurmllm.report.document import (
    Block,
    Bullets,
    Paragraph,
    causes_table,
    filled,
    plots_of,
    settings_table,
)
from slurmllm.report.facts import RunFacts
from slurmllm.report.figures import CurvePositions, Json, PlotData, figures, packed, page_data
from slurmllm.report.tables import Table
from slurmllm.report.write import to_html, utf8
from slurmllm.run.rundir import write_atomic

_MOST_ROWS = 3000  # of a line of differences


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
    shown = [("A", a), *((each.label, each.curve) for each in drawn)]
    runs = [
        RunFacts(f"{label}: {curve.name}", curve.path, curve.kind, curve=curve)
        for label, curve in shown
    ]
    of_runs = figures(runs)
    names = {name for each in comparisons for name in each.metrics}
    shown_names = [name for name in LABELS if name in names]
    made = [_difference(a, drawn, name) for name in shown_names]
    differences = [plot for plot in made if plot.content["series"]]
    texts = [
        Paragraph(
            "every difference is 0"
            if all(c.metrics[name].bit_identical for c in comparisons if name in c.metrics)
            else "none is a finite number above 0",
            strong=plot.title,
        )
        for plot, name in zip(made, shown_names, strict=True)
        if not plot.content["series"]
    ]
    settings = settings_table({f.name: c.settings for f, (_, c) in zip(runs, shown, strict=True)})
    sections = filled(
        {
            "verdict": ("Verdict", _verdicts(runs, comparisons, metrics)),
            "loss": ("Loss", plots_of("loss", of_runs)),
            "differences": ("Relative differences", [*differences, *texts]),
            "settings": ("Settings that differ", [settings] if settings else []),
            "curves": ("Curves", plots_of("curves", of_runs)),
        }
    )
    title = "Comparison of " + format_names([curve.name for curve in curves], 4)
    of_curves = [plot for plot in of_runs if plot.section in ("loss", "curves")]
    data = page_data(runs, [*of_curves, *differences])
    write_atomic(page, utf8(to_html(title, sections, data, format_utc(time.time()))))


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


def _difference(a: Curve, drawn: Sequence[Drawn], metric: str) -> PlotData:
    """Return the plot of the relative differences of a metric, with the tolerance."""

    lines: list[Json] = []
    for number, each in enumerate(drawn, 1):
        points = each.alignment.of(metric)
        values = relative_difference(points.a, points.b)
        rows = thin_rows(values, _MOST_ROWS)
        # 0 has no place on a logarithmic axis.
        shown = np.where(values[rows] > 0, values[rows], np.nan)
        if np.isfinite(shown).any():
            where = CurvePositions(a).at_steps(a, points.steps[rows])
            lines.append({"run": number, "x": where, "y": packed(shown, "f4")})
    title = LABELS[metric].split(" (")[0]
    first = drawn[0].comparison
    limit = first.metrics[metric].tolerance if metric in first.metrics else 0.0
    content = {
        "kind": "curve",
        "title": title,
        "unit": "relative difference",
        "series": lines,
        "marks": [],
        "log": True,
        "limit": limit if first.band is None else 0.0,
    }
    note = f"Dashed: the tolerance, {limit:.2g}." if content["limit"] else ""
    return PlotData(f"difference-{metric}", title.capitalize(), "curves", content, note)
