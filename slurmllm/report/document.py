"""The report in sections, whatever it is written down as."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from slurmllm.format import (
    format_plural,
)
from slurmllm.report.blocks import (
    CURVES,
    SCALING,
    UTILIZATION,
    Block,
    Bullets,
    Paragraph,
    Picture,
    Plot,
    PlotData,
    ReportSection,
    scores_name,
)
from slurmllm.report.facts import RunFacts
from slurmllm.report.scaling import ScalingRow, scaling_rows, scaling_table
from slurmllm.report.tables import (
    SHOWN_RECOVERIES,
    attempts_table,
    checkpoints_table,
    endings_table,
    parts_table,
    recoveries_table,
    scores_table,
    setting_table,
    spikes_table,
    summary_table,
    verdict,
)
from slurmllm.report.throughput import FIRST_STEPS

_MEASURE = (
    f"seq/s are the mean over the first {FIRST_STEPS} steps, each step once, as in Table 1 of "
    "AWS's post on GPT-NeoX and Pythia (2023-12-12); tokens/$ are the tokens of an hour at that "
    "rate for what the nodes cost in it, without losses; scaling is the throughput of a node "
    "relative to that on the fewest nodes, of the same model and hardware."
)


def title(runs: Sequence[RunFacts]) -> str:
    """The page's."""
    names = [facts.name for facts in runs]
    more = len(names) - 4
    return "Report of " + ", ".join(names[:4]) + (f" and {more} more" if more > 0 else "")


def sections(runs: Sequence[RunFacts], drawn: Sequence[PlotData]) -> list[ReportSection]:
    """All of the report; sections that nothing is known for are left out.

    Args:
        runs: What it is of.
        drawn: Its plots.
    """
    every = [
        ReportSection("summary", "Summary", list(_summary(runs))),
        ReportSection("setting", "What ran where", list(_setting(runs))),
        ReportSection("curves", "Curves", list(_curves(drawn))),
        ReportSection("throughput", "Throughput and scaling", list(_throughput(runs, drawn))),
        ReportSection("utilization", "Utilization", list(_utilization(runs))),
        ReportSection("evaluation", "Evaluation", list(_evaluation(runs, drawn))),
        ReportSection("checkpoints", "Checkpoints", list(_checkpoints(runs))),
        ReportSection("spikes", "Spikes", list(_spikes(runs))),
        ReportSection("warnings", "Warnings", list(_warnings(runs))),
    ]
    return [section for section in every if section.blocks]


def _summary(runs: Sequence[RunFacts]) -> Iterator[Block]:
    for facts in runs:
        yield Paragraph(verdict(facts), strong=facts.name)
    yield summary_table(runs)


def _setting(runs: Sequence[RunFacts]) -> Iterator[Block]:
    yield setting_table(runs)
    for facts in runs:
        if facts.attempts:
            yield Paragraph("attempts", strong=facts.name)
            yield attempts_table(facts)


def _curves(drawn: Sequence[PlotData]) -> Iterator[Block]:
    shown = [figure for figure in drawn if figure.section == "curves"]
    for figure in shown:
        yield Plot(figure.name, figure.title, figure.note)
    if shown:
        yield Picture(CURVES, "Curves")


def _throughput(runs: Sequence[RunFacts], drawn: Sequence[PlotData]) -> Iterator[Block]:
    rows = scaling_rows(runs)
    if rows:
        yield scaling_table(rows)
        yield Paragraph(" ".join((_MEASURE, *_short(rows))))
    for figure in drawn:
        if figure.section == "throughput":
            yield Plot(figure.name, figure.title, figure.note)
            yield Picture(SCALING, figure.title)


def _short(rows: Sequence[ScalingRow]) -> Iterator[str]:
    """Which means are over fewer steps."""
    for row in rows:
        made, all_of_them = row.rate.first_steps, row.rate.steps
        if made == 0:
            yield f"{row.facts.name}: no step of these is among the first, so over all."
        elif made < FIRST_STEPS and row.rate.seq_per_s is not None:
            nodes = "" if row.rate.nodes is None else f" on {format_plural(row.rate.nodes, 'node')}"
            fewer = "all" if made == all_of_them else "the first"
            yield f"{row.facts.name}{nodes}: over {fewer} {format_plural(made, 'step')}."


def _utilization(runs: Sequence[RunFacts]) -> Iterator[Block]:
    used = {facts.name: facts.used for facts in runs if facts.used is not None and facts.attempts}
    if not used:
        return
    yield Plot("utilization", "Where the node hours went")
    yield Picture(UTILIZATION, "Where the node hours went")
    yield parts_table(used)
    for facts in runs:
        if not facts.lost:
            continue
        yield Paragraph(
            "from the last completed step before an ending to the next one, s", strong=facts.name
        )
        yield recoveries_table(facts.lost)
        if len(facts.lost) > SHOWN_RECOVERIES:
            yield Paragraph(f"… and {len(facts.lost) - SHOWN_RECOVERIES} before these")
        yield endings_table(facts.lost)


def _evaluation(runs: Sequence[RunFacts], drawn: Sequence[PlotData]) -> Iterator[Block]:
    for figure in drawn:
        if figure.section == "evaluation":
            yield Plot(figure.name, figure.title, figure.note)
    for number, facts in enumerate(runs):
        for found in facts.scores:
            yield Paragraph(f"suite {found.suite}", strong=facts.name)
            yield Picture(scores_name(number, found.suite), f"Scores of {facts.name}")
            yield scores_table(found)


def _checkpoints(runs: Sequence[RunFacts]) -> Iterator[Block]:
    for facts in runs:
        if facts.saved:
            kept = sum(one.state == "kept" for one in facts.saved)
            words = f"{format_plural(len(facts.saved), 'checkpoint')} saved, {kept} kept"
            table = checkpoints_table(facts)
            if (more := len(facts.saved) - len(table.rows)) > 0:
                words += f"; {more:,} of those that were removed are not listed"
            yield Paragraph(words, strong=facts.name)
            yield table


def _spikes(runs: Sequence[RunFacts]) -> Iterator[Block]:
    for facts in runs:
        if facts.spikes is not None:
            yield Paragraph(facts.spikes.verdict, strong=facts.name)
            if facts.spikes.spikes:
                yield spikes_table(facts)


def _warnings(runs: Sequence[RunFacts]) -> Iterator[Block]:
    items = [f"{facts.name}: {warning}" for facts in runs for warning in facts.warnings]
    if items:
        yield Bullets(items)
