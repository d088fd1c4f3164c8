"""The plots of the page as data; `report.js` draws them with plotly.js.

Plots without a step axis (throughput by nodes, node hours, scores) are traces of plotly, without
what the script adds to each of their kind.

Every curve has three x axes (step, tokens, hours) and is stored twice: thinned to its extremes, for
display, and as means of equally long pieces, for smoothing.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import yaml

from slurmllm.evaluate.scores import HELD_OUT
from slurmllm.format import format_elapsed, format_names, format_number
from slurmllm.metrics.curves import VAL_LOSS, Curve, Floats, Ints, piece_means, thin_rows
from slurmllm.report.facts import RunFacts, per_s, scaling_rows
from slurmllm.run.records import TIME_PARTS, TimePart

Json = dict[str, Any]
_LOOK = yaml.safe_load(Path(__file__).with_name("figures.yaml").read_text(encoding="utf-8"))
RUN_COLORS: Sequence[str] = _LOOK["runs"]
PART_COLORS: Mapping[TimePart, str] = _LOOK["time_parts"]
STEP_PARTS: Mapping[str, str] = _LOOK["step_parts"]
_METRICS: Sequence[tuple[str, str, str]] = _LOOK["metrics"]
# The page must stay small enough to send by mail: rows of all curves of a figure.
_MOST_ROWS = 6000
_FEWEST_ROWS = 300
_MOST_PIECES = 600  # of a stacked figure
_MOST_STACKS = 4
_MOST_MARKS = 300  # per kind and run, the latest
_PART_COLUMNS = ("data_wait_s", "forward_backward_s", "optimizer_s")  # the rest is the last part
_ALL = slice(None)
_DASHES = ("solid", "dash", "dot", "dashdot")  # of the training loss, of each text's


@dataclass(frozen=True)
class PlotData:
    """The data of a plot."""

    name: str  # unique in the page
    title: str
    section: Literal["loss", "curves", "throughput", "utilization", "evaluation"]
    content: Json  # input of `report.js`
    note: str = ""


class CurvePositions:
    """The positions of a curve's rows on each of its axes: step, tokens, hours."""

    def __init__(self, curve: Curve | None) -> None:
        self.axes: dict[str, Floats] = {}
        if curve is None:
            return
        self.axes["step"] = curve.steps.astype(np.float64)
        if np.isfinite(tokens := curve.positions("tokens")).any():
            self.axes["tokens"] = tokens
        # Wall time since the start of the first step, h; without times the sum of the step times.
        ends, taken = curve.columns.get("time"), curve.columns.get("step_time_s")
        if ends is not None and np.isfinite(ends).any():
            first = float(ends[np.isfinite(ends)][0])
            begin = first - (float(np.nan_to_num(taken[0])) if taken is not None else 0.0)
            self.axes["hours"] = (ends - begin) / 3600.0
        elif taken is not None:
            self.axes["hours"] = np.cumsum(np.nan_to_num(taken)) / 3600.0

    def at(self, rows: Ints) -> Json:
        return {name: packed(values[rows]) for name, values in self.axes.items()}

    def at_steps(self, curve: Curve, steps: Sequence[int] | Ints) -> Json:
        # A step after the last row: its metrics were lost with the node.
        return self.at(np.minimum(np.searchsorted(curve.steps, steps), len(curve.steps) - 1))

    def pieces(self, most: int, rows: Ints | slice = _ALL) -> Json:
        return {name: packed(piece_means(values[rows], most)) for name, values in self.axes.items()}


def figures(runs: Sequence[RunFacts]) -> list[PlotData]:
    """Return all plots that have data, in the page's order."""
    positions = [CurvePositions(facts.curve) for facts in runs]
    of_steps = (plots(runs, positions) for plots in (_curves, _stacks, _memory))
    others = (plots(runs) for plots in (_scaling, _utilization, _evaluation))
    return list(chain(*of_steps, *others))


def page_data(runs: Sequence[RunFacts], drawn: Sequence[PlotData]) -> Json:
    """Return the input of the page's script."""
    return {
        "runs": [
            {"name": escape(facts.name), "color": RUN_COLORS[i % len(RUN_COLORS)]}
            for i, facts in enumerate(runs)
        ],
        "figures": {plot.name: plot.content for plot in drawn},
    }


def _series(curve: Curve, metric: str) -> Floats | None:
    """Return the values of a metric, NaN in rows without it; None if no row has it."""
    if metric in ("seq_per_s", "tokens_per_s"):
        sequences, tokens = per_s(curve)
        values = sequences if metric == "seq_per_s" else tokens
    else:
        values = curve.columns.get(metric)
    return values if values is not None and np.isfinite(values).any() else None


def _axis_top(times: Sequence[Floats]) -> float | None:
    """Return the top of an axis of step times without outliers, such as a step that compiles.

    Returns None if all values fit: none is more than twice the top.
    """
    values = np.concatenate([run[np.isfinite(run)] for run in times] or [np.empty(0)])
    if not values.size:
        return None
    top = 1.5 * float(np.percentile(values, 90))
    return top if 0 < top < float(values.max()) / 2 else None


def _curves(runs: Sequence[RunFacts], positions: Sequence[CurvePositions]) -> Iterator[PlotData]:
    most = max(_FEWEST_ROWS, _MOST_ROWS // max(1, len(runs)))
    curves = [facts.curve for facts in runs if facts.curve is not None]
    all_sequences = all(_series(curve, "seq_per_s") is not None for curve in curves)
    for metric, title, unit in _METRICS:
        logged = [v for curve in curves if (v := _series(curve, metric)) is not None]
        if not logged or (metric == "tokens_per_s" and all_sequences):
            continue
        lines: list[Json] = []
        markers: list[Json] = []
        top = _axis_top(logged) if metric == "step_time_s" else None
        for number, (facts, where) in enumerate(zip(runs, positions, strict=True)):
            if facts.curve is None:
                continue
            markers += _marks(number, facts, facts.curve, where, everything=metric == "loss")
            lines += _lines(number, facts.curve, where, metric, most)
            values = _series(facts.curve, metric)
            if values is None:
                continue
            rows = np.flatnonzero(facts.curve.present(metric))
            if top is not None and len(far := rows[values[rows] > top][-_MOST_MARKS:]):
                texts = [
                    f"{escape(facts.name)}: {format_number(value)} {unit} at step {step}"
                    for step, value in zip(facts.curve.steps[far], values[far], strict=True)
                ]
                markers.append({"run": number, "kind": "far", "x": where.at(far), "text": texts})
        content: Json = {"kind": "curve", "title": title, "unit": unit, "top": top}
        content |= {"series": lines, "marks": markers}
        if metric == "loss":
            yield PlotData(metric, title, "loss", content | {"height": 420})
        else:
            yield PlotData(metric, title, "curves", content)


def _lines(
    number: int, curve: Curve, where: CurvePositions, metric: str, most: int
) -> Iterator[Json]:
    """Yield a run's lines in the plot of a metric: in that of the loss, validation losses too."""
    names = {metric: ""}
    if metric in ("loss", VAL_LOSS):
        names |= {name: f"validation {text}".strip() for name, text in curve.validation.items()}
    for name, label in names.items():
        values = _series(curve, name)
        if values is None:
            continue
        logged = np.flatnonzero(curve.present(name))  # few have the validation loss
        values = values[logged]
        rows = thin_rows(values, most)
        x, y = where.at(logged[rows]), packed(values[rows], "f4")
        line: Json = {"run": number, "x": x, "y": y}
        if label:
            line |= {"name": escape(label), "dash": _DASHES[list(names).index(name) % len(_DASHES)]}
        if len(rows) < len(values):
            pieces = max(1, most // 3)
            means = packed(piece_means(values, pieces), "f4")
            line["mean"] = {"x": where.pieces(pieces, logged), "y": means}
        yield line


def _marks(
    number: int, facts: RunFacts, curve: Curve, where: CurvePositions, everything: bool
) -> Iterator[Json]:
    """Yield the markers of a run by kind: restarts, and with `everything` saves and spikes."""
    by_kind: dict[str, list[tuple[int, list[str]]]] = {"restart": [], "save": [], "spike": []}
    records = {attempt.attempt: attempt for attempt in facts.train}
    for row in (np.flatnonzero(np.diff(curve.attempts) != 0) + 1).tolist():
        before, after = int(curve.attempts[row - 1]), int(curve.attempts[row])
        lines = [f"{facts.name}: attempt {after} from step {curve.steps[row]}"]
        for attempt in range(before, after):  # attempts without a step have no row
            record = records.get(attempt)
            if record is not None and record.ending is not None:
                why = f" ({'; '.join(record.evidence):.150})" if record.evidence else ""
                lines.append(f"attempt {attempt} ended: {record.ending}{why}")
        if after in records:
            lines.append(f"nodes: {format_names(records[after].nodes)}")
        by_kind["restart"].append((int(curve.steps[row]), lines))
    for save in facts.saved if everything else ():
        duration = "" if save.seconds is None else f", {format_elapsed(save.seconds)} s"
        by_kind["save"].append((save.step, [f"{facts.name}: saved step {save.step}{duration}"]))
    for spike in facts.spikes.spikes if facts.spikes is not None and everything else ():
        height = f"{format_number(spike.height)} above the mean"
        text = f"{facts.name}: spike at step {spike.peak_step}, {height}"
        by_kind["spike"].append((spike.peak_step, [text]))
    for kind, marks in by_kind.items():
        if shown := marks[-_MOST_MARKS:]:
            yield {
                "run": number,
                "kind": kind,
                "x": where.at_steps(curve, [step for step, _ in shown]),
                "text": ["<br>".join(map(escape, lines)) for _, lines in shown],
            }


def _stacks(runs: Sequence[RunFacts], positions: Sequence[CurvePositions]) -> Iterator[PlotData]:
    """Yield the parts of each run's steps, for the first runs only."""
    split = [
        (number, facts.curve)
        for number, facts in enumerate(runs)
        if facts.curve and "step_time_s" in facts.curve.columns
        if facts.curve.columns.keys() & {*_PART_COLUMNS}
    ]
    for number, curve in split[:_MOST_STACKS]:
        taken = curve.columns["step_time_s"]
        absent = np.zeros(len(taken))
        parts = [np.nan_to_num(curve.columns.get(name, absent)) for name in _PART_COLUMNS]
        parts.append(np.maximum(taken - sum(parts), 0.0))
        layers = [
            {"name": name, "color": color, "y": packed(piece_means(part, _MOST_PIECES), "f4")}
            for (name, color), part in zip(STEP_PARTS.items(), parts, strict=True)
            if part.any()
        ]
        content: Json = {
            "kind": "stack",
            "title": "Step time by parts",
            "unit": "s",
            "x": positions[number].pieces(_MOST_PIECES),
            "layers": layers,
            "top": _axis_top([sum(parts, np.zeros(1))]),
        }
        shares = ", ".join(
            f"{name} {100 * float(np.sum(part)) / max(float(sum(map(np.sum, parts))), 1e-30):.1f} %"
            for name, part in zip(STEP_PARTS, parts, strict=True)
            if part.any()
        )
        title = f"Step time by parts: {runs[number].name}"
        yield PlotData(f"parts-{number}", title, "curves", content, f"Of all steps: {shares}.")


def _memory(runs: Sequence[RunFacts], positions: Sequence[CurvePositions]) -> Iterator[PlotData]:
    """Yield the peak memory of a worker, if the attempts measured it."""
    lines, limits = [], set()
    for number, facts in enumerate(runs):
        measured = [e for e in facts.events if e.kind == "memory" and "peak_bytes" in e.values]
        if not measured or facts.curve is None:
            continue
        peaks = np.array([event.values["peak_bytes"] / 1e9 for event in measured])
        limits |= {e.values["limit_bytes"] / 1e9 for e in measured if "limit_bytes" in e.values}
        where = positions[number].at_steps(facts.curve, [event.step for event in measured])
        lines.append({"run": number, "x": where, "y": packed(peaks, "f4"), "points": True})
    if lines:
        content = {"kind": "curve", "title": "Memory", "unit": "GB", "series": lines, "marks": []}
        most = " or ".join(f"{limit:.2f}" for limit in sorted(limits))
        note = "The worker with the highest peak." + (f" Its limit is {most} GB." if most else "")
        yield PlotData("memory", "Peak memory of a worker", "curves", content, note)


def _scaling(runs: Sequence[RunFacts]) -> Iterator[PlotData]:
    """Yield seq/s over nodes of models that ran on several node counts."""
    groups: dict[str, list[tuple[int, float, float]]] = {}
    for row in scaling_rows(runs):
        if row.rate.nodes and row.speed and row.efficiency:
            cluster = row.facts.configuration.text("cluster.name")
            label = f"{row.facts.recipe or row.facts.name}{f' on {cluster}' if cluster else ''}"
            groups.setdefault(label, []).append((row.rate.nodes, row.speed, row.efficiency))
    data: list[Json] = []
    for number, (label, points) in enumerate(groups.items()):
        nodes = [point[0] for point in points]
        if len(set(nodes)) < 2:
            continue
        color = RUN_COLORS[number % len(RUN_COLORS)]
        text = [f"{100 * efficiency:.1f} % of linear" for *_, efficiency in points]
        speeds = [speed for _, speed, _ in points]
        line: Json = {"color": color}
        data.append({"name": escape(label), "x": nodes, "y": speeds, "text": text, "line": line})
        begin, base, _ = points[0]
        ends = {"x": [begin, max(nodes)], "y": [base, base * max(nodes) / begin]}
        line = {"color": color, "dash": "dot", "width": 1}
        data.append({"name": "linear", **ends, "line": line, "mode": "lines", "hoverinfo": "skip"})
    if data:
        content: Json = {"kind": "scaling", "data": data}
        yield PlotData("scaling", "Throughput by nodes", "throughput", content)


def _utilization(runs: Sequence[RunFacts]) -> Iterator[PlotData]:
    """Yield one stacked bar per run."""
    runs_used = [(f.name, f.used) for f in runs if f.used is not None and f.used.node_hours > 0]
    if not runs_used:
        return
    names = [escape(name) for name, _ in runs_used]
    data = [
        {
            "name": part.replace("_", " "),
            "y": names,
            "x": [100.0 * used.shares[part] for _, used in runs_used],
            "customdata": [used.parts[part] for _, used in runs_used],
            "marker": {"color": PART_COLORS[part]},
        }
        for part in TIME_PARTS
        if any(used.parts[part] for _, used in runs_used)
    ]
    content: Json = {"kind": "utilization", "data": data, "height": 150 + 34 * len(runs_used)}
    yield PlotData("utilization", "Where the node hours went", "utilization", content)


def _evaluation(runs: Sequence[RunFacts]) -> Iterator[PlotData]:
    """Yield scores over tokens, one plot per suite with several evaluated checkpoints."""
    suites = dict.fromkeys(table.suite for facts in runs for table in facts.scores)
    for number, suite in enumerate(suites):
        data: list[Json] = []
        for name, table, row in (
            (f.name, t, r)
            for f in runs
            for t in f.scores
            for r in t.rows
            if t.suite == suite and len(t.tokens) > 1
        ):
            if row.group == HELD_OUT:  # losses are on another scale
                continue
            steps = [step for step in table.steps if step in row.scores and step in table.tokens]
            label = f"{row.group + ', ' if row.group else ''}{row.name} ({row.metric})"
            errors = [row.errors.get(step, 0.0) for step in steps]
            data.append(
                {
                    "name": escape(f"{name}: {label}" if len(runs) > 1 else label),
                    "x": [table.tokens[step] for step in steps],
                    "y": [row.scores[step] for step in steps],
                    "error_y": {"array": errors, "thickness": 1},
                }
            )
        if data:
            content: Json = {"kind": "scores", "data": data, "height": 420}
            yield PlotData(f"scores-{number}", f"Scores: {suite}", "evaluation", content)


def unpacked(values: Json) -> npt.NDArray[Any]:
    """Return the array of what `packed` returned."""
    return np.frombuffer(base64.b64decode(values["b"]), f"<{values['t']}")


def packed(values: npt.NDArray[Any], kind: Literal["f4", "f8"] = "f8") -> Json:
    """Return an array as base64 of its little-endian bytes, which `report.js` decodes."""
    with np.errstate(over="ignore"):
        raw = np.ascontiguousarray(values, dtype=f"<{kind}").tobytes()
    return {"t": kind, "b": base64.b64encode(raw).decode("ascii")}
