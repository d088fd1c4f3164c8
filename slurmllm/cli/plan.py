"""`slurmllm plan RECIPE --nodes N`: which mesh, what it costs, how long it takes."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from slurmllm.cli import commands, options
from slurmllm.core.display.tables import csv_text, markdown_table
from slurmllm.core.errors import ConfigError, UserError
from slurmllm.core.format import Texts
from slurmllm.core.run.rundir import runs_root, write_bytes

if TYPE_CHECKING:
    from slurmllm.core.config.resolve import RunConfig
    from slurmllm.plan.recipe_plan import Plans, Rank, RecipePlan
    from slurmllm.plan.search import LayoutEstimate


@dataclass(frozen=True)
class _Request:
    """The options of the verb."""

    recipes: Texts
    nodes: Texts
    clusters: Texts
    overrides: Texts
    tokens: str | None
    price: str | None
    top: int | None
    rank: Rank
    explain: bool
    plot: str | None
    csv: str | None
    markdown: str | None
    runs_dir: Path
    as_json: bool

    @property
    def files(self) -> dict[str, str]:
        """Option → file to write; `-` is standard output."""
        files = {"--plot": self.plot, "--csv": self.csv, "--markdown": self.markdown}
        return {option: path for option, path in files.items() if path is not None}

    @property
    def prints(self) -> bool:
        """Whether standard output is for people to read."""
        return not self.as_json and "-" not in self.files.values()


@commands.grouped(
    common="nodes cluster set tokens price top explain json",
)
@options.recipe_argument("recipes", nargs=-1, metavar="[RECIPE…]")
@options.node_count(metavar="N[,N…]", multiple=True, help="Node counts, one row each; repeatable.")
@options.repeatable(
    "--cluster clusters",
    "PROFILE",
    "Cluster profile, by name or .yaml file; repeatable; all: every one with a price.  "
    "[default: $SLURMLLM_CLUSTER, else `init`'s, else the recipe's default_cluster]",
    shell_complete=options.complete_recipe,
)
@options.set_value
@click.option(
    "--tokens", metavar="COUNT", help="Tokens to train on, such as 20B.  [default: the recipe's]"
)
@options.price
@options.count(
    "--top",
    help="Layouts to show of each node count.  [default: 10; 1 for several node counts; JSON: all]",
)
@options.choice("--rank", "speed lower", "Rank by throughput or its lower bound.", default="speed")
@options.flag("--explain", "Explain why the best layout is faster than others.")
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
    slurmllm plan neox_20b --nodes 4,8,16 --price 7.59       scaling and cost
    slurmllm plan gpt3_125m gpt3_1.3b --nodes 1,4 --tokens 20B
    slurmllm plan llama2_7b --nodes 8 --cluster p4d --cluster p5

    The search varies tensor and pipeline degree, micro batch, sequence parallelism, activation
    checkpointing and ZeRO. A value given with --set is fixed. `slurmllm calibrate` measures the
    hardware figures of a profile, `slurmllm report RUN --prediction` compares with a run.

    Exit codes: 0 success; 2 nothing fits, or invalid options; 4 a file
    cannot be written.
    """
    from slurmllm.plan import output
    from slurmllm.plan.recipe_plan import node_counts, plan_warnings

    request = _Request(**values)
    options.check_picture(request.plot)
    if [*request.files.values()].count("-") + request.as_json > 1:
        raise UserError("--csv -, --markdown - and --json: standard output has room for one")
    if request.explain and "-" in request.files.values():
        raise UserError("--explain prints text; leave out --csv - or --markdown -")
    for option, path in request.files.items():
        options.check_folder(option, path)
    counts = node_counts(request.nodes) if request.nodes else []
    if not request.recipes:
        raise UserError("no RECIPE given; `slurmllm recipes` lists them")
    if not counts:
        raise UserError("--nodes is missing; write for instance --nodes 16 or --nodes 4,8,16")
    plans = _plan_recipes(request, counts)
    fits = any(plan.fits for plan in plans)
    if fits:
        _write_files(request, plans)
    if request.as_json:
        options.echo_json(output.plan_json(plans, request.top, request.explain))
    elif fits and request.prints:
        _print(request, plans)
    if not fits:
        error = _no_fit_error(plans[0])
        note = [f"nothing is written: {', '.join(request.files)}"] if request.files else []
        raise ConfigError(error.title, [*error.faults, *note])
    if not request.as_json:
        for warning in plan_warnings(plans):
            click.echo(f"warning: {warning}", err=not request.prints)


def _plan_recipes(request: _Request, counts: Sequence[int]) -> list[RecipePlan]:
    """Return the plan of each recipe on each profile."""
    from slurmllm.core.display.progress import count_progress
    from slurmllm.plan.prices import parse_price, parse_tokens, select_price
    from slurmllm.plan.recipe_plan import plan_recipe
    from slurmllm.train.backends.environment import load_environment

    tokens = None if request.tokens is None else parse_tokens(request.tokens)
    usd = None if request.price is None else parse_price(request.price)
    clusters = [*dict.fromkeys(request.clusters)]
    if usd is not None and (len(clusters) > 1 or "all" in clusters):
        raise UserError(
            f"--price {request.price} with several profiles: their nodes do not cost the same; "
            "plan them one by one"
        )
    configs = [
        (recipe, cluster, config)
        for recipe in dict.fromkeys(request.recipes)
        for cluster, config in _profiles(recipe, clusters, request.overrides)
    ]
    plans = []
    with count_progress("planning node counts", len(configs) * len(counts)) as on_planned:
        for recipe, cluster, config in configs:
            unsupported = load_environment(config.backend).unsupported
            price = select_price(config, usd)
            plan = plan_recipe(config, counts, unsupported, price, tokens, request.rank, on_planned)
            plans.append(replace(plan, recipe=recipe, cluster=cluster))
    return plans


def _profiles(
    recipe: str, clusters: Sequence[str], overrides: Sequence[str]
) -> Iterator[tuple[str | None, RunConfig]]:
    """Yield the recipe with each profile; `all`: those with hardware figures and a price."""
    from slurmllm.core.config.profiles import available
    from slurmllm.core.config.resolve import clusters_dir, resolve

    for cluster in clusters or (None,):
        if cluster != "all":
            yield cluster, resolve(recipe, cluster, overrides)
    for name in available(clusters_dir()) if "all" in clusters else ():
        config = resolve(recipe, name, overrides)
        if config.cluster.price and config.cluster.hardware and name not in clusters:
            yield name, config


def _write_files(request: _Request, plans: Plans) -> None:
    """Write the picture and the tables."""
    from slurmllm.core.config.yaml_source import flatten
    from slurmllm.plan import output

    top = request.top
    for option, path in request.files.items():
        fix = f"name another file with {option}"
        if option == "--plot":
            from slurmllm.core.display.pictures import write_picture
            from slurmllm.plan.plot import draw

            write_picture(draw(plans, top or output.TOP), Path(path), fix)
            continue
        if option == "--csv":
            rows = output.csv_rows(plans, top)
            content = csv_text(
                [{key: _csv_cell(cell) for key, cell in flatten(row).items()} for row in rows]
            )
        else:
            content = "\n".join(markdown_table(*table) for table in output.tables(plans, top))
            content += "".join(f"\n{note}\n" for note in output.price_lines(plans))
        if path == "-":
            click.echo(content, nl=False)
        else:
            write_bytes(Path(path), content.encode(), f"cannot write {path}", fix)


def _csv_cell(value: Any) -> Any:
    return "; ".join(map(str, value)) if isinstance(value, list | tuple) else value


def _print(request: _Request, plans: Plans) -> None:
    from slurmllm.plan import output

    if output.is_single(plans):
        output.print_plan(plans[0], request.top or output.TOP)
        output.print_assumed(plans)
        click.echo(f"submit         {_submit_command(plans[0], plans[0].node_plans[0].best)}")
    else:
        output.print_points(plans, request.top, _submit_command)
        output.print_assumed(plans)
    for plan in plans if request.explain else ():
        for node_plan in plan.node_plans:
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
    closest = min(changes, key=lambda change: abs(math.log(change.ratio)))
    change = max(small, key=lambda change: change.best.seq_per_s, default=closest)
    command = _command("plan", plan, change.best.mesh.nodes)
    context = click.get_current_context()
    for option in options.given():
        if option in ("--tokens", "--price", "--rank"):
            command += [option, str(context.params[option.removeprefix("--")])]
    command += change.options if "--set" in change.options else ()
    return ConfigError(error.title, [*error.faults, f"for instance: {shlex.join(command)}"])


def _command(verb: str, plan: RecipePlan, nodes: int) -> list[str]:
    """Return a command with the options of this one."""
    from slurmllm.core.config.variables import is_secret_at

    command = ["slurmllm", verb, plan.recipe, "--nodes", str(nodes)]
    command += [] if plan.cluster is None else ["--cluster", plan.cluster]
    for override in click.get_current_context().params["overrides"]:
        path, _, value = override.partition("=")
        # `--set env.NAME` takes a secret from the shell, where the user has to export it.
        command += ["--set", path if is_secret_at(path.strip(), value) else override]
    return command


def _submit_command(plan: RecipePlan, layout: LayoutEstimate | None) -> str:
    """Return the command that submits a layout; it fetches missing data."""
    from slurmllm.launch.submit.inputs import locate
    from slurmllm.plan.choose_layout import changes

    if plan.config.planning_only is not None:
        return f"refused: {plan.config.planning_only}"
    assert layout is not None, "something fits"
    command = _command("submit", plan, layout.mesh.nodes)
    settings = changes(plan.config, layout, chosen=layout is plan.choice(layout.mesh.nodes))
    if plan.tokens is not None:
        steps = plan.forecast(layout).cost.steps
        settings.append(f"train.steps={steps}")
        optim = plan.config.recipe.optim
        if optim.warmup(steps) < steps < (optim.decay_steps or 0):
            settings.append(f"optim.decay_steps={steps}")
    for setting in settings:
        command += ["--set", setting]
    if locate(plan.config, runs_root()).missing:
        command.append("--fetch")
    return shlex.join(command)
