"""The sections of a report: which blocks they hold, independent of the output format."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from slurmllm.format import format_names, format_plural
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
    RECOVERIES_CAPTION,
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
    "rate divided by the nodes' price per hour, without losses; scaling is the throughput per node "
    "relative to that on the fewest nodes, of the same model and hardware."
)


def title(runs: Sequence[RunFacts]) -> str:
    return "Report of " + format_names([facts.name for facts in runs], 4)


def sections(runs: Sequence[RunFacts], drawn: Sequence[PlotData]) -> list[ReportSection]:
    """The sections of a report; empty ones are left out.

    Args:
        runs: The runs of the report.
        drawn: Its plots.
    """
    spikes = [facts for facts in runs if facts.spikes is not None]
    warnings = [f"{facts.name}: {warning}" for facts in runs for warning in facts.warnings]
    found = [
        ReportSection(
            "summary", "Summary",
            [*(Paragraph(verdict(f), strong=f.name) for f in runs), summary_table(runs)],
        ),
        ReportSection("setting", "What ran where", list(_setting(runs))),
        ReportSection("curves", "Curves", list(_curves(drawn))),
        ReportSection("throughput", "Throughput and scaling", list(_throughput(runs, drawn))),
        ReportSection("utilization", "Utilization", list(_utilization(runs))),
        ReportSection("evaluation", "Evaluation", list(_evaluation(runs, drawn))),
        ReportSection("checkpoints", "Checkpoints", list(_checkpoints(runs))),
        ReportSection("spikes", "Spikes", [block for f in spikes for block in _spikes(f)]),
        ReportSection("warnings", "Warnings", [Bullets(warnings)] if warnings else []),
    ]  # fmt: skip
    return [section for section in found if section.blocks]


def _setting(runs: Sequence[RunFacts]) -> Iterator[Block]:
    yield setting_table(runs)
    for facts in runs:
        if facts.attempts:
            yield Paragraph("attempts", strong=facts.name)
            yield attempts_table(facts)


def _curves(drawn: Sequence[PlotData]) -> Iterator[Block]:
    shown = [plot for plot in drawn if plot.section == "curves"]
    for plot in shown:
        yield Plot(plot.name, plot.title, plot.note)
    if shown:
        yield Picture(CURVES, "Curves")


def _throughput(runs: Sequence[RunFacts], drawn: Sequence[PlotData]) -> Iterator[Block]:
    rows = scaling_rows(runs)
    if rows:
        yield scaling_table(rows)
        yield Paragraph(" ".join((_MEASURE, *_fewer_steps(rows))))
    for plot in drawn:
        if plot.section == "throughput":
            yield Plot(plot.name, plot.title, plot.note)
            yield Picture(SCALING, plot.title)


def _fewer_steps(rows: Sequence[ScalingRow]) -> Iterator[str]:
    """Which means are over fewer than `FIRST_STEPS` steps."""
    for row in rows:
        first, steps = row.rate.first_steps, row.rate.steps
        if first == 0:
            yield f"{row.facts.name}: none of its steps is among the first, so over all."
        elif first < FIRST_STEPS and row.rate.seq_per_s is not None:
            nodes = "" if row.rate.nodes is None else f" on {format_plural(row.rate.nodes, 'node')}"
            which = "all" if first == steps else "the first"
            yield f"{row.facts.name}{nodes}: over {which} {format_plural(first, 'step')}."


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
        yield Paragraph(RECOVERIES_CAPTION, strong=facts.name)
        yield recoveries_table(facts.lost)
        if len(facts.lost) > SHOWN_RECOVERIES:
            yield Paragraph(f"… and {len(facts.lost) - SHOWN_RECOVERIES} before these")
        yield endings_table(facts.lost)


def _evaluation(runs: Sequence[RunFacts], drawn: Sequence[PlotData]) -> Iterator[Block]:
    for plot in drawn:
        if plot.section == "evaluation":
            yield Plot(plot.name, plot.title, plot.note)
    for number, facts in enumerate(runs):
        for found in facts.scores:
            yield Paragraph(f"suite {found.suite}", strong=facts.name)
            yield Picture(scores_name(number, found.suite), f"Scores of {facts.name}")
            yield scores_table(found)


def _checkpoints(runs: Sequence[RunFacts]) -> Iterator[Block]:
    for facts in runs:
        if facts.saved:
            kept = sum(one.state == "kept" for one in facts.saved)
            text = f"{format_plural(len(facts.saved), 'checkpoint')} saved, {kept} kept"
            table = checkpoints_table(facts)
            if (more := len(facts.saved) - len(table.rows)) > 0:
                text += f"; {more:,} removed ones are not listed"
            yield Paragraph(text, strong=facts.name)
            yield table


def _spikes(facts: RunFacts) -> Iterator[Block]:
    assert facts.spikes is not None
    yield Paragraph(facts.spikes.verdict, strong=facts.name)
    if facts.spikes.spikes:
        yield spikes_table(facts)
