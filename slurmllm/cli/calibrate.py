"""`slurmllm calibrate`: measure the hardware figures of a cluster profile."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from slurmllm.cli import commands, options
from slurmllm.core.display.tables import print_table
from slurmllm.core.errors import UserError
from slurmllm.core.format import Texts, Values, format_number, format_percent

if TYPE_CHECKING:
    from slurmllm.analysis.calibrate.run import Calibration
    from slurmllm.core.config.resolve import RunConfig


@commands.grouped(common="cluster nodes set local out plot json")
@options.cluster
@options.set_value
@options.num_nodes(help="Nodes to measure together.  [default: 1]")
@options.flag("--local", "Measure this machine, without Slurm.")
@click.option("--out", metavar="FILE.yaml", help="The profile to write.  [default: print it]")
@options.plot(": matrix size against utilization.")
@click.option(
    "--matrix-figure",
    metavar="FILE.png",
    help="Only measure and draw matrix size against utilization.",
)
@options.job_options(options.ALLOCATION, time=options.ALLOCATION_TIME)
@options.as_json
def calibrate(
    cluster: str | None,
    overrides: Texts,
    nodes: int | None,
    local: bool,
    out: str | None,
    plot: str | None,
    matrix_figure: str | None,
    as_json: bool,
    **job: str | None,
) -> None:
    """Measure nodes, and write a profile with their figures.

    \b
    slurmllm calibrate --local --out mine.yaml             this machine
    slurmllm calibrate --cluster p5 --nodes 2 --out mine.yaml
    slurmllm calibrate --matrix-figure FILE.png            matrix size and utilization

    Exit codes: 0 success; 1 salloc got no nodes; 2 invalid options; 3 a node or Slurm failed; 4 a
    file cannot be written.
    """
    from slurmllm.analysis.calibrate.run import check_target, require_measurable
    from slurmllm.core.config.resolve import local_cluster, resolve
    from slurmllm.launch.supervise.allocation import allocate_nodes

    job_names = [f"--{name}" for name, value in job.items() if value]
    if matrix_figure is not None:
        measuring = {"--nodes": nodes, "--local": local, "--out": out, "--plot": plot}
        if unused := [name for name, value in measuring.items() if value] + job_names:
            raise UserError(f"--matrix-figure does not take {', '.join(unused)}; leave out")
        # A profile is only resolved together with a recipe: precision and environment.
        _draw_matrix_figure(matrix_figure, resolve("tiny_neox", cluster, overrides), as_json)
        return
    if local and job_names:
        names = ", ".join(job_names)
        raise UserError(f"--local measures this machine, without a job; leave out {names}")
    _check_picture("--plot", plot)
    cluster = local_cluster(cluster, local)
    config = resolve("tiny_neox", cluster, overrides)
    require_measurable(config)
    if out is not None:
        check_target(Path(out))
    command = ["calibrate", *options.arguments_inside(cluster, overrides, as_json)]
    for option, path in (("--out", out), ("--plot", plot)):
        command += [f"{option}={Path(path).resolve()}"] if path else []
    allocation = allocate_nodes(
        config, command, "slurmllm-calibrate", nodes=nodes, local=local, options=job
    )
    from slurmllm.analysis.calibrate.run import calibrate as measure

    _write(measure(config, allocation, options.note), config, out, plot, as_json)


def _check_picture(option: str, path: str | None) -> None:
    options.check_picture(path, option=option)
    options.check_folder(option, path)


def _write(
    calibration: Calibration, config: RunConfig, out: str | None, plot: str | None, as_json: bool
) -> None:
    """Write or print the profile; draw and print what was measured."""
    from slurmllm.analysis.calibrate.fits import product_flops
    from slurmllm.analysis.calibrate.run import profile_text, write_profile

    if out is not None:
        write_profile(config.cluster, calibration, Path(out))
    if plot is not None:
        from slurmllm.analysis.calibrate.matrix import measured_products

        _write_figure(measured_products(calibration.hardware, calibration.products), config, plot)
        options.note(f"picture: {plot}")
    if as_json:
        products = [
            {
                "precision": product.of,
                **dict(zip("mnk", product.sizes, strict=True)),
                "tflops": product_flops(product) / product.value / 1e12,
            }
            for product in calibration.products
        ]
        options.echo_json(
            {
                "hardware": calibration.hardware.model_dump(mode="json"),
                "nodes": calibration.nodes,
                "notes": calibration.notes,
                "seconds": calibration.seconds,
                "products": products,
                "out": out,
                "plot": plot,
            }
        )
        return
    for note in calibration.notes:
        options.note(f"note: {note}")
    if out is None:
        click.echo(profile_text(config.cluster, calibration), nl=False)
        return
    nodes = ", ".join(calibration.nodes)
    click.echo(f"profile  {out}: measured on {nodes} in {calibration.seconds:.0f} s")
    click.echo(f"next     slurmllm plan RECIPE --nodes N --cluster {out}")


def _write_figure(rows: Sequence[Values], config: RunConfig, path: str) -> None:
    from slurmllm.analysis.calibrate.matrix import draw_matrix_utilization
    from slurmllm.core.display.pictures import write_picture

    write_picture(
        draw_matrix_utilization(rows, config.cluster.name), Path(path), "name another file"
    )


def _draw_matrix_figure(path: str, config: RunConfig, as_json: bool) -> None:
    """Draw and print what matrix products of each size reach of the peak."""
    from slurmllm.analysis.calibrate import matrix

    _check_picture("--matrix-figure", path)
    measured = matrix.is_device_here(config)
    rows = matrix.product_rows(config, options.note)
    _write_figure(rows, config, path)
    name, device = config.cluster.name, config.cluster.device
    if as_json:
        options.echo_json(
            {"cluster": name, "measured": measured, "products": rows, "picture": path}
        )
        return
    planner = ("planner TFLOP/s", "of the peak")
    headings = ("precision", "m × k × n", "TFLOP/s", "of the peak", *planner)
    table = []
    for row in rows:
        cells = [row["precision"], f"{row['m']:,} × {row['k']:,} × {row['n']:,}"]
        for kind in ("measured", "planner"):
            cells.append(format_number(row[f"{kind}_tflops"]))
            cells.append(format_percent(row[f"{kind}_utilization"]))
        table.append(cells)
    print_table(headings, table)
    if not measured:
        click.echo(f"not measured: this machine has no {device} device that can be measured")
    click.echo(f"picture: {path}")
