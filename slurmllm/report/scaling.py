"""Throughput over node counts, in the columns of Table 1 of the AWS post.

See `throughput.py` for the source and the measure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from slurmllm.format import (
    ABSENT,
    format_count,
    format_dollars,
    format_integer,
    format_number,
    format_percent,
)
from slurmllm.plan.cost import scaling
from slurmllm.report.blocks import Table
from slurmllm.report.facts import RunFacts
from slurmllm.report.throughput import Rate


class ScalingRow(NamedTuple):
    """A run on one number of nodes.

    Attributes:
        facts: The run.
        rate: Its throughput.
        efficiency: Throughput per node relative to that on the fewest nodes, with the same model,
            hardware and sequence length; None if nodes or throughput are unknown.
    """

    facts: RunFacts
    rate: Rate
    efficiency: float | None

    @property
    def degrees(self) -> tuple[int | None, int | None, int | None]:
        """Tensor, pipeline and data parallelism on these nodes."""
        mesh = self.facts.mesh
        if mesh is None:
            return None, None, None
        known = (
            self.rate.workers is not None and self.rate.workers % (mesh.tensor * mesh.pipeline) == 0
        )
        data = (self.rate.workers or 0) // (mesh.tensor * mesh.pipeline) if known else mesh.data
        return mesh.tensor, mesh.pipeline, data


def scaling_rows(several: Sequence[RunFacts]) -> list[ScalingRow]:
    """One row per run and node count, grouped by model, the fewest nodes first.

    A run without logged throughput has no row.
    """
    groups: dict[object, list[tuple[RunFacts, Rate]]] = {}
    for facts in several:
        for rate in facts.rates:
            if rate.seq_per_s is None and rate.tokens_per_s is None:
                continue
            groups.setdefault(_comparable(facts), []).append((facts, rate))
    rows = []
    for group in groups.values():
        group.sort(key=lambda one: one[1].nodes or 0)
        known = [(rate.nodes, speed) for _, rate in group if rate.nodes and (speed := _speed(rate))]
        efficiencies = iter(scaling(known))
        rows += [
            ScalingRow(facts, rate, next(efficiencies) if rate.nodes and _speed(rate) else None)
            for facts, rate in group
        ]
    return rows


def _speed(rate: Rate) -> float | None:
    return rate.seq_per_s_first_500 or rate.seq_per_s


def _comparable(facts: RunFacts) -> object:
    """A key that is equal for runs that differ only in their nodes."""
    config = facts.configuration.config
    if config is None:
        return facts.recipe or facts.name
    return config.recipe.model, config.cluster.name


def scaling_table(rows: Sequence[ScalingRow]) -> Table:
    """AWS's columns that `slurmllm plan` has too, with the same names."""
    return Table(
        ("run", "model", "parameters", "nodes", "workers", "TP", "PP", "DP", "seq len",
         "global batch", "seq/s", "tokens/s", "MFU", "$/h", "tokens/$", "scaling"),
        [
            (
                row.facts.name,
                row.facts.recipe or ABSENT,
                format_count(row.facts.parameters),
                format_integer(row.rate.nodes),
                format_integer(row.rate.workers),
                *(format_integer(degree) for degree in row.degrees),
                format_integer(row.facts.configuration.count("model.seq_len")),
                format_integer(row.facts.configuration.count("train.global_batch")),
                format_number(_speed(row.rate)),
                format_number(row.rate.tokens_per_s_first_500 or row.rate.tokens_per_s),
                format_percent(row.rate.mfu),
                format_dollars(row.rate.usd_per_hour),
                format_count(row.rate.tokens_per_usd),
                ABSENT if row.efficiency is None else f"{100 * row.efficiency:.1f} %",
            )
            for row in rows
        ],
    )  # fmt: skip


def scaling_json(rows: Sequence[ScalingRow]) -> list[dict[str, Any]]:
    """The rows for `--json`."""
    found = []
    for row in rows:
        tensor, pipeline, data = row.degrees
        found.append(
            {
                "run": row.facts.name,
                "recipe": row.facts.recipe,
                "parameters": row.facts.parameters,
                "nodes": row.rate.nodes,
                "workers": row.rate.workers,
                "tensor": tensor,
                "pipeline": pipeline,
                "data": data,
                "seq_len": row.facts.configuration.count("model.seq_len"),
                "global_batch": row.facts.configuration.count("train.global_batch"),
                "steps": row.rate.steps,
                "first_steps": row.rate.first_steps,
                "seq_per_s": _speed(row.rate),
                "tokens_per_s": row.rate.tokens_per_s_first_500 or row.rate.tokens_per_s,
                "mfu": row.rate.mfu,
                "usd_per_hour": row.rate.usd_per_hour,
                "tokens_per_usd": row.rate.tokens_per_usd,
                "scaling_efficiency": row.efficiency,
            }
        )
    return found
