"""Writes a report as HTML and JSON.

The page draws its plots with the script of plotly.js beside it; both open without a network, and
the page's content security policy forbids every other request. The template escapes all texts.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pydantic_core import to_jsonable_python

from slurmllm import __version__
from slurmllm.analysis.compare.result import Comparison, curve_letter
from slurmllm.analysis.report import tables
from slurmllm.analysis.report.facts import FIRST_STEPS, RunFacts, Runs, scaling_rows
from slurmllm.analysis.report.figures import (
    PlotData,
    figures,
)
from slurmllm.analysis.report.tables import Table
from slurmllm.analysis.spikes.analysis import NAMES
from slurmllm.analysis.status.recoveries import sum_by_ending
from slurmllm.analysis.status.utilization import sum_utilization
from slurmllm.core.format import ABSENT, Json, format_names, format_plural, format_utc
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


_MAX_NAME = 40  # characters of a name within a file's name
_SHOWN_SETTINGS = 40
_MEASURE = (
    f"seq/s are the mean over the first {FIRST_STEPS} steps, each step once, as in Table 1 of "
    "AWS's post on GPT-NeoX and Pythia (2023-12-12); tokens/$ are the tokens of an hour at that "
    "rate divided by the nodes' price per hour, without losses; scaling is the throughput per node "
    "relative to that on the fewest nodes, of the same model and hardware."
)


@dataclass(frozen=True)
class Paragraph:
    """A paragraph; `strong` is its beginning, in bold."""

    text: str
    strong: str = ""


# Texts: a list
Block = Paragraph | Sequence[str] | Table | PlotData
Blocks = Iterator[Block]


@dataclass(frozen=True)
class ReportSection:
    """A section with a heading, listed in the table of contents."""

    name: str
    title: str
    blocks: Sequence[Block]


def sections(
    runs: Runs, drawn: Sequence[PlotData], sweeps: Sequence[Table] = ()
) -> list[ReportSection]:
    """Return the sections of a report; empty ones are left out.

    `sweeps` are the tables of sweeps: their runs by rank.
    """
    verdicts = [Paragraph(tables.verdict(facts), strong=facts.name) for facts in runs]
    warnings = [f"{facts.name}: {warning}" for facts in runs for warning in facts.warnings]
    return filled(
        {
            "loss": ("Loss", plots_of("loss", drawn)),
            "sweep": ("Runs by rank", sweeps),
            "summary": ("Summary", [*verdicts, tables.by_column(runs, tables.summary)]),
            "comparison": ("Comparison", _comparison(runs)),
            "setting": ("What ran where", _setting(runs)),
            "curves": ("Curves", plots_of("curves", drawn)),
            "throughput": ("Throughput and scaling", _throughput(runs, drawn)),
            "utilization": ("Utilization", _utilization(runs, drawn)),
            "evaluation": ("Evaluation", _evaluation(runs, drawn)),
            "checkpoints": ("Checkpoints", _checkpoints(runs)),
            "spikes": ("Spikes", _spikes(runs)),
            "warnings": ("Warnings", [warnings] if warnings else []),
        }
    )


def filled(contents: Mapping[str, tuple[str, Iterable[Block]]]) -> list[ReportSection]:
    """Return the sections that hold blocks, of name → title and blocks."""
    made = (ReportSection(name, title, list(blocks)) for name, (title, blocks) in contents.items())
    return [section for section in made if section.blocks]


def _setting(runs: Runs) -> Blocks:
    yield tables.by_column(runs, tables.setting)
    for facts in runs:
        if facts.attempts:
            yield Paragraph("attempts", strong=facts.name)
            yield tables.attempts_table(facts)


def _evaluation(runs: Runs, drawn: Sequence[PlotData]) -> Blocks:
    yield from plots_of("evaluation", drawn)
    for facts in runs:
        for table in facts.scores:
            yield Paragraph(f"suite {table.suite}", strong=facts.name)
            yield tables.scores_table(table)


def _spikes(runs: Runs) -> Blocks:
    for facts in runs:
        for metric in facts.spikes.by_metric if facts.spikes else ():
            yield Paragraph(
                f"{metric.state}: {metric.verdict}",
                strong=f"{facts.name}, {NAMES[metric.metric]}",
            )
            share = f"; {metric.one_step_share:.1%} of them last one step" if metric.count else ""
            published = f" ({metric.reference})" if share and metric.reference else ""
            yield Paragraph(f"a spike: {metric.definition}{share}{published}")
            if doubts := [warning for warning in metric.warnings if warning not in facts.warnings]:
                yield doubts
            if metric.spikes:
                yield Table(*metric.highest_spikes())


def plots_of(section: str, drawn: Sequence[PlotData]) -> list[PlotData]:
    return [plot for plot in drawn if plot.section == section]


def compared_runs(runs: Runs) -> Iterator[tuple[str, str, Comparison | str]]:
    """Yield whom a comparison with the first run is about, its verdict, and itself."""
    first = next((facts.name for facts in runs if facts.loss is not None), "")
    compared = [(facts.name, c) for facts in runs if (c := facts.comparison) is not None]
    for number, (name, comparison) in enumerate(compared, 1):
        title = f"{name} ({curve_letter(number)}) compared with {first} (A)"
        if isinstance(comparison, str):
            yield title, comparison, comparison
        else:
            yield title, f"{comparison.verdict}: {comparison.reason}", comparison


def _comparison(runs: Runs) -> Blocks:
    """Yield verdict and causes of each run against the first, and the settings that differ."""
    for title, verdict, comparison in compared_runs(runs):
        yield Paragraph(verdict, strong=title)
        if not isinstance(comparison, str):
            yield from causes_tables(comparison)
    yield from settings_tables(runs)


def causes_tables(comparison: Comparison) -> Iterator[Table]:
    causes = [(c.kind, c.confidence, str(c.step), c.evidence) for c in comparison.causes]
    if causes:
        yield Table(("cause", "confidence", "step", "evidence"), causes)


def settings_tables(runs: Runs) -> Blocks:
    """Yield the settings that differ, of the runs with any."""
    curves = {facts.name: facts.curve for facts in runs if facts.curve}
    settings_of = {name: curve.settings for name, curve in curves.items() if curve.settings}
    rows = []
    for key in sorted(set().union(*settings_of.values())):
        values = [settings.get(key) for settings in settings_of.values()]
        if any(value != values[0] for value in values):
            rows.append((key, *(ABSENT if value is None else str(value) for value in values)))
    if rows:
        more = len(rows) - _SHOWN_SETTINGS
        caption = f"… and {more} more" if more > 0 else ""
        yield Paragraph("of the runs whose settings are recorded", strong="settings that differ")
        yield Table(("setting", *settings_of), rows[:_SHOWN_SETTINGS], caption)


def _throughput(runs: Runs, drawn: Sequence[PlotData]) -> Blocks:
    rows = scaling_rows(runs)
    notes = [_MEASURE]
    for row in rows:  # whose mean is over fewer than FIRST_STEPS steps
        first = row.rate.first_steps
        nodes = row.rate.nodes
        if first < FIRST_STEPS and row.rate.seq_per_s is not None:
            on = "" if nodes is None else f" on {format_plural(nodes, 'node')}"
            which = "the first" if 0 < first < row.rate.steps else "all"
            count = format_plural(first or row.rate.steps, "step")
            notes.append(f"{row.facts.name}{on}: over {which} {count}.")
    if rows:
        yield tables.scaling_table(rows)
        yield Paragraph(" ".join(notes))
    yield from plots_of("throughput", drawn)


def _utilization(runs: Runs, drawn: Sequence[PlotData]) -> Blocks:
    used = {facts.name: facts.used for facts in runs if facts.used and facts.attempts}
    if not used:
        return
    yield from plots_of("utilization", drawn)
    yield tables.parts_table(used)
    for facts in runs:
        if not facts.lost:
            continue
        yield Paragraph(tables.RECOVERIES_CAPTION, strong=facts.name)
        yield tables.recoveries_table(facts.lost)
        yield tables.endings_table(facts.lost)


def _checkpoints(runs: Runs) -> Blocks:
    for facts in runs:
        if facts.saved:
            num_kept = sum(checkpoint.state == "kept" for checkpoint in facts.saved)
            summary = f"{format_plural(len(facts.saved), 'checkpoint')} saved, {num_kept} kept"
            table = tables.checkpoints_table(facts)
            if (more := len(facts.saved) - len(table.rows)) > 0:
                summary += f"; {more:,} removed ones are not listed"
            yield Paragraph(summary, strong=facts.name)
            yield table


def default_path(runs: Runs) -> Path:
    """`reports/report.html` of the first run; of several runs `report-<A>-<B>.html`."""
    named_runs = runs[:_MAX_NAMES] if len(runs) > 1 else ()
    names = [facts.name[:_MAX_NAME] for facts in named_runs]
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

    environment = Environment(
        loader=FileSystemLoader(_HERE), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
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
    script = get_plotlyjs()
    path = page.with_name(SCRIPT)
    if not path.is_file() or path.stat().st_size != len(script.encode()):
        write_atomic(path, script)


def write_report(
    runs: Runs,
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
    "name",
    "path",
    "kind",
    "state",
    "recipe",
    "parameters",
    "nodes",
    "steps",
    "planned_steps",
    "tokens",
    "loss",
    "val_loss",
    "tokens_per_usd_bought",
    "usd",
    "restarts",
    "comparison",
    "data",
    "versions",
    "warnings",
)
_OF_RATE = ("seq_per_s", "tokens_per_s", "seq_per_s_first_500", "tokens_per_usd", "mfu")


def to_json(runs: Runs, page: Path | None, **more: Any) -> str:
    """Return the whole document, with the page that was written; unknown values are null."""
    used = [facts.used for facts in runs if facts.used]
    document = {
        "runs": [_run(facts) for facts in runs],
        "total": sum_utilization(used) if used else None,
        "scaling": [row.to_json() for row in scaling_rows(runs)],
        "report": {"html": str(page) if page else None},
        **more,
    }
    # pydantic's `to_json` refuses names that are no UTF-8; twice, as models keep their NaN.
    plain = to_jsonable_python(to_jsonable_python(document), inf_nan_mode="null")
    return json.dumps(plain, indent=2)


def _run(facts: RunFacts) -> Json:
    rate = facts.rate
    mesh = facts.mesh
    spikes = facts.spikes
    return {
        **{name: getattr(facts, name) for name in _OF_FACTS},
        "mesh": mesh.to_json() if mesh else None,
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
