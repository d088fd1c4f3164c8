"""The tables of `slurmllm plan`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from slurmllm.config.cluster import GIB
from slurmllm.plan.explain import describe, explain, why_too_large
from slurmllm.plan.recipe_plan import (
    Forecaster,
    NodePlan,
    RecipePlan,
    ScalingPoint,
    fixed_settings,
    most_refused,
    table_rows,
)
from slurmllm.tables import print_table

if TYPE_CHECKING:
    from slurmllm.plan.estimate import LayoutEstimate

_NEAREST = 3


def print_plan(found: RecipePlan, top: int) -> None:
    """All that is to say of one recipe on one number of nodes; some layout fits."""
    (planned,), foresight = found.planned, found.foresight
    rows = table_rows(planned, top)
    best = rows[0][1]
    click.echo(_title(best))
    if fixed := fixed_settings(found.config):
        click.echo(f"fixed: {', '.join(fixed)}")
    print_table(
        ("#", "TP", "PP", "DP", "micro", "SP", "checkpointing", "ZeRO",
         f"of {best.memory.limit / GIB:.4g} GiB", "s/step", "seq/s", "MFU", "tokens/$"),
        [_row(planned, rank, candidate, foresight) for rank, candidate in rows],
    )  # fmt: skip
    click.echo("\nwhere a step goes, %")
    parts = list(best.step.parts())
    print_table(("#", "TP", "PP", *parts), [_parts(rank, one) for rank, one in rows])
    click.echo("")
    print_written(planned)
    _print_rest(planned)
    click.echo("")
    print_end(best, foresight)


def _title(best: LayoutEstimate) -> str:
    recipe, mesh = best.config.recipe, best.mesh
    return (
        f"{recipe.name} on {_nodes(mesh.nodes)} of {best.config.cluster.name}, "
        f"{mesh.world_size:,} devices; {mesh.global_batch:,} × {recipe.model.seq_len:,} tokens a "
        f"step, {recipe.train.precision}"
    )


def _row(
    planned: NodePlan, rank: int, candidate: LayoutEstimate, foresight: Forecaster
) -> tuple[str, ...]:
    mesh, recipe = candidate.mesh, candidate.config.recipe
    return (
        f"{rank}{' *' if planned.is_written(candidate) else ''}",
        str(mesh.tensor),
        _stages(candidate),
        str(mesh.data),
        f"{mesh.micro_batch} × {mesh.accumulation}",
        "yes" if recipe.parallel.sequence else "no",
        recipe.train.activation_checkpointing,
        str(recipe.parallel.zero),
        f"{candidate.memory.peak / GIB:.2f}",
        figure(candidate.step.total),
        figure(candidate.seq_per_s),
        f"{100 * candidate.mfu:.1f} %",
        _count(foresight.of(candidate).cost.tokens_per_usd),
    )


def _parts(rank: int, candidate: LayoutEstimate) -> tuple[str, ...]:
    total = candidate.step.total
    shares = (f"{100 * part / total:.1f}" for part in candidate.step.parts().values())
    return (str(rank), str(candidate.mesh.tensor), _stages(candidate), *shares)


def _stages(candidate: LayoutEstimate) -> str:
    virtual = candidate.mesh.virtual_pipeline
    return f"{candidate.mesh.pipeline}{f' × {virtual}' if virtual > 1 else ''}"


def print_written(planned: NodePlan) -> None:
    """Where the recipe's own layout stands."""
    written = planned.written
    if written is None:
        click.echo("the recipe leaves the layout to the planner")
    elif written.candidate is None:
        click.echo(f"the recipe's own layout (*) cannot be: {written.fault}")
    elif not written.candidate.fits:
        own = written.candidate
        click.echo(
            f"the recipe's own layout (*) does not fit: {describe(own)}: "
            f"{why_too_large(own.memory)}"
        )
    else:
        own, best = written.candidate, planned.fitting[0]
        click.echo(
            f"the recipe's own layout (*) is {planned.rank(own)} of {len(planned.fitting)} that "
            f"fit, with {100 * own.seq_per_s / best.seq_per_s:.1f} % of the best one's seq/s"
        )


def _print_rest(planned: NodePlan) -> None:
    """What does not fit, and what was not considered, in a few lines."""
    if planned.too_large:
        click.echo(f"does not fit: {_layouts(len(planned.too_large))}")
        for line in _hopeless(planned)[:_NEAREST]:
            click.echo(f"  {line}")
    if planned.plan.refused:
        click.echo(f"not considered: {_layouts(sum(planned.plan.refused.values()))}")
        for reason, count in most_refused(planned.plan.refused):
            click.echo(f"  {count:>4}  {reason}")


def _hopeless(planned: NodePlan) -> list[str]:
    """The meshes of which no layout fits, those that lack the least first."""
    fitting = {(one.mesh.tensor, one.mesh.pipeline) for one in planned.fitting}
    found: dict[tuple[int, int], LayoutEstimate] = {}
    for one in planned.too_large:
        if (mesh := (one.mesh.tensor, one.mesh.pipeline)) not in fitting:
            found.setdefault(mesh, one)
    return [f"{describe(one)}: {why_too_large(one.memory)}" for one in found.values()]


def _why_nothing_fits(planned: NodePlan) -> str:
    """The layout that lacks the least; without one, what rules most of them out."""
    if planned.too_large:
        return _hopeless(planned)[0]
    reasons = most_refused(planned.plan.refused, most=1)
    return f"no layout is possible: {reasons[0][0]}" if reasons else "no layout is possible"


def print_explanation(planned: NodePlan) -> None:
    """Why the best layout is the best."""
    if planned.fitting:
        click.echo(f"\nwhy, on {_nodes(planned.plan.nodes)}")
        for line in explain(planned.fitting, planned.too_large):
            click.echo(line)


def print_end(best: LayoutEstimate, foresight: Forecaster) -> None:
    """Time and cost to the end of the training on the best layout, and what is lost on the way."""
    prospects = foresight.of(best)
    cost, losses = prospects.cost, prospects.losses
    end = f"to the end     {cost.steps:,} steps, {_count(cost.tokens)} tokens: "
    if losses is None:
        click.echo(f"{end}never; {prospects.fault}")
        return
    click.echo(
        f"{end}{figure(cost.days)} days, {figure(cost.node_hours)} node hours"
        f"{_dollars(foresight, cost.usd)}"
    )
    lost = sorted(
        ((part, share) for part, share in losses.shares.items() if part != "productive"),
        key=lambda row: -row[1],
    )
    parts = ", ".join(f"{part.replace('_', ' ')} {100 * s:.2f} %" for part, s in lost if s >= 5e-5)
    click.echo(f"utilization    {100 * losses.effective:.2f} % of the node hours train; {parts}")
    click.echo(
        f"failures       one in {figure(losses.mtbf_s / 3600)} h (a node: one in "
        f"{best.config.cluster.node_mtbf_hours:,.0f} h)"
    )
    said = f"every {losses.interval_steps} steps"
    if best.config.recipe.checkpoint.every_steps != "auto":
        auto = foresight.auto_steps(best)
        chosen = str(auto) if auto < prospects.cost.steps else "none before the end"
        said += f"; checkpoint.every_steps: auto would choose {chosen}"
    click.echo(f"checkpoints    {said}")


def _dollars(foresight: Forecaster, usd: float | None) -> str:
    if usd is None:
        return "; no dollars: the cluster profile has no price"
    return f", ${usd:,.0f} at ${foresight.usd_per_node_hour:,.2f} a node and hour"


def print_points(answers: Sequence[RecipePlan]) -> None:
    """A row a recipe and node count."""
    several = len(answers) > 1
    points = [point for found in answers for point in found.points()]
    headings = ("recipe",) * several + (
        "nodes", "TP", "PP", "DP", "micro", "checkpointing", "seq/s", "tokens/s", "MFU", "$/h",
        "tokens/$", "scaling", "tokens", "days", "$",
    )  # fmt: skip
    print_table(headings, [(point.recipe,) * several + _point(point) for point in points])
    for found in answers:
        name = f"{found.config.recipe.name} on " if several else ""
        for planned in found.planned:
            if not planned.fitting:
                click.echo(f"{name}{_nodes(planned.plan.nodes)}: {_why_nothing_fits(planned)}")
        for point in found.points():
            if point.prospects is not None and point.prospects.losses is None:
                click.echo(f"{name}{_nodes(point.nodes)}: no end; {point.prospects.fault}")
        if found.foresight.usd_per_node_hour is None:
            click.echo(f"no dollars: cluster profile {found.config.cluster.name} has no price")


def _point(point: ScalingPoint) -> tuple[str, ...]:
    candidate, prospects = point.candidate, point.prospects
    if candidate is None or prospects is None or point.efficiency is None:
        return (str(point.nodes), *["-"] * 5, "nothing fits", *["-"] * 8)
    mesh, cost = candidate.mesh, prospects.cost
    return (
        str(point.nodes),
        str(mesh.tensor),
        _stages(candidate),
        str(mesh.data),
        str(mesh.micro_batch),
        candidate.config.recipe.train.activation_checkpointing,
        figure(candidate.seq_per_s),
        f"{candidate.tokens_per_s:,.0f}",
        f"{100 * candidate.mfu:.1f} %",
        "-" if cost.usd_per_hour is None else f"{cost.usd_per_hour:,.2f}",
        _count(cost.tokens_per_usd),
        f"{100 * point.efficiency:.1f} %",
        _count(cost.tokens),
        "never" if prospects.hours is None else figure(prospects.hours / 24),
        "-" if prospects.usd is None else f"{prospects.usd:,.0f}",
    )


def figure(value: float) -> str:
    """`0.0213`, `14.2`, `1,234`: three or four digits that count."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}" if value >= 1 else f"{value:.3g}"


def _count(number: float | None) -> str:
    """`1.23B`."""
    if number is None:
        return "-"
    for unit, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= unit:
            return f"{number / unit:.3g}{letter}"
    return f"{number:.3g}"


def _nodes(count: int) -> str:
    return f"{count:,} node{'s' * (count != 1)}"


def _layouts(count: int) -> str:
    return f"{count:,} layout{'s' * (count != 1)}"
