"""Matrix size against utilization: the share of a device's peak that products reach."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from slurmllm.analysis.calibrate.fits import matrix_figures, product_flops
from slurmllm.analysis.calibrate.node import PRODUCT_SIZES, Samples, product_grid
from slurmllm.analysis.calibrate.run import run_task, task_of
from slurmllm.core.config.cluster import Hardware
from slurmllm.core.config.resolve import RunConfig
from slurmllm.core.display.pictures import PICTURE_STYLE, Axes, Figure, NullLocator, rc_context
from slurmllm.core.format import Json, Values
from slurmllm.launch.supervise.allocation import LocalAllocation
from slurmllm.plan.parameters import Product
from slurmllm.plan.plot import COLORS, MARKERS
from slurmllm.plan.search import known_hardware
from slurmllm.plan.step import product_s

_BYTES = {"bf16": 2, "fp32": 4}


def is_device_here(config: RunConfig, root: Path = Path("/")) -> bool:
    """Whether this machine has a device of the profile that can be measured."""
    device = config.cluster.device
    # The driver's device files; NeuronCores are not measured.
    return device == "cpu" or (device == "cuda" and any(root.glob("dev/nvidia[0-9]*")))


def product_rows(config: RunConfig, show: Callable[[str], None]) -> list[Json]:
    """Return what products reach: measured if this machine has the device, else as predicted."""
    hardware = known_hardware(config)
    if not is_device_here(config):
        return predicted_products(hardware, config.cluster.device)
    # Forward and both gradients, with one worker on this machine.
    allocation = LocalAllocation()
    only = {"workers": 1, "sharing": 1, "products_only": True}
    task = task_of(config, allocation, quick=False).model_copy(update=only)
    measured, _ = run_task(config.cluster, task, allocation, show)
    samples = [sample for sample in measured if sample.kind == "product"]
    if hardware.rough:  # its figures are a guess: the curve is fitted to the measurement
        figures = matrix_figures(samples, "bf16", hardware, hardware.memory_gb_s)
        hardware = hardware.model_copy(update=figures)
    return measured_products(hardware, samples)


def predicted_products(hardware: Hardware, device: str) -> list[Json]:
    sizes = product_grid(*PRODUCT_SIZES["cpu" if device == "cpu" else "cuda"])
    return [_row(hardware, "bf16", size, None) for size in sizes]


def measured_products(hardware: Hardware, samples: Samples) -> list[Json]:
    largest = max(sample.sizes[0] for sample in samples)
    largest_products = [s for s in samples if s.sizes[0] == largest]  # without the head
    return [
        _row(hardware, s.of, s.sizes, product_flops(s) / s.value / 1e12)
        for s in sorted(largest_products, key=lambda s: (s.of, s.sizes))
    ]


def _row(hardware: Hardware, precision: str, sizes: Sequence[int], measured: float | None) -> Json:
    m, n, k = sizes
    peak = hardware.bf16_tflops if precision == "bf16" else hardware.fp32_tflops
    # The product, and the gradients of its factors.
    products = (Product(m, n, k), Product(m, k, n), Product(k, n, m))
    seconds = sum(product_s(p, peak * 1e12, _BYTES[precision], hardware) for p in products)
    planner = sum(product.flops for product in products) / seconds / 1e12
    return {
        "precision": precision,
        **{"m": m, "k": k, "n": n},
        "peak_tflops": peak,
        "planner_tflops": planner,
        "planner_utilization": planner / peak,
        "measured_tflops": measured,
        "measured_utilization": None if measured is None else measured / peak,
    }


@rc_context(fname=PICTURE_STYLE)
def draw_matrix_utilization(rows: Sequence[Values], profile: str) -> Figure:
    """Draw the share of the peak by matrix size.

    Left: k and n grow together, as in feed-forward matrices; right, if measured: k for some n.
    """
    together = dict[str, list[Values]]()
    alone = dict[str, list[Values]]()
    for row in rows:
        if row["n"] == 4 * row["k"]:
            name = f"{row['precision']}, peak {row['peak_tflops']:.4g} TFLOP/s"
            together.setdefault(name, []).append(row)
        if row["precision"] == rows[0]["precision"]:
            alone.setdefault(f"n = {row['n']:,}", []).append(row)
    length = max(map(len, alone.values()))
    panels = {"4k": together}
    if length > 1:
        panels["n"] = {name: line for name, line in alone.items() if len(line) == length}
    figure = Figure(figsize=(1 + 6 * len(panels), 4.2), dpi=100, layout="constrained")
    drawn = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (n, lines) in zip(drawn, panels.items(), strict=True):
        _draw_shares(axes, lines)
        axes.set_xlabel(f"k of products {rows[0]['m']:,} × k × {n}")
    figure.axes[0].set(ylabel="share of the peak, %", title=f"profile {profile}")
    return figure


def _draw_shares(axes: Axes, lines: Mapping[str, Sequence[Values]]) -> None:
    for number, (name, rows) in enumerate(lines.items()):
        widths = [row["k"] for row in rows]
        color = COLORS[number]
        for kind, marker, style in (("measured", MARKERS[number], "-"), ("planner", "", ":")):
            shares = [row[f"{kind}_utilization"] for row in rows]
            if None not in shares:
                percent = [100 * share for share in shares]
                label = f"{name}, {kind}"
                axes.plot(widths, percent, color=color, label=label, marker=marker, ls=style)
    axes.set_xscale("log", base=2)
    axes.set_xticks(widths, [f"{width:,}" for width in widths])
    axes.xaxis.set_minor_locator(NullLocator())
    # Above 100 % if the profile's peak is too low.
    axes.set_ylim(0, max(100.0, axes.get_ylim()[1]))
    axes.legend(frameon=False)
