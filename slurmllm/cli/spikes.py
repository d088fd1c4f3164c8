"""`slurmllm spikes`: the spikes of loss and gradient norm of runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click
from pydantic_core import to_jsonable_python

from slurmllm.cli import options
from slurmllm.core.display.tables import print_line, print_table
from slurmllm.core.errors import RunError, StorageError
from slurmllm.core.format import Texts

if TYPE_CHECKING:
    from slurmllm.analysis.spikes.analysis import Metric, SpikeAnalysis
    from slurmllm.core.metrics.curves import Curve


@click.command()
@options.run_argument("sources", nargs=-1, required=True, metavar="SOURCE...")
@options.choice("--metric", "loss grad_norm all", "What to search for spikes.", default="all")
@click.option("--window", default=20, help="Number of steps in the running mean.")
@click.option(
    "--threshold",
    default=0.1,
    help="A value higher than the running mean by more than this is a spike.",
)
@click.option(
    "--min-gap", default=1, help="Spikes with fewer normal steps between them are merged."
)
@options.log_options
@options.step_range
@options.plot_or_none("<run>/reports/spikes-<run>.png; of logs none")
@options.runs_dir
@options.as_json
def spikes(
    *,
    sources: Texts,
    metric: str,
    of_logs: options.LogOptions,
    steps: options.StepRange,
    plot: str | None,
    runs_dir: Path,
    as_json: bool,
    **definition: Any,
) -> None:
    """Find spikes of loss and gradient norm in runs and logs.

    Also finds the restarts, skipped batches and gradient-norm changes that coincide with them.

    A step is in a spike if its value exceeds the mean of the --window steps before it by more than
    --threshold. The defaults are those of HLAT, AWS's Llama 2 7B (2024), for the gradient norm.

    SOURCE is a run's name, a run directory, or a log of another framework, as for `compare`.

    Exit codes: 0 success, with or without spikes; 2 invalid input; 4 the plot cannot be written.
    """
    from slurmllm.analysis.spikes.detection import analyze, select_steps
    from slurmllm.core.metrics.source import locate, name_apart, read_curve

    logs = name_apart(
        [
            read_curve(locate(source, runs_dir), lenient=True, **of_source)
            for source, of_source in zip(sources, of_logs.arguments(len(sources)), strict=True)
        ]
    )
    of_logs.refuse_unused(logs)
    curves = [select_steps(curve, *steps.values()) for curve in logs]
    chosen = None if metric == "all" else cast("Metric", metric)
    runs = [analyze(curve, metric=chosen, **definition) for curve in curves]
    if not any(
        analysis.judged or analysis.not_finite_steps for run in runs for analysis in run.by_metric
    ):
        raise RunError(
            "; ".join(f"{run.name}: {run.verdict}" for run in runs) + "; wait for more steps, or "
            "give a smaller --window"
        )
    if plot is not None:
        runs = _draw(curves, runs, plot)
    if as_json:
        # pydantic's JSON refuses names that are no UTF-8
        plain = to_jsonable_python([run.model_dump() for run in runs], inf_nan_mode="null")
        options.echo_json({"runs": plain})
    else:
        for run in runs:
            _print(run)


def _draw(curves: Sequence[Curve], runs: Sequence[SpikeAnalysis], plot: str) -> list[SpikeAnalysis]:
    """Draw a picture for each run, or one of all with --plot; only the latter must succeed."""
    from slurmllm.analysis.spikes.plot import draw
    from slurmllm.core.metrics.source import run_report

    pairs = list(zip(curves, runs, strict=True))
    if plot:
        draw(pairs, Path(plot))
        return [run.model_copy(update={"plot": plot}) for run in runs]
    drawn: list[SpikeAnalysis] = []
    for curve, run in pairs:
        update: dict[str, Any] = {}
        if path := run_report("spikes", [curve]):
            try:  # the default folder may be read-only, such as a colleague's run
                draw([(curve, run)], path)
                update["plot"] = str(path)
            except StorageError as error:
                update["warnings"] = (*run.warnings, str(error))
        drawn.append(run.model_copy(update=update))
    return drawn


def _print(run: SpikeAnalysis) -> None:
    from rich.text import Text

    from slurmllm.analysis.spikes.analysis import NAMES, SHOWN

    interval = "" if run.interval == 1 else f", one in {run.interval} logged"
    print_line(f"{run.name}: steps {run.first_step}–{run.last_step}{interval}")
    print_line()
    for analysis in run.by_metric:
        print_line(
            Text.assemble((f"{NAMES[analysis.metric]} spike", "bold"), f": {analysis.definition}")
        )
        print_line()
        print_table(("figure", "value"), _figures(analysis, first=analysis is run))
        if analysis.count:
            print_line()
            print_table(*analysis.highest_spikes())
            if analysis.count > SHOWN:
                print_line(f"… the {SHOWN} highest of {analysis.count:,}")
        print_line()
    for analysis in run.by_metric:
        color = {"calm": "green", "passing": "green", "lasting": "yellow", "too_short": "yellow"}
        state = (analysis.state, f"bold {color.get(analysis.state, 'red')}")
        print_line(Text.assemble(f"{NAMES[analysis.metric]}: ", state, ": ", analysis.verdict))
        for warning in analysis.warnings:
            print_line(f"warning: {warning}")
    if run.plot:
        print_line(f"picture: {run.plot}")
    print_line()


def _figures(run: SpikeAnalysis, first: bool) -> Iterator[tuple[str, str]]:
    from slurmllm.analysis.spikes.plot import binned

    yield "steps judged", f"{run.judged:,} of {run.steps:,}"
    yield "spikes", f"{run.count:,}"
    if run.judged:
        yield "per 1,000 steps", f"{run.per_1000_steps:.3g}"
        yield "inside spikes", f"{run.inside_share:.3%} of the steps"
    if run.count:
        published = f" ({run.reference})" if run.reference else ""
        yield "last one step", f"{run.one_step_share:.1%}{published}"
        durations = ", ".join(f"{name}: {count[0]:,}" for name, count in binned([run.durations]))
        yield "durations", durations
    if run.not_finite_steps:
        yield "NaN or infinite", f"{run.not_finite_steps:,} steps"
    growth, gradient, norm = run.growth, run.grad_norm, run.param_norm
    if growth:
        figure = f"{growth.largest:.3g} at step {growth.step}; at the end {growth.at_end:.3g}"
        yield "rise over the lowest", figure
    if gradient and gradient.growth and run.metric == "grad_norm":
        yield "times the lowest", f"{gradient.growth:.3g} at step {gradient.growth_step}"
    if gradient and gradient.ratio_median is not None:
        figure = f"{gradient.ratio_median:.3g} times the median before them"
        yield "gradient norm at spikes", f"{figure}, at most {gradient.ratio_largest:.3g}"
    if norm and first:
        figure = f"{norm.first:.5g} at the start → {norm.last:.5g}"
        if norm.slope is not None:
            trend = "" if norm.direction in (None, "neither") else f", {norm.direction} throughout"
            figure += f"; over the last half {norm.slope:+.3g} per 1,000 steps{trend}"
        yield "parameter norm", figure
    if run.restarts and first:
        steps = ", ".join(map(str, run.restarts[:5]))
        yield "restarts at", steps + (" …" if len(run.restarts) > 5 else "")
