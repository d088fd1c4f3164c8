"""The sections of a report and the blocks that they hold."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from slurmllm.analysis.report import tables
from slurmllm.analysis.report.facts import FIRST_STEPS, RunFacts, scaling_rows
from slurmllm.analysis.report.figures import PlotData
from slurmllm.analysis.report.tables import Table
from slurmllm.analysis.spikes.analysis import NAMES
from slurmllm.core.format import ABSENT, format_plural

if TYPE_CHECKING:
    from slurmllm.analysis.compare.result import Comparison

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


@dataclass(frozen=True)
class Bullets:
    """A list."""

    items: Sequence[str]


Block = Paragraph | Bullets | Table | PlotData


@dataclass(frozen=True)
class ReportSection:
    """A section with a heading, listed in the table of contents."""

    name: str
    title: str
    blocks: Sequence[Block] = field(default_factory=tuple)


def file_part(name: str) -> str:
    """Return a run's or suite's name as a part of a file's name."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", name)[:_MAX_NAME]


def sections(
    runs: Sequence[RunFacts], drawn: Sequence[PlotData], sweeps: Sequence[Table] = ()
) -> list[ReportSection]:
    """Return the sections of a report; empty ones are left out.

    `sweeps` are the tables of sweeps: their runs by rank.
    """
    verdicts = [Paragraph(tables.verdict(facts), strong=facts.name) for facts in runs]
    warnings = [f"{facts.name}: {warning}" for facts in runs for warning in facts.warnings]
    contents: dict[str, tuple[str, Iterable[Block]]] = {
        "loss": ("Loss", plots_of("loss", drawn)),
        "sweep": ("Runs by rank", sweeps),
        "summary": ("Summary", [*verdicts, tables.summary_table(runs)]),
        "comparison": ("Comparison", _comparison(runs)),
        "setting": ("What ran where", _setting(runs)),
        "curves": ("Curves", plots_of("curves", drawn)),
        "throughput": ("Throughput and scaling", _throughput(runs, drawn)),
        "utilization": ("Utilization", _utilization(runs, drawn)),
        "evaluation": ("Evaluation", _evaluation(runs, drawn)),
        "checkpoints": ("Checkpoints", _checkpoints(runs)),
        "spikes": ("Spikes", _spikes(runs)),
        "warnings": ("Warnings", [Bullets(warnings)] if warnings else []),
    }
    return filled(contents)


def filled(contents: Mapping[str, tuple[str, Iterable[Block]]]) -> list[ReportSection]:
    """Return the sections that hold blocks, of name → title and blocks."""
    made = (ReportSection(name, title, list(blocks)) for name, (title, blocks) in contents.items())
    return [section for section in made if section.blocks]


def _setting(runs: Sequence[RunFacts]) -> Iterator[Block]:
    yield tables.setting_table(runs)
    for facts in runs:
        if facts.attempts:
            yield Paragraph("attempts", strong=facts.name)
            yield tables.attempts_table(facts)


def _evaluation(runs: Sequence[RunFacts], drawn: Sequence[PlotData]) -> Iterator[Block]:
    yield from plots_of("evaluation", drawn)
    for facts in runs:
        for table in facts.scores:
            yield Paragraph(f"suite {table.suite}", strong=facts.name)
            yield tables.scores_table(table)


def _spikes(runs: Sequence[RunFacts]) -> Iterator[Block]:
    for facts in runs:
        for metric in () if facts.spikes is None else facts.spikes.by_metric:
            title = f"{facts.name}, {NAMES[metric.metric]}"
            yield Paragraph(f"{metric.state}: {metric.verdict}", strong=title)
            share = f"; {metric.one_step_share:.1%} of them last one step" if metric.count else ""
            published = f" ({metric.reference})" if share and metric.reference else ""
            yield Paragraph(f"a spike: {metric.definition}{share}{published}")
            if doubts := [warning for warning in metric.warnings if warning not in facts.warnings]:
                yield Bullets(doubts)
            if metric.spikes:
                yield Table(*metric.highest_spikes())


def plots_of(section: str, drawn: Sequence[PlotData]) -> list[PlotData]:
    return [plot for plot in drawn if plot.section == section]


def comparison_texts(runs: Sequence[RunFacts]) -> list[tuple[str, str]]:
    """Return the verdict on each run compared with the first, and whom it is about."""
    first = next((facts.name for facts in runs if facts.loss is not None), "")
    compared = [(facts.name, c) for facts in runs if (c := facts.comparison) is not None]
    if not compared:
        return []
    from slurmllm.analysis.compare.result import curve_letter  # not loaded for a single run

    return [
        (
            verdict if isinstance(verdict, str) else f"{verdict.verdict}: {verdict.reason}",
            f"{name} ({curve_letter(number)}) compared with {first} (A)",
        )
        for number, (name, verdict) in enumerate(compared, 1)
    ]


def _comparison(runs: Sequence[RunFacts]) -> Iterator[Block]:
    """Yield verdict and causes of each run against the first, and the settings that differ."""
    comparisons = [facts.comparison for facts in runs if facts.comparison is not None]
    for comparison, (verdict, title) in zip(comparisons, comparison_texts(runs), strict=True):
        yield Paragraph(verdict, strong=title)
        if not isinstance(comparison, str) and comparison.causes:
            yield causes_table(comparison)
    table = settings_table({f.name: f.curve.settings for f in runs if f.curve})
    if table is not None:
        yield Paragraph("of the runs whose settings are recorded", strong="settings that differ")
        yield table


def causes_table(comparison: Comparison) -> Table:
    causes = [(c.kind, c.confidence, str(c.step), c.evidence) for c in comparison.causes]
    return Table(("cause", "confidence", "step", "evidence"), causes)


def settings_table(of_runs: Mapping[str, Mapping[str, object]]) -> Table | None:
    """Return the settings that differ, of the runs with any; None if none do."""
    settings_of = {name: settings for name, settings in of_runs.items() if settings}
    rows = []
    for key in sorted({key for settings in settings_of.values() for key in settings}):
        values = [settings.get(key) for settings in settings_of.values()]
        if any(value != values[0] for value in values):
            rows.append((key, *(ABSENT if value is None else str(value) for value in values)))
    more = len(rows) - _SHOWN_SETTINGS
    caption = f"… and {more} more" if more > 0 else ""
    return Table(("setting", *settings_of), rows[:_SHOWN_SETTINGS], caption) if rows else None


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
    yield from plots_of("throughput", drawn)


def _utilization(runs: Sequence[RunFacts], drawn: Sequence[PlotData]) -> Iterator[Block]:
    used = {facts.name: facts.used for facts in runs if facts.used is not None and facts.attempts}
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


def _checkpoints(runs: Sequence[RunFacts]) -> Iterator[Block]:
    for facts in runs:
        if facts.saved:
            num_kept = sum(checkpoint.state == "kept" for checkpoint in facts.saved)
            summary = f"{format_plural(len(facts.saved), 'checkpoint')} saved, {num_kept} kept"
            table = tables.checkpoints_table(facts)
            if (more := len(facts.saved) - len(table.rows)) > 0:
                summary += f"; {more:,} removed ones are not listed"
            yield Paragraph(summary, strong=facts.name)
            yield table
