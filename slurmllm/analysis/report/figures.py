"""The plots of the page, as figures of plotly: data, layout and buttons.

A curve has up to three x axes (step, tokens, hours), chosen by its buttons. A long one is
thinned to its extremes, and drawn again as means of equally long pieces.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import yaml

from slurmllm.analysis.evaluate.scores import HELD_OUT
from slurmllm.analysis.report.facts import RunFacts, Runs, ScalingRow, per_s, scaling_rows
from slurmllm.core.format import Json, Values, format_number, format_percent
from slurmllm.core.metrics.curves import VAL_LOSS, Curve, Floats, Ints, piece_means, thin_rows
from slurmllm.core.run.records import TIME_PARTS

_LOOK: Values = yaml.safe_load(Path(__file__).with_name("figures.yaml").read_text(encoding="utf-8"))
_AXIS_TITLES = {"step": "step", "tokens": "tokens", "hours": "hours since the first step began"}
# The page must stay small enough to send by mail: rows of all curves of a figure.
_MAX_ROWS = 6000
_MIN_ROWS = 300
_MAX_PIECES = 600  # of a stacked figure
_MAX_STACKS = 4
_MAX_MARKS = 300  # per kind and run, the latest
_FEW_POINTS = 40  # are drawn as such, on their line
_PART_COLUMNS = ("data_wait_s", "forward_backward_s", "optimizer_s")  # the rest is the last part
_DASHES = ("solid", "dash", "dot", "dashdot")  # of the training loss, of each text's

Axes = dict[str, Floats]  # x axis → position of each point


@dataclass(frozen=True)
class PlotData:
    """A plot of the page."""

    name: str  # unique in the page
    title: str
    section: Literal["loss", "curves", "throughput", "utilization", "evaluation"]
    figure: Json  # of plotly
    note: str = ""
    height: int = 340  # pixels


@dataclass
class CurveFigure:
    """Collects the lines and marks of a figure over steps.

    Attributes:
        top: End of a linear y axis that leaves out outliers.
        limit: Height of a dashed line; 0 draws none.
    """

    unit: str
    top: float | None = None
    log: bool = False
    limit: float = 0.0
    traces: list[Json] = field(default_factory=list)
    _axes: list[Axes] = field(default_factory=list)

    def add(self, trace: Json, axes: Axes, y: Floats) -> None:
        self.traces.append({"type": "scatter", "y": packed(y), **trace})
        self._axes.append(axes)

    def finish(self) -> Json:
        """Return the figure, whose first axis is the one that all curves have."""
        names = [name for name in _AXIS_TITLES if any(name in axes for axes in self._axes)]
        positions = {
            name: [packed(axes[name]) if name in axes else [] for axes in self._axes]
            for name in names
        }
        for trace, x in zip(self.traces, positions[names[0]], strict=True):
            trace["x"] = x
        linear: Json = {"yaxis.type": "linear", "yaxis.autorange": self.top is None}
        y_axis: Json = {
            "title": {"text": self.unit, "standoff": 12},
            "type": "log" if self.log else "linear",
        }
        if self.top is not None:
            linear["yaxis.range"] = y_axis["range"] = [0.0, self.top]
        logarithmic = {"yaxis.type": "log", "yaxis.autorange": True}
        of_x = [
            _button(name, "update", {"x": x}, {"xaxis.title.text": _AXIS_TITLES[name]})
            for name, x in positions.items()
        ]
        of_y = [_button("linear", "relayout", linear), _button("log", "relayout", logarithmic)]
        return _figure(
            self.traces,
            {"title": {"text": _AXIS_TITLES[names[0]]}},
            y_axis,
            hovermode="x unified",
            shapes=[_LOOK["limit"] | {"y0": self.limit, "y1": self.limit}] if self.limit else [],
            updatemenus=[_menu(of_x, 0, 0), _menu(of_y, 1, int(self.log))],
        )


def _button(label: str, method: str, *arguments: Json) -> Json:
    return {"label": label, "method": method, "args": arguments}


def _menu(buttons: Sequence[Json], corner: int, active: int) -> Json:
    """Return a row of buttons at one of the corners of `figures.yaml`."""
    return {**_LOOK["menu"], **_LOOK["corners"][corner], "buttons": buttons, "active": active}


def _figure(data: Sequence[Json], x_axis: Json, y_axis: Json, **layout: Any) -> Json:
    axes = {"xaxis": _LOOK["axis"] | x_axis, "yaxis": _LOOK["axis"] | y_axis}
    return {"data": data, "layout": _LOOK["layout"] | axes | layout}


def _fixed_figure(kind: str, data: Sequence[Json]) -> Json:
    """Return a figure without a step axis, whose look is that of its kind."""
    look = _LOOK[kind]
    return _figure([look["trace"] | trace for trace in data], look["x"], look["y"], **look["more"])


def packed(values: Floats | Ints) -> Json:
    """Return an array as plotly reads it: base64 of little-endian numbers."""
    kind = "f4"
    if np.isfinite(values).all() and (values == np.rint(values)).all():
        kind = "i4" if abs(values).max(initial=0) < 2**31 else "f8"
    with np.errstate(over="ignore"):
        content = np.ascontiguousarray(values, dtype=f"<{kind}").tobytes()
    return {"dtype": kind, "bdata": base64.b64encode(content).decode("ascii")}


class DrawnRun:
    """A run of the page, and the positions of its rows on each of the axes that it has."""

    def __init__(self, runs: Runs, number: int) -> None:
        self.facts = runs[number]
        self.number = number
        self.is_single = len(runs) == 1
        self.curve = self.facts.curve
        self.color = _color(number)
        self.axes: Axes = {}
        if (curve := self.curve) is None:
            return
        self.axes["step"] = curve.steps.astype(np.float64)
        if np.isfinite(tokens := curve.positions("tokens")).any():
            self.axes["tokens"] = tokens
        # Wall time since the start of the first step, h; without times the sum of the step times.
        ends = _series(curve, "time")
        taken = curve.columns.get("step_time_s")
        if ends is not None:
            first = float(ends[np.isfinite(ends)][0])
            begin = first - (float(np.nan_to_num(taken[0])) if taken is not None else 0.0)
            self.axes["hours"] = (ends - begin) / 3600.0
        elif taken is not None:
            self.axes["hours"] = np.nan_to_num(taken).cumsum() / 3600.0

    def select(self, rows: Ints) -> Axes:
        return {name: values[rows] for name, values in self.axes.items()}

    def select_steps(self, steps: Sequence[int] | Ints) -> Axes:
        # A step after the last row: its metrics were lost with the node.
        of_rows = self.axes["step"]
        return self.select(np.minimum(of_rows.searchsorted(steps), len(of_rows) - 1))

    def means(self, pieces: int, rows: Ints | slice) -> Axes:
        return {name: piece_means(values[rows], pieces) for name, values in self.axes.items()}

    def line(self, num_points: int, label: str = "") -> Json:
        """Return the look of the run's line; `label` names one of several."""
        names = [self.facts.name, label] if label else [self.facts.name]
        return {
            **_LOOK["line"],
            "name": escape(label if label and self.is_single else ", ".join(names)),
            "mode": "lines+markers" if num_points <= _FEW_POINTS else "lines",
            "marker": {"size": 5, "color": self.color},
            "line": {"color": self.color, "width": 1.3},
            "legendgroup": f"run {self.number}",
            "showlegend": not self.is_single or bool(label),
        }


def figures(runs: Runs) -> list[PlotData]:
    """Return all plots that have data, in the page's order."""
    drawn = [DrawnRun(runs, number) for number in range(len(runs))]
    over_steps = (plots(drawn) for plots in (_curves, _stacks, _memory))
    over_runs = (plots(runs) for plots in (_scaling, _utilization, _evaluation))
    return list(chain(*over_steps, *over_runs))


def _color(number: int) -> Any:
    """Return the colour of a run."""
    return _LOOK["runs"][number % len(_LOOK["runs"])]


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
    values = np.concatenate([run[np.isfinite(run)] for run in times])
    top = 1.5 * float(np.percentile(values, 90))
    return top if 0 < top < float(values.max()) / 2 else None


def _curves(drawn: Sequence[DrawnRun]) -> Iterator[PlotData]:
    max_rows = max(_MIN_ROWS, _MAX_ROWS // max(1, len(drawn)))
    curves = [run.curve for run in drawn if run.curve]
    all_sequences = all(_series(curve, "seq_per_s") is not None for curve in curves)
    for metric, title, unit in _LOOK["metrics"]:
        logged = [v for curve in curves if (v := _series(curve, metric)) is not None]
        if not logged or (metric == "tokens_per_s" and all_sequences):
            continue
        top = _axis_top(logged) if metric == "step_time_s" else None
        values = np.concatenate(logged)
        values = values[np.isfinite(values)]
        if top is None and 0 < values[0] < 1e300 and np.ptp(values) <= 1e-6 * values[0]:
            top = 2 * float(values[0])  # around a constant
        if unit == "nats" and any(curve.kind != "run" for curve in curves):
            unit = ""  # that of a log is not known
        figure = CurveFigure(unit or title, top)
        for run in drawn:
            _add_lines(figure, run, metric, max_rows)
        legend: set[str] = set()
        for run in drawn:
            _add_marks(figure, run, metric, legend)
        if metric == "loss":
            yield PlotData(metric, title, "loss", figure.finish(), height=440)
        else:
            yield PlotData(metric, title, "curves", figure.finish())


def _add_lines(figure: CurveFigure, run: DrawnRun, metric: str, max_rows: int) -> None:
    """Add a run's lines of a metric: in the plot of the loss, validation losses too."""
    if (curve := run.curve) is None:
        return
    names = {metric: ""}
    if metric in ("loss", VAL_LOSS):
        names |= {name: f"validation {corpus}".strip() for name, corpus in curve.validation.items()}
    for index, (name, label) in enumerate(names.items()):
        values = _series(curve, name)
        if values is None:
            continue
        logged = np.flatnonzero(curve.present(name))  # few have the validation loss
        values = values[logged]
        rows = thin_rows(values, max_rows)
        line = run.line(len(rows), label)
        line["line"]["dash"] = _DASHES[index % len(_DASHES)] if label else "solid"
        thinned = len(rows) < len(values)
        look = line | _LOOK["thinned"] if thinned else line
        figure.add(look, run.select(logged[rows]), values[rows])
        if thinned:
            pieces = max(1, max_rows // 3)
            mean = {**line, "line": line["line"] | {"width": 2}}
            figure.add(mean, run.means(pieces, logged), piece_means(values, pieces))


def _add_marks(figure: CurveFigure, run: DrawnRun, metric: str, legend: set[str]) -> None:
    """Add a run's marks, on its curve; marks of one kind have one entry in the legend."""
    facts = run.facts
    curve = run.curve
    if curve is None or (values := _series(curve, metric)) is None:
        return
    marks = {"restart": [*_restarts(facts, curve)]}
    if (diverged := facts.diverges_at.get(metric)) is not None:
        marks["divergence"] = [(diverged, f"{facts.name} diverges at step {diverged}")]
    if metric == "loss":
        spikes = facts.spikes.spikes if facts.spikes else ()
        marks["save"] = [
            (save.step, f"{facts.name}: saved step {save.step}") for save in facts.saved
        ]
        marks["spike"] = [
            (
                spike.peak_step,
                f"{facts.name}: spike at step {spike.peak_step}, "
                f"{format_number(spike.height)} above the mean",
            )
            for spike in spikes
        ]
    rows = np.flatnonzero(curve.present(metric))
    for kind, texts in marks.items():
        latest = texts[-_MAX_MARKS:]
        if not latest:
            continue
        steps = np.array([step for step, _ in latest])
        y = np.interp(steps, curve.steps[rows], values[rows])
        look: Json = {
            **_LOOK["mark"],
            **_LOOK["marks"][kind],
            "legendgroup": kind,
            "showlegend": kind not in legend,
            "text": [escape(note).replace("\n", "<br>") for _, note in latest],
        }
        colors = {"color": run.color, "line": {"width": 1, "color": run.color}}
        look["marker"] = look["marker"] | colors
        figure.add(look, run.select_steps(steps), y)
        legend.add(kind)


def _restarts(facts: RunFacts, curve: Curve) -> Iterator[tuple[int, str]]:
    endings = {attempt.attempt: attempt for attempt in facts.train}
    for row in (np.flatnonzero(np.diff(curve.attempts) != 0) + 1).tolist():
        before = int(curve.attempts[row - 1])
        after = int(curve.attempts[row])
        lines = [f"{facts.name}: attempt {after} from step {curve.steps[row]}"]
        for attempt in range(before, after):  # attempts without a step have no row
            if attempt in endings and endings[attempt].ending is not None:
                evidence = "; ".join(endings[attempt].evidence)
                lines.append(f"attempt {attempt} ended: {endings[attempt].ending} {evidence:.150}")
        yield int(curve.steps[row]), "\n".join(lines)


def _stacks(drawn: Sequence[DrawnRun]) -> Iterator[PlotData]:
    """Yield the parts of each run's steps, for the first runs only."""
    split = [
        (run, run.curve)
        for run in drawn
        if run.curve and "step_time_s" in run.curve.columns
        if run.curve.columns.keys() & {*_PART_COLUMNS}
    ]
    for run, curve in split[:_MAX_STACKS]:
        taken = curve.columns["step_time_s"]
        absent = np.zeros(len(taken))
        parts = [np.nan_to_num(curve.columns.get(name, absent)) for name in _PART_COLUMNS]
        parts.append(np.maximum(taken - sum(parts), 0.0))
        figure = CurveFigure("s", _axis_top([sum(parts, np.zeros(1))]))
        total = max(float(sum(map(np.sum, parts))), 1e-30)
        shares = []
        for (name, color), seconds in zip(_LOOK["step_parts"].items(), parts, strict=True):
            if seconds.any():
                shares.append(f"{name} {100 * float(seconds.sum()) / total:.1f} %")
                look = _LOOK["layer"] | {"name": name, "fillcolor": color}
                figure.add(
                    look, run.means(_MAX_PIECES, slice(None)), piece_means(seconds, _MAX_PIECES)
                )
        if figure.traces:
            yield PlotData(
                f"parts-{run.number}",
                f"Step time by parts: {run.facts.name}",
                "curves",
                figure.finish(),
                f"Of all steps: {', '.join(shares)}.",
            )


def _memory(drawn: Sequence[DrawnRun]) -> Iterator[PlotData]:
    """Yield the peak memory of a worker, if the attempts measured it."""
    figure = CurveFigure("GB")
    limits = set()
    for run in drawn:
        measured = [e for e in run.facts.events if e.kind == "memory" and "peak_bytes" in e.values]
        if not measured or not run.curve:
            continue
        peaks = np.array([event.values["peak_bytes"] / 1e9 for event in measured])
        limits |= {e.values["limit_bytes"] / 1e9 for e in measured if "limit_bytes" in e.values}
        figure.add(
            run.line(len(peaks)) | {"mode": "lines+markers"},
            run.select_steps([event.step for event in measured]),
            peaks,
        )
    if figure.traces:
        limits_text = " or ".join(f"{limit:.2f}" for limit in sorted(limits))
        note = "The worker with the highest peak."
        if limits:
            note += f" Its limit is {limits_text} GB."
        yield PlotData("memory", "Peak memory of a worker", "curves", figure.finish(), note)


def _scaling(runs: Runs) -> Iterator[PlotData]:
    """Yield seq/s over nodes of models that ran on several node counts."""
    groups: dict[str, list[ScalingRow]] = {}
    for row in scaling_rows(runs):
        if row.efficiency is not None:
            cluster = row.facts.configuration.text("cluster.name")
            label = f"{row.facts.recipe or row.facts.name}{f' on {cluster}' if cluster else ''}"
            groups.setdefault(label, []).append(row)
    data = []
    for number, (label, rows) in enumerate(groups.items()):
        nodes = [row.rate.nodes for row in rows]
        if len(set(nodes)) < 2:
            continue
        data.append(
            {
                "name": escape(label),
                "text": [f"{format_percent(row.efficiency, 1)} of linear" for row in rows],
                "line": {"color": _color(number)},
                "x": nodes,
                "y": [row.speed for row in rows],
            }
        )
    if data:
        yield PlotData(
            "scaling", "Throughput by nodes", "throughput", _fixed_figure("scaling", data)
        )


def _utilization(runs: Runs) -> Iterator[PlotData]:
    """Yield one stacked bar per run."""
    runs_used = [(f.name, f.used) for f in runs if f.used is not None and f.used.node_hours > 0]
    if not runs_used:
        return
    data = [
        {
            "name": time_part.replace("_", " "),
            "y": [escape(name) for name, _ in runs_used],
            "x": [100.0 * used.shares[time_part] for _, used in runs_used],
            "customdata": [used.parts[time_part] for _, used in runs_used],
            "marker": {"color": _LOOK["time_parts"][time_part]},
        }
        for time_part in TIME_PARTS
        if any(used.parts[time_part] for _, used in runs_used)
    ]
    yield PlotData(
        "utilization",
        "Where the node hours went",
        "utilization",
        _fixed_figure("utilization", data),
        height=210 + 34 * len(runs_used),
    )


def _evaluation(runs: Runs) -> Iterator[PlotData]:
    """Yield scores over tokens, one plot per suite with several evaluated checkpoints."""
    suites = dict.fromkeys(table.suite for facts in runs for table in facts.scores)
    for number, suite in enumerate(suites):
        data = []
        for facts in runs:
            for table in facts.scores:
                if table.suite != suite or len({*table.tokens.values()}) < 2:
                    continue
                for row in table.rows:
                    if row.group == HELD_OUT:  # losses, on another scale
                        continue
                    steps = [step for step in table.steps if step in row.scores]
                    label = f"{row.group + ', ' if row.group else ''}{row.name} ({row.metric})"
                    errors = [row.errors.get(step, 0.0) for step in steps]
                    data.append(
                        {
                            "name": escape(f"{facts.name}: {label}" if len(runs) > 1 else label),
                            "x": [table.tokens[step] for step in steps],
                            "y": [row.scores[step] for step in steps],
                            "error_y": {"array": errors, "thickness": 1},
                        }
                    )
        if data:
            yield PlotData(
                f"scores-{number}",
                f"Scores: {suite}",
                "evaluation",
                _fixed_figure("scores", data),
                height=440,
            )
