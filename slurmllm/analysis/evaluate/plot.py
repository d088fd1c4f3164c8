"""Plots scores over training tokens: a panel per task group, published models as dashed lines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from slurmllm.analysis.evaluate.scores import ScoreRow, ScoreTable
from slurmllm.analysis.evaluate.suites import AVERAGE
from slurmllm.core.display.pictures import Axes, EngFormatter, Figure, MaxNLocator, write_picture
from slurmllm.core.format import Json
from slurmllm.core.metrics.curves import Curve, thin_rows
from slurmllm.core.run.rundir import RunDir

_COLUMNS = 3
_MAX_POINTS = 1200  # of the training loss: one for each column of the picture
_ROW_LOOK: Json = {"markersize": 3, "linewidth": 1.2}
_REFERENCE_COLOURS = ("0.25", "tab:red", "tab:purple", "tab:brown", "tab:olive", "tab:cyan")


def default_path(store: RunDir, suite: str) -> Path:
    return store.reports / f"evaluation-{suite}.png"


def draw(table: ScoreTable, name: str, path: Path, curve: Curve | None = None) -> None:
    """Plot the scores of a suite, next to the validation loss the training loss of `curve`."""
    by_unit: dict[tuple[str, str], list[ScoreRow]] = {}
    for row in table.rows:
        metric = row.metric.partition(",")[0]
        # A panel for each group and unit: perplexity is not drawn on the axis of the loss.
        unit = metric if metric in ("loss", "perplexity", "bits_per_token") else ""
        by_unit.setdefault((f"{row.group}: {unit}" if unit else row.group, unit), []).append(row)
    columns = min(_COLUMNS, len(by_unit))
    panel_rows = math.ceil(len(by_unit) / columns)
    size = (4.6 * columns, 3.4 * panel_rows + 0.4)
    figure = Figure(figsize=size, layout="constrained", dpi=110)
    figure.suptitle(f"{name}: {table.suite}")
    axes = figure.subplots(panel_rows, columns, squeeze=False).ravel()
    # A model folder has no token count: its scores are plotted over steps.
    against_tokens = any(table.tokens.values())
    for ax, ((title, unit), rows) in zip(axes, by_unit.items(), strict=False):
        if unit == "loss" and curve and "loss" in curve.columns:
            rows_drawn = thin_rows(curve.columns["loss"], _MAX_POINTS)
            x = curve.positions("tokens" if against_tokens else "step")[rows_drawn]
            losses = curve.columns["loss"][rows_drawn]
            ax.plot(x, losses, color="0.7", linewidth=0.8, label="training loss")
        _draw_panel(ax, title, rows, table, against_tokens)
    for ax in axes[len(by_unit) :]:  # unused places in the last row
        ax.set_axis_off()
    write_picture(figure, path, "name another file: --plot FILE.png")


def _draw_panel(
    ax: Axes, title: str, rows: Sequence[ScoreRow], table: ScoreTable, against_tokens: bool
) -> None:
    for row in rows:
        steps = sorted(row.scores)
        x = [table.tokens[step] if against_tokens else step for step in steps]
        y = np.array([row.scores[step] for step in steps])
        average = row.name.startswith(AVERAGE)
        look = {"markersize": 4, "linewidth": 2.4, "color": "black"} if average else _ROW_LOOK
        (line,) = ax.plot(x, y, marker="o", label=row.name, **look)
        if all(step in row.errors for step in steps):
            errors = np.array([row.errors[step] for step in steps])
            color = line.get_color()
            if len(steps) > 1:
                ax.fill_between(x, y - errors, y + errors, color=color, alpha=0.15, linewidth=0)
            else:
                ax.errorbar(x, y, errors, color=color, capsize=3)
    # One dashed line per published model: its average, or its score in the panel's only row.
    main_row = next((row for row in rows if row.name.startswith(AVERAGE)), rows[0])
    if len(rows) == 1 or main_row.name.startswith(AVERAGE):
        models = list(table.sources)
        for model, score in main_row.references.items():
            colour = _REFERENCE_COLOURS[models.index(model) % len(_REFERENCE_COLOURS)]
            ax.axhline(score, linestyle="--", linewidth=1, color=colour, label=model)
    ax.set_title(title, fontsize=10)
    ax.set_xlabel("training tokens" if against_tokens else "step")
    ax.xaxis.set_major_formatter(EngFormatter())
    ax.xaxis.set_major_locator(MaxNLocator(5))
    ax.grid(alpha=0.3)
    ax.legend(fontsize=7)
