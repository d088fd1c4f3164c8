"""`slurmllm plan --matrix-figure`: what matrix products of each size reach of the peak."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from slurmllm.cli import options


def draw_matrix_figure(
    path: str, cluster: str | None, overrides: Sequence[str], as_json: bool
) -> None:
    """Draw and print what matrix products of each size reach of the peak."""
    from slurmllm.calibrate.fits import matrix_figures
    from slurmllm.calibrate.matrix import (
        is_device_here,
        measure_products,
        measured_products,
        predicted_products,
    )
    from slurmllm.config.resolve import resolve
    from slurmllm.display.pictures import write_picture
    from slurmllm.display.tables import print_table
    from slurmllm.plan.estimate import known_hardware
    from slurmllm.plan.plot import draw_matrix_utilization

    options.check_picture(path, option="--matrix-figure")
    options.check_folder("--matrix-figure", path)
    config = resolve("tiny_neox", cluster, overrides)
    hardware = known_hardware(config)
    if here := is_device_here(config):
        samples = measure_products(config, lambda line: click.echo(line, err=True))
        if hardware.rough:  # its figures are a guess: the curve is fitted to the measurement
            hardware = matrix_figures(samples, "bf16", hardware)
        rows = measured_products(hardware, samples)
    else:
        rows = predicted_products(hardware, config.cluster.device)
    name = config.cluster.name
    write_picture(draw_matrix_utilization(rows, name), Path(path), "name another file")
    if as_json:
        options.echo_json({"cluster": name, "measured": here, "products": rows, "picture": path})
        return
    print_table(
        ("precision", "m × k × n", "TFLOP/s", "of the peak", "planner TFLOP/s", "of the peak"),
        [
            (
                one["precision"], f"{one['m']:,} × {one['k']:,} × {one['n']:,}",
                *_reached(one, "measured"), *_reached(one, "planner"),
            )
            for one in rows
        ],
    )  # fmt: skip
    if not here:
        device = config.cluster.device
        click.echo(f"not measured: this machine has no {device} device that can be measured")
    click.echo(f"picture: {path}")


def _reached(row: Mapping[str, Any], kind: str) -> tuple[str, str]:
    from slurmllm.format import format_number, format_percent

    tflops, share = row[f"{kind}_tflops"], row[f"{kind}_utilization"]
    return ("-", "-") if tflops is None else (format_number(tflops), format_percent(share))
