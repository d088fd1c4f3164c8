"""Writes a report, or the comparison of `compare --html`, as HTML and JSON.

The page draws its plots with the script of plotly.js beside it; both open without a network, and
the page's content security policy forbids every other request. The template escapes all texts.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pydantic_core

from slurmllm import __version__
from slurmllm.analysis.compare.plot import LABELS, Drawn, align
from slurmllm.analysis.compare.result import Comparison
from slurmllm.analysis.report.document import (
    Block,
    Bullets,
    Paragraph,
    ReportSection,
    causes_table,
    file_part,
    filled,
    plots_of,
    sections,
    settings_table,
)
from slurmllm.analysis.report.facts import RunFacts, scaling_rows
from slurmllm.analysis.report.figures import (
    CurveFigure,
    CurvePositions,
    PlotData,
    figures,
    run_line,
)
from slurmllm.analysis.report.tables import Table
from slurmllm.analysis.status.recoveries import sum_by_ending
from slurmllm.analysis.status.utilization import sum_utilization
from slurmllm.core.format import format_names, format_utc
from slurmllm.core.metrics.curves import Curve, relative_difference, thin_rows
from slurmllm.core.run.rundir import report_path, write_atomic

_HERE = Path(__file__).parent
_MAX_NAMES = 4
SCRIPT = "plotly.min.js"  # next to the page; several pages share it
_CONFIG = {  # of plotly
    "displaylogo": False,
    "responsive": True,
    "showSendToCloud": False,
    "plotlyServerURL": "",  # nothing leaves the page
    "modeBarButtonsToRemove": ["select2d", "lasso2d"],
    "toImageButtonOptions": {"scale": 2},
}


def default_path(runs: Sequence[RunFacts]) -> Path:
    """`reports/report.html` of the first run; of several runs `report-<A>-<B>.html`."""
    names = [file_part(facts.name) for facts in runs[:_MAX_NAMES]] if len(runs) > 1 else []
    if len(runs) > _MAX_NAMES:
        names.append(f"and-{len(runs) - _MAX_NAMES}-more")
    paths = (facts.path for facts in runs if facts.kind == "run")
    return report_path("report", names, next(paths, None), ".html")


def to_html(title: str, sections: Sequence[ReportSection], made_at: str) -> str:
    """Return the page, without the script that draws its plots."""
    from jinja2 import Environment, FileSystemLoader
    from markupsafe import Markup
    from plotly.io import to_html as plot_html  # type: ignore[import-untyped]

    def draw(plot: PlotData) -> Markup:
        html = plot_html(
            plot.figure,
            config=_CONFIG,
            include_plotlyjs=False,
            full_html=False,
            default_height=f"{plot.height}px",
            validate=False,
            div_id=f"plot-{plot.name}",
        )
        return Markup(html)  # noqa: S704 (plotly escapes what would end its script)

    loader = FileSystemLoader(_HERE)
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    css = (_HERE / "report.css").read_text(encoding="utf-8")
    return environment.get_template("report.html.j2").render(
        title=title,
        version=__version__,
        made_at=made_at,
        sections=sections,
        draw=draw,
        script=SCRIPT,
        css=Markup(css),  # noqa: S704 (a file of ours)
    )


def write_page(page: Path, title: str, sections: Sequence[ReportSection]) -> None:
    """Write a page, and the script of plotly.js beside it, unless it is there.

    Raises:
        StorageError: a file cannot be written.
    """
    from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]

    write_atomic(page, utf8(to_html(title, sections, format_utc(time.time()))))
    script, path = get_plotlyjs(), page.with_name(SCRIPT)
    if not path.is_file() or path.stat().st_size != len(script.encode()):
        write_atomic(path, script)


def write_report(
    runs: Sequence[RunFacts],
    page: Path,
    sweeps: Sequence[Table] = (),
    heading: str | None = None,
) -> None:
    """Write the page of a report.

    `sweeps` are the tables of sweeps, `heading` replaces the title that names the runs.
    """
    runs = [replace(facts, name=utf8(facts.name)) for facts in runs]
    heading = heading or "Report of " + format_names([facts.name for facts in runs], 4)
    write_page(page, heading, sections(runs, figures(runs), sweeps))


def utf8(value: str) -> str:
    """Return a text with `?` for bytes of names that are no UTF-8."""
    return value.encode(errors="replace").decode()


# Of an analysis of spikes: the lists of single ones
_LISTS = {"spikes": True, "not_finite": True}
_EXCLUDED: Any = {**_LISTS, "grad_norm_spikes": _LISTS}
# Keys of a run in JSON that are fields or properties of its facts, or of its throughput
_OF_FACTS = (
    *("name", "path", "kind", "state", "recipe", "parameters", "nodes", "steps", "planned_steps"),
    *("tokens", "loss", "val_loss", "tokens_per_usd_bought", "usd", "restarts", "comparison"),
    *("data", "versions", "warnings"),
)
_OF_RATE = ("seq_per_s", "tokens_per_s", "seq_per_s_first_500", "tokens_per_usd", "mfu")


def to_json(runs: Sequence[RunFacts], page: Path | None, **more: Any) -> str:
    """Return the whole document, with the page that was written; unknown values are null."""
    used = [facts.used for facts in runs if facts.used is not None]
    document = {
        "runs": [_run(facts) for facts in runs],
        "total": sum_utilization(used) if used else None,
        "scaling": [row.to_json() for row in scaling_rows(runs)],
        "report": {"html": None if page is None else str(page)},
        **more,
    }
    # pydantic's `to_json` refuses names that are no UTF-8.
    plain = pydantic_core.to_jsonable_python(document)
    return json.dumps(json.loads(json.dumps(plain), parse_constant=lambda _: None), indent=2)


def _run(facts: RunFacts) -> dict[str, Any]:
    rate, mesh, spikes = facts.rate, facts.mesh, facts.spikes
    return {
        **{name: getattr(facts, name) for name in _OF_FACTS},
        "mesh": None if mesh is None else mesh.to_json(),
        **{name: rate and getattr(rate, name) for name in _OF_RATE},
        "step_time_s": rate and rate.step_s,
        "checkpoints": [
            # An invalidated checkpoint is still on disk.
            asdict(checkpoint) | {"kept": checkpoint.state in ("kept", "invalidated")}
            for checkpoint in facts.saved
        ],
        "evaluations": facts.scores,
        "spikes": spikes and spikes.model_dump(exclude=_EXCLUDED),
        "utilization": facts.used,
        "recoveries": facts.lost,
        "endings": sum_by_ending(facts.lost),
    }


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
