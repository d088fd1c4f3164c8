"""The JSON of `slurmllm plan`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slurmllm.plan.estimate import LayoutEstimate
from slurmllm.plan.explain import explain, settings, why_too_large
from slurmllm.plan.recipe_plan import Forecaster, NodePlan, RecipePlan, ScalingPoint


def text(answers: Sequence[RecipePlan], top: int | None, explained: bool) -> dict[str, Any]:
    """All of it. With one recipe, or one node count, its own value stands where else is a list.

    Args:
        answers: A recipe each.
        top: Layouts of each recipe and node count, at most; None: all.
        explained: Whether to say why.
    """
    first, every = answers[0], [(one, p) for one in answers for p in one.planned]
    nodes = [planned.plan.nodes for planned in first.planned]
    rows = [row for one, p in every for row in _candidates(p, one.foresight, top)]
    found: dict[str, Any] = {
        "recipe": _one_or_all([one.config.recipe.name for one in answers]),
        "cluster": _one_or_all([one.config.cluster.name for one in answers]),
        "nodes": _one_or_all(nodes),
        "candidates": rows,
        "written": [_written(planned) for _, planned in every],
        "refused": [{**_where(p), "reasons": dict(p.plan.refused)} for _, p in every],
        "warnings": list(dict.fromkeys(w for one in answers for w in one.warnings)),
    }
    if len(every) > 1:
        found["scaling"] = [_point(point) for one in answers for point in one.points()]
    if explained:
        found["explanation"] = [
            line for _, p in every if p.fitting for line in explain(p.fitting, p.too_large)
        ]
    return found


def _one_or_all(values: list[Any]) -> Any:
    different = list(dict.fromkeys(values))
    return different[0] if len(different) == 1 else values


def _where(planned: NodePlan) -> dict[str, Any]:
    return {"recipe": planned.plan.config.recipe.name, "nodes": planned.plan.nodes}


def _candidates(planned: NodePlan, foresight: Forecaster, top: int | None) -> list[dict[str, Any]]:
    """Those that fit, fastest first, then those that do not, the least memory first."""
    every = [*planned.fitting, *planned.too_large][:top]
    return [_candidate(planned, one, foresight) for one in every]


def _candidate(planned: NodePlan, one: LayoutEstimate, foresight: Forecaster) -> dict[str, Any]:
    prospects = foresight.of(one)
    cost, losses = prospects.cost, prospects.losses
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
        "hours": prospects.hours,
        "usd": prospects.usd,
        "written": planned.is_written(one),
    }


def _written(planned: NodePlan) -> dict[str, Any]:
    """The recipe's own layout: its rank among those that fit, or why it cannot be."""
    own = planned.written
    place: dict[str, Any] = {**_where(planned), "rank": None, "fault": None}
    if own is None:
        return place
    if own.candidate is None:
        return {**place, "fault": own.fault}
    if not own.candidate.fits:
        return {**place, "fault": why_too_large(own.candidate.memory)}
    return {**place, "rank": planned.rank(own.candidate)}


def _point(point: ScalingPoint) -> dict[str, Any]:
    row: dict[str, Any] = {"recipe": point.recipe, "nodes": point.nodes}
    if point.candidate is None or point.prospects is None:
        return {**row, "fits": False}
    cost, hours = point.prospects.cost, point.prospects.hours
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
        "usd": point.prospects.usd,
    }
