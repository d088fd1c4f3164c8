"""`slurmllm compare`: the loss and gradient norm of runs, compared."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from slurmllm.cli import commands, options
from slurmllm.core.display.tables import print_line, print_table
from slurmllm.core.errors import EXIT_NEGATIVE, StorageError, UserError
from slurmllm.core.format import Texts, by_key, format_plural
from slurmllm.core.run.rundir import find_sweep

if TYPE_CHECKING:
    from slurmllm.analysis.compare.result import Comparison, Overlap, Side
    from slurmllm.core.metrics.curves import Curve


@dataclass(frozen=True)
class _Choices:
    """Options of the command."""

    tolerance: float | None
    grad_norm_tolerance: float | None
    require: Literal["identical", "match", "equivalent"] | None
    exact: bool
    seeds: Texts
    ignored: Texts
    basis: Literal["tolerance", "precision"] | None
    precision: str | None
    by: Literal["step", "tokens", "samples"]
    of_logs: options.LogOptions
    shifts: Texts
    steps: options.StepRange
    plot: str | None
    html: str | None

    @property
    def tolerances(self) -> dict[str, float]:
        values = {"loss": self.tolerance, "grad_norm": self.grad_norm_tolerance}
        return {metric: value for metric, value in values.items() if value is not None}

    def precisions(self, count: int) -> list[str]:
        return [""] * count if self.precision is None else self.precision.split(",")


@commands.grouped(
    common="tolerance grad-norm-tolerance require exact seed from-step to-step plot json",
)
@options.run_argument("a")
@options.run_argument("others", metavar="B [C …]", nargs=-1)
@click.option("--tolerance", type=float, help="Relative tolerance of the loss.  [default: 1e-3]")
@click.option(
    "--grad-norm-tolerance", type=float, help="That of the gradient norm.  [default: 1e-2]"
)
@options.choice(
    "--require",
    "identical match equivalent",
    "Exit with 1 if the verdict of a run is weaker.  [default: equivalent]",
)
@options.flag("--exact", "Require bit-identical values, and files without a damaged line.")
@options.repeatable(
    "--seed seeds",
    "RUN",
    "Run of the same recipe with another seed; the spread over seeds becomes the tolerance. "
    "Repeatable.",
)
@options.choice(
    "--ignore ignored",
    "lr data batches seed model precision optimizer",
    "Recorded settings that may differ although the curves match; repeatable.",
    multiple=True,
)
@options.choice(
    "--as basis",
    "tolerance precision",
    "Allowed differences: the tolerances, or the roundings of two precisions.  "
    "[default: precision if both are slurmllm's runs that differ in nothing else, else tolerance]",
)
@click.option(
    "--precision",
    metavar="P,P…",
    help="Precisions of A, B, … for --as precision: fp32, bf16_mixed, fp8_mixed, bf16_sr or bf16.  "
    "[default: as recorded]",
)
@options.choice("--by", "step tokens samples", "Axis that aligns the runs.", default="step")
@options.log_options
@options.repeatable(
    "--shift shifts",
    "A=STEPS",
    "Add this to the steps of a log that counts from 0, such as A=1; repeatable.  "
    "[default: by the log's format and values]",
)
@options.step_range
@options.plot_or_none("<run>/reports/compare-<A>-<B>.png; of logs none")
@click.option("--html", metavar="FILE.html", help="Also write a page, in the style of `report`.")
@options.runs_dir
@options.as_json
@click.pass_context
def compare(
    ctx: click.Context,
    /,
    *,
    a: str,
    others: Texts,
    runs_dir: Path,
    as_json: bool,
    **choices_of_user: Any,
) -> None:
    """Compare the curves of B, C … with those of A.

    A is the reference; loss and gradient norm are compared point by point.

    A, B … are run names or directories, or logs of other frameworks: TensorBoard event files or
    folders of them, JSON lines, CSV, text.

    The verdict of each is identical, match, equivalent (independent scatter around the same
    trajectory), or differ.

    `compare SWEEP` prints one table of the sweep's runs, the lowest loss first.

    Exit codes: 0 no run differs from A; 1 one does, or its verdict is weaker than --require;
    2 invalid input; 4 the plot cannot be written.
    """
    if not others and (sweep := find_sweep(a, runs_dir)):
        from slurmllm.cli.sweep import print_table_of

        for option in options.given():
            if option not in ("a", "--runs-dir", "--json"):
                raise UserError(
                    f"{a} is a sweep, for which only a table is printed; leave out {option}, or "
                    f"draw the curves with `slurmllm report {a}`"
                )
        print_table_of(sweep, as_json)
        return
    if not others:
        raise UserError(f"{a} is no sweep, so give a second run: slurmllm compare {a} B")
    choices = _Choices(**choices_of_user)
    _check(choices, 1 + len(others))
    curves, seeds = _read((a, *others), choices, runs_dir)
    comparisons = _compare(curves, seeds, choices)
    comparisons = _write_files(curves, comparisons, seeds, choices)
    from slurmllm.analysis.compare.result import curve_letter

    by_letter = {curve_letter(number): row for number, row in enumerate(comparisons, start=1)}
    if as_json:
        _print_json(comparisons)
    else:
        for letter, comparison in by_letter.items():
            _print(comparison, letter, alone=len(comparisons) == 1)
        for name, path in (("picture", comparisons[0].plot), ("page", comparisons[0].html)):
            if path:
                click.echo(f"{name}: {path}")
        if not choices.basis:
            for (letter, comparison), other in zip(by_letter.items(), others, strict=True):
                arguments = ctx.meta["arguments"] if len(others) == 1 else (a, other)
                _print_advice(comparison, letter, arguments)
    ctx.exit(0 if _meets_requirement(by_letter, choices) else EXIT_NEGATIVE)


def _print_json(comparisons: Sequence[Comparison]) -> None:
    documents = [comparison.to_dict() for comparison in comparisons]
    match = all(comparison.match for comparison in comparisons)
    document = documents[0] if len(documents) == 1 else {"comparisons": documents, "match": match}
    click.echo(json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False))


def _meets_requirement(by_letter: Mapping[str, Comparison], choices: _Choices) -> bool:
    """Return whether no verdict is weaker than required; say which are, if the user requires it."""
    from slurmllm.analysis.compare.result import VERDICTS

    require = "identical" if choices.exact else choices.require
    required = VERDICTS.index(require or "equivalent")
    weaker = [
        f"{letter} is {comparison.verdict}"
        for letter, comparison in by_letter.items()
        if VERDICTS.index(comparison.verdict) > required
    ]
    if require and weaker:
        options.note(f"--require {require} is not met: {', '.join(weaker)}")
    contrary = [text for comparison in by_letter.values() for text in comparison.contrary_settings]
    if contrary:
        options.note(
            "exit code 1, although the curves match, because recorded settings differ: "
            f"{'; '.join(contrary)}; --ignore KIND accepts them"
        )
    return not (weaker or contrary)


def _check(choices: _Choices, count: int) -> None:
    """Raise UserError if the options contradict each other, or are not for `count` runs."""
    from slurmllm.analysis.compare.result import check_tolerances

    exact, seeds = choices.exact, choices.seeds
    limits = {
        "--tolerance": choices.tolerance,
        "--grad-norm-tolerance": choices.grad_norm_tolerance,
    }
    check_tolerances(limits, "--exact" if exact else "")
    if exact and choices.require not in (None, "identical"):
        raise UserError(f"--exact requires identical runs; leave out --require {choices.require}")
    if len(choices.precisions(count)) != count:
        raise UserError(
            f"--precision {choices.precision}: give {count}, one for each of A, B, …, such as "
            f"{','.join(['bf16_mixed'] + ['bf16_sr'] * (count - 1))}"
        )
    if choices.precision is not None and choices.basis == "tolerance":
        raise UserError("--precision is for --as precision; leave out --as tolerance")
    if (choices.basis == "precision" or choices.precision is not None) and (exact or seeds):
        raise UserError("--as precision excludes --exact and --seed; leave them out")
    if seeds and (exact or choices.tolerances):
        raise UserError(
            "--seed gives the tolerance; leave out --exact, --tolerance and --grad-norm-tolerance"
        )
    options.check_page("--html", choices.html)
    _parse_shifts(choices.shifts, count)


def _read(runs: Texts, choices: _Choices, runs_dir: Path) -> tuple[list[Curve], list[Curve]]:
    """Read the curves of the runs, and of the seeds."""
    from concurrent.futures import ThreadPoolExecutor
    from importlib import import_module

    from slurmllm.analysis.compare.result import refuse_incomplete_logs
    from slurmllm.core.metrics.source import locate, name_apart, read_curve

    sources = (*runs, *choices.seeds)
    arguments = choices.of_logs.arguments(len(sources))
    paths = [locate(source, runs_dir) for source in sources]
    with ThreadPoolExecutor(max_workers=2) as pool:  # the parsers release the GIL
        reading = pool.map(
            lambda path, options: read_curve(path, lenient=not choices.exact, **options),
            paths,
            arguments,
        )
        # These imports take half a second, during which the threads read.
        import_module("slurmllm.analysis.compare.compare")
        if choices.plot is not None:
            import_module("slurmllm.analysis.compare.plot")
        curves = name_apart(list(reading))
    choices.of_logs.refuse_unused(curves)
    if choices.exact or choices.require in ("identical", "match"):
        option = "--exact" if choices.exact else f"--require {choices.require}"
        refuse_incomplete_logs(curves, option)
    return curves[: len(runs)], curves[len(runs) :]


def _compare(
    curves: Sequence[Curve], seeds: Sequence[Curve], choices: _Choices
) -> list[Comparison]:
    from slurmllm.analysis.compare.compare import compare
    from slurmllm.analysis.compare.result import Tolerances, curve_letter

    basis = choices.basis
    if choices.precision is not None:
        basis = "precision"
    elif basis is None and choices.tolerances:
        basis = "tolerance"  # the user's own limits
    precisions = choices.precisions(len(curves))
    shifts = _parse_shifts(choices.shifts, len(curves))
    return [
        compare(
            curves[0],
            curves[i],
            Tolerances(exact=choices.exact, **choices.tolerances),
            axis=choices.by,
            seeds=seeds,
            letter=curve_letter(i),
            basis=basis,
            ignored=choices.ignored,
            shifts=(shifts[0], shifts[i]),
            precisions=(precisions[0], precisions[i]),
            **choices.steps,
        )
        for i in range(1, len(curves))
    ]


def _write_files(
    curves: Sequence[Curve],
    comparisons: list[Comparison],
    seeds: Sequence[Curve],
    choices: _Choices,
) -> list[Comparison]:
    """Write picture and page, and record their paths; a picture that nobody named may fail.

    Without a run there is none that nobody named.
    """
    from slurmllm.core.metrics.source import run_report

    written = {}
    path = Path(choices.plot) if choices.plot else None
    if choices.plot == "":
        path = run_report("compare", curves)
    if path:
        from slurmllm.analysis.compare.plot import draw

        try:
            draw(curves[0], curves[1:], comparisons, path, seeds=seeds, **choices.steps)
            written["plot"] = str(path)
        except StorageError as error:
            if choices.plot:
                raise
            comparisons = [
                c.model_copy(update={"warnings": (*c.warnings, str(error))}) for c in comparisons
            ]
    if choices.html:
        from slurmllm.analysis.report.comparison_page import write_comparison
        from slurmllm.analysis.report.tables import Table

        tables = [Table.from_rows(_metric_rows(comparison)) for comparison in comparisons]
        write_comparison(curves, comparisons, tables, Path(choices.html), **choices.steps)
        written["html"] = choices.html
    return [comparison.model_copy(update=written) for comparison in comparisons]


def _print(comparison: Comparison, letter: str, *, alone: bool) -> None:
    from rich.text import Text

    from slurmllm.analysis.compare.result import format_figure

    print_line(_describe_side("A", comparison.a, comparison.overlaps["a"]) if letter == "B" else "")
    print_line(_describe_side(letter, comparison.b, comparison.overlaps["b"]))
    print_line()
    rows = _metric_rows(comparison)
    print_table(tuple(rows[0]), [tuple(row.values()) for row in rows])
    if comparison.data:
        print_line(f"data: {'; '.join(comparison.data.differences) or 'the same in both runs'}")
    speed = comparison.statistics.get("seq_per_s") or comparison.statistics.get("tokens_per_s")
    if speed and speed.ratio is not None:
        print_line(f"throughput: {letter} at {speed.ratio:.3g} times that of A (median)")
    basis = comparison.basis
    if basis.precisions:
        limits = (
            f"{name} {format_figure(metric.tolerance)} for a lasting difference, "
            f"{format_figure(metric.scatter.allowed)} at single points"
            for name, metric in comparison.metrics.items()
        )
        which = " against ".join(basis.precisions)
        print_line(f"tolerance: expected noise of {which} ({basis.reason}): {', '.join(limits)}")
    print_line()
    color = "green" if comparison.match else "red"
    runs = "" if alone else f"A and {letter} "
    print_line(Text.assemble(runs, (comparison.verdict, f"bold {color}"), ": ", comparison.reason))
    possible = [cause for cause in comparison.causes if cause.confidence == "possible"]
    if possible:
        print_line("possible causes, the likeliest first:")
    for evidence, kinds in by_key((cause.evidence, cause.kind) for cause in possible).items():
        repeated = evidence in comparison.reason
        print_line(f"  {', '.join(kinds)}: {'by the same evidence' if repeated else evidence}")
    for warning in comparison.warnings:
        print_line(f"warning: {warning}")


def _print_advice(comparison: Comparison, letter: str, arguments: Sequence[str]) -> None:
    """Print the whole commands that judge a difference by the noise that it may be."""
    for option in comparison.advice:
        command = f"{shlex.join(['slurmllm', 'compare', *arguments])} {option}"
        if option.startswith("--seed"):
            print_line(
                f"another seed is no fault: with RUN, a run as A with a third seed, `{command}` is "
                f"`equivalent` if {letter} is no further off than one more seed would be"
            )
        else:
            print_line(f"if both were trained in bf16, its noise judges them: {command}")


def _describe_side(label: str, side: Side, overlap: Overlap) -> str:
    line = f"{label}  {side.name}: steps {side.first_step}–{side.last_step}"
    if side.restarts:
        more = " …" if len(side.restarts) > 5 else ""
        line += f", restarted at {', '.join(map(str, side.restarts[:5]))}{more}"
    if overlap.rows:
        line += f", {format_plural(overlap.rows, 'step')} recomputed after a restart"
        line += ", with the same values" if overlap.identical else ""
    if side.shift:
        line += f"; {side.shift:+} to its steps: {side.shift_reason}"
    if side.averaged:
        line += f"; loss averaged over {side.averaged} steps, as the other log does"
    return line


def _parse_shifts(values: Sequence[str], count: int) -> list[int | None]:
    from slurmllm.analysis.compare.result import curve_letter

    shifts: dict[str, int | None] = dict.fromkeys(map(curve_letter, range(count)))
    for value in values:
        letter, _, steps = value.partition("=")
        if letter not in shifts or not re.fullmatch(r"[+-]?\d{1,15}", steps):
            raise UserError(
                f"--shift {value!r}: give a source and a number of steps, such as A=1; the sources "
                f"are A to {[*shifts][-1]}"
            )
        if shifts[letter] is not None:
            raise UserError(f"--shift {value!r}: {letter} has a shift already; give one a source")
        shifts[letter] = int(steps)
    return list(shifts.values())


def _metric_rows(comparison: Comparison) -> list[dict[str, str]]:
    """Return a row for each metric, by heading; those that decide the verdict come first."""
    from slurmllm.analysis.compare.result import format_figure

    def figure(value: float | None) -> str:
        return "-" if value is None else format_figure(value)

    rows = []
    # The others have no tolerance: they do not decide the verdict.
    validation = [name for name in comparison.statistics if name.startswith("val_loss")]
    for name in dict.fromkeys((*comparison.metrics, "param_norm", "lr", *validation)):
        figures, metric = comparison.statistics.get(name), comparison.metrics.get(name)
        if not figures:
            continue
        tolerance, onset, identical = "-", None, figures.max_rel_diff == 0
        if metric:
            onset, identical = metric.onset_step, metric.bit_identical
            tolerance = "exact" if comparison.tolerance.exact else format_figure(metric.tolerance)
            if comparison.band:
                tolerance = "band"
        rows.append(
            {
                "metric": name,
                "steps": str(figures.points),
                "max diff": figure(figures.max_rel_diff),
                "at step": str(figures.max_rel_diff_step) if figures.max_rel_diff else "-",
                "mean diff": figure(figures.mean_rel_diff),
                "diverges at": "-" if onset is None else str(onset),
                "tolerance": tolerance,
                "identical": "yes" if identical else "no",
            }
        )
    return rows
