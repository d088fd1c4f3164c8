"""`slurmllm compare`: do two runs have the same loss and gradient norm?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from slurmllm.cli import options

if TYPE_CHECKING:
    from slurmllm.analysis.comparing.comparison import Comparison, Overlap, Side, Tolerances
    from slurmllm.analysis.curves import Curve


_HEADINGS = (
    "metric",
    "steps",
    "max diff",
    "at step",
    "mean diff",
    "parts at",
    "tolerance",
    "identical",
)


@click.command()
@click.argument("a")
@click.argument("b")
@click.option("--tolerance", type=float, help="Relative tolerance of the loss.  [default: 1e-3]")
@click.option(
    "--grad-norm-tolerance",
    type=float,
    help="Relative tolerance of the gradient norm.  [default: 1e-2]",
)
@click.option("--exact", is_flag=True, help="Ask for bit-identical values instead.")
@click.option("--from-step", type=click.IntRange(min=0), help="First step to compare.")
@click.option("--to-step", type=click.IntRange(min=0), help="Last step to compare, included.")
@click.option(
    "--plot", metavar="FILE.png", help="Picture.  [default: <run A>/reports/compare-<A>-<B>.png]"
)
@click.option("--no-plot", is_flag=True, help="Draw no picture.")
@options.runs_dir
@options.as_json
@click.pass_context
def compare(
    ctx: click.Context,
    *,
    a: str,
    b: str,
    tolerance: float | None,
    grad_norm_tolerance: float | None,
    exact: bool,
    from_step: int | None,
    to_step: int | None,
    plot: str | None,
    no_plot: bool,
    runs_dir: str | None,
    as_json: bool,
) -> None:
    """Compare the loss and gradient norm of two runs, step by step.

    A and B are run names, run directories or metrics files (.jsonl).

    Exit codes: 0 the runs match, 1 they differ, 2 unusable input, 4 the picture asked for
    with --plot cannot be written.
    """
    from slurmllm.analysis.comparing import compare as stage
    from slurmllm.analysis.reading.source import read_curve
    from slurmllm.errors import EXIT_NEGATIVE, UserError
    from slurmllm.rundir import runs_root

    tolerances = _tolerances(tolerance, grad_norm_tolerance, exact)
    if plot is not None and no_plot:
        raise UserError("--plot and --no-plot exclude each other; give one of them")
    if plot is not None and Path(plot).suffix.lower() != ".png":
        raise UserError(f"--plot {plot}: the picture is a PNG; name it {Path(plot).stem}.png")
    root = runs_root(runs_dir)
    curve_a, curve_b = (read_curve(_locate(source, root)) for source in (a, b))
    comparison = stage.compare(curve_a, curve_b, tolerances, from_step=from_step, to_step=to_step)
    if not no_plot:
        comparison = _draw(curve_a, curve_b, comparison, plot)
    if as_json:
        click.echo(comparison.model_dump_json(indent=2))
    else:
        _print(comparison)
    ctx.exit(0 if comparison.match else EXIT_NEGATIVE)


def _tolerances(loss: float | None, grad_norm: float | None, exact: bool) -> Tolerances:
    from slurmllm.analysis.comparing.comparison import Tolerances
    from slurmllm.errors import UserError

    given = {"--tolerance": loss, "--grad-norm-tolerance": grad_norm}
    for option, value in given.items():
        if value is not None and exact:
            raise UserError(f"{option} {value:g} and --exact exclude each other; give one of them")
        if value is not None and not 0 <= value < float("inf"):
            raise UserError(f"{option} {value:g}: a tolerance is 0 or more, such as 1e-3")
    standard = Tolerances(exact=exact)
    return Tolerances(
        loss=standard.loss if loss is None else loss,
        grad_norm=standard.grad_norm if grad_norm is None else grad_norm,
        exact=exact,
    )


def _locate(source: str, root: Path) -> Path:
    """The metrics file or run directory that an argument means.

    A folder with metrics but without config.yaml will do: a run copied in part.
    """
    from slurmllm.errors import RunError
    from slurmllm.rundir import find_run

    path = Path(source)
    try:
        if path.is_file():
            return path
        if path.suffix == ".jsonl" and not (root / path).exists() and not path.exists():
            raise RunError(f"no metrics file {path.absolute()}; give a .jsonl file or a run")
        try:
            return find_run(source, root).path
        except RunError:
            if (path / "metrics").is_dir():
                return path
            raise
    except OSError as error:
        raise RunError(
            f"cannot look up {source:.200}: {error.strerror or error}; give the name or the "
            "directory of a run, or a .jsonl file"
        ) from error


def _draw(a: Curve, b: Curve, comparison: Comparison, plot: str | None) -> Comparison:
    """Draw the picture and note where; only a picture that was asked for must succeed."""
    from slurmllm.analysis.comparing.plot import default_path, draw
    from slurmllm.errors import StorageError

    path = Path(plot) if plot is not None else default_path(a, b)
    try:
        draw(a, b, comparison, path)
    except StorageError as error:
        if plot is not None:
            raise
        return comparison.model_copy(update={"warnings": (*comparison.warnings, str(error))})
    return comparison.model_copy(update={"plot": str(path)})


def _print(comparison: Comparison) -> None:
    """The table, the verdict, the warnings and where the picture is."""
    from rich.text import Text

    from slurmllm.cli.output import console, print_table

    def line(text: str | Text) -> None:
        console().print(text, soft_wrap=True, markup=False)

    line(_describe("A", comparison.a, comparison.overlaps["a"]))
    line(_describe("B", comparison.b, comparison.overlaps["b"]))
    line("")
    print_table(_HEADINGS, _cells(comparison))
    if comparison.data is not None:
        line(f"data: {'; '.join(comparison.data.differences) or 'the same on both sides'}")
    line("")
    color = "green" if comparison.match else "red"
    line(Text.assemble((comparison.verdict, f"bold {color}"), ": ", comparison.reason))
    for warning in comparison.warnings:
        line(f"warning: {warning}")
    if comparison.plot is not None:
        line(f"picture: {comparison.plot}")


def _describe(label: str, side: Side, overlap: Overlap) -> str:
    text = f"{label}  {side.name}: steps {side.first_step}–{side.last_step}"
    if side.restarts:
        more = " …" if len(side.restarts) > 5 else ""
        text += f", restarted at {', '.join(str(step) for step in side.restarts[:5])}{more}"
    if overlap.rows:
        rows = "1 row" if overlap.rows == 1 else f"{overlap.rows} rows"
        text += f", {rows} made again and counted once"
        text += " (bit-identical)" if overlap.identical else ""
    return text


def _cells(comparison: Comparison) -> list[tuple[str, ...]]:
    """A row a metric, in the order of the headings."""
    from slurmllm.analysis.comparing.verdict import figure

    def shown(value: float | None) -> str:
        return "-" if value is None else figure(value)

    return [
        (
            name,
            str(metric.steps_compared),
            shown(metric.max_rel_diff),
            str(metric.max_rel_diff_step) if metric.max_rel_diff else "-",
            shown(metric.mean_rel_diff),
            "-" if metric.first_departure_step is None else str(metric.first_departure_step),
            "exact" if comparison.tolerance.exact else shown(metric.tolerance),
            "yes" if metric.bit_identical else "no",
        )
        for name, metric in comparison.metrics.items()
    ]
