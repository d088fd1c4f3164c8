"""`slurmllm plan RECIPE --nodes N`: which mesh, what it costs, how long it takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from slurmllm.cli import options

if TYPE_CHECKING:
    from slurmllm.plan.estimate import LayoutEstimate
    from slurmllm.plan.recipe_plan import RecipePlan
    from slurmllm.report.prediction import ExpectedOverheads, PredictionCheck

_MOST_NODES = 65536
_TOP = 10


@click.command()
@click.argument("recipes", nargs=-1, metavar="[RECIPE…]", shell_complete=options.complete_recipe)
@click.option("--nodes", metavar="N[,N…]", help="Node counts; several give one row per count.")
@options.cluster
@options.set_value
@click.option(
    "--tokens", metavar="COUNT", help="Tokens to train on, such as 20B.  [default: the recipe's]"
)
@click.option(
    "--price", metavar="NAME|USD",
    help="on_demand, capacity_block, 1y or 3y, with a region before it if needed "
    "(us-east-1/1y); or dollars for an hour of one node.  [default: on_demand]",
)  # fmt: skip
@click.option(
    "--prices", metavar="FILE",
    help="Table of prices to use: ours in YAML, or AWS's price list of AmazonEC2 in JSON.",
)  # fmt: skip
@click.option(
    "--top", type=click.IntRange(min=1), help=f"Layouts to show.  [default: {_TOP}; JSON: all]"
)
@click.option("--explain", is_flag=True, help="Explain why the best layout is faster than others.")
@options.plot(": throughput, cost and memory; with --calibrate, matrix products by size.")
@click.option(
    "--against", metavar="RUN", help="Compare the prediction with the measurements of RUN."
)
@click.option(
    "--calibrate", is_flag=True, help="Measure hardware parameters for a cluster profile."
)
@click.option("--local", is_flag=True, help="With --calibrate: this machine, without Slurm.")
@click.option("--out", metavar="FILE.yaml", help="With --calibrate: the profile to write.")
@options.job_options(
    "nodelist partition account qos reservation exclude time", "(--calibrate) ",
    time="Time limit of the Slurm job: minutes, H:MM:SS or D-HH:MM:SS.  [default: 15]",
)  # fmt: skip
@options.runs_dir
@options.as_json
def plan(
    *, recipes: tuple[str, ...], nodes: str | None, cluster: str | None, overrides: tuple[str, ...],
    tokens: str | None, price: str | None, prices: str | None, top: int | None, explain: bool,
    plot: str | None, against: str | None, calibrate: bool, local: bool, out: str | None,
    runs_dir: Path, as_json: bool, **job: str | None,
) -> None:  # fmt: skip
    """Rank parallel layouts of recipes by predicted throughput.

    Memory, step time and cost are predicted too. Layouts that exceed device memory are not ranked.

    \b
    slurmllm plan llama2_70b --nodes 64                      rank the layouts
    slurmllm plan neox_20b --nodes 4,8,16 --price 3y         scaling and cost
    slurmllm plan gpt3_125m gpt3_1.3b --nodes 1,4 --tokens 20B
    slurmllm plan --against RUN                              compare with a run
    slurmllm plan --calibrate --local --out mine.yaml        measure hardware parameters

    The search varies tensor and pipeline degree, micro batch, sequence parallelism, activation
    checkpointing and ZeRO. A value given with --set is fixed.

    Exit codes: 0 success; 2 nothing fits, or invalid options; 3 a node or Slurm failed while
    measuring; 4 a file cannot be written.
    """
    from slurmllm.backends.environment import load_environment
    from slurmllm.config.resolve import resolve
    from slurmllm.errors import UserError
    from slurmllm.plan import output
    from slurmllm.plan.cost import parse_tokens
    from slurmllm.plan.prices import parse_price, read_prices, select_price
    from slurmllm.plan.recipe_plan import plan_recipe

    drawn = plot and not calibrate
    if (calibrate or against is not None) and (
        explain or drawn or tokens or top or price or prices
    ):
        mode, more = ("--calibrate", "") if calibrate else ("--against", " --plot,")
        raise UserError(
            f"{mode} takes none of --explain,{more} --price, --prices, --tokens and --top; leave "
            "it out"
        )
    given = [f"--{name}" for name, value in job.items() if value]
    if not calibrate and (local or out or given):
        given = ["--local"] * local + ["--out"] * bool(out) + given
        raise UserError(
            f"{', '.join(given)}: only --calibrate measures nodes; add it, or leave out"
        )
    if local and given:
        raise UserError(
            f"--local measures this machine, without a job; leave out {', '.join(given)}"
        )
    if calibrate:
        if recipes or against is not None:
            raise UserError("--calibrate measures nodes, not a RECIPE or RUN; leave that out")
        counts = [None] if nodes is None else node_counts(nodes)
        if len(counts) > 1:
            raise UserError(f"--nodes {nodes}: --calibrate measures one number of nodes; give one")
        options.check_picture(plot)
        _calibrate(cluster, overrides, counts[0], local, out, job, plot, as_json)
        return
    if against is not None:
        if recipes or nodes is not None or overrides:
            raise UserError(
                f"--against {against}: recipe, nodes and values are the run's; leave out"
            )
        _compare_with_run(against, cluster, runs_dir, as_json)
        return
    if not recipes:
        raise UserError("no RECIPE given; `slurmllm recipes` lists them")
    if nodes is None:
        raise UserError("--nodes is missing; write for instance --nodes 16 or --nodes 4,8,16")
    options.check_picture(plot)
    counts = node_counts(nodes)
    total = None if tokens is None else parse_tokens(tokens)
    configs = [resolve(name, cluster, overrides) for name in dict.fromkeys(recipes)]
    choice = None if price is None else parse_price(price)
    if choice is not None and choice.usd is not None and prices is not None:
        raise UserError(f"--price {price} with --prices: both give a price; leave one out")
    table = None if prices is None else read_prices(Path(prices))
    plans = [
        plan_recipe(
            config, counts, load_environment(config.backend).unsupported,
            select_price(config.cluster, choice, table), total,
        )
        for config in configs
    ]  # fmt: skip
    fits = any(one.fits for one in plans)
    if plot is not None and fits:
        from slurmllm.pictures import write_picture
        from slurmllm.plan.plot import draw

        write_picture(draw(plans), Path(plot), "name another file with --plot")
    if as_json:
        options.echo_json(output.plan_json(plans, top, explain))
    elif fits:
        if len(configs) == len(counts) == 1:
            output.print_plan(plans[0], top or _TOP)
            click.echo(f"submit         {_submit_command(plans[0], recipes[0], cluster)}")
        else:
            output.print_points(plans)
        for node_plan in (found for one in plans if explain for found in one.node_plans):
            output.print_explanation(node_plan)
        for warning in dict.fromkeys(w for one in plans for w in one.warnings):
            click.echo(f"warning: {warning}")
        if plot is not None:
            click.echo(f"picture: {plot}")
    if not fits:
        raise plans[0].no_fit_error()


def node_counts(text: str) -> list[int]:
    """The counts of --nodes, each once, ascending; raises UserError if one is not a count."""
    from slurmllm.errors import UserError

    parts = [part.strip() for part in text.split(",")]
    counts = [int(part) for part in parts if part.isascii() and part.isdigit()]
    if len(counts) < len(parts) or not all(1 <= count <= _MOST_NODES for count in counts):
        raise UserError(
            f"--nodes {text!r}: whole numbers from 1 to {_MOST_NODES} with commas between; write "
            "for instance 16 or 4,8,16"
        )
    return sorted(set(counts))


def _submit_command(plan: RecipePlan, recipe: str, cluster: str | None) -> str:
    """The command that submits the best layout, with the options of this one."""
    import shlex

    from slurmllm.plan.fit_check import changes

    (node_plan,) = plan.node_plans
    assert node_plan.best is not None, "something fits"
    command = ["slurmllm", "submit", recipe, "--nodes", str(node_plan.nodes)]
    command += [] if cluster is None else ["--cluster", cluster]
    given = [how for how in plan.config.origins.values() if how.startswith("--set ")]
    for how in dict.fromkeys(given):
        command += how.split(" ", 1)
    settings = changes(plan.config, node_plan.best)
    if plan.forecaster.tokens is not None:
        settings.append(f"train.steps={plan.forecaster.forecast(node_plan.best).cost.steps}")
    for setting in settings:
        command += ["--set", setting]
    return shlex.join(command)


def _calibrate(
    cluster: str | None, overrides: Sequence[str], nodes: int | None, local: bool, out: str | None,
    job: Mapping[str, str | None], plot: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Measure nodes, and write or print the cluster profile with their figures."""
    from slurmllm.calibrate.fits import product_flops
    from slurmllm.calibrate.run import calibrate as measure
    from slurmllm.calibrate.run import check_target, profile_text, require_measurable, write_profile
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
        from slurmllm.pictures import write_picture
        from slurmllm.plan.plot import draw_products

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


def _compare_with_run(name: str, cluster: str | None, runs_dir: Path, as_json: bool) -> None:
    """Print predicted and measured figures of a run."""
    from slurmllm.report.prediction import check_run_prediction
    from slurmllm.rundir import find_run

    found = check_run_prediction(find_run(name, runs_dir), cluster, _expected_overheads)
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
