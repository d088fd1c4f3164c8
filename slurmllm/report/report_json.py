"""The JSON of `slurmllm report`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from slurmllm.evaluate.scores import ScoreTable
from slurmllm.report.facts import CheckpointFacts, RunFacts
from slurmllm.report.scaling import scaling_json, scaling_rows
from slurmllm.report.write import ReportFiles
from slurmllm.status.recoveries import sum_by_ending
from slurmllm.status.utilization import sum_utilization


def to_json(runs: Sequence[RunFacts], written: ReportFiles | None) -> dict[str, Any]:
    """The whole document; unknown values are null.

    Args:
        runs: The runs of the report.
        written: Its files; None if none were written.
    """
    used = [facts.used for facts in runs if facts.used is not None]
    html = None if written is None else written.html
    found: dict[str, Any] = {
        "runs": [_run(facts) for facts in runs],
        "total": sum_utilization(used).model_dump(mode="json") if used else None,
        "scaling": scaling_json(scaling_rows(runs)),
        "report": {
            "html": None if html is None else str(html),
            "markdown": None if written is None else str(written.markdown),
        },
    }
    plain: dict[str, Any] = _finite(found)
    return plain


def _run(facts: RunFacts) -> dict[str, Any]:
    rate, mesh, spikes = facts.rate, facts.mesh, facts.spikes
    return {
        "name": facts.name,
        "path": str(facts.path),
        "kind": facts.kind,
        "state": facts.state,
        "recipe": facts.recipe,
        "parameters": facts.parameters,
        "nodes": facts.nodes,
        "mesh": None if mesh is None else mesh.to_json(),
        "steps": facts.steps,
        "planned_steps": facts.planned_steps,
        "tokens": facts.tokens,
        "loss": facts.loss,
        "val_loss": facts.val_loss,
        "seq_per_s": rate and rate.seq_per_s,
        "tokens_per_s": rate and rate.tokens_per_s,
        "seq_per_s_first_500": rate and rate.seq_per_s_first_500,
        "step_time_s": rate and rate.step_s,
        "tokens_per_usd": rate and rate.tokens_per_usd,
        "tokens_per_usd_bought": facts.tokens_per_usd_bought,
        "mfu": rate and rate.mfu,
        "usd": facts.usd,
        "restarts": facts.restarts,
        "checkpoints": [_saved(one) for one in facts.saved],
        "evaluations": [_scores(one) for one in facts.scores],
        "spikes": spikes and spikes.model_dump(mode="json", exclude={"spikes", "not_finite"}),
        "data": facts.data and facts.data.model_dump(mode="json"),
        "versions": dict(facts.versions),
        "utilization": facts.used and facts.used.model_dump(mode="json"),
        "recoveries": [one.model_dump(mode="json", by_alias=True) for one in facts.lost],
        "endings": [
            one.model_dump(mode="json", by_alias=True) for one in sum_by_ending(facts.lost)
        ],
        "warnings": list(facts.warnings),
    }


def _saved(one: CheckpointFacts) -> dict[str, Any]:
    return {
        "step": one.step,
        "attempt": one.attempt,
        "tokens": one.tokens,
        "bytes": one.num_bytes,
        "saved_at": one.saved_at,
        "seconds": one.seconds,
        "waited_s": one.waited_s,
        "kept": one.state in ("kept", "invalidated"),
        "state": one.state,
    }


def _scores(found: ScoreTable) -> dict[str, Any]:
    return {
        "suite": found.suite,
        "rows": [asdict(row) for row in found.rows],
        "steps": list(found.steps),
        "tokens": dict(found.tokens),
        "sources": dict(found.sources),
    }


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become null."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
