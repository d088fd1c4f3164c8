"""Tables and pictures from published rows (tools/benchmarks/published) and slurmllm's predictions.

Each function draws a picture into a file and returns the table as text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter
from published_rows import Row, rows

from slurmllm.core.config.resolve import resolve
from slurmllm.core.display.pictures import write_picture
from slurmllm.core.display.tables import Column, fitted
from slurmllm.core.format import format_count, format_dollars
from slurmllm.plan.evidence import published_runs
from slurmllm.plan.mesh import make_mesh
from slurmllm.plan.parameters import parameters
from slurmllm.plan.plot import PlanCurve
from slurmllm.plan.plot import picture as scaling_picture
from slurmllm.plan.recipe_plan import plan_recipe
from slurmllm.plan.step import step_time

RESERVED_USD = 7.59  # a trn1.32xlarge-hour, three years reserved: the NeoX post's
A100_USD = 32.77  # a p4d.24xlarge-hour on demand, 8 A100-40GB, at the end of 2023
TOKENS_PER_PARAMETER = 20  # Hoffmann et al. 2022, "Training compute-optimal large language models"
NODES = 16  # of 8 A100-40GB: the largest cluster that llm-foundry's table has for most sizes
GPT3_SIZES = ("gpt3_125m", "gpt3_350m", "gpt3_760m", "gpt3_1.3b")  # of Mosaic's Part 1
_FIX = "name another folder with --out"


def predicted(row: Row) -> float:
    """Sequences a second of a published run, as slurmllm plan predicts its layout."""
    return row.mesh.global_batch / step_time(row.config, row.mesh, row.trainer).total


def table1(path: Path) -> str:
    """Throughput and tokens per dollar of the NeoX post's runs, and throughput over nodes.

    Predictions are by constants fitted without the run's model.
    """
    shown = [row for row in rows("published_trn1.csv") if row.name.startswith("neox-post")]
    left_out = {run.name: run.left_out for run in published_runs()}
    cells = []
    for row in shown:
        seq_len = row.config.recipe.model.seq_len
        per_usd = row.measured * seq_len * 3600 / (row.mesh.nodes * RESERVED_USD)
        ratio = left_out[row.name]
        cells.append(
            (
                row.model,
                str(row.mesh.nodes),
                f"{row.mesh.tensor}",
                f"{row.mesh.pipeline}",
                f"{row.measured:.1f}",
                f"{row.measured * ratio:.1f}",
                f"{ratio:.3f}",
                format_count(per_usd),
                format_count(per_usd * ratio),
            )
        )
    curves = []
    for model in dict.fromkeys(row.model for row in shown):
        of_model = [row for row in shown if row.model == model]
        nodes = [row.mesh.nodes for row in of_model]
        speeds = [row.measured * row.config.recipe.model.seq_len for row in of_model]
        ours = [speed * left_out[row.name] for speed, row in zip(speeds, of_model, strict=True)]
        curves.append(PlanCurve(f"{model}, published", nodes, {"tokens_per_s": speeds}))
        planned = {"tokens_per_s": ours}
        curves.append(PlanCurve(f"{model}, slurmllm plan", nodes, planned))
    write_picture(scaling_picture(curves, {}), path, _FIX)
    return _table(
        "model, nodes, TP, PP, seq/s published, predicted, ratio, tokens/$ published, predicted",
        cells,
    )


def time_and_cost(path: Path) -> str:
    """Days and dollars of compute-optimal training on 128 A100-40GB, from llm-foundry's table."""
    row_of: dict[str, Row] = {}
    for row in rows("published_gpu.csv"):
        fits = row.hardware == "A100-40GB" and row.mesh.nodes == NODES
        if fits and row.config.recipe.model.seq_len == 2048:
            row_of[row.model] = row
    cells, measured, ours = [], [], []
    for row in sorted(row_of.values(), key=_parameters):
        tokens = TOKENS_PER_PARAMETER * _parameters(row)
        days = [
            tokens / row.config.recipe.model.seq_len / speed / 86400
            for speed in (row.measured, predicted(row))
        ]
        usd = [day * 24 * NODES * A100_USD for day in days]
        cells.append(
            (
                row.model,
                format_count(_parameters(row)),
                format_count(tokens),
                f"{days[0]:.3g}",
                f"{days[1]:.3g}",
                f"${format_dollars(usd[0], 0)}",
                f"${format_dollars(usd[1], 0)}",
                f"{days[1] / days[0]:.2f}",
            )
        )
        measured.append((_parameters(row), days[0], usd[0]))
        ours.append((_parameters(row), days[1], usd[1]))
    figure = Figure(figsize=(9, 4), dpi=100, layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw(left, measured, ours, 1, f"days on {8 * NODES} A100-40GB")
    _draw(right, measured, ours, 2, "dollars")
    write_picture(figure, path, _FIX)
    return _table(
        "model, parameters, tokens, days published, predicted, $ published, predicted, ratio", cells
    )


def time_to_train(path: Path) -> str:
    """Hours at full throughput for 1B tokens over A100-40GB, published by Mosaic and predicted.

    As the published hours: tokens / throughput, on the post's network, without start-up and losses.
    """
    tokens, counts = 10**9, (1, 2, 4, 8, 16)
    published = {
        row.mesh.nodes: row
        for row in rows("published_gpu.csv")
        if row.name.startswith("mosaic1-1.3b")
    }
    measured = {nodes: _hours(row, tokens, row.measured) for nodes, row in published.items()}
    first = published[1]
    of_layout = {}  # of the published run, on any number of nodes
    for nodes in counts:
        row = replace(first, mesh=replace(first.mesh, nodes=nodes, data=8 * nodes))
        of_layout[nodes] = _hours(row, tokens, predicted(row))
    train = first.config.recipe.train.model_copy(update={"activation_checkpointing": "none"})
    config = replace(first.config, recipe=first.config.recipe.model_copy(update={"train": train}))
    kept = _hours(first, tokens, predicted(replace(first, config=config)))
    figure = Figure(figsize=(7, 4.5), dpi=100, layout="constrained")
    axes = figure.subplots()
    cells = [["its layout without checkpointing", "8", "", "", f"{kept:.3g}", "", "", ""]]
    for recipe in GPT3_SIZES:
        config = resolve(recipe, "p4d", ["cluster.hardware.network_gb_s=100"])  # the post's
        points = plan_recipe(config, counts, lambda _: (), None, tokens).points()
        speeds = {
            point.node_plan.nodes: point.candidate.tokens_per_s
            for point in points
            if point.candidate
        }
        hours = {nodes: tokens / speed / 3600 for nodes, speed in speeds.items()}
        axes.plot([8 * nodes for nodes in hours], [*hours.values()], "s:", label=f"{recipe}, plan")
        sources = (hours, of_layout, measured) if recipe == "gpt3_1.3b" else (hours,)
        for nodes in counts:
            row_cells = [recipe, str(8 * nodes)]
            for source in sources:
                if nodes in source:
                    row_cells += [f"{source[nodes]:.3g}", f"{source[1] / source[nodes]:.1f}"]
            cells.append(row_cells + [""] * (8 - len(row_cells)))
    lines = {"plan of its layout": (of_layout, "k^:"), "published": (measured, "ko-")}
    for name, (hours, style) in lines.items():
        axes.plot([8 * nodes for nodes in hours], [*hours.values()], style, label=f"1.3B, {name}")
    axes.set(xscale="log", yscale="log", xlabel="A100-40GB", ylabel="hours for 1B tokens")
    axes.set_xticks([8 * nodes for nodes in counts], [str(8 * nodes) for nodes in counts])
    axes.set_yticks([2.0**power for power in range(-5, 4, 2)], ["1/32", "1/8", "1/2", "2", "8"])
    axes.minorticks_off()
    _finish(axes)
    write_picture(figure, path, _FIX)
    return _table("recipe, GPUs, plan h, ×, its layout h, ×, published h, ×", cells)


def _hours(row: Row, tokens: int, sequences_per_s: float) -> float:
    return tokens / row.config.recipe.model.seq_len / sequences_per_s / 3600


def scaling(path: Path) -> str:
    """Throughput per node of the HLAT recipes' own layouts, relative to the fewest nodes."""
    # Recipe, sequences a node where the batch grows with the nodes (None: the recipe's batch), and
    # the node counts: of 70B those that it fits on, of 7B AWS's, and HLAT's 128.
    series: dict[str, tuple[str, int | None, tuple[int, ...]]] = {
        "Llama 2 70B, batch 1,024": ("llama2_70b", None, (16, 32, 64, 128)),
        "Llama 2 70B, batch 64 a node": ("llama2_70b", 64, (16, 32, 64, 128)),
        "Llama 2 7B, batch 1,024": ("llama2_7b", None, (4, 8, 16, 32, 64, 128)),
    }
    hardware = resolve("llama2_70b", "trn1").cluster.hardware
    assert hardware is not None
    assert hardware.network_efficiency_range is not None
    low, high = hardware.network_efficiency_range
    figure = Figure(figsize=(7, 4.5), dpi=100, layout="constrained")
    axes = figure.subplots()
    cells = []
    for number, (name, (recipe, batch, counts)) in enumerate(series.items()):
        least, usual, most = (
            _scaling(recipe, counts, batch, share)
            for share in (low, hardware.network_efficiency, high)
        )
        axes.fill_between(counts, least, most, alpha=0.15, color=f"C{number}", linewidth=0)
        axes.plot(counts, usual, "o-", color=f"C{number}", label=name)
        cells += [
            (name, str(nodes), f"{middle:.1f} %", f"{bottom:.1f}–{top:.1f} %")
            for nodes, middle, bottom, top in zip(counts, usual, least, most, strict=True)
        ]
    axes.axhline(90, color="#777777", linestyle="--", linewidth=1)
    axes.annotate("90 %", (counts[0], 90), textcoords="offset points", xytext=(0, 4))
    axes.set(xscale="log", xlabel="nodes", ylabel="throughput of a node, % of the first")
    axes.set_xticks(counts, [str(nodes) for nodes in counts])
    axes.minorticks_off()
    _finish(axes)
    write_picture(figure, path, _FIX)
    network = f"network {low:g} to {high:g}"
    return _table(f"layout, nodes, scaling, {network}", cells)


def _scaling(recipe: str, counts: Sequence[int], batch: int | None, share: float) -> list[float]:
    """Throughput of a node on each count, % of that on the first, with the recipe's own layout."""
    speeds = []
    for nodes in counts:
        overrides = [f"cluster.hardware.network_efficiency={share}"]
        overrides += [f"train.global_batch={(batch or 0) * nodes}"] * (batch is not None)
        config = resolve(recipe, "trn1", overrides)
        mesh = make_mesh(config, nodes)
        speeds.append(mesh.global_batch / step_time(config, mesh).total / nodes)
    return [100 * speed / speeds[0] for speed in speeds]


def _parameters(row: Row) -> float:
    return float(parameters(row.config.recipe.model))


def _table(headings: str, cells: Sequence[Sequence[str]]) -> str:
    return "\n".join(fitted([*map(Column, headings.split(", "))], cells, 1000).lines)


def _draw(
    axes: Axes,
    measured: Sequence[tuple[float, ...]],
    ours: Sequence[tuple[float, ...]],
    column: int,
    label: str,
) -> None:
    for points, name, style in ((measured, "published throughput", "o-"), (ours, "plan", "s:")):
        x, y = ([point[i] for point in points] for i in (0, column))
        axes.plot(x, y, style, label=name)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.set_xlabel("parameters")
    axes.set_ylabel(label)
    _finish(axes)


def _finish(axes: Axes) -> None:
    axes.grid(visible=True, color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
