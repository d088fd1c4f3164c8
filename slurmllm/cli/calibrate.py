"""`slurmllm calibrate`: measure the hardware figures of a cluster profile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from slurmllm.cli import commands, options

if TYPE_CHECKING:
    from slurmllm.calibrate.run import Calibration
    from slurmllm.config.resolve import RunConfig


@dataclass(frozen=True)
class _CalibrationOptions:
    """The options of the verb, except those of the Slurm job."""

    cluster: str | None
    overrides: tuple[str, ...]
    nodes: int | None
    local: bool
    out: str | None
    plot: str | None
    matrix_figure: str | None
    as_json: bool

    def command(self) -> list[str]:
        """Return the arguments of the same command inside an allocation."""
        command = ["calibrate", *([f"--cluster={self.cluster}"] if self.cluster else [])]
        command += [f"--set={override}" for override in self.overrides]
        for option, path in (("--out", self.out), ("--plot", self.plot)):
            command += [f"{option}={Path(path).resolve()}"] if path else []
        return command + ["--json"] * self.as_json


@click.command(cls=commands.GroupedCommand, common="cluster nodes set local out plot json")
@options.cluster
@options.set_value
@options.node_count(type=click.IntRange(1), help="Nodes to measure together.  [default: 1]")
@click.option("--local", is_flag=True, help="Measure this machine, without Slurm.")
@click.option("--out", metavar="FILE.yaml", help="The profile to write.  [default: print it]")
@options.plot(": matrix size against utilization.")
@click.option(
    "--matrix-figure", metavar="FILE.png", help="Only draw matrix size against utilization."
)
@options.job_options(
    "nodelist partition account qos reservation exclude time",
    time="Time limit of the Slurm job: minutes, H:MM:SS or D-HH:MM:SS.  [default: 15]",
)
@options.as_json
def calibrate(**values: Any) -> None:
    """Measure nodes, and write a cluster profile with their hardware figures.

    \b
    slurmllm calibrate --local --out mine.yaml             this machine
    slurmllm calibrate --cluster p5 --nodes 2 --out mine.yaml
    slurmllm calibrate --matrix-figure FILE.png            matrix size and utilization

    Exit codes: 0 success; 1 salloc got no nodes; 2 invalid options; 3 a node or Slurm failed; 4 a
    file cannot be written.
    """
    from slurmllm.errors import UserError

    request = _CalibrationOptions(
        **{name: values.pop(name) for name in _CalibrationOptions.__dataclass_fields__}
    )
    job_names = [f"--{name}" for name, value in values.items() if value]
    if request.matrix_figure is not None:
        others = {"--nodes": request.nodes, "--local": request.local, "--out": request.out}
        others |= {"--plot": request.plot}
        unused = [name for name, value in others.items() if value] + job_names
        if unused:
            raise UserError(f"--matrix-figure does not take {', '.join(unused)}; leave out")
        _draw_matrix_figure(request.matrix_figure, request)
        return
    if request.local and job_names:
        text = ", ".join(job_names)
        raise UserError(f"--local measures this machine, without a job; leave out {text}")
    options.check_picture(request.plot)
    options.check_folder("--plot", request.plot)
    _calibrate(request, values)


def _calibrate(request: _CalibrationOptions, job: Mapping[str, str | None]) -> None:
    """Measure nodes, and write or print the cluster profile with their figures."""
    from slurmllm.calibrate.run import calibrate as measure
    from slurmllm.calibrate.run import check_target, profile_text, require_measurable, write_profile
    from slurmllm.config.resolve import local_cluster, resolve
    from slurmllm.supervise.allocation import allocate_nodes

    cluster = local_cluster(request.cluster, request.local)
    # A profile is only resolved together with a recipe: precision, compilation and environment.
    config = resolve("tiny_neox", cluster, request.overrides)
    require_measurable(config)
    out = request.out
    if out is not None:
        check_target(Path(out))
    where: dict[str, Any] = {"nodes": request.nodes, "local": request.local, "options": job}
    allocation = allocate_nodes(config, request.command(), "slurmllm-calibrate", **where)
    calibration = measure(config, allocation, lambda line: click.echo(line, err=True))
    if out is not None:
        write_profile(config.cluster, calibration, Path(out))
    if request.plot is not None:
        from slurmllm.calibrate.matrix import measured_products

        rows = measured_products(calibration.hardware, calibration.products)
        _write_figure(rows, config, request.plot)
        click.echo(f"picture: {request.plot}", err=True)
    if request.as_json:
        options.echo_json(_calibration_json(calibration, request))
        return
    for note in calibration.notes:
        click.echo(f"note: {note}", err=True)
    if out is None:
        click.echo(profile_text(config.cluster, calibration), nl=False)
        return
    nodes = ", ".join(calibration.nodes)
    click.echo(f"profile  {out}: measured on {nodes} in {calibration.seconds:.0f} s")
    click.echo(f"next     slurmllm plan RECIPE --nodes N --cluster {out}")


def _calibration_json(calibration: Calibration, request: _CalibrationOptions) -> dict[str, Any]:
    from slurmllm.calibrate.fits import product_flops

    products = []
    for product in calibration.products:
        m, n, k = product.sizes
        tflops = product_flops(product) / product.value / 1e12
        products.append({"precision": product.of, "m": m, "n": n, "k": k, "tflops": tflops})
    figures = {name: getattr(calibration, name) for name in ("nodes", "notes", "seconds")}
    hardware = calibration.hardware.model_dump(mode="json")
    files = {"out": request.out, "plot": request.plot}
    return {"hardware": hardware, **figures, "products": products, **files}


def _write_figure(rows: Sequence[Mapping[str, Any]], config: RunConfig, path: str) -> None:
    from slurmllm.calibrate.matrix import draw_matrix_utilization
    from slurmllm.display.pictures import write_picture

    figure = draw_matrix_utilization(rows, config.cluster.name)
    write_picture(figure, Path(path), "name another file")


def _draw_matrix_figure(path: str, request: _CalibrationOptions) -> None:
    """Draw and print what matrix products of each size reach of the peak."""
    from slurmllm.calibrate import matrix
    from slurmllm.config.resolve import resolve
    from slurmllm.display.tables import print_table

    options.check_picture(path, option="--matrix-figure")
    options.check_folder("--matrix-figure", path)
    config = resolve("tiny_neox", request.cluster, request.overrides)
    measured = matrix.is_device_here(config)
    rows = matrix.product_rows(config, lambda line: click.echo(line, err=True))
    _write_figure(rows, config, path)
    name, device = config.cluster.name, config.cluster.device
    if request.as_json:
        text = {"cluster": name, "measured": measured, "products": rows, "picture": path}
        options.echo_json(text)
        return
    headings = (
        "precision",
        "m × k × n",
        "TFLOP/s",
        "of the peak",
        "planner TFLOP/s",
        "of the peak",
    )
    print_table(headings, [_cells(row) for row in rows])
    if not measured:
        click.echo(f"not measured: this machine has no {device} device that can be measured")
    click.echo(f"picture: {path}")


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    from slurmllm.format import format_number, format_percent

    cells = [row["precision"], f"{row['m']:,} × {row['k']:,} × {row['n']:,}"]
    for kind in ("measured", "planner"):
        tflops, share = row[f"{kind}_tflops"], row[f"{kind}_utilization"]
        cells += ["-", "-"] if tflops is None else [format_number(tflops), format_percent(share)]
    return tuple(cells)
