"""`slurmllm compare`: do runs have the same loss and gradient norm, and if not, why?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from slurmllm.cli import options

if TYPE_CHECKING:
    from slurmllm.compare.comparison import Comparison, Overlap, Side
    from slurmllm.compare.statistics import Statistics
    from slurmllm.metrics.curves import Curve


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
_DESCRIBED = ("param_norm", "lr", "val_loss")


@click.command()
@click.argument("a")
@click.argument("others", metavar="B [C …]", nargs=-1, required=True)
@click.option("--tolerance", type=float, help="Relative tolerance of the loss.  [default: 1e-3]")
@click.option(
    "--grad-norm-tolerance",
    type=float,
    help="Relative tolerance of the gradient norm.  [default: 1e-2]",
)
@click.option("--exact", is_flag=True, help="Ask for bit-identical values instead.")
@click.option(
    "--seed",
    "seeds",
    multiple=True,
    metavar="RUN",
    help="Another seed of A; repeatable. The spread of A and these is the tolerance then.",
)
@click.option(
    "--by",
    type=click.Choice(["step", "tokens", "samples"]),
    default="step",
    show_default=True,
    help="What the runs are aligned by.",
)
@options.tags
@options.from_step
@options.to_step
@click.option(
    "--plot", metavar="FILE.png", help="Picture.  [default: <run A>/reports/compare-<A>-<B>.png]"
)
@options.no_plot
@options.runs_dir
@options.as_json
@click.pass_context
def compare(
    ctx: click.Context,
    *,
    a: str,
    others: tuple[str, ...],
    tolerance: float | None,
    grad_norm_tolerance: float | None,
    exact: bool,
    seeds: tuple[str, ...],
    by: Literal["step", "tokens", "samples"],
    tags: tuple[str, ...],
    from_step: int | None,
    to_step: int | None,
    plot: str | None,
    no_plot: bool,
    runs_dir: str | None,
    as_json: bool,
) -> None:
    """Compare the loss and gradient norm of runs, point by point, with A's.

    A, B … are run names or directories, or other frameworks' logs: TensorBoard event files or
    folders of them, JSON lines, CSV, text.

    Exit codes: 0 the runs match A, 1 one of them differs, 2 unusable input, 4 the picture asked
    for with --plot cannot be written.
    """
    from slurmllm.errors import EXIT_NEGATIVE, UserError

    _check_tolerances(tolerance, grad_norm_tolerance, exact)
    if seeds and (exact or tolerance is not None or grad_norm_tolerance is not None):
        raise UserError(
            "--seed gives the tolerance; leave out --exact, --tolerance and --grad-norm-tolerance"
        )
    options.check_picture(plot, no_plot)

    from concurrent.futures import ThreadPoolExecutor
    from importlib import import_module

    from slurmllm.metrics.source import locate, read_curve
    from slurmllm.metrics.tags import parse_tags
    from slurmllm.rundir import runs_root

    root, named = runs_root(runs_dir), parse_tags(tags)
    sources = [locate(source, root) for source in (a, *others, *seeds)]
    with ThreadPoolExecutor(max_workers=2) as pool:  # the parsers work outside Python's lock
        reading = pool.map(lambda path: read_curve(path, named, lenient=not exact), sources)
        # What comes next takes half a second to import, time enough to read in.
        from slurmllm.compare import compare as stage
        from slurmllm.compare.comparison import Tolerances, letter_of

        if not no_plot:
            import_module("slurmllm.compare.plot")
        read = list(reading)
    curves, own = read[: 1 + len(others)], read[1 + len(others) :]
    given = {"loss": tolerance, "grad_norm": grad_norm_tolerance}
    tolerances = Tolerances(
        exact=exact, **{name: value for name, value in given.items() if value is not None}
    )
    letters = [letter_of(place) for place in range(1, len(curves))]
    comparisons = [
        stage.compare(
            curves[0],
            curve,
            tolerances,
            axis=by,
            from_step=from_step,
            to_step=to_step,
            seeds=own,
            letter=letters[place],
        )
        for place, curve in enumerate(curves[1:])
    ]
    if not no_plot:
        comparisons = _draw(curves, comparisons, plot, from_step, to_step, own)
    if as_json:
        click.echo(_as_json(comparisons))
    else:
        for number, comparison in enumerate(comparisons):
            _print(comparison, letters[number], alone=len(comparisons) == 1)
    match = all(comparison.match for comparison in comparisons)
    ctx.exit(0 if match else EXIT_NEGATIVE)


def _as_json(comparisons: Sequence[Comparison]) -> str:
    if len(comparisons) == 1:
        return comparisons[0].model_dump_json(indent=2)
    import json

    answer = {
        "comparisons": [json.loads(comparison.model_dump_json()) for comparison in comparisons],
        "match": all(comparison.match for comparison in comparisons),
    }
    return json.dumps(answer, indent=2, ensure_ascii=False, allow_nan=False)


def _check_tolerances(loss: float | None, grad_norm: float | None, exact: bool) -> None:
    from slurmllm.errors import UserError

    given = {"--tolerance": loss, "--grad-norm-tolerance": grad_norm}
    for option, value in given.items():
        if value is not None and exact:
            raise UserError(f"{option} {value:g} and --exact exclude each other; give one of them")
        if value is not None and not 0 <= value < float("inf"):
            raise UserError(f"{option} {value:g}: a tolerance is 0 or more, such as 1e-3")


def _draw(
    curves: Sequence[Curve],
    comparisons: Sequence[Comparison],
    plot: str | None,
    from_step: int | None,
    to_step: int | None,
    seeds: Sequence[Curve],
) -> list[Comparison]:
    """Draw the picture and note where; only a picture that was asked for must succeed."""
    from slurmllm.compare.plot import default_path, draw_all
    from slurmllm.errors import StorageError

    path = Path(plot) if plot is not None else default_path(*curves)
    try:
        draw_all(
            curves[0], curves[1:], comparisons, path,
            from_step=from_step, to_step=to_step, seeds=seeds,
        )  # fmt: skip
    except StorageError as error:
        if plot is not None:
            raise
        return [
            comparison.model_copy(update={"warnings": (*comparison.warnings, str(error))})
            for comparison in comparisons
        ]
    return [comparison.model_copy(update={"plot": str(path)}) for comparison in comparisons]


def _print(comparison: Comparison, letter: str, *, alone: bool) -> None:
    """The table, the verdict, the warnings and where the picture is."""
    from rich.text import Text

    from slurmllm.tables import console, print_table

    def line(text: str | Text) -> None:
        console().print(text, soft_wrap=True, markup=False)

    if letter == "B":
        line(_describe("A", comparison.a, comparison.overlaps["a"]))
    else:
        line("")
    line(_describe(letter, comparison.b, comparison.overlaps["b"]))
    line("")
    print_table(_HEADINGS, _cells(comparison))
    if comparison.data is not None:
        line(f"data: {'; '.join(comparison.data.differences) or 'the same on both sides'}")
    speed = comparison.statistics.get("seq_per_s") or comparison.statistics.get("tokens_per_s")
    if speed is not None and speed.ratio is not None:
        line(f"throughput: {letter} at {speed.ratio:.3g} times that of A (median)")
    line("")
    color = "green" if comparison.match else "red"
    which = "" if alone else f"A and {letter} "
    line(Text.assemble(which, (comparison.verdict, f"bold {color}"), ": ", comparison.reason))
    diagnosis = comparison.diagnosis
    if diagnosis is not None and diagnosis.words not in comparison.reason:
        line(f"diagnosis: {diagnosis.words}")
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
    """A row a metric, in the order of the headings; those of the verdict first."""
    from slurmllm.compare.verdict import figure

    def shown(value: float | None) -> str:
        return "-" if value is None else figure(value)

    rows = [
        (
            name,
            str(metric.steps_compared),
            shown(metric.max_rel_diff),
            str(metric.max_rel_diff_step) if metric.max_rel_diff else "-",
            shown(metric.mean_rel_diff),
            "-" if metric.onset_step is None else str(metric.onset_step),
            _rule(comparison, shown(metric.tolerance)),
            "yes" if metric.bit_identical else "no",
        )
        for name, metric in comparison.metrics.items()
    ]
    return rows + [
        _described(name, comparison.statistics[name], shown)
        for name in _DESCRIBED
        if name in comparison.statistics
    ]


def _rule(comparison: Comparison, tolerance: str) -> str:
    if comparison.band is not None:
        return "band"
    return "exact" if comparison.tolerance.exact else tolerance


def _described(
    name: str, statistics: Statistics, shown: Callable[[float | None], str]
) -> tuple[str, ...]:
    """A row of a metric that is no part of the verdict."""
    same = statistics.max_rel_diff == 0
    return (
        name,
        str(statistics.points),
        shown(statistics.max_rel_diff),
        str(statistics.max_rel_diff_step) if statistics.max_rel_diff else "-",
        shown(statistics.mean_rel_diff),
        "-",
        "-",
        "yes" if same else "no",
    )
