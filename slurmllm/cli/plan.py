"""`slurmllm plan RECIPE --nodes N`: which mesh, what it costs, how long it takes."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from slurmllm.cli import commands, options
from slurmllm.display.tables import csv_text, markdown_table
from slurmllm.errors import ConfigError, UserError
from slurmllm.run.rundir import runs_root, write_bytes

if TYPE_CHECKING:
    from slurmllm.config.resolve import RunConfig
    from slurmllm.plan.budget import PurchasePlan
    from slurmllm.plan.estimate import LayoutEstimate
    from slurmllm.plan.prices import NodePrice, PriceChoice
    from slurmllm.plan.recipe_plan import Rank, RecipePlan


@dataclass(frozen=True)
class _Request:
    """The options of the verb."""

    recipes: tuple[str, ...]
    nodes: tuple[str, ...]
    clusters: tuple[str, ...]
    overrides: tuple[str, ...]
    tokens: str | None
    price: str | None
    prices: str | None
    budget: str | None
    deadline: str | None
    top: int | None
    rank: Rank
    explain: bool
    plot: str | None
    csv: str | None
    markdown: str | None
    runs_dir: Path
    as_json: bool

    @property
    def limited(self) -> bool:
        """Whether a budget or a deadline is given."""
        return self.budget is not None or self.deadline is not None

    @property
    def tables(self) -> dict[str, str | None]:
        """Option → file of the tables."""
        return {"--csv": self.csv, "--markdown": self.markdown}

    @property
    def prints(self) -> bool:
        """Whether standard output is for people to read."""
        return not self.as_json and "-" not in self.tables.values()


@click.command(
    cls=commands.GroupedCommand,
    common="nodes cluster set tokens price budget deadline top explain json",
)
@click.argument("recipes", nargs=-1, metavar="[RECIPE…]", shell_complete=options.complete_recipe)
@options.node_count(metavar="N[,N…]", multiple=True, help="Node counts, one row each; repeatable.")
@click.option(
    "--cluster",
    "clusters",
    metavar="PROFILE",
    multiple=True,
    shell_complete=options.complete_recipe,
    help="Cluster profile, by name or .yaml file; repeatable; all: every one with a price.  "
    "[default: $SLURMLLM_CLUSTER, else `init`'s, else the recipe's default_cluster]",
)
@options.set_value
@click.option(
    "--tokens", metavar="COUNT", help="Tokens to train on, such as 20B.  [default: the recipe's]"
)
@options.price
@click.option(
    "--prices", metavar="FILE", help="YAML table of prices to use instead of the shipped ones."
)
@click.option(
    "--budget",
    metavar="USD",
    help="Maximum cost; searches cluster profiles and node counts 1 to 512.",
)
@click.option(
    "--deadline", metavar="TIME", help="Maximum time to the end, such as 90m, 2d12h or 1w."
)
@click.option(
    "--top",
    type=click.IntRange(min=1),
    help="Layouts to show of each node count.  [default: 10; 1 for several node counts; JSON: all]",
)
@options.choice("--rank", "speed lower", "Rank by throughput or its lower bound.", default="speed")
@click.option("--explain", is_flag=True, help="Explain why the best layout is faster than others.")
@options.plot(": throughput, cost and memory.")
@click.option("--csv", metavar="FILE", help="Write the table as CSV; - for standard output.")
@click.option(
    "--markdown", metavar="FILE", help="Write the table in Markdown; - for standard output."
)
@options.runs_dir
@options.as_json
def plan(**values: Any) -> None:
    """Rank parallel layouts of recipes by predicted throughput.

    Memory, step time and cost are predicted too. Layouts that exceed device memory are not ranked.

    \b
    slurmllm plan llama2_70b --nodes 64                      rank the layouts
    slurmllm plan neox_20b --nodes 4,8,16 --price 3y         scaling and cost
    slurmllm plan gpt3_125m gpt3_1.3b --nodes 1,4 --tokens 20B
    slurmllm plan llama2_7b --tokens 20B --budget 5000 --deadline 7d --cluster p4d --cluster p5

    The search varies tensor and pipeline degree, micro batch, sequence parallelism, activation
    checkpointing and ZeRO. A value given with --set is fixed. `slurmllm calibrate` measures the
    hardware figures of a profile, `slurmllm report RUN --prediction` compares with a run.

    Exit codes: 0 success; 2 nothing fits or is within the limits, or invalid options; 4 a file
    cannot be written.
    """
    from slurmllm.plan.recipe_plan import node_counts

    request = _Request(**values)
    if [request.csv, request.markdown, "-" if request.as_json else None].count("-") > 1:
        raise UserError("--csv -, --markdown - and --json: standard output has room for one")
    if request.explain and "-" in request.tables.values():
        raise UserError("--explain prints text; leave out --csv - or --markdown -")
    options.check_picture(request.plot)
    for option, path in (("--plot", request.plot), *request.tables.items()):
        options.check_folder(option, path)
    counts = node_counts(request.nodes) if request.nodes else []
    if not request.recipes:
        raise UserError("no RECIPE given; `slurmllm recipes` lists them")
    if request.limited and len(set(request.recipes)) > 1:
        raise UserError("--budget and --deadline are for one training; give one RECIPE")
    if request.limited and request.explain:
        raise UserError(
            "--explain with --budget or --deadline: these compare profiles and node counts, not "
            "layouts; leave it out, or name one with --nodes and --cluster"
        )
    if not counts and not request.limited:
        raise UserError(
            "--nodes is missing; write for instance --nodes 16 or --nodes 4,8,16, "
            "or give --budget or --deadline"
        )
    _plan(request, counts)


def _plan(request: _Request, counts: Sequence[int]) -> None:
    """Plan recipes on profiles and node counts, and print or write the tables."""
    from slurmllm.plan import budget, output
    from slurmllm.plan.recipe_plan import plan_warnings

    limits = budget.parse_limits(request.budget, request.deadline) if request.limited else None
    plans = _plan_recipes(request, counts or budget.NODES)
    fits = any(plan.fits for plan in plans)
    error = None if fits else _no_fit_error(plans[0])
    purchase = None
    if limits is not None:
        budget.require_prices(plans, limits)
        purchase = budget.purchase_plan(plans, limits, request.rank) if fits else None
    if purchase is not None and not purchase.choices:
        error = purchase.no_plan_error()
    if error is None:
        _write_files(request, plans, purchase)
    if request.as_json:
        top = request.top or (1 if purchase else None)
        text = output.plan_json(plans, top, request.explain)
        options.echo_json({**text, "budget": purchase.as_json()} if purchase else text)
    elif error is None and request.prints:
        _print(request, plans, purchase)
    if fits and not request.as_json:
        for warning in plan_warnings(plans):
            click.echo(f"warning: {warning}", err=not request.prints)
    if error is not None:
        files = {"--plot": request.plot, **request.tables}
        unwritten = [name for name, path in files.items() if path is not None]
        note = [f"nothing is written: {', '.join(unwritten)}"] if unwritten else []
        raise ConfigError(error.title, [*error.faults, *note])


def _plan_recipes(request: _Request, counts: Sequence[int]) -> list[RecipePlan]:
    """Return the plan of each recipe on each profile."""
    from slurmllm.backends.environment import load_environment
    from slurmllm.display.progress import count_progress
    from slurmllm.plan.prices import parse_price, parse_tokens, read_prices, select_price
    from slurmllm.plan.recipe_plan import plan_recipe

    tokens = None if request.tokens is None else parse_tokens(request.tokens)
    choice = None if request.price is None else parse_price(request.price)
    if choice is not None and choice.usd is not None:
        if request.prices is not None:
            raise UserError(
                f"--price {request.price} with --prices: both give a price; leave one out"
            )
        if len(set(request.clusters)) > 1 or "all" in request.clusters:
            raise UserError(
                f"--price {request.price} with several profiles: their nodes do not cost the "
                "same; write a table of prices, --prices FILE"
            )
    table = None if request.prices is None else read_prices(Path(request.prices))
    configs = [
        (recipe, cluster, config)
        for recipe in dict.fromkeys(request.recipes)
        for cluster, config in _profiles(recipe, request, choice, table)
    ]
    if not configs:
        raise UserError(
            f"--cluster all: no shipped profile has hardware figures and the price "
            f"{request.price or 'on_demand'}; name profiles with --cluster, and a price with "
            "--price"
        )
    plans = []
    with count_progress("planning node counts", len(configs) * len(counts)) as on_planned:
        for recipe, cluster, config in configs:
            unsupported = load_environment(config.backend).unsupported
            price = select_price(config, choice, table)
            plan = plan_recipe(config, counts, unsupported, price, tokens, request.rank, on_planned)
            plans.append(replace(plan, recipe=recipe, cluster=cluster))
    return plans


def _profiles(
    recipe: str, request: _Request, choice: PriceChoice | None, table: Sequence[NodePrice] | None
) -> Iterator[tuple[str | None, RunConfig]]:
    """Yield the recipe with each profile; `all`: those with figures and a price."""
    from slurmllm.config.profiles import available
    from slurmllm.config.resolve import clusters_dir, resolve
    from slurmllm.plan.prices import select_price

    named = [name for name in dict.fromkeys(request.clusters) if name != "all"]
    for name in named if request.clusters else (None,):
        yield name, resolve(recipe, name, request.overrides)
    for name in available(clusters_dir()) if "all" in request.clusters else ():
        config = resolve(recipe, name, request.overrides)
        with suppress(ConfigError):
            priced = select_price(config, choice, table) is not None
            if priced and config.cluster.hardware and name not in named:
                yield name, config


def _write_files(
    request: _Request, plans: Sequence[RecipePlan], purchase: PurchasePlan | None
) -> None:
    """Write the picture and the tables; `-` is standard output."""
    from slurmllm.config.yaml_source import flatten
    from slurmllm.plan import output

    if request.plot is not None:
        from slurmllm.display.pictures import write_picture
        from slurmllm.plan.plot import draw, draw_purchase

        figure = draw(plans) if purchase is None else draw_purchase(purchase)
        write_picture(figure, Path(request.plot), "name another file with --plot")
    top = request.top
    for option, path in request.tables.items():
        if path is None:
            continue
        if option == "--csv":
            rows = output.csv_rows(plans, top) if purchase is None else purchase.rows()
            cells = [{key: _csv_cell(cell) for key, cell in flatten(row).items()} for row in rows]
            text = csv_text(cells)
        else:
            tables = output.tables(plans, top) if purchase is None else [purchase.table()]
            text = "\n".join(markdown_table(*table) for table in tables)
            text += "".join(f"\n{note}\n" for note in output.price_lines(plans))
        if path == "-":
            click.echo(text, nl=False)
        else:
            fix = f"name another file with {option}"
            write_bytes(Path(path), text.encode(), f"cannot write {path}", fix)


def _csv_cell(value: Any) -> Any:
    return "; ".join(map(str, value)) if isinstance(value, list | tuple) else value


def _print(request: _Request, plans: Sequence[RecipePlan], purchase: PurchasePlan | None) -> None:
    from slurmllm.plan import output

    if purchase is not None:
        purchase.print()
        for name, choice in purchase.choices.items():
            command = _submit_command(choice.plan, choice.point.candidate)
            click.echo(f"submit the {name}: {command}")
    elif len(plans) == len(plans[0].node_plans) == 1:
        output.print_plan(plans[0], request.top or output.TOP)
        output.print_assumed(plans)
        click.echo(f"submit         {_submit_command(plans[0], plans[0].node_plans[0].best)}")
    else:
        output.print_points(plans, request.top, _submit_command)
        output.print_assumed(plans)
    for node_plan in (node_plan for plan in plans for node_plan in plan.node_plans):
        if request.explain:
            output.print_explanation(node_plan)
    if request.plot is not None:
        click.echo(f"picture: {request.plot}")


def _no_fit_error(plan: RecipePlan) -> ConfigError:
    """Return the plan's error, with a command that plans a change with which a layout fits."""
    error = plan.no_fit_error()
    if not (changes := plan.node_plans[-1].nearest):
        return error
    # The fastest of those within 5 %, else the closest.
    small = [change for change in changes if abs(change.ratio - 1) < 0.05]
    if small:
        change = max(small, key=lambda change: change.best.seq_per_s)
    else:
        change = min(changes, key=lambda change: abs(math.log(change.ratio)))
    command = _command("plan", plan, change.nodes)
    context = click.get_current_context()
    for name in ("tokens", "price", "prices", "budget", "deadline", "rank"):
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            command += [f"--{name}", str(context.params[name])]
    command += change.options if "--set" in change.options else ()
    return ConfigError(error.title, [*error.faults, f"for instance: {shlex.join(command)}"])


def _command(verb: str, plan: RecipePlan, nodes: int) -> list[str]:
    """Return a command with the options of this one."""
    from slurmllm.config.variables import is_secret_at

    command = ["slurmllm", verb, plan.recipe, "--nodes", str(nodes)]
    command += [] if plan.cluster is None else ["--cluster", plan.cluster]
    for text in click.get_current_context().params["overrides"]:
        path, _, value = text.partition("=")
        # `--set env.NAME` takes a secret from the shell, where the user has to export it.
        command += ["--set", path if is_secret_at(path.strip(), value) else text]
    return command


def _submit_command(plan: RecipePlan, layout: LayoutEstimate | None) -> str:
    """Return the command that submits a layout; it fetches missing data."""
    from slurmllm.plan.fit_check import changes
    from slurmllm.submit.inputs import locate

    if plan.config.cluster.planning_only is not None:
        return f"refused: {plan.config.cluster.planning_only}"
    assert layout is not None, "something fits"
    command = _command("submit", plan, layout.mesh.nodes)
    settings = changes(plan.config, layout, chosen=layout is plan.choice(layout.mesh.nodes))
    if plan.forecaster.tokens is not None:
        settings.append(f"train.steps={plan.forecaster.forecast(layout).cost.steps}")
    for setting in settings:
        command += ["--set", setting]
    if locate(plan.config, runs_root()).missing:
        command.append("--fetch")
    return shlex.join(command)
