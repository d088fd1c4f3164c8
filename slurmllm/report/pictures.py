"""The pictures of the Markdown report, as PNG files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np

from slurmllm.display.pictures import (
    PICTURE_STYLE,
    Axes,
    Figure,
    LogFormatter,
    rc_context,
    write_picture,
)
from slurmllm.evaluate.plot import draw as draw_scores
from slurmllm.format import format_number
from slurmllm.metrics.curves import VAL_LOSS, piece_means, thin_rows
from slurmllm.report.document import CURVES, SCALING, UTILIZATION, scores_name
from slurmllm.report.facts import RunFacts
from slurmllm.report.figures import (
    PART_COLORS,
    RUN_COLORS,
    STEP_PARTS,
    PlotData,
    axis_top,
    series,
    shown_metrics,
    step_parts,
)
from slurmllm.run.records import TIME_PARTS
from slurmllm.status.utilization import Utilization

_ROWS = 2000
_FIX = "name another file with --out"


def write_pictures(
    runs: Sequence[RunFacts], drawn: Sequence[PlotData], folder: Path
) -> Mapping[str, Path]:
    """Draw the pictures that have data; returns their files by name.

    Raises:
        StorageError: a file cannot be written.
    """
    paths = {}
    metrics = shown_metrics(runs)
    split = next((f for f in runs if f.curve is not None and step_parts(f.curve)), None)
    if metrics or split is not None:  # neither: no value is finite
        paths[CURVES] = folder / f"{CURVES}.png"
        _write_curves(runs, metrics, split, paths[CURVES])
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
    """Draw the page's plot of throughput over nodes, with linear scaling for comparison."""
    picture = Figure(figsize=(7, 4.2), dpi=100, layout="constrained")
    axes = picture.subplots()
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for line in figure.content["data"]:
        measured = "text" in line
        color = line["line"]["color"]
        form = "o-" if measured else ":"
        axes.plot(line["x"], line["y"], form, color=color, label=unescape(line["name"]))
        for nodes, speed, text in zip(line["x"], line["y"], line.get("text", ()), strict=False):
            _annotate(axes, text, (nodes, speed), (5, -10), fontsize=7, color=color)
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
def _write_curves(
    runs: Sequence[RunFacts],
    metrics: Sequence[tuple[str, str, str]],
    split: RunFacts | None,
    path: Path,
) -> None:
    """Draw one panel per metric, and one with the step parts of the first run that has them."""
    count = len(metrics) + (split is not None)
    rows = -(-count // 2)
    # Fixed margins, in inches: a constrained layout takes as long to solve as all the drawing.
    height = 2.9 * rows + 0.5
    picture = Figure(figsize=(11, height), dpi=100)
    margins = {"top": 1 - 0.7 / height, "bottom": 0.3 / height, "hspace": 0.25}
    grid = {"left": 0.07, "right": 0.99, "wspace": 0.15} | margins
    panels = list(np.atleast_1d(picture.subplots(rows, 2, gridspec_kw=grid)).flat)
    for axes, (metric, title, unit) in zip(panels, metrics, strict=False):
        _draw_metric(axes, runs, metric)
        axes.set_title(f"{title}{f', {unit}' if unit else ''}")
    if split is not None and split.curve is not None:
        axes, parts = panels[len(metrics)], step_parts(split.curve) or []
        axes.stackplot(
            piece_means(split.curve.steps.astype(np.float64), _ROWS),
            *(piece_means(part, _ROWS) for part in parts),
            labels=list(STEP_PARTS),
            colors=list(STEP_PARTS.values()),
        )
        axes.set_title(f"Step time by parts, s: {split.name}")
        if (top := axis_top([sum(parts, np.zeros(1))])) is not None:
            axes.set_ylim(0.0, top)
        axes.legend(fontsize=7, loc="upper right")
    for axes in panels[:count]:
        axes.tick_params(labelsize=8)
        axes.margins(x=0.01)
    for axes in panels[count:]:
        axes.set_axis_off()
    if len(runs) > 1:
        handles, labels = panels[0].get_legend_handles_labels()
        picture.legend(handles, labels, loc="upper center", ncols=4, frameon=False)
    write_picture(picture, path, _FIX)


def _draw_metric(axes: Axes, runs: Sequence[RunFacts], metric: str) -> None:
    logged = [series(facts.curve, metric) for facts in runs if facts.curve is not None]
    of_runs = [values for values in logged if values is not None]
    top = axis_top(of_runs) if metric == "step_time_s" else None
    for number, facts in enumerate(runs):
        curve, color = facts.curve, RUN_COLORS[number % len(RUN_COLORS)]
        # matplotlib hides labels that begin with an underscore.
        label = f" {facts.name}" if facts.name.startswith("_") else facts.name
        values = None if curve is None else series(curve, metric)
        if curve is None or values is None:  # for the legend, which is the first panel's
            axes.plot([], [], color=color, label=label)
            continue
        rows = np.flatnonzero(np.isfinite(values))
        rows = rows[thin_rows(values[rows], _ROWS)]
        axes.plot(curve.steps[rows], values[rows], color=color, linewidth=0.9, label=label)
        if metric in ("loss", VAL_LOSS):
            others = {n: text for n, text in curve.validation.items() if n != metric}
            texts = [
                axes.plot(*curve.series(name), form, color=color, linewidth=1.2, label="_")[0]
                for form, name in zip((".--", ".:", ".-."), others, strict=False)
            ]
            if texts and axes.get_legend() is None:  # the same styles for all runs
                names = [f"validation {text}".strip() for text in others.values()]
                axes.legend(texts, names[: len(texts)], fontsize=7, loc="upper right")
        if top is not None and (far := np.flatnonzero(values > top)).size:
            # The axis is cut, with a mark at each step above it.
            axes.set_ylim(0.0, top)
            axes.plot(curve.steps[far], np.full(len(far), 0.96 * top), "^", color=color)
            highest = f"up to {format_number(float(np.nanmax(values)))}"
            place = (curve.steps[far[0]], 0.96 * top)
            _annotate(axes, highest, place, (7, 0), fontsize=8, color=color, va="center")
        for step in curve.restarts[-60:]:  # more would cover the curve
            axes.axvline(float(step), color=color, linewidth=0.8, linestyle=":", alpha=0.7)

    finite = np.concatenate([values[np.isfinite(values)] for values in of_runs])
    if finite.size and np.ptp(finite) <= 1e-6 * np.abs(finite).max():  # a constant learning rate
        axes.set_ylim(*sorted((0.0, 2 * float(np.clip(finite[0], -1e300, 1e300)) or 1.0)))


def _annotate(
    axes: Axes, text: str, at: tuple[float, float], offset: tuple[float, float], **look: Any
) -> None:
    axes.annotate(text, at, offset, textcoords="offset points", **look)


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
        left = [0.0] * len(names)
        for part in parts:
            widths = [100.0 * runs[name].shares[part] for name in names]
            label = part.replace("_", " ") if axes is whole else None
            axes.barh(range(len(names)), widths, left=left, color=PART_COLORS[part], label=label)
            left = [begin + width for begin, width in zip(left, widths, strict=True)]
        axes.grid(visible=False, axis="y")
    whole.set_xlabel("% of the node hours")
    lost.set_xlabel("% of the node hours, without productive time")
    # A longer name would leave no room for the bars.
    shown = [name if len(name) <= 40 else f"{name[:39]}…" for name in names]
    whole.set_yticks(range(len(names)), shown)
    whole.invert_yaxis()
    picture.legend(loc="outside upper center", ncols=len(TIME_PARTS), frameon=False)
    write_picture(picture, path, "name another file with --plot")
