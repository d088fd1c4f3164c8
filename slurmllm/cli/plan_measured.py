"""Measurements of `slurmllm plan`: of nodes (--calibrate) and of a run (--against)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from slurmllm.cli import options

if TYPE_CHECKING:
    from slurmllm.plan.estimate import LayoutEstimate
    from slurmllm.report.prediction import ExpectedOverheads, PredictionCheck


def calibrate(
    cluster: str | None,
    overrides: Sequence[str],
    nodes: int | None,
    local: bool,
    out: str | None,
    job: Mapping[str, str | None],
    plot: str | None,
    as_json: bool,
) -> None:
    """Measure nodes, and write or print the cluster profile with their figures."""
    from slurmllm.calibrate.fits import product_flops
    from slurmllm.calibrate.run import calibrate as measure
    from slurmllm.calibrate.run import (
        check_target,
        profile_text,
        require_measurable,
        write_profile,
    )
    from slurmllm.config.resolve import resolve
    from slurmllm.supervise.allocation import allocate_nodes

    # A profile is only resolved together with a recipe: precision, compilation and environment.
    config = resolve("tiny_neox", cluster, overrides)
    require_measurable(config)
    if out is not None:
        check_target(Path(out))
    again = ["plan", "--calibrate", *([f"--cluster={cluster}"] if cluster else [])]
    again += [f"--set={override}" for override in overrides]
    again += [f"--out={Path(out).resolve()}"] if out else []
    again += [f"--plot={Path(plot).resolve()}"] if plot else []
    again += ["--json"] * as_json
    allocation = allocate_nodes(
        config, again, "slurmllm-calibrate", nodes=nodes, local=local, options=job
    )
    found = measure(config, allocation, lambda line: click.echo(line, err=True))
    if out is not None:
        write_profile(config.cluster, found, Path(out))
    products: list[dict[str, Any]] = [
        {"precision": product.of, **dict(zip("mnk", product.sizes, strict=True)),
         "tflops": product_flops(product) / product.value / 1e12}
        for product in found.products
    ]  # fmt: skip
    if plot is not None:
        from slurmllm.plan.plot import draw_products
        from slurmllm.rundir import write_picture

        drawn = draw_products(products, found.hardware)
        write_picture(drawn, Path(plot), "name another file with --plot")
        click.echo(f"picture: {plot}", err=True)
    if as_json:
        text = {
            "hardware": found.hardware.model_dump(mode="json"), "nodes": found.nodes,
            "notes": found.notes, "products": products, "seconds": found.seconds, "out": out,
            "plot": plot,
        }  # fmt: skip
        options.echo_json(text)
        return
    for note in found.notes:
        click.echo(f"note: {note}", err=True)
    if out is None:
        click.echo(profile_text(config.cluster, found), nl=False)
        return
    click.echo(f"profile  {out}: measured on {', '.join(found.nodes)} in {found.seconds:.0f} s")
    click.echo(f"next     slurmllm plan RECIPE --nodes N --cluster {out}")


def compare_with_run(name: str, cluster: str | None, runs_dir: str | None, as_json: bool) -> None:
    """Print predicted and measured figures of a run."""
    from slurmllm.report.prediction import check_run_prediction
    from slurmllm.rundir import find_run, runs_root

    found = check_run_prediction(find_run(name, runs_root(runs_dir)), cluster, _expected_overheads)
    if as_json:
        click.echo(found.model_dump_json(indent=2))
        return
    _print_check(found)
    for warning in found.warnings:
        click.echo(f"warning: {warning}")


def _print_check(found: PredictionCheck) -> None:
    from slurmllm.format import format_plural
    from slurmllm.tables import print_table

    steps = f"{found.steps} steps of attempt{'s' * (len(found.attempts) > 1)} "
    attempts = ", ".join(str(attempt) for attempt in found.attempts)
    nodes = format_plural(found.nodes, "node")
    click.echo(f"{found.run}: {steps}{attempts} on {nodes}; profile {found.cluster}")
    rows = (
        (
            row.name, _measure(row.unit, row.predicted), _measure(row.unit, row.measured),
            "-" if row.ratio is None else f"{row.ratio:.3f}", row.note,
        )
        for row in found.rows
    )  # fmt: skip
    print_table(
        ("", "predicted", "measured", "measured / predicted", "what it is"), rows, "what it is"
    )


def _measure(unit: str, value: float | None) -> str:
    from slurmllm.format import format_number, format_percent

    if value is None or unit == "":
        return format_percent(value)
    return f"{value / 1e9:.2f} GB" if unit == "bytes" else f"{format_number(value)} {unit}"


def _expected_overheads(candidate: LayoutEstimate) -> ExpectedOverheads:
    """The expected overheads of a run outside its steps."""
    from slurmllm.errors import ConfigError
    from slurmllm.plan.lost_time_assumptions import assumed, lost_time
    from slurmllm.plan.parameters import parameters
    from slurmllm.report.prediction import ExpectedOverheads

    config, nodes = candidate.config, candidate.mesh.nodes
    asynchronous = config.recipe.checkpoint.asynchronous
    size = parameters(config.recipe.model)
    durations, save = assumed(size, nodes, config.cluster.device, asynchronous)
    try:
        effective = lost_time(config, nodes, candidate.step.total).effective
    except ConfigError:  # no progress by the assumptions, but the run made some
        effective = None
    return ExpectedOverheads(
        start_up_s=durations.start_up[0],
        first_step_s=durations.first_step[0],
        save_waited_s=save.waited_s,
        effective=effective,
    )
