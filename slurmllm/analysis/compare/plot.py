"""The picture of comparisons: loss, gradient norm and their relative differences."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple

import numpy as np

from slurmllm.analysis.compare.alignment import Alignment, Points, match_steps, shift_steps
from slurmllm.analysis.compare.bands import SeedBand
from slurmllm.analysis.compare.result import Comparison, curve_letter
from slurmllm.analysis.compare.result import format_figure as in_figures
from slurmllm.core.display.pictures import (
    PICTURE_STYLE,
    Axes,
    Figure,
    FuncFormatter,
    MaxNLocator,
    NullFormatter,
    rc_context,
    write_picture,
)
from slurmllm.core.format import format_names
from slurmllm.core.metrics.curves import (
    Axis,
    Curve,
    Floats,
    piece_means,
    relative_difference,
    thin_rows,
)

# A wide light line beneath narrow dark ones: both are visible if they coincide. They also differ
# in lightness, for colour-blind readers and for print.
_COLOR_A = "#f2a65a"
_COLORS = ("#12466b", "#a3195b", "#2a8c6e", "#6b5b95", "#8a6d1f", "#4a4a4a")
_METRIC_COLORS = {"loss": "#7a1f5c", "grad_norm": "#2a8c6e"}
_MAX_POINTS = 1200  # of a line: one for each column of the picture
_MAX_VALUE = 1e30  # matplotlib's axes overflow beyond it
_MEANS = 300  # points of the line of means that is drawn over a longer line's pale values
_METRIC_STYLES = {"loss": "-", "grad_norm": ":"}
LABELS = {"loss": "loss (nats)", "grad_norm": "gradient norm"}


class Drawn(NamedTuple):
    """One of the curves that are compared with A."""

    label: str  # its letter
    curve: Curve
    comparison: Comparison  # with A
    color: str
    alignment: Alignment  # with A

    def differences(self, metric: str) -> tuple[Points, Floats]:
        """Return the points of a metric and their relative differences; NaN for 0 or none."""
        points = self.alignment.points_of(metric)
        values = relative_difference(points.a, points.b)
        return points, np.where(np.isfinite(values) & (values > 0), values, np.nan)

    def tolerance(self, metric: str) -> float:
        """Return the tolerance that a line shows; 0 of a band, or if nothing was compared."""
        compared = self.comparison.metrics.get(metric)
        return 0.0 if compared is None or self.comparison.band else compared.tolerance


def align(
    a: Curve,
    other_curves: Sequence[Curve],
    comparisons: Sequence[Comparison],
    from_step: int | None,
    to_step: int | None,
) -> tuple[Curve, list[Drawn]]:
    """Return A and the curves that it was compared with, their steps shifted as there."""
    axis = comparisons[0].alignment.axis
    drawn = []
    for i, (curve, comparison) in enumerate(zip(other_curves, comparisons, strict=True)):
        shifts = comparison.a.shift, comparison.b.shift
        matched = match_steps(a, curve, shifts, by_step=axis == "step")
        alignment = Alignment(matched[0].used, matched[1].used, axis, from_step, to_step)
        drawn.append(
            Drawn(
                curve_letter(i + 1),
                matched[1].read,
                comparison,
                _COLORS[i % len(_COLORS)],
                alignment,
            )
        )
    return shift_steps(a, comparisons[0].a.shift), drawn


@rc_context(fname=PICTURE_STYLE)
def draw(
    a: Curve,
    other_curves: Sequence[Curve],
    comparisons: Sequence[Comparison],
    path: Path,
    *,
    from_step: int | None = None,
    to_step: int | None = None,
    seeds: Sequence[Curve] = (),
) -> None:
    """Draw A, the curves that it was compared with and the band of seeds into a PNG file."""
    a, drawn = align(a, other_curves, comparisons, from_step, to_step)
    axis = comparisons[0].alignment.axis
    band = SeedBand(a, seeds, comparisons[0].a.shift, axis) if seeds else None
    metrics = [name for name in LABELS if any(name in each.metrics for each in comparisons)]
    if len(drawn) == 1:
        reasons = f"{comparisons[0].verdict}: {comparisons[0].reason}".split("; ")
    else:
        reasons = [f"A-{d.label} {d.comparison.verdict}: {d.comparison.reason}" for d in drawn]
    title = "\n".join(fill(reason, 112, subsequent_indent="   ") for reason in reasons)
    # Set by hand, in inches: matplotlib's own layout draws everything twice.
    above = 0.25 + 0.18 * (title.count("\n") + 1)
    identical = all(r.bit_identical for each in comparisons for r in each.metrics.values())
    ratios = [3.0, 2.2][2 - len(metrics) :]
    height = 5.7 + above
    if not identical:
        # The legend of the differences is in the gap above them.
        ratios += [0.05, 1.4]
        height = max(8.5, 7.7 + above)
    picture = Figure(figsize=(10, height), dpi=120)
    panels = picture.subplots(len(ratios), sharex=True, height_ratios=ratios, squeeze=False)[:, 0]
    picture.subplots_adjust(
        left=0.09, right=0.985, bottom=0.55 / height, top=1 - above / height, hspace=0.13
    )
    span = (  # first and last position compared
        min(each.alignment.positions[0] for each in drawn),
        max(each.alignment.positions[-1] for each in drawn),
    )
    for axes, metric in zip(panels, metrics, strict=False):
        _draw_curves(axes, a, drawn, metric, span, band)
    if not identical:
        panels[-2].set_visible(False)
        _draw_difference(panels[-1], drawn, metrics)
    panels[-1].set_xlabel(axis)
    panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    margin = 0.015 * max(span[1] - span[0], 1)
    panels[-1].set_xlim(span[0] - margin, span[1] + margin)
    panels[0].set_title(title)
    write_picture(picture, path, "name another file with --plot, or leave it out with --no-plot")


def _draw_line(axes: Axes, positions: Floats, values: Floats, **style: Any) -> None:
    if len(values) <= _MAX_POINTS:
        axes.plot(positions, values, **style)
        return
    rows = thin_rows(values, _MAX_POINTS, keep_short_gaps=False)
    axes.plot(positions[rows], values[rows], color=style["color"], alpha=0.35, linewidth=0.7)
    axes.plot(piece_means(positions, _MEANS), piece_means(values, _MEANS), **style)


def _draw_curves(
    axes: Axes,
    a: Curve,
    drawn: Sequence[Drawn],
    metric: str,
    span: tuple[float, float],
    band: SeedBand | None,
) -> None:
    axis = drawn[0].comparison.alignment.axis
    late = []
    is_long = False
    lines = [("A", a, _COLOR_A, 5.0), *((d.label, d.curve, d.color, 1.3) for d in drawn)]
    for label, curve, color, width in lines:
        if metric in curve.columns:
            places = curve.positions(axis)
            column = curve.columns[metric]
            visible = (places >= span[0]) & (places <= span[1]) & curve.present(metric)
            values = np.where(np.isfinite(column[visible]), column[visible], np.nan)  # NaN: a gap
            late.append(values[len(values) // 50 :])
            is_long |= len(values) > _MAX_POINTS
            style = {"color": color, "linewidth": width, "solid_capstyle": "round"}
            style["label"] = f"{label}: {curve.name}"
            style |= {"marker": "o" if len(values) < 3 else "", "markersize": width + 4}
            _draw_line(axes, places[visible], values, **style)
        for name in curve.validation if metric == "loss" else ():
            visible = ~curve.absent.get(name, np.isnan(curve.columns[name]))
            points = curve.positions(axis)[visible], curve.columns[name][visible]
            axes.plot(*points, color=color, linewidth=0.8, ls="--", marker="D", markersize=4)
            late.append(points[1])
        _mark_restarts(axes, curve, label, color, axis, span)
    if band:
        _draw_band(axes, drawn[0], metric, band)
    if metric == "loss":
        if any(curve.validation for _, curve, *_ in lines):
            axes.plot([], [], color="0.4", linestyle="--", marker="D", label="validation")
        axes.legend(loc="upper right")
    finite = np.concatenate(late)
    finite = np.clip(finite[np.isfinite(finite)], -_MAX_VALUE, _MAX_VALUE)
    if is_long and finite.size:
        # The first steps of a long run would flatten the rest: they are cut off at the top.
        margin = 0.06 * float(np.ptp(finite)) or 1.0
        axes.set_ylim(finite.min() - margin, finite.max() + margin)
    axes.set_ylabel(LABELS[metric])
    for each in drawn:
        color = _METRIC_COLORS[metric] if len(drawn) == 1 else each.color
        _mark_departure(axes, each, metric, color, span)


def _draw_band(axes: Axes, drawn: Drawn, metric: str, band: SeedBand) -> None:
    points = drawn.alignment.points_of(metric)
    if not len(points):
        return
    within = band.check(metric, points, drawn.label)
    positions = points.positions[np.isin(points.steps, within.steps)]
    low = within.mean - within.half_width
    high = within.mean + within.half_width
    label = f"band of {len(band.names)} seeds, for single points"
    rows = slice(None, None, max(1, len(positions) // _MAX_POINTS))
    axes.fill_between(
        positions[rows], low[rows], high[rows], color="#9a9a9a", alpha=0.35, lw=0, label=label
    )


def _mark_restarts(
    axes: Axes, curve: Curve, label: str, color: str, axis: Axis, span: tuple[float, float]
) -> None:
    takeovers = np.flatnonzero(np.diff(curve.attempts)) + 1
    positions = curve.positions(axis)
    inside = takeovers[(positions[takeovers] >= span[0]) & (positions[takeovers] <= span[1])]
    # Between the last row of one attempt and the first of the next
    middles = (positions[inside] + positions[inside - 1]) / 2
    name = f"{label} restarted at {format_names([*map(str, curve.steps[inside])], 4)}"
    for middle in middles[np.isfinite(middles)][:200]:
        axes.axvline(middle, color=color, linewidth=1.2, ls=(0, (2, 2)), zorder=1, label=name)
        name = ""  # once in the legend


def _mark_departure(
    axes: Axes, each: Drawn, metric: str, color: str, span: tuple[float, float]
) -> None:
    result = each.comparison.metrics.get(metric)
    if result is None or result.onset_step is None:
        return
    steps = each.alignment.steps
    step = result.onset_step
    row = min(int(steps.searchsorted(step)), len(steps) - 1)
    position = each.alignment.positions[row]
    axes.axvline(position, color=color, linewidth=1.0, zorder=1)
    # On the side of the line with more room.
    side = "left" if position <= (span[0] + span[1]) / 2 else "right"
    axes.text(
        position,
        0.03,
        f" diverges at step {step} ",
        color=color,
        ha=side,
        transform=axes.get_xaxis_transform(),
    )


def _draw_difference(axes: Axes, drawn: Sequence[Drawn], metrics: Sequence[str]) -> None:
    smallest = []
    for each in drawn:
        for metric in metrics:
            points, curve = each.differences(metric)
            if np.isnan(curve).all():
                continue
            smallest.append(float(np.nanmin(curve)))
            label = LABELS[metric].split(" (")[0]
            style: dict[str, Any] = {"color": _METRIC_COLORS[metric], "label": label}
            if len(drawn) > 1:
                label = f"{each.label}, {label}"
                style = {"color": each.color, "label": label, "linestyle": _METRIC_STYLES[metric]}
            style |= {"marker": "." if len(points) <= 500 else "", "markersize": 3}
            _draw_line(axes, points.positions, curve, linewidth=0.9, **style)
    for metric in metrics:
        if (tolerance := drawn[0].tolerance(metric)) > 0:
            label = f"tolerance {in_figures(tolerance)}, {LABELS[metric].split(' (')[0]}"
            axes.axhline(
                tolerance,
                color=_METRIC_COLORS[metric],
                linewidth=1.2,
                linestyle=(0, (5, 3)),
                label=label,
            )
            smallest.append(tolerance)
    axes.set_yscale("log")
    # Plain text: matplotlib's own labels go through its parser of formulas, a tenth of a second.
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: in_figures(value)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_ylabel("relative\ndifference")
    if smallest:
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
