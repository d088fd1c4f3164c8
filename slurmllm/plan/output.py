"""The output of `slurmllm plan`: tables and JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import click

from slurmllm.core.config.cluster import GIB
from slurmllm.core.config.data_sources import corpus_epochs, epochs_text
from slurmllm.core.config.resolve import RunConfig, change
from slurmllm.core.config.yaml_source import flatten
from slurmllm.core.display.tables import data_frame, print_table
from slurmllm.core.errors import ConfigError
from slurmllm.core.format import (
    ABSENT,
    Json,
    format_count,
    format_days,
    format_dollars,
    format_estimate,
    format_mfu,
    format_number,
    format_percent,
    format_plural,
)
from slurmllm.plan.choose_layout import changes
from slurmllm.plan.evidence import STATUS_TEXTS, evidence, evidence_text, network_range
from slurmllm.plan.explain import figures, misfit_reasons, most_refused, why_too_large
from slurmllm.plan.recipe_plan import (
    NodePlan,
    Plans,
    RecipePlan,
    TrainingForecast,
    fixed_settings,
    plan_warnings,
)
from slurmllm.plan.search import LayoutEstimate

if TYPE_CHECKING:
    import pandas

TOP = 10  # layouts shown by default
_NEAREST = 3  # layouts that do not fit, at most
_UNKNOWN_COST = "cost unknown: give --price DOLLARS for a node hour"


Cells = dict[str, str]  # by heading, or by name of a fact
PlanTable = tuple[Sequence[str], Sequence[Sequence[str]]]  # headings, rows


@dataclass(frozen=True)
class Plan:
    """The layouts of a recipe on each of several node counts, the best first."""

    recipe_plan: RecipePlan

    def __repr__(self) -> str:
        plan = self.recipe_plan
        bests = []
        for point in plan.points():
            best = "nothing fits"
            if point.candidate is not None:
                speed = format_number(point.candidate.seq_per_s)
                best = f"{speed} seq/s, {_answer(plan, point.candidate)}"
            bests.append(f"{format_plural(point.node_plan.nodes, 'node')}: {best}")
        name = f"{plan.config.recipe.name} on {plan.config.cluster.name}"
        return f"<Plan of {name}; {'; '.join(bests)}>"

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
        raise replace(self.recipe_plan, node_plans=plans).no_fit_error()

    def best_config(self, nodes: int | None = None) -> RunConfig:
        """Return the recipe with the layout of `best`, for `submit_run`."""
        config = self.recipe_plan.config
        return change(config, None, changes(config, self.best(nodes)))

    def to_dict(self) -> Json:
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
    forecast = plan.forecast(best)
    cost = forecast.cost
    click.echo(
        f"{recipe.name} on {format_plural(mesh.nodes, 'node')} of {best.config.cluster.name}, "
        f"{format_plural(mesh.world_size, 'device')}; {format_plural(cost.steps, 'step')} of "
        f"{mesh.global_batch:,} × {recipe.model.seq_len:,} tokens ({format_count(cost.tokens)}), "
        f"{recipe.train.precision}"
    )
    degrees_text = best.mesh.degrees.replace("TP 1 × ", "").replace("PP 1 × ", "")
    answer = _answer(plan, best, f", {_UNKNOWN_COST}")
    status = STATUS_TEXTS[evidence(best).status]
    click.echo(f"{answer}; on {degrees_text}, micro batch {mesh.micro_batch}; {status}")
    if fixed := fixed_settings(plan.config):
        click.echo(f"fixed: {', '.join(fixed)}")
    layouts, shares = layout_tables(plan, top)
    click.echo("")
    print_table(*layouts)
    click.echo("\nwhere a step goes, %")
    print_table(*shares)
    click.echo(f"\n{recipe_layout_text(plan, node_plan)}")
    if node_plan.too_large:
        click.echo(f"does not fit: {format_plural(len(node_plan.too_large), 'layout')}")
        for line in node_plan.meshes_too_large[:_NEAREST]:
            click.echo(f"  {line}")
    if refused := node_plan.refused:
        click.echo(f"not considered: {format_plural(sum(refused.values()), 'layout')}")
        for reason, count in most_refused(refused):
            click.echo(f"  {count:>4}  {reason}")
    click.echo("")
    dollars = format_dollars(cost.waiting_usd)
    waiting = f"${dollars} of the cost is for owned nodes, paid while the job is pending"
    facts = {
        "evidence": evidence_text(evidence(best)),
        "data": epochs_text(recipe.data, cost.tokens),
        "price": plan.price,
        "waiting": waiting if cost.waiting_usd else None,
        **_lost_time_facts(best, forecast),
    }
    for name, fact in facts.items():
        if fact is not None:
            click.echo(f"{name:<14} {fact}")


def _answer(plan: RecipePlan, layout: LayoutEstimate, unknown_cost: str = "") -> str:
    """Return `2.4 days (2.1–2.7), 460 node hours, $9,870`, or why the training does not end."""
    forecast, spares = plan.forecast(layout), layout.config.recipe.slurm.spare_nodes
    cost = forecast.cost
    if forecast.lost_time is None:
        return f"does not finish; {forecast.reason}"
    time = format_days(cost.hours, evidence(layout).hours_interval(cost.hours))
    with_spares = f" with {format_plural(spares, 'spare node')}" if spares else ""
    dollars = unknown_cost if cost.usd is None else f", ${cost.usd:,.0f}"
    return f"{time}, {format_estimate(cost.node_hours)} node hours{with_spares}{dollars}"


def layout_tables(plan: RecipePlan, top: int) -> tuple[PlanTable, PlanTable]:
    """Return layouts of one recipe on one number of nodes, and where their steps go."""
    (node_plan,) = plan.node_plans
    layouts, shares = [], []
    for number, (_, layout) in enumerate(node_plan.top(top), 1):
        cells = _cells(plan, layout)
        mark = " *" if layout is node_plan.recipe_layout else ""
        layouts.append({**cells, "#": f"{number}{mark}"})
        total_s = layout.step.total
        parts = {name: f"{100 * s / total_s:.1f}" for name, s in layout.step.parts().items()}
        shares.append({"#": str(number), "TP": cells["TP"], "PP": cells["PP"], **parts})
    first = ("#", "TP", "PP", "DP", "micro", "SP", "checkpointing", "ZeRO")
    last = ("s/step", "seq/s", "90 %", "MFU", "tokens/$")
    headings = (*first, _memory_heading(node_plan.fitting[0]), *last)
    return _table(headings, layouts), _table(list(shares[0]), shares)


def _table(headings: Sequence[str], rows: Sequence[Cells]) -> PlanTable:
    """Return a table without the columns that are empty in every row."""
    names = [name for name in headings if {row.get(name, ABSENT) for row in rows} - {ABSENT, "0.0"}]
    return names, [[row.get(name, ABSENT) for name in names] for row in rows]


def _memory_heading(layout: LayoutEstimate) -> str:
    return f"of {layout.memory.limit / GIB:.4g} GiB"


def _cells(plan: RecipePlan, layout: LayoutEstimate) -> Cells:
    """Return heading → cell of all tables."""
    mesh, recipe, forecast = layout.mesh, layout.config.recipe, plan.forecast(layout)
    cost, published = forecast.cost, evidence(layout)
    tight = " tight" if layout.memory.tight else ""
    chunks = f" × {mesh.virtual_pipeline}" if mesh.virtual_pipeline > 1 else ""
    return {
        "TP": str(mesh.tensor),
        "PP": f"{mesh.pipeline}{chunks}",
        "DP": f"{mesh.replicate} × {mesh.shard}" if mesh.replicate > 1 else str(mesh.data),
        "micro": f"{mesh.micro_batch} × {mesh.accumulation}",
        "SP": "yes" if recipe.parallel.sequence else "no",
        "checkpointing": recipe.train.checkpointing_text,
        "ZeRO": str(recipe.parallel.zero),
        _memory_heading(layout): f"{layout.memory.peak / GIB:.2f}{tight}",
        "s/step": format_number(layout.step.total),
        "seq/s": format_number(layout.seq_per_s),
        "90 %": published.interval_text,
        "evidence": published.status,
        "tokens/s": f"{layout.tokens_per_s:,.0f}",
        "MFU": format_mfu(layout.mfu, recipe.train.precision, 1),
        "$/h": format_dollars(cost.usd_per_hour),
        "tokens/$": format_count(cost.tokens_per_usd),
        "tokens": format_count(cost.tokens),
        "time": "never" if forecast.hours is None else format_days(forecast.hours),
        "$": format_dollars(forecast.usd, 0),
    }


def recipe_layout_text(plan: RecipePlan, node_plan: NodePlan) -> str:
    """Return rank, time and cost of the recipe's own layout, or why it cannot be used."""
    layout = node_plan.recipe_layout
    if layout is None:
        return "the recipe leaves the layout to the planner"
    if isinstance(layout, str) or not layout.fits:
        return f"the recipe's own layout cannot be used: {node_plan.recipe_fault}"
    share = format_percent(layout.seq_per_s / node_plan.fitting[0].seq_per_s, 1)
    rank = f"{node_plan.recipe_rank} of {len(node_plan.fitting)}"
    answer = _answer(plan, layout)
    return (
        f"the recipe's own layout is {rank} that fit, with {share} of the best one's seq/s: "
        f"{layout.description}; {answer}; "
        f"{STATUS_TEXTS[evidence(layout).status]}"
    )


def print_explanation(node_plan: NodePlan) -> None:
    if node_plan.fitting:
        click.echo(f"\nwhy, on {format_plural(node_plan.nodes, 'node')}")
        for line in node_plan.explain():
            click.echo(line)


def _lost_time_facts(best: LayoutEstimate, forecast: TrainingForecast) -> Cells:
    """Return where the node hours go, how often nodes fail, and the checkpoint interval."""
    recipe, lost = best.config.recipe, forecast.lost_time
    if lost is None:
        return {}
    parts = ", ".join(
        f"{name.replace('_', ' ')} {format_percent(share)}"
        for name, share in sorted(lost.shares.items(), key=lambda row: -row[1])
        if share >= 5e-5 and name != "productive"
    )
    spares = "without spare nodes " if recipe.slurm.spare_nodes else ""
    percent = format_percent(lost.effective)
    mtbf, node_mtbf = lost.mtbf_s / 3600, best.config.cluster.node_mtbf_hours
    interval = f"every {format_plural(lost.interval_steps, 'step')}"
    if recipe.checkpoint.every_steps != "auto":
        before_end = lost.auto_steps < forecast.cost.steps
        choice = lost.auto_steps if before_end else "none before the end"
        interval += f"; checkpoint.every_steps: auto would choose {choice}"
    return {
        "utilization": f"{percent} of the node hours {spares}are productive; {parts}",
        "failures": f"one in {format_number(mtbf)} h (MTBF of one node: {node_mtbf:,.0f} h)",
        "checkpoints": interval,
    }


def points_table(plans: Plans, top: int | None) -> PlanTable:
    """Return a row for each recipe, cluster profile and node count, or several with `top`."""
    varied = [
        key
        for key in ("recipe", "cluster")
        if len({getattr(plan.config, key).name for plan in plans}) > 1
    ]
    headings = [*varied, "nodes", *(("#",) if top else ()), *POINT_HEADINGS]
    rows = []
    for plan in plans:
        for point in plan.points(top or 1):
            node_plan, layout = point.node_plan, point.candidate
            cells = {"seq/s": "nothing fits"}
            if layout is not None:
                cells = _cells(plan, layout)
                cells["scaling"] = format_percent(point.efficiency, 1)
                mark = " *" if layout is node_plan.recipe_layout else ""
                cells["#"] = f"{point.row}{mark}"
            cells |= {"recipe": plan.config.recipe.name, "cluster": plan.config.cluster.name}
            rows.append({**cells, "nodes": str(node_plan.nodes)})
    return _table(headings, rows)


def print_points(
    recipe_plans: Plans,
    top: int | None,
    submit: Callable[[RecipePlan, LayoutEstimate], str],
) -> None:
    """Print the rows of `points_table`, and below them the layouts that they are about.

    Args:
        submit: Returns the command that submits a layout.
    """
    print_table(*points_table(recipe_plans, top))
    for plan in recipe_plans:
        for point in plan.points():
            node_plan = point.node_plan
            request = format_plural(node_plan.nodes, "node")
            if len(recipe_plans) > 1:
                request = f"{plan.config.recipe.name} on {request} of {plan.config.cluster.name}"
            if point.candidate is None:
                for line in [*misfit_reasons(node_plan)[:1], *node_plan.nearest]:
                    click.echo(f"{request}: {line}")
                continue
            answer = f"{_answer(plan, point.candidate)}; on {point.candidate.description}"
            click.echo(f"{request}: {answer}; {recipe_layout_text(plan, node_plan)}")
            lines = [*evidence(point.candidate).reasons, submit(plan, point.candidate)]
            tokens = plan.forecast(point.candidate).cost.tokens
            epochs = epochs_text(plan.config.recipe.data, tokens)
            for line in filter(None, [*lines, epochs]):
                click.echo(f"  {line}")
    for line in price_lines(recipe_plans):
        click.echo(line)


def price_lines(recipe_plans: Plans) -> list[str]:
    """Return the price of each profile."""
    prices = {plan.config.cluster.name: plan.price for plan in recipe_plans}
    return [f"price of {name}: {price or _UNKNOWN_COST}" for name, price in prices.items()]


def is_single(plans: Plans) -> bool:
    return len(plans) == len(plans[0].node_plans) == 1


def tables(plans: Plans, top: int | None) -> list[PlanTable]:
    if is_single(plans):
        return list(layout_tables(plans[0], top or TOP))
    return [points_table(plans, top)]


def csv_rows(plans: Plans, top: int | None) -> list[Json]:
    if not is_single(plans):
        return _scaling_json(plans, top or 1)
    (node_plan,) = plans[0].node_plans
    return [
        {"rank": rank, **_layout_json(plans[0], node_plan, layout)}
        for rank, layout in node_plan.top(top or TOP)
    ]


POINT_HEADINGS = (
    "TP",
    "PP",
    "DP",
    "micro",
    "checkpointing",
    "seq/s",
    "90 %",
    "evidence",
    "tokens/s",
    "MFU",
    "$/h",
    "tokens/$",
    "scaling",
    "tokens",
    "time",
    "$",
)


def print_assumed(plans: Plans) -> None:
    """Print the hardware constants that are assumed, a line for each profile."""
    for name, constants in {plan.config.cluster.name: plan.assumed for plan in plans}.items():
        if constants:
            values = ", ".join(f"{constant} {value:g}" for constant, value in constants.items())
            click.echo(f"assumed, not measured: {values} (profile {name})")


def plan_json(plans: Plans, top: int | None, explained: bool) -> Json:
    """Return the --json output. `recipe`, `cluster` and `nodes` are lists only if values differ.

    `top` is the maximum number of layouts of each recipe and node count; None: all.
    """
    rows: dict[str, list[Any]] = {
        name: [] for name in ("candidates", "recipe_layouts", "refused", "nearest")
    }
    explanation = []
    for plan in plans:
        for node_plan in plan.node_plans:
            key = _key_json(plan, node_plan)
            rows["candidates"] += [
                _layout_json(plan, node_plan, layout)
                for layout in [*node_plan.fitting, *node_plan.too_large][:top]
            ]
            rows["recipe_layouts"].append(
                {**key, "rank": node_plan.recipe_rank, "fault": node_plan.recipe_fault}
            )
            rows["refused"].append({**key, "reasons": dict(node_plan.refused)})
            if node_plan.fitting:
                explanation += node_plan.explain()
            else:
                near = [change.to_json() for change in node_plan.nearest]
                rows["nearest"].append({**key, "would_fit": near})
    prices = {plan.config.cluster.name: plan.price for plan in plans}
    document = {
        "recipe": _value_or_list([plan.config.recipe.name for plan in plans]),
        "cluster": _value_or_list([plan.config.cluster.name for plan in plans]),
        "nodes": _value_or_list([node_plan.nodes for node_plan in plans[0].node_plans]),
        **rows,
        "assumed": {plan.config.cluster.name: plan.assumed for plan in plans},
        "prices": {name: price and price.as_json() for name, price in prices.items()},
        "warnings": plan_warnings(plans),
    }
    if not is_single(plans):
        document["scaling"] = _scaling_json(plans, 1)
    if explained:
        document["explanation"] = explanation
    return document


def _key_json(plan: RecipePlan, node_plan: NodePlan) -> Json:
    config = plan.config
    return {
        "recipe": config.recipe.name,
        "cluster": config.cluster.name,
        "nodes": node_plan.nodes,
    }


def _value_or_list(values: list[Any]) -> Any:
    different = list(dict.fromkeys(values))
    return different[0] if len(different) == 1 else values


def _layout_json(plan: RecipePlan, node_plan: NodePlan, layout: LayoutEstimate) -> Json:
    forecast = plan.forecast(layout)
    cost, lost, published = forecast.cost, forecast.lost_time, evidence(layout)
    epochs = corpus_epochs(layout.config.recipe.data, cost.tokens)
    return {
        "recipe": layout.config.recipe.name,
        "cluster": layout.config.cluster.name,
        **figures(layout),
        "evidence": published.status,
        "evidence_reasons": published.reasons,
        "evidence_software": published.generations or None,
        "nearest_run": published.nearest and asdict(published.nearest),
        "seq_per_s_interval": published.interval,
        "seq_per_s_by_network": network_range(layout),
        "nodes": layout.mesh.nodes,
        "tokens_per_s": layout.tokens_per_s,
        "tokens_per_usd": cost.tokens_per_usd,
        "usd_per_hour": cost.usd_per_hour,
        "reason": None if layout.fits else why_too_large(layout.memory),
        "utilization": lost.effective if lost else 0.0,
        "losses": lost and lost.shares,
        "checkpoint_every_steps": lost.interval_steps if lost else None,
        "tokens": cost.tokens,
        "epochs": epochs and epochs[1],
        "hours": forecast.hours,
        "hours_interval": published.hours_interval(forecast.hours),
        "usd": forecast.usd,
        "waiting_usd": cost.waiting_usd,
        "recipe_layout": layout is node_plan.recipe_layout,
    }


def _scaling_json(plans: Plans, top: int) -> list[Json]:
    rows: list[Json] = []
    for plan in plans:
        for point in plan.points(top):
            rows.append({**_key_json(plan, point.node_plan), "rank": point.rank, "fits": False})
            if point.candidate is not None:
                forecast = plan.forecast(point.candidate)
                hours = forecast.hours
                rows[-1] |= {
                    **_layout_json(plan, point.node_plan, point.candidate),
                    "scaling_efficiency": point.efficiency,
                    "days": hours and hours / 24,
                    "node_hours": hours and forecast.cost.node_hours,
                }
    return rows
