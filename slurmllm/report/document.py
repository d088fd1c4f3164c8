"""The sections of a report: which blocks they hold, independent of the output format."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from slurmllm.format import ABSENT, format_names, format_plural
from slurmllm.report import tables
from slurmllm.report.facts import RunFacts
from slurmllm.report.figures import PlotData
from slurmllm.report.tables import Table
from slurmllm.report.throughput import FIRST_STEPS, scaling_rows
from slurmllm.spikes.analysis import NAMES

# Names of the Markdown's pictures
CURVES, SCALING, UTILIZATION = "curves", "scaling", "utilization"
_LONGEST = 40  # characters of a name within a file's name
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


@dataclass(frozen=True)
class Bullets:
    """A list."""

    items: Sequence[str]


@dataclass(frozen=True)
class Plot:
    """A plot of the HTML page; its data have the same name in `figures.page_data`."""

    name: str
    title: str
    note: str = ""


@dataclass(frozen=True)
class Picture:
    """A PNG file, which replaces plots in the Markdown."""

    name: str
    title: str


Block = Paragraph | Bullets | Table | Plot | Picture


@dataclass(frozen=True)
class ReportSection:
    """A section with a heading, listed in the table of contents."""

    name: str
    title: str
    blocks: Sequence[Block] = field(default_factory=tuple)


def file_part(name: str) -> str:
    """A run's or suite's name within the name of a file."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", name)[:_LONGEST]


def scores_name(run: int, suite: str) -> str:
    """Name of the picture of a suite's scores; `run` is the index of the run in the report."""
    return f"scores-{run}-{file_part(suite)}"


def title(runs: Sequence[RunFacts]) -> str:
    return "Report of " + format_names([facts.name for facts in runs], 4)


def sections(runs: Sequence[RunFacts], drawn: Sequence[PlotData]) -> list[ReportSection]:
    """The sections of a report; empty ones are left out."""
    setting: list[Block] = [tables.setting_table(runs)]
    evaluation: list[Block] = list(_plots(drawn, "evaluation"))
    spikes: list[Block] = []
    for number, facts in enumerate(runs):
        if facts.attempts:
            setting += [Paragraph("attempts", strong=facts.name), tables.attempts_table(facts)]
        for table in facts.scores:
            evaluation += [
                Paragraph(f"suite {table.suite}", strong=facts.name),
                Picture(scores_name(number, table.suite), f"Scores of {facts.name}"),
                tables.scores_table(table),
            ]
        for one in () if facts.spikes is None else facts.spikes.by_metric:
            title = f"{facts.name}, {NAMES[one.metric]}"
            spikes.append(Paragraph(f"{one.state}: {one.verdict}", strong=title))
            share = f"; {one.one_step_share:.1%} of them last one step" if one.count else ""
            published = f" ({one.reference})" if share and one.reference else ""
            spikes.append(Paragraph(f"a spike: {one.definition}{share}{published}"))
            doubts = [text for text in one.warnings if text not in facts.warnings]
            spikes += [Bullets(doubts)] if doubts else []
            if one.spikes:
                spikes.append(Table(*one.highest_spikes()))
    curves = _plots(drawn, "curves")
    warnings = [f"{facts.name}: {warning}" for facts in runs for warning in facts.warnings]
    found = [
        ReportSection(
            "summary", "Summary",
            [
                *(Paragraph(tables.verdict(facts), strong=facts.name) for facts in runs),
                tables.summary_table(runs),
            ],
        ),
        ReportSection("comparison", "Comparison", list(_comparison(runs))),
        ReportSection("setting", "What ran where", setting),
        ReportSection("curves", "Curves", [*curves, *[Picture(CURVES, "Curves")][: len(curves)]]),
        ReportSection("throughput", "Throughput and scaling", list(_throughput(runs, drawn))),
        ReportSection("utilization", "Utilization", list(_utilization(runs))),
        ReportSection("evaluation", "Evaluation", evaluation),
        ReportSection("checkpoints", "Checkpoints", list(_checkpoints(runs))),
        ReportSection("spikes", "Spikes", spikes),
        ReportSection("warnings", "Warnings", [Bullets(warnings)] if warnings else []),
    ]  # fmt: skip
    return [section for section in found if section.blocks]


def _plots(drawn: Sequence[PlotData], section: str) -> list[Plot]:
    return [Plot(one.name, one.title, one.note) for one in drawn if one.section == section]


def comparison_texts(runs: Sequence[RunFacts]) -> list[tuple[str, str]]:
    """The verdict on each run compared with the first, and whom it is about."""
    first = next((facts.name for facts in runs if facts.loss is not None), "")
    compared = [(facts.name, found) for facts in runs if (found := facts.comparison) is not None]
    if not compared:
        return []
    from slurmllm.compare.comparison import curve_letter  # not loaded for a single run

    return [
        (
            found if isinstance(found, str) else f"{found.verdict}: {found.reason}",
            f"{name} ({curve_letter(number)}) compared with {first} (A)",
        )
        for number, (name, found) in enumerate(compared, 1)
    ]


def _comparison(runs: Sequence[RunFacts]) -> Iterator[Block]:
    """Verdict and causes of each run against the first, and the settings that differ."""
    found = [facts.comparison for facts in runs if facts.comparison is not None]
    for one, (text, title) in zip(found, comparison_texts(runs), strict=True):
        yield Paragraph(text, strong=title)
        if not isinstance(one, str) and one.causes:
            causes = [(c.kind, c.confidence, str(c.step), c.evidence) for c in one.causes]
            yield Table(("cause", "confidence", "step", "evidence"), causes)
    known = {f.name: f.curve.settings for f in runs if f.curve is not None and f.curve.settings}
    rows = []
    for key in sorted({key for settings in known.values() for key in settings}):
        values = [settings.get(key) for settings in known.values()]
        if any(value != values[0] for value in values):
            rows.append((key, *(ABSENT if value is None else str(value) for value in values)))
    if rows:
        yield Paragraph("of the runs whose settings are recorded", strong="settings that differ")
        more = len(rows) - _SHOWN_SETTINGS
        caption = f"… and {more} more" if more > 0 else ""
        yield Table(("setting", *known), rows[:_SHOWN_SETTINGS], caption)


def _throughput(runs: Sequence[RunFacts], drawn: Sequence[PlotData]) -> Iterator[Block]:
    rows = scaling_rows(runs)
    notes = [_MEASURE] if rows else []
    for row in rows:  # whose mean is over fewer than FIRST_STEPS steps
        first, nodes = row.rate.first_steps, row.rate.nodes
        if first == 0:
            notes.append(f"{row.facts.name}: none of its steps is among the first, so over all.")
        elif first < FIRST_STEPS and row.rate.seq_per_s is not None:
            on = "" if nodes is None else f" on {format_plural(nodes, 'node')}"
            which = "all" if first == row.rate.steps else "the first"
            notes.append(f"{row.facts.name}{on}: over {which} {format_plural(first, 'step')}.")
    if rows:
        yield tables.scaling_table(rows)
        yield Paragraph(" ".join(notes))
    for plot in _plots(drawn, "throughput"):
        yield plot
        yield Picture(SCALING, plot.title)


def _utilization(runs: Sequence[RunFacts]) -> Iterator[Block]:
    used = {facts.name: facts.used for facts in runs if facts.used is not None and facts.attempts}
    if not used:
        return
    yield Plot("utilization", "Where the node hours went")
    yield Picture(UTILIZATION, "Where the node hours went")
    yield tables.parts_table(used)
    for facts in runs:
        if not facts.lost:
            continue
        yield Paragraph(tables.RECOVERIES_CAPTION, strong=facts.name)
        yield tables.recoveries_table(facts.lost)
        yield tables.endings_table(facts.lost)


def _checkpoints(runs: Sequence[RunFacts]) -> Iterator[Block]:
    for facts in runs:
        if facts.saved:
            kept = sum(one.state == "kept" for one in facts.saved)
            text = f"{format_plural(len(facts.saved), 'checkpoint')} saved, {kept} kept"
            table = tables.checkpoints_table(facts)
            if (more := len(facts.saved) - len(table.rows)) > 0:
                text += f"; {more:,} removed ones are not listed"
            yield Paragraph(text, strong=facts.name)
            yield table
