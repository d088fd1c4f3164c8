"""The pictures of a plan: throughput, time, dollars, memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from slurmllm.core.config.cluster import GIB
from slurmllm.core.display.pictures import (
    PICTURE_STYLE,
    Axes,
    Figure,
    LogLocator,
    NullLocator,
    StrMethodFormatter,
    SubFigure,
    rc_context,
)
from slurmllm.core.format import format_plural
from slurmllm.plan.recipe_plan import Plans, RecipePlan
from slurmllm.plan.search import LayoutEstimate, MemoryUse

# Okabe and Ito 2008 ("Color universal design"): distinguishable with colour blindness.
# Neighbours differ in lightness, for print.
COLORS = ["#0072b2", "#e69f00", "#009e73", "#f0e442", "#d55e00", "#56b4e9", "#cc79a7", "#000000"]
_HATCHES = ("", "///", "...")
MARKERS = ("o", "s", "^", "D", "v", "P")
_BARS = 6  # layouts of which the memory is drawn, at most


class PlanCurve(NamedTuple):
    """One recipe's best layouts."""

    label: str  # the recipe's name
    nodes: Sequence[int]  # node counts, ascending
    # Panel → value of the best layout on each, if all have one.
    values: Mapping[str, Sequence[float]]


@rc_context(fname=PICTURE_STYLE)
def picture(curves: Sequence[PlanCurve], layouts: Mapping[str, MemoryUse]) -> Figure:
    """Draw throughput, time, cost, and the memory of layouts; panels without data are left out.

    Curves with a single node count have no line.
    """
    curves = [curve for curve in curves if len(curve.nodes) > 1]
    panels = {
        field: with_field
        for field in _PANELS
        if (with_field := [curve for curve in curves if field in curve.values])
    }
    bars = 1.6 + 0.45 * len(layouts) if layouts else 0.0
    lines = 4.2 if panels else 0.0
    width = 14 if len(panels) == 3 else 11
    figure = Figure(figsize=(width, bars + lines), dpi=120, layout="constrained")
    heights = [height for height in (lines, bars) if height]
    rows = figure.subfigures(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
    if panels:
        drawn = rows[0].subplots(1, len(panels), squeeze=False)[0]
        for axes, (field, panel_curves) in zip(drawn, panels.items(), strict=True):
            _draw_panel(axes, panel_curves, field)
    if layouts:
        _draw_memory(rows[-1], layouts)
    return figure


# Panel → its label, format of its axis, and the power of the nodes that it follows without loss.
_PANELS = {
    "tokens_per_s": ("tokens/s", "{x:,.0f}", 1),
    "hours": ("hours to the end", "{x:,g}", -1),
    "usd": ("dollars to the end", "{x:,.0f}", 0),
}


def _draw_panel(axes: Axes, curves: Sequence[PlanCurve], field: str) -> None:
    """Draw a figure over the nodes; logarithmic, with dashed lines of no loss, except dollars."""
    label, number_format, power = _PANELS[field]
    for number, curve in enumerate(curves):
        values = curve.values[field]
        color, marker = COLORS[number % len(COLORS)], MARKERS[number % len(MARKERS)]
        axes.plot(curve.nodes, values, label=curve.label, color=color, marker=marker, lw=1.8)
        if power:
            ideal = [values[0] * (nodes / curve.nodes[0]) ** power for nodes in curve.nodes]
            dashed = "" if number else "no loss"
            axes.plot(curve.nodes, ideal, color="#777777", lw=1.0, ls=(0, (4, 3)), label=dashed)
    if power:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.set_ylim(0, 1.1 * max(max(curve.values[field]) for curve in curves))
    axes.yaxis.set_major_formatter(StrMethodFormatter(number_format))
    counts = sorted({nodes for curve in curves for nodes in curve.nodes})
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [f"{count:,}" for count in counts])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set(xlabel="nodes", ylabel=label)
    axes.legend(frameon=False)


def _draw_memory(figure: SubFigure, layouts: Mapping[str, MemoryUse]) -> None:
    axes: Axes = figure.subplots()
    labels, uses = list(layouts), list(layouts.values())
    left = np.zeros(len(uses))
    names = dict.fromkeys(name for use in uses for name in use.parts)
    for number, name in enumerate(names):
        widths = np.array([use.parts.get(name, 0) / GIB for use in uses])
        axes.barh(
            range(len(uses)),
            widths,
            0.7,
            left,
            color=COLORS[number % len(COLORS)],
            hatch=_HATCHES[number // len(COLORS) % len(_HATCHES)],
            edgecolor="white",
            linewidth=0.5,
            label=name.replace("_", " "),
        )
        left = left + widths
    limits = [use.limit / GIB for use in uses]
    named = f"limit, {limits[0]:.4g} GiB" if len(set(limits)) == 1 else "limit"
    edges = [number - 0.5 for number in range(len(uses) + 1)]
    axes.stairs(
        limits,
        edges,
        orientation="horizontal",
        baseline=None,
        color="#b00020",
        linewidth=2.0,
        label=named,
    )
    axes.set_xlim(0, 1.04 * max(*limits, *left))
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set_xlabel("GiB of the device that needs the most")
    figure.legend(loc="outside upper center", ncols=8, frameon=False, fontsize=8)
    axes.grid(visible=False, axis="y")


def draw(plans: Plans, top: int) -> Figure:
    """Draw throughput, time and dollars over the nodes, and the memory of the best layouts.

    Those of one number of nodes have the numbers of the table's rows, which has `top`.
    """
    node_plans = [node_plan for plan in plans for node_plan in plan.node_plans]
    bars = {}
    if len(node_plans) == 1:
        for number, (_, layout) in enumerate(node_plans[0].top(top), 1):
            if number <= _BARS or layout is node_plans[0].recipe_layout:
                bars[f"{number}: {_label(layout)}"] = layout.memory
    else:
        for layout in (node_plan.best for node_plan in node_plans if node_plan.best):
            nodes = format_plural(layout.mesh.nodes, "node")
            bars[f"{layout.config.recipe.name}, {nodes}: {_label(layout)}"] = layout.memory
    return picture([_curve(plan) for plan in plans], bars)


def _curve(plan: RecipePlan) -> PlanCurve:
    layouts = [node_plan.best for node_plan in plan.node_plans if node_plan.best]
    forecasts = [plan.forecast(layout) for layout in layouts]
    figures: dict[str, list[Any]] = {
        "tokens_per_s": [layout.tokens_per_s for layout in layouts],
        "hours": [forecast.hours for forecast in forecasts],
        "usd": [forecast.usd for forecast in forecasts],
    }
    complete = {name: values for name, values in figures.items() if None not in values}
    return PlanCurve(plan.config.recipe.name, [layout.mesh.nodes for layout in layouts], complete)


def _label(layout: LayoutEstimate) -> str:
    how = layout.config.recipe.train.checkpointing_text
    return f"{layout.mesh.degrees}, micro batch {layout.mesh.micro_batch}, {how}"
