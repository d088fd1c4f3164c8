"""The output of `slurmllm plan`: tables and JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from slurmllm.core.config.cluster import GIB
from slurmllm.core.config.data_sources import corpus_epochs, epochs_text
from slurmllm.core.config.resolve import RunConfig, change
from slurmllm.core.config.yaml_source import flatten
from slurmllm.core.display.tables import data_frame, print_table
from slurmllm.core.errors import ConfigError
from slurmllm.core.format import format_count, format_days, format_number, format_plural
from slurmllm.plan.choose_layout import changes
from slurmllm.plan.evidence import evidence, evidence_lines, network_range
from slurmllm.plan.explain import describe, explain_parts, figures, settings, why_too_large
from slurmllm.plan.mesh import Mesh
from slurmllm.plan.recipe_plan import (
    Forecaster,
    NodePlan,
    RecipePlan,
    ScalingPoint,
    TrainingForecast,
    fixed_settings,
    most_refused,
    plan_warnings,
)
from slurmllm.plan.search import LayoutEstimate

if TYPE_CHECKING:
    import pandas

TOP = 10  # layouts shown by default
_NEAREST = 3  # layouts that do not fit, at most


class PlanTable(NamedTuple):
    """A table of a plan."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Plan:
    """The layouts of a recipe on each of several node counts, the best first."""

    recipe_plan: RecipePlan

    def __repr__(self) -> str:
        plan = self.recipe_plan
        counts = ", ".join(str(node_plan.nodes) for node_plan in plan.node_plans)
        return f"<Plan of {plan.config.recipe.name} on {plan.config.cluster.name}, nodes {counts}>"

    def best(self, nodes: int | None = None) -> LayoutEstimate:
        """Return the best layout on a number of nodes, by default the fewest with one that fits.

        Raises:
            ConfigError: no layout fits there, or nothing was planned.
        """
        plans = [plan for plan in self.recipe_plan.node_plans if nodes in (None, plan.nodes)]
        if not plans:
            counts = ", ".join(str(plan.nodes) for plan in self.recipe_plan.node_plans)
            raise ConfigError(f"nothing was planned on {nodes} nodes; choose one of {counts}")
        for layout in filter(None, (plan.best for plan in plans)):
            return layout
        raise replace(self.recipe_plan, node_plans=tuple(plans)).no_fit_error()

    def best_config(self, nodes: int | None = None) -> RunConfig:
        """Return the recipe with the layout of `best`, for `submit_run`."""
        config = self.recipe_plan.config
        return change(config, None, changes(config, self.best(nodes)))

    def to_dict(self) -> dict[str, Any]:
        """Return it for JSON, as `slurmllm plan --json` prints it."""
        return plan_json([self.recipe_plan], None, explained=False)

    def to_pandas(self) -> pandas.DataFrame:
        """Return a row for each layout: throughput, memory, cost; nested keys are dotted."""
        return data_frame([flatten(row) for row in self.to_dict()["candidates"]])


def print_plan(plan: RecipePlan, top: int) -> None:
    """Print one recipe on one number of nodes; at least one layout fits."""
    (node_plan,) = plan.node_plans
    best = node_plan.fitting[0]
    recipe, mesh = best.config.recipe, best.mesh
    click.echo(
        f"{recipe.name} on {format_plural(mesh.nodes, 'node')} of {best.config.cluster.name}, "
        f"{format_plural(mesh.world_size, 'device')}; {mesh.global_batch:,} × "
        f"{recipe.model.seq_len:,} tokens per step, {recipe.train.precision}"
    )
    if fixed := fixed_settings(plan.config):
        click.echo(f"fixed: {', '.join(fixed)}")
    layouts, shares = layout_tables(plan, top)
    print_table(*layouts)
    click.echo("\nwhere a step goes, %")
    print_table(*shares)
    click.echo(f"\n{recipe_layout_text(node_plan, ' (*)')}")
    if node_plan.too_large:
        click.echo(f"does not fit: {format_plural(len(node_plan.too_large), 'layout')}")
        lines = node_plan.meshes_too_large[:_NEAREST]
        for line in [*lines, *explain_parts(" ".join(lines))]:
            click.echo(f"  {line}")
    if refused := node_plan.refused:
        click.echo(f"not considered: {format_plural(sum(refused.values()), 'layout')}")
        for reason, count in most_refused(refused):
            click.echo(f"  {count:>4}  {reason}")
    click.echo("")
    for line in evidence_lines(best):
        click.echo(line)
    _print_forecast(best, plan.forecaster)


def layout_tables(plan: RecipePlan, top: int) -> tuple[PlanTable, PlanTable]:
    """Return layouts of one recipe on one number of nodes, and where their steps go."""
    (node_plan,) = plan.node_plans
    rows = node_plan.top(top)
    best = rows[0][1]
    headings = ("#", "TP", "PP", "DP", "micro", "SP", "checkpointing", "ZeRO")
    limit = f"of {best.memory.limit / GIB:.4g} GiB"
    layouts, shares = [], []
    for rank, layout in rows:
        mesh, recipe = layout.mesh, layout.config.recipe
        tight = " tight" if layout.memory.tight else ""
        layouts.append(
            [
                f"{rank}{' *' if node_plan.is_recipe_layout(layout) else ''}",
                str(mesh.tensor),
                _stages(layout),
                _data(mesh),
                f"{mesh.micro_batch} × {mesh.accumulation}",
                "yes" if recipe.parallel.sequence else "no",
                recipe.train.checkpointing_text,
                str(recipe.parallel.zero),
                f"{layout.memory.peak / GIB:.2f}{tight}",
                format_number(layout.step.total),
                format_number(layout.seq_per_s),
                evidence(layout).interval_text,
                f"{100 * layout.mfu:.1f} %",
                format_count(plan.forecaster.forecast(layout).cost.tokens_per_usd),
            ]
        )
        percent = [100 * seconds / layout.step.total for seconds in layout.step.parts().values()]
        cells = [f"{share:.1f}" for share in percent]
        shares.append([str(rank), str(mesh.tensor), _stages(layout), *cells])
    columns = (*headings, limit, "s/step", "seq/s", "90 %", "MFU", "tokens/$")
    return PlanTable(columns, layouts), PlanTable(("#", "TP", "PP", *best.step.parts()), shares)


def _data(mesh: Mesh) -> str:
    """Return `512`, or `64 × 8`: copies times shards."""
    return f"{mesh.replicate} × {mesh.shard}" if mesh.replicate > 1 else str(mesh.data)


def _stages(candidate: LayoutEstimate) -> str:
    virtual = candidate.mesh.virtual_pipeline
    return f"{candidate.mesh.pipeline}{f' × {virtual}' if virtual > 1 else ''}"


def recipe_layout_text(node_plan: NodePlan, mark: str = "") -> str:
    """Return the rank of the recipe's own layout, or why it is impossible."""
    layout, name = node_plan.recipe_layout, f"the recipe's own layout{mark}"
    if layout is None:
        return "the recipe leaves the layout to the planner"
    if isinstance(layout, str):
        return f"{name} is impossible: {layout}"
    if not layout.fits:
        return f"{name} does not fit: {describe(layout)}: {node_plan.recipe_fault}"
    best = node_plan.fitting[0]
    if layout is best and not mark:
        return f"{name} is the same"
    share = 100 * layout.seq_per_s / best.seq_per_s
    rank = f"{node_plan.rank(layout)} of {len(node_plan.fitting)}"
    sentence = f"{name} is {rank} that fit, with {share:.1f} % of the best one's seq/s"
    return sentence if mark else f"{sentence}: {describe(layout)}"


def print_explanation(node_plan: NodePlan) -> None:
    if node_plan.fitting:
        click.echo(f"\nwhy, on {format_plural(node_plan.nodes, 'node')}")
        lines = node_plan.explain()
        for line in [*lines, *explain_parts(" ".join(lines))]:
            click.echo(line)


def _print_forecast(best: LayoutEstimate, forecaster: Forecaster) -> None:
    """Print time, cost and the time lost to failures and checkpoints on the best layout."""
    forecast, price = forecaster.forecast(best), forecaster.price
    cost = forecast.cost
    end = f"to the end     {cost.steps:,} steps, {format_count(cost.tokens)} tokens: "
    if forecast.lost_time is None:
        click.echo(f"{end}does not finish; {forecast.reason}")
        return
    spares = best.config.recipe.slurm.spare_nodes
    spare = f"; with {format_plural(spares, 'spare node')}" if spares else ""
    dollars = "; cost unknown: give --price DOLLARS for a node hour"
    if cost.usd is not None:
        dollars = f", ${cost.usd:,.0f}"
    click.echo(
        f"{end}{format_days(cost.hours)}, {format_number(cost.node_hours)} node hours"
        f"{dollars}{spare}"
    )
    if (epochs := epochs_text(best.config.recipe.data, cost.tokens)) is not None:
        click.echo(f"data           {epochs}")
    if price is not None:
        click.echo(f"price          {price}")
    if cost.waiting_usd:
        click.echo(
            f"waiting        ${cost.waiting_usd:,.2f} of the cost is for owned nodes, paid while "
            "the job is pending"
        )
    for line in _lost_time_lines(best, forecast):
        click.echo(line)


def _lost_time_lines(best: LayoutEstimate, forecast: TrainingForecast) -> Iterator[str]:
    """Yield where the node hours go, how often nodes fail, and the checkpoint interval."""
    recipe, lost = best.config.recipe, forecast.lost_time
    assert lost is not None
    # Not to be confused with that of activations, of which the table above has a column.
    names = {"recomputation": "recomputation of lost steps"}
    parts = ", ".join(
        f"{names.get(name, name).replace('_', ' ')} {100 * share:.2f} %"
        for name, share in sorted(lost.shares.items(), key=lambda row: -row[1])
        if share >= 5e-5 and name != "productive"
    )
    spares = "without spare nodes " if recipe.slurm.spare_nodes else ""
    percent = f"{100 * lost.effective:.2f} % of the node hours"
    yield f"utilization    {percent} {spares}are productive; {parts}"
    yield (
        f"failures       one in {format_number(lost.mtbf_s / 3600)} h (MTBF of one node: "
        f"{best.config.cluster.node_mtbf_hours:,.0f} h)"
    )
    interval = f"every {format_plural(lost.interval_steps, 'step')}"
    if recipe.checkpoint.every_steps != "auto":
        before_end = lost.auto_steps < forecast.cost.steps
        choice = str(lost.auto_steps) if before_end else "none before the end"
        interval += f"; checkpoint.every_steps: auto would choose {choice}"
    yield f"checkpoints    {interval}"


def points_table(plans: Sequence[RecipePlan], top: int | None) -> PlanTable:
    """Return a row for each recipe, cluster profile and node count, or several with `top`."""
    names = {
        "recipe": {plan.config.recipe.name for plan in plans},
        "cluster": {plan.config.cluster.name for plan in plans},
    }
    keys = [key for key, different in names.items() if len(different) > 1]
    rows = []
    for plan in plans:
        node_plans = {node_plan.nodes: node_plan for node_plan in plan.node_plans}
        for point in plan.points(top or 1):
            cells = [*(getattr(point, key) for key in keys), str(point.nodes)]
            if top is not None:
                is_recipes = node_plans[point.nodes].is_recipe_layout(point.candidate)
                cells.append(f"{point.rank} *" if is_recipes else str(point.rank))
            rows.append([*cells, *point_cells(point).values()])
    headings = [*keys, "nodes"]
    if top is not None:
        headings.append("#")
    return PlanTable([*headings, *POINT_HEADINGS], rows)


def print_points(
    recipe_plans: Sequence[RecipePlan],
    top: int | None,
    submit: Callable[[RecipePlan, LayoutEstimate], str],
) -> None:
    """Print the rows of `points_table`, and below them the layouts that they are about.

    Args:
        submit: Returns the command that submits a layout.
    """
    print_table(*points_table(recipe_plans, top))
    for plan in recipe_plans:
        for node_plan, point in zip(plan.node_plans, plan.points(), strict=True):
            request = format_plural(node_plan.nodes, "node")
            if len(recipe_plans) > 1:
                request = f"{plan.config.recipe.name} on {request} of {plan.config.cluster.name}"
            if node_plan.best is None:
                misfit = "no layout is possible"
                if node_plan.too_large:
                    misfit = node_plan.meshes_too_large[0]
                elif reasons := most_refused(node_plan.refused, limit=1):
                    misfit += f": {reasons[0][0]}"
                click.echo(f"{request}: {misfit}")
                for change in node_plan.nearest:
                    click.echo(f"  {change}")
                continue
            click.echo(f"{request}: {describe(node_plan.best)}; {recipe_layout_text(node_plan)}")
            for reason in evidence(node_plan.best).reasons:
                click.echo(f"  {reason}")
            click.echo(f"  {submit(plan, node_plan.best)}")
            if point.forecast is not None and point.forecast.lost_time is None:
                click.echo(f"  does not finish; {point.forecast.reason}")
    for line in dict.fromkeys(_data_lines(recipe_plans)):
        click.echo(line)
    for line in price_lines(recipe_plans):
        click.echo(line)


def _data_lines(recipe_plans: Sequence[RecipePlan]) -> Iterator[str]:
    for plan in recipe_plans:
        for point in plan.points():
            if point.forecast is not None:
                sentence = epochs_text(plan.config.recipe.data, point.forecast.cost.tokens)
                if sentence is not None:
                    yield f"{plan.config.recipe.name}: {sentence}"


def price_lines(recipe_plans: Sequence[RecipePlan]) -> list[str]:
    """Return the price of each profile, and the share of the cost while jobs are pending."""
    lines = []
    by_cluster: dict[str, list[RecipePlan]] = {}
    for plan in recipe_plans:
        by_cluster.setdefault(plan.config.cluster.name, []).append(plan)
    for name, plans in by_cluster.items():
        price = plans[0].forecaster.price
        if price is None:
            lines.append(f"cost unknown: profile {name} has no price; --price DOLLARS gives one")
            continue
        lines.append(f"price of {name}: {price}")
        costs = [point.forecast.cost for plan in plans for point in plan.points() if point.forecast]
        shares = [cost.waiting_usd / cost.usd for cost in costs if cost.waiting_usd and cost.usd]
        if shares:
            lines.append(
                f"waiting: up to {100 * max(shares):.2g} % of the cost is for owned nodes, paid "
                "while jobs are pending"
            )
    return lines


def _is_single(plans: Sequence[RecipePlan]) -> bool:
    return len(plans) == len(plans[0].node_plans) == 1


def tables(plans: Sequence[RecipePlan], top: int | None) -> list[PlanTable]:
    if _is_single(plans):
        return list(layout_tables(plans[0], top or TOP))
    return [points_table(plans, top)]


def csv_rows(plans: Sequence[RecipePlan], top: int | None) -> list[dict[str, Any]]:
    if not _is_single(plans):
        return [point_json(point) for plan in plans for point in plan.points(top or 1)]
    node_plan = plans[0].node_plans[0]
    return [
        {"rank": rank, **_candidate_json(node_plan, layout, plans[0].forecaster)}
        for rank, layout in node_plan.top(top or TOP)
    ]


POINT_HEADINGS = (
    *("TP", "PP", "DP", "micro", "checkpointing", "seq/s", "90 %", "evidence", "tokens/s", "MFU"),
    *("$/h", "tokens/$", "scaling", "tokens", "time", "$"),
)


def point_cells(point: ScalingPoint) -> dict[str, str]:
    candidate, forecast = point.candidate, point.forecast
    if candidate is None or forecast is None or point.efficiency is None:
        return {**dict.fromkeys(POINT_HEADINGS, "-"), "seq/s": "nothing fits"}
    mesh, cost, published = candidate.mesh, forecast.cost, evidence(candidate)
    return {
        "TP": str(mesh.tensor),
        "PP": _stages(candidate),
        "DP": _data(mesh),
        "micro": str(mesh.micro_batch),
        "checkpointing": candidate.config.recipe.train.checkpointing_text,
        "seq/s": format_number(candidate.seq_per_s),
        "90 %": published.interval_text,
        "evidence": published.status,
        "tokens/s": f"{candidate.tokens_per_s:,.0f}",
        "MFU": f"{100 * candidate.mfu:.1f} %",
        "$/h": "-" if cost.usd_per_hour is None else f"{cost.usd_per_hour:,.2f}",
        "tokens/$": format_count(cost.tokens_per_usd),
        "scaling": f"{100 * point.efficiency:.1f} %",
        "tokens": format_count(cost.tokens),
        "time": "never" if forecast.hours is None else format_days(forecast.hours),
        "$": "-" if forecast.usd is None else f"{forecast.usd:,.0f}",
    }


def print_assumed(plans: Sequence[RecipePlan]) -> None:
    """Print the hardware constants that are assumed, a line for each profile."""
    for name, constants in {plan.config.cluster.name: plan.assumed for plan in plans}.items():
        if constants:
            values = ", ".join(f"{constant} {value:g}" for constant, value in constants.items())
            click.echo(f"assumed, not measured: {values} (profile {name})")


def plan_json(plans: Sequence[RecipePlan], top: int | None, explained: bool) -> dict[str, Any]:
    """Return the --json output. `recipe`, `cluster` and `nodes` are lists only if values differ.

    `top` is the maximum number of layouts of each recipe and node count; None: all.
    """
    node_plans = [(plan, node_plan) for plan in plans for node_plan in plan.node_plans]
    rows: dict[str, list[Any]] = {
        name: [] for name in ("candidates", "recipe_layouts", "refused", "nearest")
    }
    for plan, node_plan in node_plans:
        config, layout, rank = plan.config, node_plan.recipe_layout, None
        key: dict[str, object] = {"recipe": config.recipe.name, "cluster": config.cluster.name}
        key["nodes"] = node_plan.nodes
        if isinstance(layout, LayoutEstimate) and layout.fits:
            rank = node_plan.rank(layout)
        rows["candidates"] += [
            _candidate_json(node_plan, candidate, plan.forecaster)
            for candidate in [*node_plan.fitting, *node_plan.too_large][:top]
        ]
        rows["recipe_layouts"].append({**key, "rank": rank, "fault": node_plan.recipe_fault})
        rows["refused"].append({**key, "reasons": dict(node_plan.refused)})
        if not node_plan.fitting:
            near = [change.to_json() for change in node_plan.nearest]
            rows["nearest"].append({**key, "would_fit": near})
    document = {
        "recipe": _value_or_list([plan.config.recipe.name for plan in plans]),
        "cluster": _value_or_list([plan.config.cluster.name for plan in plans]),
        "nodes": _value_or_list([node_plan.nodes for node_plan in plans[0].node_plans]),
        **rows,
        "assumed": {plan.config.cluster.name: plan.assumed for plan in plans},
        "prices": {
            plan.config.cluster.name: price and price.as_json()
            for plan in plans
            for price in [plan.forecaster.price]
        },
        "warnings": plan_warnings(plans),
    }
    if not _is_single(plans):
        document["scaling"] = [point_json(point) for plan in plans for point in plan.points()]
    if explained:
        fitting = [node_plan for _, node_plan in node_plans if node_plan.fitting]
        document["explanation"] = [line for node_plan in fitting for line in node_plan.explain()]
    return document


def _value_or_list(values: list[Any]) -> Any:
    different = list(dict.fromkeys(values))
    return different[0] if len(different) == 1 else values


def _candidate_json(
    node_plan: NodePlan, layout: LayoutEstimate, forecaster: Forecaster
) -> dict[str, Any]:
    forecast = forecaster.forecast(layout)
    cost, lost = forecast.cost, forecast.lost_time
    return {
        "recipe": layout.config.recipe.name,
        "cluster": layout.config.cluster.name,
        **figures(layout),
        **_evidence_json(layout),
        "nodes": layout.mesh.nodes,
        "tokens_per_s": layout.tokens_per_s,
        "tokens_per_usd": cost.tokens_per_usd,
        "usd_per_hour": cost.usd_per_hour,
        "reason": None if layout.fits else why_too_large(layout.memory),
        "utilization": lost.effective if lost else 0.0,
        "losses": dict(lost.shares) if lost else None,
        "checkpoint_every_steps": lost.interval_steps if lost else None,
        "tokens": cost.tokens,
        "epochs": corpus_epochs(layout.config.recipe.data, cost.tokens),
        "hours": forecast.hours,
        "usd": forecast.usd,
        "waiting_usd": cost.waiting_usd,
        "recipe_layout": node_plan.is_recipe_layout(layout),
    }


def _evidence_json(layout: LayoutEstimate) -> dict[str, Any]:
    published = evidence(layout)
    return {
        "evidence": published.status,
        "evidence_reasons": published.reasons,
        "evidence_software": published.generations or None,
        "nearest_run": published.nearest and asdict(published.nearest),
        "seq_per_s_interval": published.interval,
        "seq_per_s_by_network": network_range(layout),
    }


def point_json(point: ScalingPoint) -> dict[str, Any]:
    row = {name: getattr(point, name) for name in ("recipe", "cluster", "nodes", "rank")}
    if point.candidate is None or point.forecast is None:
        return {**row, "fits": False}
    cost, hours = point.forecast.cost, point.forecast.hours
    return {
        **row,
        "fits": True,
        "tight": point.candidate.memory.tight,
        **settings(point.candidate),
        "seq_per_s": point.candidate.seq_per_s,
        **_evidence_json(point.candidate),
        "tokens_per_s": point.candidate.tokens_per_s,
        "usd_per_hour": cost.usd_per_hour,
        "tokens_per_usd": cost.tokens_per_usd,
        "scaling_efficiency": point.efficiency,
        "tokens": cost.tokens,
        "epochs": corpus_epochs(point.candidate.config.recipe.data, cost.tokens),
        "days": None if hours is None else hours / 24,
        "hours": hours,
        "node_hours": None if hours is None else cost.node_hours,
        "usd": point.forecast.usd,
        "waiting_usd": cost.waiting_usd,
    }
