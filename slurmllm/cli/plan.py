"""`slurmllm plan RECIPE --nodes N`: which mesh, what it costs, how long it takes."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from slurmllm.cli import options

if TYPE_CHECKING:
    from slurmllm.config.resolve import RunConfig
    from slurmllm.errors import ConfigError
    from slurmllm.plan.estimate import LayoutEstimate
    from slurmllm.plan.prices import NodePrice, PriceChoice
    from slurmllm.plan.recipe_plan import Rank, RecipePlan

_MOST_NODES = 65536


@click.command()
@click.argument("recipes", nargs=-1, metavar="[RECIPE…]", shell_complete=options.complete_recipe)
@click.option(
    "--nodes", metavar="N[,N…]", multiple=True,
    help="Node counts; several give one row per count. Repeatable.",
)  # fmt: skip
@click.option(
    "--cluster", "clusters", metavar="PROFILE", multiple=True,
    shell_complete=options.complete_recipe,
    help="Cluster profile, by name or .yaml file; repeatable; all: every one with a price.  "
    "[default: $SLURMLLM_CLUSTER, else the recipe's default_cluster]",
)  # fmt: skip
@options.set_value
@click.option(
    "--tokens", metavar="COUNT", help="Tokens to train on, such as 20B.  [default: the recipe's]"
)
@options.price
@click.option(
    "--prices", metavar="FILE", help="YAML table of prices to use instead of the shipped ones."
)
@click.option(
    "--budget", metavar="USD",
    help="The most that the training may cost: compares profiles and node counts (1 to 512).",
)  # fmt: skip
@click.option(
    "--deadline", metavar="TIME", help="The most that it may take, such as 90m, 2d12h or 1w."
)
@click.option(
    "--top", type=click.IntRange(min=1),
    help="Layouts to show of each node count.  [default: 10, or 1 of several; JSON: all]",
)  # fmt: skip
@click.option(
    "--rank", type=click.Choice(["speed", "lower"]), default="speed", show_default=True,
    help="Rank by predicted throughput, or by the lower end of its interval.",
)  # fmt: skip
@click.option("--explain", is_flag=True, help="Explain why the best layout is faster than others.")
@options.plot(": throughput, cost and memory; with --calibrate, matrix size against utilization.")
@click.option(
    "--against", metavar="RUN", help="Compare the prediction with the measurements of RUN."
)
@click.option(
    "--calibrate", is_flag=True, help="Measure hardware parameters for a cluster profile."
)
@click.option("--local", is_flag=True, help="With --calibrate: this machine, without Slurm.")
@click.option("--out", metavar="FILE.yaml", help="With --calibrate: the profile to write.")
@click.option(
    "--matrix-figure",
    metavar="FILE.png",
    help="Draw matrix size against utilization: measured if this machine has the device.",
)
@options.job_options(
    "nodelist partition account qos reservation exclude time", "(--calibrate) ",
    time="Time limit of the Slurm job: minutes, H:MM:SS or D-HH:MM:SS.  [default: 15]",
)  # fmt: skip
@click.option("--csv", metavar="FILE", help="Write the table as CSV; - for standard output.")
@click.option(
    "--markdown", metavar="FILE", help="Write the table in Markdown; - for standard output."
)
@options.runs_dir
@options.as_json
def plan(
    *, recipes: tuple[str, ...], nodes: tuple[str, ...], clusters: tuple[str, ...],
    overrides: tuple[str, ...], tokens: str | None, price: str | None, prices: str | None,
    budget: str | None, deadline: str | None, top: int | None, rank: Rank, explain: bool,
    plot: str | None, against: str | None, calibrate: bool, local: bool, out: str | None,
    matrix_figure: str | None, csv: str | None, markdown: str | None, runs_dir: Path,
    as_json: bool, **job: str | None,
) -> None:  # fmt: skip
    """Rank parallel layouts of recipes by predicted throughput.

    Memory, step time and cost are predicted too. Layouts that exceed device memory are not ranked.

    \b
    slurmllm plan llama2_70b --nodes 64                      rank the layouts
    slurmllm plan neox_20b --nodes 4,8,16 --price 3y         scaling and cost
    slurmllm plan gpt3_125m gpt3_1.3b --nodes 1,4 --tokens 20B
    slurmllm plan llama2_7b --tokens 20B --budget 5000 --deadline 7d --cluster p4d --cluster p5
    slurmllm plan --against RUN                              compare with a run
    slurmllm plan --calibrate --local --out mine.yaml        measure hardware parameters
    slurmllm plan --matrix-figure FILE.png --cluster p5      matrix size and utilization

    The search varies tensor and pipeline degree, micro batch, sequence parallelism, activation
    checkpointing and ZeRO. A value given with --set is fixed.

    Exit codes: 0 success; 2 nothing fits or is within the limits, or invalid options; 3 a node or
    Slurm failed while measuring; 4 a file cannot be written.
    """
    from slurmllm.errors import UserError

    several = len(set(clusters)) > 1 or "all" in clusters
    cluster = clusters[0] if clusters else None
    if matrix_figure is not None:
        from slurmllm.cli.plan_matrix import draw_matrix_figure

        _refuse_others("matrix_figure", ("clusters", "overrides", "as_json", "runs_dir"))
        if several:
            raise UserError("--matrix-figure is of one profile; give one --cluster")
        draw_matrix_figure(matrix_figure, cluster, overrides, as_json)
        return
    planning = {
        "--nodes": nodes, "--set": overrides, "--explain": explain, "--price": price,
        "--prices": prices, "--tokens": tokens, "--top": top, "--budget": budget,
        "--deadline": deadline, "--rank": rank != "speed",
    }  # fmt: skip
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
    outputs = {"--csv": csv, "--markdown": markdown}
    if [csv, markdown].count("-") + as_json * ("-" in (csv, markdown)) > 1:
        raise UserError("--csv -, --markdown - and --json: standard output has room for one")
    options.check_picture(plot)
    for option, path in (("--plot", plot), *outputs.items()):
        options.check_folder(option, path)
    counts = node_counts(nodes) if nodes else []
    if calibrate or against is not None:
        mode, why = (
            ("--calibrate", "it measures nodes")
            if calibrate
            else (f"--against {against}", "recipe, nodes and settings are the run's")
        )
        takes = ("--nodes", "--set") if calibrate else ()
        refused = ["RECIPE"] * bool(recipes) + ["--against"] * (calibrate and against is not None)
        refused += [name for name, value in planning.items() if value and name not in takes]
        refused += [name for name, value in outputs.items() if value and calibrate]
        refused += ["--plot"] * bool(plot and not calibrate) + ["several --cluster"] * several
        if refused:
            text = ", ".join(refused)
            raise UserError(f"{mode} with {text}: {why}; leave out {text}")
    if calibrate:
        if len(counts) > 1:
            raise UserError(
                f"--nodes {','.join(nodes)}: --calibrate measures one number of nodes; give one"
            )
        _calibrate(
            cluster, overrides, counts[0] if counts else None, local, out, job, plot, as_json
        )
        return
    if against is not None:
        from slurmllm.cli.plan_against import compare_with_run

        compare_with_run(against, cluster, runs_dir, as_json, outputs)
        return
    if not recipes:
        raise UserError("no RECIPE given; `slurmllm recipes` lists them")
    limited = budget is not None or deadline is not None
    if limited and len(set(recipes)) > 1:
        raise UserError("--budget and --deadline are for one training; give one RECIPE")
    if limited and explain:
        raise UserError(
            "--explain with --budget or --deadline: these compare profiles and node counts, not "
            "layouts; leave it out, or name one with --nodes and --cluster"
        )
    if not counts and not limited:
        raise UserError(
            "--nodes is missing; write for instance --nodes 16 or --nodes 4,8,16, "
            "or give --budget or --deadline"
        )
    _plan(
        list(dict.fromkeys(recipes)), counts, clusters, overrides, tokens, price, prices, top,
        rank, explain, plot, outputs, (budget, deadline) if limited else None, as_json,
    )  # fmt: skip


def _plan(
    recipes: Sequence[str], counts: list[int], clusters: Sequence[str], overrides: Sequence[str],
    tokens: str | None, price: str | None, prices: str | None, top: int | None, rank: Rank,
    explain: bool, plot: str | None, outputs: Mapping[str, str | None],
    limits: tuple[str | None, str | None] | None, as_json: bool,
) -> None:  # fmt: skip
    """Plan recipes on profiles and node counts, and print or write the tables."""
    from slurmllm.backends.environment import load_environment
    from slurmllm.display.progress import count_progress
    from slurmllm.errors import ConfigError, UserError
    from slurmllm.plan import budget, output
    from slurmllm.plan.cost import parse_tokens
    from slurmllm.plan.prices import parse_price, read_prices, select_price
    from slurmllm.plan.recipe_plan import plan_recipe

    limit = None if limits is None else budget.parse_limits(*limits)
    total = None if tokens is None else parse_tokens(tokens)
    choice = None if price is None else parse_price(price)
    if choice is not None and choice.usd is not None and prices is not None:
        raise UserError(f"--price {price} with --prices: both give a price; leave one out")
    if (
        choice is not None
        and choice.usd is not None
        and (len(set(clusters)) > 1 or "all" in clusters)
    ):
        raise UserError(
            f"--price {price} with several profiles: their nodes do not cost the same; write a "
            "table of prices, --prices FILE"
        )
    table = None if prices is None else read_prices(Path(prices))
    requests = [
        (recipe, profile, config)
        for recipe in recipes
        for profile, config in _profiles(recipe, clusters, overrides, choice, table)
    ]
    planned = counts or budget.NODES
    with count_progress("planning node counts", len(requests) * len(planned)) as on_planned:
        found = [
            (recipe, profile, plan_recipe(
                config, planned, load_environment(config.backend).unsupported,
                select_price(config, choice, table), total, rank, on_planned,
            ))
            for recipe, profile, config in requests
        ]  # fmt: skip
    if not found:
        raise UserError(
            f"--cluster all: no shipped profile has hardware figures and the price "
            f"{price or 'on_demand'}; name profiles with --cluster, and a price with --price"
        )
    plans = [one for _, _, one in found]

    def submit(one: RecipePlan, layout: LayoutEstimate | None) -> str:
        recipe, profile, plan = next(row for row in found if row[2] is one)
        return _submit_command(plan, layout, recipe, profile)

    fits = any(one.fits for one in plans)
    purchase = None
    if limit is not None:
        budget.require_prices(plans, limit)
        purchase = budget.purchase_plan(plans, limit, rank) if fits else None
    error = None if fits else _no_fit_error(*found[0])
    if purchase is not None and not purchase.choices:
        error = purchase.no_plan_error()
    if plot is not None and error is None:
        from slurmllm.display.pictures import write_picture
        from slurmllm.plan import plot as drawing

        drawn = drawing.draw(plans) if purchase is None else drawing.draw_purchase(purchase)
        write_picture(drawn, Path(plot), "name another file with --plot")
    if error is None:
        rows = output.csv_rows(plans, top) if purchase is None else purchase.rows()
        tables = output.tables(plans, top) if purchase is None else [purchase.table()]
        options.write_tables(outputs, rows, tables, output.price_lines(plans))
    if as_json:
        text = output.plan_json(plans, top or (1 if purchase else None), explain)
        options.echo_json({**text, "budget": purchase.as_json()} if purchase else text)
    elif error is None and "-" not in outputs.values():
        if purchase is not None:
            purchase.print()
            for name, one in purchase.choices.items():
                click.echo(f"submit the {name}: {submit(one.plan, one.point.candidate)}")
        elif len(plans) == len(counts) == 1:
            output.print_plan(plans[0], top or output.TOP)
            output.print_assumed(plans)
            click.echo(f"submit         {submit(plans[0], plans[0].node_plans[0].best)}")
        else:
            output.print_points(plans, top, submit)
            output.print_assumed(plans)
        for node_plan in (one for plan in plans if explain for one in plan.node_plans):
            output.print_explanation(node_plan)
        if plot is not None:
            click.echo(f"picture: {plot}")
    if not as_json:
        for warning in dict.fromkeys(w for one in plans for w in one.warnings) if fits else ():
            click.echo(f"warning: {warning}", err="-" in outputs.values())
    if error is not None:
        unwritten = [name for name, path in {"--plot": plot, **outputs}.items() if path is not None]
        note = [f"nothing is written: {', '.join(unwritten)}"] if unwritten else []
        raise ConfigError(error.title, [*error.faults, *note])


def _no_fit_error(recipe: str, cluster: str | None, plan: RecipePlan) -> ConfigError:
    """The plan's error, with a command that plans a change with which a layout fits."""
    from slurmllm.errors import ConfigError

    error = plan.no_fit_error()
    if not (changes := plan.node_plans[-1].nearest):
        return error
    # The fastest of those within 5 %, else the closest.
    small = [one for one in changes if abs(one.ratio - 1) < 0.05]
    if small:
        change = max(small, key=lambda one: one.best.seq_per_s)
    else:
        change = min(changes, key=lambda one: abs(math.log(one.ratio)))
    command = _command("plan", plan, recipe, cluster, change.nodes)
    command += _given("tokens", "price", "prices", "budget", "deadline", "rank")
    command += change.options if "--set" in change.options else ()
    return ConfigError(error.title, [*error.faults, f"for instance: {shlex.join(command)}"])


def _profiles(
    recipe: str, clusters: Sequence[str], overrides: Sequence[str], choice: PriceChoice | None,
    table: Sequence[NodePrice] | None,
) -> Iterator[tuple[str | None, RunConfig]]:  # fmt: skip
    """The configurations of a recipe with each profile; `all`: those with figures and a price."""
    from slurmllm.config.profiles import available
    from slurmllm.config.resolve import clusters_dir, resolve
    from slurmllm.errors import ConfigError
    from slurmllm.plan.prices import select_price

    named = [name for name in clusters if name != "all"]
    for name in dict.fromkeys(named) if clusters else (None,):
        yield name, resolve(recipe, name, overrides)
    for name in available(clusters_dir()) if "all" in clusters else ():
        config = resolve(recipe, name, overrides)
        with suppress(ConfigError):
            priced = select_price(config, choice, table) is not None
            if priced and config.cluster.hardware and name not in named:
                yield name, config


def node_counts(texts: Sequence[str]) -> list[int]:
    """The counts of --nodes, each once, ascending; raises UserError if one is not a count."""
    from slurmllm.errors import UserError

    text = ",".join(texts)
    parts = [part.strip() for part in text.split(",")]
    counts = [int(part) for part in parts if part.isascii() and part.isdigit()]
    if len(counts) < len(parts) or not all(1 <= count <= _MOST_NODES for count in counts):
        raise UserError(
            f"--nodes {text!r}: whole numbers from 1 to {_MOST_NODES} with commas between; write "
            "for instance 16 or 4,8,16"
        )
    return sorted(set(counts))


def _command(
    verb: str, plan: RecipePlan, recipe: str, cluster: str | None, nodes: int
) -> list[str]:
    """A command with the options of this one."""
    command = ["slurmllm", verb, recipe, "--nodes", str(nodes)]
    command += [] if cluster is None else ["--cluster", cluster]
    given = [how for how in plan.config.origins.values() if how.startswith("--set ")]
    for how in dict.fromkeys(given):
        command += how.split(" ", 1)
    return command


def _given(*names: str) -> Iterator[str]:
    """Options as they were given on the command line."""
    from click.core import ParameterSource

    context = click.get_current_context()
    for name in names:
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            yield from (f"--{name}", str(context.params[name]))


def _submit_command(
    plan: RecipePlan, layout: LayoutEstimate | None, recipe: str, cluster: str | None
) -> str:
    """The command that submits a layout, with the options of this one; it fetches missing data."""
    from slurmllm.plan.fit_check import changes
    from slurmllm.run.rundir import runs_root
    from slurmllm.submit.inputs import locate

    if plan.config.cluster.planning_only is not None:
        return f"refused: {plan.config.cluster.planning_only}"
    assert layout is not None, "something fits"
    command = _command("submit", plan, recipe, cluster, layout.mesh.nodes)
    settings = changes(plan.config, layout)
    if plan.forecaster.tokens is not None:
        settings.append(f"train.steps={plan.forecaster.forecast(layout).cost.steps}")
    for setting in settings:
        command += ["--set", setting]
    if locate(plan.config, runs_root()).missing:
        command.append("--fetch")
    return shlex.join(command)


def _refuse_others(option: str, allowed: Sequence[str]) -> None:
    """Raise UserError if options are given on the command line that do not go with `option`."""
    from click.core import ParameterSource

    from slurmllm.errors import UserError

    context = click.get_current_context()
    given = [
        parameter.opts[0] if isinstance(parameter, click.Option) else "RECIPE"
        for parameter in context.command.params
        if parameter.name not in (option, *allowed)
        and context.get_parameter_source(parameter.name or "") is ParameterSource.COMMANDLINE
    ]
    if given:
        raise UserError(f"--{option.replace('_', '-')} does not take {', '.join(given)}; leave out")


def _calibrate(
    cluster: str | None, overrides: Sequence[str], nodes: int | None, local: bool, out: str | None,
    job: Mapping[str, str | None], plot: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Measure nodes, and write or print the cluster profile with their figures."""
    from slurmllm.calibrate.fits import product_flops
    from slurmllm.calibrate.matrix import measured_products
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
        from slurmllm.display.pictures import write_picture
        from slurmllm.plan.plot import draw_matrix_utilization

        rows = measured_products(found.hardware, found.products)
        drawn = draw_matrix_utilization(rows, config.cluster.name)
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
