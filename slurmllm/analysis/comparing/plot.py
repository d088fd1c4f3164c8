"""The picture of a comparison: loss, gradient norm and their relative differences by step."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from textwrap import fill

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from slurmllm.analysis.comparing.comparison import Comparison
from slurmllm.analysis.comparing.verdict import figure as in_figures
from slurmllm.analysis.curves import Curve, align, relative_difference
from slurmllm.analysis.picture import write_picture

# A wide light line beneath a narrow dark one: both are seen where they coincide. The pair also
# differs in lightness, for readers who do not tell the colours apart and for print.
_COLOR_A, _COLOR_B = "#f2a65a", "#12466b"
_METRIC_COLORS = {"loss": "#7a1f5c", "grad_norm": "#2a8c6e"}
_LABELS = {"loss": "loss (nats)", "grad_norm": "gradient norm"}


def default_path(a: Curve, b: Curve) -> Path:
    """`reports/compare-<A>-<B>.png` of the first of the two that is a run, else in this folder."""
    name = f"compare-{_file_part(a.name)}-{_file_part(b.name)}.png"
    for curve in (a, b):
        if curve.path.is_dir():
            return curve.path / "reports" / name
    return Path(name)


def _file_part(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "_", name)[:100]


def draw(a: Curve, b: Curve, comparison: Comparison, path: Path) -> None:
    """Draw both curves into a PNG file.

    Raises:
        StorageError: the file cannot be written.
    """
    picture = Figure(figsize=(10, 8.5), dpi=120, layout="constrained")
    metrics = list(comparison.metrics)
    panels = picture.subplots(
        len(metrics) + 1, 1, sharex=True, height_ratios=[3.0, 2.2, 1.4][-len(metrics) - 1 :]
    )
    for axes, metric in zip(panels, metrics, strict=False):
        _draw_curves(axes, a, b, comparison, metric)
    _draw_difference(panels[-1], a, b, comparison)
    panels[-1].set_xlabel("step")
    panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    panels[-1].set_xlim(*_span(comparison))
    lines = f"{comparison.verdict}: {comparison.reason}".split("; ")
    title = "\n".join(fill(line, 120) for line in lines)
    panels[0].set_title(title, fontsize=10, loc="left", parse_math=False)
    with warnings.catch_warnings():
        # A run may be named in a script that matplotlib's own font lacks: drawn as boxes then.
        warnings.filterwarnings("ignore", message="Glyph")
        write_picture(
            picture, path, "name another file with --plot, or leave it out with --no-plot"
        )


def _span(comparison: Comparison) -> tuple[float, float]:
    first, last = comparison.first_step, comparison.last_step
    margin = 0.015 * max(last - first, 1)
    return first - margin, last + margin


def _draw_curves(axes: Axes, a: Curve, b: Curve, comparison: Comparison, metric: str) -> None:
    """One metric of both runs, with their restarts along the lower edge."""
    first, last = comparison.first_step, comparison.last_step
    handles = []
    for label, curve, color, width in (("A", a, _COLOR_A, 5.0), ("B", b, _COLOR_B, 1.3)):
        steps, values, _ = align(curve, curve, metric, first, last)
        finite = np.where(np.isfinite(values), values, np.nan)
        marker = "o" if len(steps) < 3 else ""
        axes.plot(
            steps,
            finite,
            color=color,
            linewidth=width,
            marker=marker,
            markersize=width + 4,
            solid_capstyle="round",
        )
        handles.append(Line2D([], [], color=color, linewidth=width, label=f"{label}: {curve.name}"))
        handles += _mark_restarts(axes, curve, label, color, first, last)
    if metric == next(iter(comparison.metrics)):
        legend = axes.legend(handles=handles, loc="upper right", fontsize=9, framealpha=0.9)
        for text in legend.get_texts():
            text.set_parse_math(False)
    axes.set_ylabel(_LABELS[metric])
    _tidy(axes)
    _mark_departure(axes, comparison, metric)


def _mark_restarts(
    axes: Axes, curve: Curve, label: str, color: str, first: int, last: int
) -> list[Line2D]:
    restarts = curve.restarts[(curve.restarts >= first) & (curve.restarts <= last)]
    if not restarts.size:
        return []
    for step in restarts:
        # Between the last row of one attempt and the first of the next.
        axes.axvline(step - 0.5, color=color, linewidth=1.2, linestyle=(0, (2, 2)), zorder=1)
    where = ", ".join(str(step) for step in restarts[:4]) + (" …" if len(restarts) > 4 else "")
    name = f"{label} restarted at {where}"
    return [Line2D([], [], color=color, linewidth=1.2, linestyle=(0, (2, 2)), label=name)]


def _mark_departure(axes: Axes, comparison: Comparison, metric: str) -> None:
    step = comparison.metrics[metric].first_departure_step
    if step is None:
        return
    color = _METRIC_COLORS[metric]
    axes.axvline(step, color=color, linewidth=1.0, zorder=1)
    # On the side of the line where there is room.
    right = step <= (comparison.first_step + comparison.last_step) / 2
    axes.annotate(
        f"parts at step {step}",
        (step, 0.03),
        xycoords=("data", "axes fraction"),
        xytext=(5 if right else -5, 0),
        textcoords="offset points",
        ha="left" if right else "right",
        color=color,
        fontsize=9,
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1.0},
    )


def _draw_difference(axes: Axes, a: Curve, b: Curve, comparison: Comparison) -> None:
    """Relative differences and tolerances on a logarithmic axis, which has no place for zeros."""
    smallest = []
    for metric, result in comparison.metrics.items():
        color = _METRIC_COLORS[metric]
        steps, values_a, values_b = align(a, b, metric, comparison.first_step, comparison.last_step)
        difference = relative_difference(values_a, values_b)
        shown = np.where(difference > 0, difference, np.nan)
        label = _LABELS[metric].split(" (")[0]
        if np.isfinite(shown).any():
            smallest.append(float(np.nanmin(shown)))
            marker = "." if len(steps) <= 500 else ""
            axes.plot(
                steps, shown, color=color, linewidth=0.9, marker=marker, markersize=3, label=label
            )
        if result.tolerance > 0:
            axes.axhline(
                result.tolerance,
                color=color,
                linewidth=1.2,
                linestyle=(0, (5, 3)),
                label=f"tolerance {in_figures(result.tolerance)}, {label}",
            )
            smallest.append(result.tolerance)
    axes.set_yscale("log")
    axes.set_ylabel("relative\ndifference")
    _tidy(axes)
    if all(result.bit_identical for result in comparison.metrics.values()):
        axes.set_ylim(1e-8, 1.0)
        axes.text(
            0.5, 0.15, "bit-identical: every difference is 0", transform=axes.transAxes,
            ha="center", fontsize=9, color="#444444",
        )  # fmt: skip
    elif smallest:
        top = axes.get_ylim()[1]
        axes.set_ylim(min(smallest) / 3, max(top, min(smallest) * 100))
    if axes.get_legend_handles_labels()[0]:
        # Above the panel: inside there is no place that is free of curves.
        axes.legend(
            loc="lower right",
            bbox_to_anchor=(1.0, 1.0),
            borderaxespad=0.2,
            fontsize=8,
            ncols=4,
            frameon=False,
        )


def _tidy(axes: Axes) -> None:
    axes.grid(visible=True, color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
