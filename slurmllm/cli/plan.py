"""`slurmllm plan RECIPE --nodes N`: which mesh, what it costs, how long it takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from slurmllm.cli import options

if TYPE_CHECKING:
    from slurmllm.plan.cost import PriceKind
    from slurmllm.plan.recipe_plan import RecipePlan

F = TypeVar("F", bound=Callable[..., Any])

_MOST_NODES = 65536
_TOP = 10
# Of the job that measures, where there is no allocation yet: option → help.
_JOB = {
    "nodelist": "which nodes, as n3 or n[1-4].",
    "partition": "Slurm partition.",
    "account": "Slurm account.",
    "qos": "Slurm quality of service.",
    "reservation": "Slurm reservation.",
    "exclude": "nodes to keep away from.",
    "time": "time limit of the job that holds the nodes.",
}


def _job_options(verb: F) -> F:
    for name, text in reversed(_JOB.items()):
        verb = click.option(f"--{name}", help=f"With --calibrate: {text}")(verb)
    return verb


@click.command()
@click.argument("recipes", nargs=-1, metavar="[RECIPE…]")
@click.option("--nodes", metavar="N[,N…]", help="Nodes; of several, a row each.")
@options.cluster
@options.set_value
@click.option("--tokens", metavar="COUNT", help="To train on, as 20B.  [default: the recipe's]")
@click.option(
    "--price", type=click.Choice(["on_demand", "reserved"]), default="on_demand",
    show_default=True, help="Which of the profile's prices counts.",
)  # fmt: skip
@click.option(
    "--top", type=click.IntRange(min=1), help=f"Layouts to show.  [default: {_TOP}; JSON: all]"
)
@click.option("--explain", is_flag=True, help="Say why the best layout is the best.")
@click.option("--plot", metavar="FILE.png", help="Picture: throughput, dollars, memory.")
@click.option("--against", metavar="RUN", help="Hold the prediction against what RUN measured.")
@click.option("--calibrate", is_flag=True, help="Measure the nodes' figures for a profile.")
@click.option("--local", is_flag=True, help="With --calibrate: this machine, without Slurm.")
@click.option("--out", metavar="FILE.yaml", help="With --calibrate: the profile to write.")
@_job_options
@options.runs_dir
@options.as_json
def plan(
    *,
    recipes: tuple[str, ...],
    nodes: str | None,
    cluster: str | None,
    overrides: tuple[str, ...],
    tokens: str | None,
    price: PriceKind,
    top: int | None,
    explain: bool,
    plot: str | None,
    against: str | None,
    calibrate: bool,
    local: bool,
    out: str | None,
    runs_dir: str | None,
    as_json: bool,
    **job: str | None,
) -> None:
    """Predict the layouts of RECIPE… on N nodes: memory, step time, throughput, cost.

    \b
    slurmllm plan llama2_70b --nodes 64                      rank the layouts
    slurmllm plan neox_20b --nodes 4,8,16 --price reserved   scaling and cost
    slurmllm plan gpt3_125m gpt3_1.3b --nodes 1,4 --tokens 20B
    slurmllm plan --against RUN                              prediction beside a run
    slurmllm plan --calibrate --local --out mine.yaml        measure a profile's figures

    Tensor, pipeline, micro batch, sequence parallelism, activation checkpointing and ZeRO are
    varied; one that --set names is fixed.

    Exit codes: 0; 2 nothing fits, unusable options; 3 a node or Slurm failed while measuring;
    4 a file cannot be written.
    """
    from slurmllm.errors import UserError

    reserved = price == "reserved"
    if (calibrate or against is not None) and (explain or plot or tokens or top or reserved):
        mode = "--calibrate" if calibrate else "--against"
        raise UserError(
            f"{mode} takes none of --explain, --plot, --price, --tokens and --top; leave it out"
        )
    if not calibrate and (local or out or any(job.values())):
        given = [
            f"--{name}" for name, value in {"local": local, "out": out, **job}.items() if value
        ]
        raise UserError(
            f"{', '.join(given)}: only --calibrate measures nodes; add it, or leave out"
        )
    if local and any(job.values()):
        given = [f"--{name}" for name, value in job.items() if value]
        raise UserError(
            f"--local measures this machine, without a job; leave out {', '.join(given)}"
        )
    if calibrate:
        from slurmllm.cli.plan_measured import calibrate as measure

        if recipes or against is not None:
            raise UserError("--calibrate measures nodes, not a RECIPE or RUN; leave that out")
        counts = [None] if nodes is None else node_counts(nodes)
        if len(counts) > 1:
            raise UserError(f"--nodes {nodes}: --calibrate measures one number of nodes; give one")
        measure(cluster, overrides, counts[0], local, out, job, as_json)
    elif against is not None:
        from slurmllm.cli.plan_measured import against as hold

        if recipes or nodes is not None or overrides:
            raise UserError(
                f"--against {against}: recipe, nodes and values are the run's; leave out"
            )
        hold(against, cluster, runs_dir, as_json)
    else:
        _plan(recipes, nodes, cluster, overrides, tokens, price, top, explain, plot, as_json)


def _plan(
    recipes: Sequence[str],
    nodes: str | None,
    cluster: str | None,
    overrides: Sequence[str],
    tokens: str | None,
    price: PriceKind,
    top: int | None,
    explain: bool,
    plot: str | None,
    as_json: bool,
) -> None:
    from slurmllm.config.resolve import resolve
    from slurmllm.errors import UserError
    from slurmllm.plan.cost import parse_tokens
    from slurmllm.plan.recipe_plan import nothing_fits, plan_recipe

    if not recipes:
        raise UserError("no RECIPE given; `slurmllm recipes` lists them")
    if nodes is None:
        raise UserError("--nodes is missing; write for instance --nodes 16 or --nodes 4,8,16")
    options.check_picture(plot)
    counts = node_counts(nodes)
    total = None if tokens is None else parse_tokens(tokens)
    configs = [resolve(name, cluster, overrides) for name in dict.fromkeys(recipes)]
    answers = [plan_recipe(config, counts, price, total) for config in configs]
    fits = any(one.fits for one in answers)
    if plot is not None and fits:
        _draw(answers, Path(plot))
    if as_json:
        _print_json(answers, top, explain)
    elif fits:
        single = len(configs) == len(counts) == 1
        submit = _submit(answers[0], recipes[0], cluster) if single else None
        _print(answers, top or _TOP, explain, submit)
        if plot is not None:
            click.echo(f"picture: {plot}")
    if not fits:
        raise nothing_fits(answers[0])


def node_counts(text: str) -> list[int]:
    """The counts given to --nodes, each once, ascending.

    Raises:
        UserError: something that is no count, or none at all.
    """
    from slurmllm.errors import UserError

    words = [word.strip() for word in text.split(",")]
    counts = [int(word) for word in words if word.isascii() and word.isdigit()]
    if len(counts) < len(words) or not all(1 <= count <= _MOST_NODES for count in counts):
        raise UserError(
            f"--nodes {text!r}: whole numbers from 1 to {_MOST_NODES} with commas between; write "
            "for instance 16 or 4,8,16"
        )
    return sorted(set(counts))


def _print(answers: Sequence[RecipePlan], top: int, explain: bool, submit: str | None) -> None:
    from slurmllm.plan import tables

    if submit is not None:
        tables.print_plan(answers[0], top)
        click.echo(f"submit         {submit}")
    else:
        tables.print_points(answers)
    for one in answers if explain else ():
        for planned in one.planned:
            tables.print_explanation(planned)
    for warning in dict.fromkeys(w for one in answers for w in one.warnings):
        click.echo(f"warning: {warning}")


def _submit(found: RecipePlan, recipe: str, cluster: str | None) -> str:
    """The line that submits the best layout: with what was given here, and what it takes."""
    import shlex

    from slurmllm.plan.suggestions import changes

    (planned,) = found.planned
    assert planned.best is not None, "something fits"
    words = ["slurmllm", "submit", recipe, "--nodes", str(planned.plan.nodes)]
    words += [] if cluster is None else ["--cluster", cluster]
    given = [how for how in found.config.origins.values() if how.startswith("--set ")]
    for how in dict.fromkeys(given):
        words += how.split(" ", 1)
    settings = changes(found.config, planned.best)
    if found.foresight.tokens is not None:
        settings.append(f"train.steps={found.foresight.of(planned.best).cost.steps}")
    for setting in settings:
        words += ["--set", setting]
    return shlex.join(words)


def _print_json(answers: Sequence[RecipePlan], top: int | None, explain: bool) -> None:
    import json

    from slurmllm.plan import plan_json

    click.echo(json.dumps(plan_json.text(answers, top, explain), indent=2))


def _draw(answers: Sequence[RecipePlan], path: Path) -> None:
    from slurmllm.picture import write_picture
    from slurmllm.plan.plot import draw

    write_picture(draw(answers), path, "name another file with --plot")
