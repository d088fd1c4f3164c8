"""The plots without a step axis: throughput by nodes, node hours, scores."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from slurmllm.evaluate.scores import HELD_OUT, ScoreTable
from slurmllm.records import TIME_PARTS
from slurmllm.report.blocks import PART_COLORS, RUN_COLORS, Json, PlotData
from slurmllm.report.facts import RunFacts
from slurmllm.report.scaling import scaling_rows


def summary_figures(runs: Sequence[RunFacts]) -> list[PlotData]:
    """The plots that have data, as plotly's data and layout."""
    return [*_scaling(runs), *_utilization(runs), *_evaluation(runs)]


def _scaling(runs: Sequence[RunFacts]) -> Iterator[PlotData]:
    """seq/s over nodes of models that ran on several node counts."""
    groups: dict[str, list[tuple[int, float, float]]] = {}
    for row in scaling_rows(runs):
        speed = row.rate.seq_per_s_first_500 or row.rate.seq_per_s
        if row.rate.nodes and speed and row.efficiency:
            cluster = row.facts.configuration.text("cluster.name")
            label = f"{row.facts.recipe or row.facts.name}{f' on {cluster}' if cluster else ''}"
            groups.setdefault(label, []).append((row.rate.nodes, speed, row.efficiency))
    data: list[Json] = []
    for number, (label, points) in enumerate(groups.items()):
        nodes = [point[0] for point in points]
        if len(set(nodes)) < 2:
            continue
        color = RUN_COLORS[number % len(RUN_COLORS)]
        text = [f"{100 * efficiency:.1f} % of linear" for *_, efficiency in points]
        data.append(
            {
                "type": "scatter", "mode": "lines+markers", "name": escape(label), "x": nodes,
                "y": [speed for _, speed, _ in points], "text": text,
                "line": {"color": color},
                "hovertemplate": "%{x} nodes: %{y:.4g} seq/s, %{text}<extra></extra>",
            }
        )  # fmt: skip
        begin, base, _ = points[0]
        data.append(
            {
                "type": "scatter", "mode": "lines", "name": "linear", "x": [begin, max(nodes)],
                "y": [base, base * max(nodes) / begin], "hoverinfo": "skip",
                "line": {"color": color, "dash": "dot", "width": 1},
            }
        )  # fmt: skip
    if data:
        layout = {
            "xaxis": {"title": {"text": "nodes"}, "type": "log", "dtick": 0.30102999566},
            "yaxis": {"title": {"text": "sequences/s"}, "type": "log"},
        }
        content: Json = {"kind": "native", "data": data, "layout": layout}
        yield PlotData("scaling", "Throughput by nodes", "throughput", content)


def _utilization(runs: Sequence[RunFacts]) -> Iterator[PlotData]:
    """One stacked bar per run."""
    runs_used = [(f.name, f.used) for f in runs if f.used is not None and f.used.node_hours > 0]
    if not runs_used:
        return
    names = [escape(name) for name, _ in runs_used]
    data = [
        {
            "type": "bar", "orientation": "h", "name": part.replace("_", " "), "y": names,
            "x": [100.0 * used.shares[part] for _, used in runs_used],
            "customdata": [used.parts[part] for _, used in runs_used],
            "marker": {"color": PART_COLORS[part]},
            "hovertemplate": "%{fullData.name}: %{x:.2f} %, %{customdata:.4g} node hours"
            "<extra>%{y}</extra>",
        }
        for part in TIME_PARTS
        if any(used.parts[part] for _, used in runs_used)
    ]  # fmt: skip
    layout = {
        "barmode": "stack",
        "xaxis": {"title": {"text": "% of the node hours"}, "range": [0, 100]},
        "yaxis": {"autorange": "reversed", "automargin": True, "type": "category"},
        "height": 150 + 34 * len(runs_used),
    }
    content: Json = {"kind": "native", "data": data, "layout": layout}
    yield PlotData("utilization", "Where the node hours went", "utilization", content)


def _evaluation(runs: Sequence[RunFacts]) -> Iterator[PlotData]:
    """Scores over tokens, one plot per suite with several evaluated checkpoints."""
    suites = dict.fromkeys(table.suite for facts in runs for table in facts.scores)
    for number, suite in enumerate(suites):
        data: list[Json] = []
        for facts in runs:
            for table in facts.scores:
                if table.suite == suite and len(table.tokens) > 1:
                    data += _score_lines(table, f"{facts.name}: " if len(runs) > 1 else "")
        if data:
            layout = {"xaxis": {"title": {"text": "tokens"}}, "yaxis": {"title": {"text": "score"}}}
            content: Json = {"kind": "native", "data": data, "layout": layout | {"height": 420}}
            yield PlotData(f"scores-{number}", f"Scores: {suite}", "evaluation", content)


def _score_lines(table: ScoreTable, prefix: str) -> Iterator[Json]:
    for row in table.rows:
        if row.group == HELD_OUT:  # losses are on another scale
            continue
        steps = [step for step in table.steps if step in row.scores and step in table.tokens]
        group = f"{row.group}, " if row.group else ""
        yield {
            "type": "scatter", "mode": "lines+markers",
            "name": escape(f"{prefix}{group}{row.name} ({row.metric})"),
            "x": [table.tokens[step] for step in steps], "y": [row.scores[step] for step in steps],
            "error_y": {"array": [row.errors.get(step, 0.0) for step in steps], "thickness": 1},
            "hovertemplate": "%{fullData.name}: %{y:.4g} at %{x:,} tokens<extra></extra>",
        }  # fmt: skip
