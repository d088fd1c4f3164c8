"""The JSON of `slurmllm plan`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slurmllm.plan.estimate import LayoutEstimate
from slurmllm.plan.explain import explain, settings, why_too_large
from slurmllm.plan.recipe_plan import Forecaster, NodePlan, RecipePlan, ScalingPoint


def plan_json(plans: Sequence[RecipePlan], top: int | None, explained: bool) -> dict[str, Any]:
    """The whole document. `recipe`, `cluster` and `nodes` are lists only if values differ.

    Args:
        plans: One for each recipe.
        top: Maximum number of layouts of each recipe and node count; None: all.
        explained: Whether to include the explanation.
    """
    every = [(plan, one) for plan in plans for one in plan.node_plans]
    found: dict[str, Any] = {
        "recipe": _one_or_all([plan.config.recipe.name for plan in plans]),
        "cluster": _one_or_all([plan.config.cluster.name for plan in plans]),
        "nodes": _one_or_all([one.nodes for one in plans[0].node_plans]),
        "candidates": [
            _candidate(one, candidate, plan.forecaster)
            for plan, one in every
            for candidate in [*one.fitting, *one.too_large][:top]
        ],
        "recipe_layouts": [_recipe_layout(one) for _, one in every],
        "refused": [{**_key(one), "reasons": dict(one.search.refused)} for _, one in every],
        "warnings": list(dict.fromkeys(warning for plan in plans for warning in plan.warnings)),
    }
    if len(every) > 1:
        found["scaling"] = [_point(point) for plan in plans for point in plan.points()]
    if explained:
        found["explanation"] = [
            line for _, one in every if one.fitting for line in explain(one.fitting, one.too_large)
        ]
    return found


def _one_or_all(values: list[Any]) -> Any:
    different = list(dict.fromkeys(values))
    return different[0] if len(different) == 1 else values


def _key(plan: NodePlan) -> dict[str, Any]:
    return {"recipe": plan.search.config.recipe.name, "nodes": plan.nodes}


def _candidate(plan: NodePlan, one: LayoutEstimate, forecaster: Forecaster) -> dict[str, Any]:
    forecast = forecaster.forecast(one)
    cost, losses = forecast.cost, forecast.losses
    return {
        "recipe": one.config.recipe.name,
        **settings(one),
        "accumulation": one.mesh.accumulation,
        "nodes": one.mesh.nodes,
        "seq_per_s": one.seq_per_s,
        "tokens_per_s": one.tokens_per_s,
        "tokens_per_usd": cost.tokens_per_usd,
        "usd_per_hour": cost.usd_per_hour,
        "step_s": one.step.total,
        "parts_s": one.step.parts(),
        "memory_bytes": one.memory.peak,
        "memory": dict(one.memory.parts),
        "memory_limit_bytes": one.memory.limit,
        "fits": one.fits,
        "reason": None if one.fits else why_too_large(one.memory),
        "mfu": one.mfu,
        "utilization": losses.effective if losses else 0.0,
        "losses": dict(losses.shares) if losses else None,
        "checkpoint_every_steps": losses.interval_steps if losses else None,
        "tokens": cost.tokens,
        "hours": forecast.hours,
        "usd": forecast.usd,
        "recipe_layout": plan.is_recipe_layout(one),
    }


def _recipe_layout(plan: NodePlan) -> dict[str, Any]:
    """The rank of the recipe's own layout among those that fit, or why it is impossible."""
    own = plan.recipe_layout
    row: dict[str, Any] = {**_key(plan), "rank": None, "fault": None}
    if own is None:
        return row
    if own.candidate is None:
        return {**row, "fault": own.fault}
    if not own.candidate.fits:
        return {**row, "fault": why_too_large(own.candidate.memory)}
    return {**row, "rank": plan.rank(own.candidate)}


def _point(point: ScalingPoint) -> dict[str, Any]:
    row: dict[str, Any] = {"recipe": point.recipe, "nodes": point.nodes}
    if point.candidate is None or point.forecast is None:
        return {**row, "fits": False}
    cost, hours = point.forecast.cost, point.forecast.hours
    return {
        **row,
        "fits": True,
        **settings(point.candidate),
        "seq_per_s": point.candidate.seq_per_s,
        "tokens_per_s": point.candidate.tokens_per_s,
        "usd_per_hour": cost.usd_per_hour,
        "tokens_per_usd": cost.tokens_per_usd,
        "scaling_efficiency": point.efficiency,
        "tokens": cost.tokens,
        "days": None if hours is None else hours / 24,
        "usd": point.forecast.usd,
    }
