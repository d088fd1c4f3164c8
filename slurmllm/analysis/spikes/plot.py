"""The picture of a run's spikes: the metrics with spikes marked, parameter norm, durations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from textwrap import fill

import numpy as np

from slurmllm.analysis.spikes.analysis import NAMES, Metric, SpikeAnalysis
from slurmllm.core.display.pictures import (
    PICTURE_STYLE,
    Axes,
    Figure,
    MaxNLocator,
    SubFigure,
    rc_context,
    write_picture,
)
from slurmllm.core.metrics.curves import Curve, Floats, Ints, thin_rows

_COLORS: dict[Metric, str] = {"loss": "#12466b", "grad_norm": "#2a8c6e"}
_SPIKE, _NORM = "#c2185b", "#8a6d1f"
_MAX_VALUE = 1e30  # matplotlib's axes overflow beyond it
_LIMITS = (1, 2, 3, 5, 10, 20, 50, 100)  # of the bins of durations, logged steps
_MAX_POINTS = 4000  # of a line; no screen has more columns


@rc_context(fname=PICTURE_STYLE)
def draw(runs: Sequence[tuple[Curve, SpikeAnalysis]], path: Path) -> None:
    """Draw runs next to each other into a PNG file; raises StorageError if it cannot be written."""
    height = 8.5 if all(analysis.grad_norm_spikes is None for _, analysis in runs) else 10.5
    picture = Figure(figsize=(10 * len(runs), height), dpi=120, layout="constrained")
    columns = picture.subfigures(1, len(runs), squeeze=False)[0]
    for column, (curve, analysis) in zip(columns, runs, strict=True):
        _draw_run(column, curve, analysis)
    write_picture(picture, path, "name another file with --plot, or leave it out with --no-plot")


def _draw_run(column: SubFigure, curve: Curve, analysis: SpikeAnalysis) -> None:
    metrics = analysis.by_metric
    norms = analysis.param_norm is not None
    ratios = [3.0, 2.2][: len(metrics)] + [1.6] * (1 + norms)
    panels = column.subplots(len(ratios), 1, height_ratios=ratios)
    for axes, spikes in zip(panels, metrics, strict=False):
        first = spikes is analysis
        _draw_metric(axes, curve, spikes, legend=first)
        axes.sharex(panels[0])
        title = f"{NAMES[spikes.metric]}: {spikes.verdict}"
        axes.set_title(fill(f"{curve.name}: {title}" if first else title, 115))
    if norms:
        steps, values = curve.series("param_norm")
        panels[-2].plot(*_thinned(steps, values), color=_NORM, linewidth=1.2)
        panels[-2].set_ylabel("parameter norm")
        panels[-2].sharex(panels[0])
    panels[-2].set_xlabel("step")
    last = panels[-1]
    bins = binned([spikes.durations for spikes in metrics])
    width = 0.8 / len(metrics)
    for number, spikes in enumerate(metrics):
        places = np.arange(len(bins)) + (number - (len(metrics) - 1) / 2) * width
        label = NAMES[spikes.metric]
        if spikes.reference:
            label += f"; {spikes.reference} last one step"
        counts = [count[number] for _, count in bins]
        bars = last.bar(places, counts, width, color=_COLORS[spikes.metric], label=label)
        last.bar_label(bars, fontsize=9)
    if bins:
        last.set_xticks(range(len(bins)), [name for name, _ in bins])
        last.margins(y=0.2)
        last.set_xlabel("duration of spikes (logged steps)")
        last.set_ylabel("spikes")
        last.yaxis.set_major_locator(MaxNLocator(integer=True))
        last.legend(loc="upper right")
    else:
        last.text(0.5, 0.5, "no spike", transform=last.transAxes, ha="center", color="#444444")
        last.set_xticks([])
        last.set_yticks([])


def _draw_metric(axes: Axes, curve: Curve, analysis: SpikeAnalysis, *, legend: bool) -> None:
    steps, values = curve.series(analysis.metric)
    finite = values[np.isfinite(values)].clip(-_MAX_VALUE, _MAX_VALUE)
    peaks = np.clip([spike.value for spike in analysis.spikes], -_MAX_VALUE, _MAX_VALUE)
    marker = "o" if len(steps) < 3 else ""
    color = _COLORS[analysis.metric]
    axes.plot(*_thinned(steps, values), color=color, linewidth=0.9, marker=marker)
    for number, step in enumerate(analysis.restarts):
        label = None if number else "restart"
        axes.axvline(
            step - 0.5, color="#777777", linewidth=1, ls=(0, (2, 2)), zorder=1, label=label
        )
    if analysis.spikes:
        label = f"more than {analysis.threshold:g} above the mean of {analysis.window} steps"
        axes.plot(
            [spike.peak_step for spike in analysis.spikes],
            peaks,
            linestyle="",
            marker="v",
            markersize=5,
            color=_SPIKE,
            label=label,
        )
    for number, bad in enumerate(analysis.not_finite):
        label = None if number else "not a finite number"
        axes.axvspan(bad.step - 0.5, bad.last_step + 0.5, color="#f2a65a", alpha=0.6, label=label)
    if finite.size:
        # The values of the first steps would flatten the rest: they are cut off at the top.
        low = finite.min()
        high = peaks.max(initial=np.percentile(finite, 95))
        margin = 0.06 * (high - low) or 1.0
        # Room for the legend above the spikes
        axes.set_ylim(low - margin, high + margin * (4 if legend else 1))
    axes.set_ylabel("loss (nats)" if analysis.metric == "loss" else NAMES[analysis.metric])
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if legend and axes.get_legend_handles_labels()[0]:
        axes.legend(loc="upper right", ncols=2)


def _thinned(steps: Ints, values: Floats) -> tuple[Ints, Floats]:
    values = np.where(np.isfinite(values), values.clip(-_MAX_VALUE, _MAX_VALUE), np.nan)
    rows = thin_rows(values, _MAX_POINTS, keep_short_gaps=False)
    return steps[rows], values[rows]


def binned(durations: Sequence[Mapping[int, int]]) -> list[tuple[str, list[int]]]:
    """Count spikes by ranges of durations, up to the last with any: `4–5` → [3, 0] of two runs."""
    longest = max(chain([0], *durations))
    bins = []
    first = 1
    for limit in (*_LIMITS, longest):
        if first > longest:
            break
        counts = [sum(n for k, n in run.items() if first <= k <= limit) for run in durations]
        bins.append((f"{first}" if first == limit else f"{first}–{limit}", counts))
        first = limit + 1
    return bins
