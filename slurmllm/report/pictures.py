"""The pictures of the Markdown report, as PNG files: the page's plots, drawn with matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import unescape
from pathlib import Path

import numpy as np

from slurmllm.display.pictures import (
    PICTURE_STYLE,
    Axes,
    Figure,
    Line2D,
    LogFormatter,
    rc_context,
    write_picture,
)
from slurmllm.evaluate.plot import draw as draw_scores
from slurmllm.format import format_number
from slurmllm.report.document import CURVES, SCALING, UTILIZATION, scores_name
from slurmllm.report.facts import RunFacts
from slurmllm.report.figures import PART_COLORS, RUN_COLORS, Json, PlotData, unpacked
from slurmllm.run.records import TIME_PARTS
from slurmllm.status.utilization import Utilization

_FIX = "name another file with --out"
_FORMS = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-."}


def write_pictures(
    runs: Sequence[RunFacts], drawn: Sequence[PlotData], folder: Path
) -> Mapping[str, Path]:
    """Draw the pictures that have data; returns their files by name.

    Raises:
        StorageError: a file cannot be written.
    """
    paths = {}
    # Of the step parts, only those of the first run that has them
    curves = [plot for plot in drawn if plot.content["kind"] == "curve"]
    curves += [plot for plot in drawn if plot.content.get("layers")][:1]
    if curves:
        paths[CURVES] = folder / f"{CURVES}.png"
        _write_curves(runs, curves, paths[CURVES])
    used = {f.name: f.used for f in runs if f.used is not None and f.used.node_hours > 0}
    if used:
        paths[UTILIZATION] = folder / f"{UTILIZATION}.png"
        draw_utilization(used, paths[UTILIZATION])
    for figure in drawn:
        if figure.section == "throughput":
            paths[SCALING] = folder / f"{SCALING}.png"
            _write_scaling(figure, paths[SCALING])
    for number, facts in enumerate(runs):
        for table in facts.scores:
            if len(table.tokens) > 1:
                name = scores_name(number, table.suite)
                paths[name] = folder / f"{name}.png"
                draw_scores(table, facts.name, paths[name], facts.curve)
    return paths


@rc_context(fname=PICTURE_STYLE)
def _write_scaling(figure: PlotData, path: Path) -> None:
    """Draw throughput over nodes, with linear scaling for comparison."""
    picture = Figure(figsize=(7, 4.2), dpi=100, layout="constrained")
    axes = picture.subplots()
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for line in figure.content["data"]:
        color, form = line["line"]["color"], "o-" if "text" in line else ":"
        axes.plot(line["x"], line["y"], form, color=color, label=unescape(line["name"]))
        for nodes, speed, text in zip(line["x"], line["y"], line.get("text", ()), strict=False):
            look: Json = {"textcoords": "offset points", "fontsize": 7, "color": color}
            axes.annotate(text, (nodes, speed), (5, -10), **look)
    axes.set_xticks(sorted({nodes for line in figure.content["data"] for nodes in line["x"]}))
    axes.set_xlabel("nodes")
    axes.set_ylabel("sequences/s")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(LogFormatter())  # few labels over a long range
    axes.grid(which="minor")
    axes.legend(frameon=False)
    write_picture(picture, path, _FIX)


@rc_context(fname=PICTURE_STYLE)
def _write_curves(runs: Sequence[RunFacts], plots: Sequence[PlotData], path: Path) -> None:
    """Draw one panel per plot over steps."""
    rows = -(-len(plots) // 2)
    # Fixed margins, in inches: a constrained layout takes as long to solve as all the drawing.
    height = 2.9 * rows + 0.5
    picture = Figure(figsize=(11, height), dpi=100)
    margins = {"top": 1 - 0.7 / height, "bottom": 0.3 / height, "hspace": 0.25}
    grid = {"left": 0.07, "right": 0.99, "wspace": 0.15} | margins
    panels = list(np.atleast_1d(picture.subplots(rows, 2, gridspec_kw=grid)).flat)
    for axes, plot in zip(panels, plots, strict=False):
        unit = plot.content["unit"]
        axes.set_title(f"{plot.title}{f', {unit}' if unit else ''}")
        draw = _draw_curves if plot.content["kind"] == "curve" else _draw_stack
        draw(axes, plot.content)
        axes.tick_params(labelsize=8)
        axes.margins(x=0.01)
    for axes in panels[len(plots) :]:
        axes.set_axis_off()
    if len(runs) > 1:
        # matplotlib hides labels that begin with an underscore.
        names = (f" {f.name}" if f.name.startswith("_") else f.name for f in runs)
        handles = [
            Line2D([], [], color=RUN_COLORS[number % len(RUN_COLORS)], label=name)
            for number, name in enumerate(names)
        ]
        picture.legend(handles=handles, loc="upper center", ncols=4, frameon=False)
    write_picture(picture, path, _FIX)


def _draw_stack(axes: Axes, content: Json) -> None:
    layers = content["layers"]
    values = [unpacked(layer["y"]) for layer in layers]
    labels, colors = ([layer[key] for layer in layers] for key in ("name", "color"))
    axes.stackplot(unpacked(content["x"]["step"]), *values, labels=labels, colors=colors)
    if content["top"] is not None:
        axes.set_ylim(0.0, content["top"])
    axes.legend(fontsize=7, loc="upper right")


def _draw_curves(axes: Axes, content: Json) -> None:
    values = []
    of_texts: dict[str, Line2D] = {}  # of validation texts: the same styles for all runs
    for line in content["series"]:
        color = RUN_COLORS[line["run"] % len(RUN_COLORS)]
        y = unpacked(line["y"]).astype(np.float64)
        y[np.isinf(y)] = np.nan
        values.append(y[np.isfinite(y)])
        # With dots: a validation loss may have one point.
        form = "." * ("name" in line) + _FORMS[line.get("dash", "solid")]
        form = "o" if "points" in line else form
        (artist,) = axes.plot(unpacked(line["x"]["step"]), y, form, color=color, linewidth=0.9)
        if "name" in line:
            of_texts.setdefault(unescape(line["name"]), artist)
    if of_texts:
        axes.legend([*of_texts.values()], [*of_texts], fontsize=7, loc="upper right")
    finite, top = np.concatenate(values), content.get("top")
    if top is not None and finite.size:
        axes.set_ylim(0.0, top)
        axes.set_title(f"{axes.get_title()}; up to {format_number(float(finite.max()))}")
    for mark in content["marks"]:
        color, steps = RUN_COLORS[mark["run"] % len(RUN_COLORS)], unpacked(mark["x"]["step"])
        if mark["kind"] == "far" and top is not None:  # the axis is cut
            axes.plot(steps, np.full(len(steps), 0.96 * top), "^", color=color)
        elif mark["kind"] == "restart":
            for step in steps[-60:]:  # more would cover the curve
                axes.axvline(step, color=color, linewidth=0.8, linestyle=":", alpha=0.7)
    if finite.size and np.ptp(finite) <= 1e-6 * np.abs(finite).max():  # a constant learning rate
        axes.set_ylim(*sorted((0.0, 2 * float(np.clip(finite[0], -1e300, 1e300)) or 1.0)))


@rc_context(fname=PICTURE_STYLE)
def draw_utilization(runs: Mapping[str, Utilization], path: Path) -> None:
    """Draw the shares of each run's node hours, and next to them only the lost ones, as a PNG.

    Raises:
        StorageError: the file cannot be written.
    """
    picture = Figure(figsize=(11, 1.8 + 0.5 * len(runs)), dpi=120, layout="constrained")
    whole, lost = picture.subplots(1, 2, sharey=True)
    names = list(runs)
    for axes, parts in ((whole, TIME_PARTS), (lost, TIME_PARTS[1:])):
        left = np.zeros(len(names))
        for part in parts:
            widths = np.array([100.0 * runs[name].shares[part] for name in names])
            label = part.replace("_", " ") if axes is whole else None
            axes.barh(range(len(names)), widths, left=left, color=PART_COLORS[part], label=label)
            left = left + widths
        axes.grid(visible=False, axis="y")
    whole.set_xlabel("% of the node hours")
    lost.set_xlabel("% of the node hours, without productive time")
    # A longer name would leave no room for the bars.
    shown = [name if len(name) <= 40 else f"{name[:39]}…" for name in names]
    whole.set_yticks(range(len(names)), shown)
    whole.invert_yaxis()
    picture.legend(loc="outside upper center", ncols=len(TIME_PARTS), frameon=False)
    write_picture(picture, path, "name another file with --plot")
