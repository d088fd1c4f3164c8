"""The output of `slurmllm plan`: tables and JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import click

from slurmllm.config.cluster import GIB
from slurmllm.display.tables import print_table
from slurmllm.format import format_count, format_days, format_number, format_plural
from slurmllm.plan.estimate import LayoutEstimate
from slurmllm.plan.evidence import evidence, evidence_lines, interval_text, network_range
from slurmllm.plan.explain import (
    describe,
    explain,
    explain_parts,
    figures,
    settings,
    why_too_large,
)
from slurmllm.plan.recipe_plan import (
    Forecaster,
    NodePlan,
    RecipePlan,
    ScalingPoint,
    fixed_settings,
    most_refused,
)

TOP = 10  # layouts shown by default
_NEAREST = 3  # layouts that do not fit, at most


class PlanTable(NamedTuple):
    """A table of a plan."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]


def print_plan(plan: RecipePlan, top: int) -> None:
    """Print one recipe on one number of nodes; at least one layout fits."""
    (node_plan,), forecaster = plan.node_plans, plan.forecaster
    rows = node_plan.top(top)
    best = rows[0][1]
    recipe, mesh = best.config.recipe, best.mesh
    click.echo(
        f"{recipe.name} on {format_plural(mesh.nodes, 'node')} of {best.config.cluster.name}, "
        f"{mesh.world_size:,} devices; {mesh.global_batch:,} × {recipe.model.seq_len:,} tokens "
        f"per step, {recipe.train.precision}"
    )
    if fixed := fixed_settings(plan.config):
        click.echo(f"fixed: {', '.join(fixed)}")
    layouts, shares = layout_tables(plan, top)
    print_table(*layouts)
    click.echo("\nwhere a step goes, %")
    print_table(*shares)
    click.echo("")
    print_recipe_layout(node_plan)
    if node_plan.too_large:
        click.echo(f"does not fit: {format_plural(len(node_plan.too_large), 'layout')}")
        lines = _meshes_too_large(node_plan)[:_NEAREST]
        for line in [*lines, *explain_parts(" ".join(lines))]:
            click.echo(f"  {line}")
    if node_plan.search.refused:
        click.echo(
            f"not considered: {format_plural(sum(node_plan.search.refused.values()), 'layout')}"
        )
        for reason, count in most_refused(node_plan.search.refused):
            click.echo(f"  {count:>4}  {reason}")
    click.echo("")
    for line in evidence_lines(best):
        click.echo(line)
    print_forecast(best, forecaster)


def layout_tables(plan: RecipePlan, top: int) -> tuple[PlanTable, PlanTable]:
    """Layouts of one recipe on one number of nodes, and where their steps go."""
    (node_plan,) = plan.node_plans
    rows = node_plan.top(top)
    best = rows[0][1]
    layouts = PlanTable(
        ("#", "TP", "PP", "DP", "micro", "SP", "checkpointing", "ZeRO",
         f"of {best.memory.limit / GIB:.4g} GiB", "s/step", "seq/s", "90 %", "MFU",
         "tokens/$"),
        [_layout_row(node_plan, rank, one, plan.forecaster) for rank, one in rows],
    )  # fmt: skip
    shares = [
        (
            str(rank),
            str(one.mesh.tensor),
            _stages(one),
            *(f"{100 * part / one.step.total:.1f}" for part in one.step.parts().values()),
        )
        for rank, one in rows
    ]
    return layouts, PlanTable(("#", "TP", "PP", *best.step.parts()), shares)


def _layout_row(
    node_plan: NodePlan, rank: int, candidate: LayoutEstimate, forecaster: Forecaster
) -> tuple[str, ...]:
    mesh, recipe = candidate.mesh, candidate.config.recipe
    return (
        f"{rank}{' *' if node_plan.is_recipe_layout(candidate) else ''}",
        str(mesh.tensor),
        _stages(candidate),
        str(mesh.data),
        f"{mesh.micro_batch} × {mesh.accumulation}",
        "yes" if recipe.parallel.sequence else "no",
        recipe.train.checkpointing_text,
        str(recipe.parallel.zero),
        f"{candidate.memory.peak / GIB:.2f}{' tight' * candidate.memory.tight}",
        format_number(candidate.step.total),
        format_number(candidate.seq_per_s),
        interval_text(evidence(candidate)),
        f"{100 * candidate.mfu:.1f} %",
        format_count(forecaster.forecast(candidate).cost.tokens_per_usd),
    )


def _stages(candidate: LayoutEstimate) -> str:
    virtual = candidate.mesh.virtual_pipeline
    return f"{candidate.mesh.pipeline}{f' × {virtual}' if virtual > 1 else ''}"


def print_recipe_layout(node_plan: NodePlan) -> None:
    """Print the rank of the recipe's own layout, or why it is impossible."""
    click.echo(recipe_layout_text(node_plan, " (*)"))


def recipe_layout_text(node_plan: NodePlan, mark: str = "") -> str:
    """The rank of the recipe's own layout, or why it is impossible."""
    layout, own = node_plan.recipe_layout, f"the recipe's own layout{mark}"
    if layout is None:
        return "the recipe leaves the layout to the planner"
    if layout.candidate is None:
        return f"{own} is impossible: {layout.reason}"
    if not layout.candidate.fits:
        return f"{own} does not fit: {describe(layout.candidate)}: {layout.fault}"
    candidate, best = layout.candidate, node_plan.fitting[0]
    if candidate is best and not mark:
        return f"{own} is the same"
    return (
        f"{own} is {node_plan.rank(candidate)} of "
        f"{len(node_plan.fitting)} that fit, with "
        f"{100 * candidate.seq_per_s / best.seq_per_s:.1f} % of the best one's seq/s"
        f"{'' if mark else f': {describe(candidate)}'}"
    )


def _meshes_too_large(node_plan: NodePlan) -> list[str]:
    """The meshes of which no layout fits, one line each, those closest to fitting first."""
    fitting = {(one.mesh.tensor, one.mesh.pipeline) for one in node_plan.fitting}
    found: dict[tuple[int, int], LayoutEstimate] = {}
    for one in node_plan.too_large:
        if (mesh := (one.mesh.tensor, one.mesh.pipeline)) not in fitting:
            found.setdefault(mesh, one)
    return [f"{describe(one)}: {why_too_large(one.memory)}" for one in found.values()]


def print_explanation(node_plan: NodePlan) -> None:
    """Print why the best layout is the best."""
    if node_plan.fitting:
        click.echo(f"\nwhy, on {format_plural(node_plan.nodes, 'node')}")
        lines = explain(node_plan.fitting, node_plan.too_large)
        for line in [*lines, *explain_parts(" ".join(lines))]:
            click.echo(line)


def print_forecast(best: LayoutEstimate, forecaster: Forecaster) -> None:
    """Print time, cost and the time lost to failures and checkpoints on the best layout."""
    forecast = forecaster.forecast(best)
    cost, lost = forecast.cost, forecast.lost_time
    end = f"to the end     {cost.steps:,} steps, {format_count(cost.tokens)} tokens: "
    if lost is None:
        click.echo(f"{end}does not finish; {forecast.reason}")
        return
    held = best.config.recipe.slurm.spare_nodes
    spare = f"; with {format_plural(held, 'spare node')}" if held else ""
    dollars = "; cost unknown: the cluster profile has no price"
    if cost.usd is not None:
        dollars = f", ${cost.usd:,.0f}"
    click.echo(
        f"{end}{format_days(cost.hours)}, {format_number(cost.node_hours)} node hours"
        f"{dollars}{spare}"
    )
    if forecaster.price is not None:
        click.echo(f"price          {forecaster.price}")
        if cost.waiting_usd:
            term = forecaster.price.waiting_term
            click.echo(
                f"waiting        ${cost.waiting_usd:,.2f} of the cost is for {term}, paid while "
                "the job is pending"
            )
    shares = sorted(
        ((part, share) for part, share in lost.shares.items() if part != "productive"),
        key=lambda row: -row[1],
    )
    # Not to be confused with that of activations, of which the table above has a column.
    names = {"recomputation": "recomputation of lost steps"}
    parts = ", ".join(
        f"{names.get(part, part).replace('_', ' ')} {100 * share:.2f} %"
        for part, share in shares
        if share >= 5e-5
    )
    click.echo(
        f"utilization    {100 * lost.effective:.2f} % of the node hours "
        f"{'without spare nodes ' * bool(held)}are productive; {parts}"
    )
    click.echo(
        f"failures       one in {format_number(lost.mtbf_s / 3600)} h (MTBF of one node: "
        f"{best.config.cluster.node_mtbf_hours:,.0f} h)"
    )
    interval = f"every {lost.interval_steps} steps"
    if best.config.recipe.checkpoint.every_steps != "auto":
        chosen = str(lost.auto_steps) if lost.auto_steps < cost.steps else "none before the end"
        interval += f"; checkpoint.every_steps: auto would choose {chosen}"
    click.echo(f"checkpoints    {interval}")


def points_table(plans: Sequence[RecipePlan], top: int | None) -> PlanTable:
    """A row for each recipe, cluster profile and node count, or several with `top`."""
    keys = {
        "recipe": len({plan.config.recipe.name for plan in plans}) > 1,
        "cluster": len({plan.config.cluster.name for plan in plans}) > 1,
    }
    rows = []
    for plan in plans:
        own = {one.nodes: one.is_recipe_layout for one in plan.node_plans}
        for point in plan.points(top or 1):
            mark = " *" * bool(point.candidate and own[point.nodes](point.candidate))
            names = [getattr(point, key) for key, several in keys.items() if several]
            rank = [f"{point.rank}{mark}"] * (top is not None)
            rows.append([*names, str(point.nodes), *rank, *point_cells(point)])
    headings = (
        *(key for key, several in keys.items() if several), "nodes", *["#"] * (top is not None),
        "TP", "PP", "DP", "micro", "checkpointing", "seq/s", "90 %", "evidence", "tokens/s", "MFU",
        "$/h", "tokens/$", "scaling", "tokens", "time", "$",
    )  # fmt: skip
    return PlanTable(headings, rows)


def print_points(
    recipe_plans: Sequence[RecipePlan],
    top: int | None,
    submit: Callable[[RecipePlan, LayoutEstimate], str],
) -> None:
    """Print the rows of `points_table`, and below them the layouts that they are about.

    Args:
        submit: Returns the command that submits a layout.
    """
    several = len(recipe_plans) > 1
    print_table(*points_table(recipe_plans, top))
    for plan in recipe_plans:
        name = f"{plan.config.recipe.name} on " if several else ""
        kind = f" of {plan.config.cluster.name}" if several else ""
        for node_plan in plan.node_plans:
            if node_plan.best is not None:
                click.echo(
                    f"{name}{format_plural(node_plan.nodes, 'node')}{kind}: "
                    f"{describe(node_plan.best)}; "
                    f"{recipe_layout_text(node_plan)}"
                )
                for reason in evidence(node_plan.best).reasons:
                    click.echo(f"  {reason}")
                click.echo(f"  {submit(plan, node_plan.best)}")
                continue
            why = "no layout is possible"
            if node_plan.too_large:
                why = _meshes_too_large(node_plan)[0]
            elif reasons := most_refused(node_plan.search.refused, limit=1):
                why += f": {reasons[0][0]}"
            click.echo(f"{name}{format_plural(node_plan.nodes, 'node')}{kind}: {why}")
            for near in node_plan.near_lines:
                click.echo(f"  {near}")
        for point in plan.points():
            if point.forecast is not None and point.forecast.lost_time is None:
                click.echo(
                    f"{name}{format_plural(point.nodes, 'node')}{kind}: does not finish; "
                    f"{point.forecast.reason}"
                )
    for line in price_lines(recipe_plans):
        click.echo(line)


def price_lines(recipe_plans: Sequence[RecipePlan]) -> list[str]:
    """The price of each profile, and the share of the cost while jobs are pending."""
    lines = []
    for plans in _by_cluster(recipe_plans):
        name, price = plans[0].config.cluster.name, plans[0].forecaster.price
        if price is None:
            lines.append(f"cost unknown: cluster profile {name} has no price")
            continue
        lines.append(f"price of {name}: {price}")
        costs = [point.forecast.cost for plan in plans for point in plan.points() if point.forecast]
        shares = [cost.waiting_usd / cost.usd for cost in costs if cost.waiting_usd and cost.usd]
        if shares:
            lines.append(
                f"waiting: up to {100 * max(shares):.2g} % of the cost is for "
                f"{price.waiting_term}, paid while jobs are pending"
            )
    return lines


def _by_cluster(plans: Sequence[RecipePlan]) -> list[list[RecipePlan]]:
    found: dict[str, list[RecipePlan]] = {}
    for plan in plans:
        found.setdefault(plan.config.cluster.name, []).append(plan)
    return list(found.values())


def tables(plans: Sequence[RecipePlan], top: int | None) -> list[PlanTable]:
    """The printed tables."""
    if len(plans) == len(plans[0].node_plans) == 1:
        return list(layout_tables(plans[0], top or TOP))
    return [points_table(plans, top)]


def csv_rows(plans: Sequence[RecipePlan], top: int | None) -> list[dict[str, Any]]:
    """The figures of the printed rows, by the names of --json."""
    if len(plans) == len(plans[0].node_plans) == 1:
        (node_plan,), forecaster = plans[0].node_plans, plans[0].forecaster
        return [
            {"rank": rank, **_candidate_json(node_plan, one, forecaster)}
            for rank, one in node_plan.top(top or TOP)
        ]
    return [point_json(point) for plan in plans for point in plan.points(top or 1)]


def point_cells(point: ScalingPoint) -> tuple[str, ...]:
    candidate, forecast = point.candidate, point.forecast
    if candidate is None or forecast is None or point.efficiency is None:
        return (*["-"] * 5, "nothing fits", *["-"] * 10)
    mesh, cost, found = candidate.mesh, forecast.cost, evidence(candidate)
    return (
        str(mesh.tensor),
        _stages(candidate),
        str(mesh.data),
        str(mesh.micro_batch),
        candidate.config.recipe.train.checkpointing_text,
        format_number(candidate.seq_per_s),
        interval_text(found),
        found.status,
        f"{candidate.tokens_per_s:,.0f}",
        f"{100 * candidate.mfu:.1f} %",
        "-" if cost.usd_per_hour is None else f"{cost.usd_per_hour:,.2f}",
        format_count(cost.tokens_per_usd),
        f"{100 * point.efficiency:.1f} %",
        format_count(cost.tokens),
        "never" if forecast.hours is None else format_days(forecast.hours),
        "-" if forecast.usd is None else f"{forecast.usd:,.0f}",
    )


def print_assumed(plans: Sequence[RecipePlan]) -> None:
    """Print the hardware constants that are assumed, a line for each profile."""
    found = {plan.config.cluster.name: plan.assumed for plan in plans if plan.assumed}
    for name, assumed in found.items():
        values = ", ".join(f"{constant} {value:g}" for constant, value in assumed.items())
        click.echo(f"assumed, not measured: {values} (profile {name})")


def plan_json(plans: Sequence[RecipePlan], top: int | None, explained: bool) -> dict[str, Any]:
    """Return the --json output. `recipe`, `cluster` and `nodes` are lists only if values differ.

    `top` is the maximum number of layouts of each recipe and node count; None: all.
    """
    node_plans = [(plan, node_plan) for plan in plans for node_plan in plan.node_plans]
    keyed = [
        (
            {
                "recipe": plan.config.recipe.name,
                "cluster": plan.config.cluster.name,
                "nodes": node_plan.nodes,
            },
            node_plan,
        )
        for plan, node_plan in node_plans
    ]
    recipe_layouts = []  # rank among those that fit, or why it is impossible
    for key, node_plan in keyed:
        layout, rank = node_plan.recipe_layout, None
        fault = None if layout is None else layout.fault
        if layout is not None and layout.candidate is not None and fault is None:
            rank = node_plan.rank(layout.candidate)
        recipe_layouts.append({**key, "rank": rank, "fault": fault})
    found: dict[str, Any] = {
        "recipe": _one_or_all([plan.config.recipe.name for plan in plans]),
        "cluster": _one_or_all([plan.config.cluster.name for plan in plans]),
        "nodes": _one_or_all([node_plan.nodes for node_plan in plans[0].node_plans]),
        "candidates": [
            _candidate_json(node_plan, candidate, plan.forecaster)
            for plan, node_plan in node_plans
            for candidate in [*node_plan.fitting, *node_plan.too_large][:top]
        ],
        "recipe_layouts": recipe_layouts,
        "refused": [{**key, "reasons": dict(node_plan.search.refused)} for key, node_plan in keyed],
        "nearest": [
            {
                **key,
                "would_fit": [one.to_json() for one in node_plan.nearest],
                "no_batch": node_plan.no_batch,
            }
            for key, node_plan in keyed
            if not node_plan.fitting
        ],
        "assumed": {plan.config.cluster.name: plan.assumed for plan in plans},
        "prices": {
            plan.config.cluster.name: price and price.as_json()
            for plan in plans
            for price in [plan.forecaster.price]
        },
        "warnings": list(dict.fromkeys(warning for plan in plans for warning in plan.warnings)),
    }
    if len(node_plans) > 1:
        found["scaling"] = [point_json(point) for plan in plans for point in plan.points()]
    if explained:
        found["explanation"] = [
            line
            for _, node_plan in node_plans
            if node_plan.fitting
            for line in explain(node_plan.fitting, node_plan.too_large)
        ]
    return found


def _one_or_all(values: list[Any]) -> Any:
    different = list(dict.fromkeys(values))
    return different[0] if len(different) == 1 else values


def _candidate_json(plan: NodePlan, one: LayoutEstimate, forecaster: Forecaster) -> dict[str, Any]:
    forecast = forecaster.forecast(one)
    cost, lost = forecast.cost, forecast.lost_time
    return {
        "recipe": one.config.recipe.name,
        "cluster": one.config.cluster.name,
        **figures(one),
        **_evidence_json(one),
        "nodes": one.mesh.nodes,
        "tokens_per_s": one.tokens_per_s,
        "tokens_per_usd": cost.tokens_per_usd,
        "usd_per_hour": cost.usd_per_hour,
        "reason": None if one.fits else why_too_large(one.memory),
        "utilization": lost.effective if lost else 0.0,
        "losses": dict(lost.shares) if lost else None,
        "checkpoint_every_steps": lost.interval_steps if lost else None,
        "tokens": cost.tokens,
        "hours": forecast.hours,
        "usd": forecast.usd,
        "waiting_usd": cost.waiting_usd,
        "recipe_layout": plan.is_recipe_layout(one),
    }


def _evidence_json(one: LayoutEstimate) -> dict[str, Any]:
    return {**evidence(one).to_json(), "seq_per_s_by_network": network_range(one)}


def point_json(point: ScalingPoint) -> dict[str, Any]:
    row: dict[str, Any] = {
        "recipe": point.recipe, "cluster": point.cluster, "nodes": point.nodes, "rank": point.rank,
    }  # fmt: skip
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
        "days": None if hours is None else hours / 24,
        "hours": hours,
        "node_hours": None if hours is None else cost.node_hours,
        "usd": point.forecast.usd,
        "waiting_usd": cost.waiting_usd,
    }
