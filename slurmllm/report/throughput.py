"""The throughput of runs by node count, in the columns of Table 1 of the AWS post.

The measure is that of AWS's "Frugality meets Accuracy: Cost-efficient training of GPT NeoX and
Pythia models with AWS Trainium" (2023-12-12): the mean of the steps' throughput over the first 500
steps, each step once, first steps after a start included; and the tokens of an hour at that rate
per dollar of the nodes' price. Failures and saves are not included.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from slurmllm.config.resolve import RunConfig
from slurmllm.metrics.curves import Curve, Flags, Floats
from slurmllm.plan.parameters import model_flops
from slurmllm.plan.prices import scaling
from slurmllm.plan.step import peak_flops
from slurmllm.report.facts import Rate, RunFacts

FIRST_STEPS = 500


class ScalingRow(NamedTuple):
    """A run on one number of nodes."""

    facts: RunFacts
    rate: Rate
    # Throughput per node relative to that on the fewest nodes, with the same model, hardware and
    # sequence length; None if nodes or throughput are unknown.
    efficiency: float | None

    @property
    def degrees(self) -> tuple[int | None, int | None, int | None]:
        """Tensor, pipeline and data parallelism on these nodes."""
        mesh, workers = self.facts.mesh, self.rate.workers
        if mesh is None:
            return None, None, None
        # The plan is of the last submission: on other nodes only data parallelism differs.
        replica = mesh.tensor * mesh.pipeline
        divides = workers is not None and workers % replica == 0
        return mesh.tensor, mesh.pipeline, (workers or 0) // replica if divides else mesh.data

    @property
    def speed(self) -> float | None:
        """Sequences/s over the first steps, else over all."""
        return self.rate.seq_per_s_first_500 or self.rate.seq_per_s


def throughput_by_nodes(
    curve: Curve,
    sizes: Mapping[int, tuple[int, int]],
    config: RunConfig | None,
    usd_per_node_hour: float | None,
) -> list[Rate]:
    """Return the throughput by node count, the count with the most steps first.

    `sizes` has the nodes and workers of each attempt, if known.
    """
    sequences, tokens = per_s(curve)
    # A curve may begin later than step 1: the first 500 of the steps that it has.
    begin = max(0, int(curve.steps[0]) - 1)
    first_rows = int(np.searchsorted(curve.steps, begin + FIRST_STEPS, side="right"))
    groups: dict[tuple[int, int] | None, list[int]] = {}
    for attempt in np.unique(curve.attempts).tolist():
        groups.setdefault(sizes.get(attempt), []).append(attempt)
    rates = []
    for size, attempts in groups.items():
        rows: Flags = np.isin(curve.attempts, attempts)
        first: Flags = rows & (np.arange(len(rows)) < first_rows)
        nodes, workers = size or (None, None)
        seq_per_s, mfu = _reduce(np.mean, sequences, rows), None
        has_model = config is not None and config.recipe.command is None
        hardware = config.cluster.hardware if config is not None and has_model else None
        # A peak that is only a guess would give a figure that looks measured.
        if config and hardware and not hardware.rough and workers and seq_per_s:
            peak = workers * peak_flops(config)
            mfu = model_flops(config.recipe.model, 1) * seq_per_s / peak
        usd = usd_per_node_hour
        rates.append(
            Rate(
                nodes=nodes,
                workers=workers,
                steps=int(rows.sum()),
                first_steps=int(first.sum()),
                seq_per_s=seq_per_s,
                tokens_per_s=_reduce(np.mean, tokens, rows),
                seq_per_s_first_500=_reduce(np.mean, sequences, first),
                tokens_per_s_first_500=_reduce(np.mean, tokens, first),
                step_s=_reduce(np.median, curve.columns.get("step_time_s"), rows),
                mfu=mfu,
                usd_per_hour=nodes * usd if nodes and usd is not None else None,
            )
        )
    return sorted(rates, key=lambda rate: -rate.steps)


def _reduce(how: Callable[[Floats], Any], values: Floats | None, rows: Flags) -> float | None:
    """Return the mean or median of the finite values in some rows; None without any."""
    finite = np.empty(0) if values is None else values[rows][np.isfinite(values[rows])]
    return float(how(finite)) if len(finite) else None


def per_s(curve: Curve) -> tuple[Floats | None, Floats | None]:
    """Return sequences/s and tokens/s of each row; a missing one is computed from the other."""
    sequences, tokens = curve.columns.get("seq_per_s"), curve.columns.get("tokens_per_s")
    length, batch = map(curve.positive_setting, ("model.seq_len", "train.global_batch"))
    taken = curve.columns.get("step_time_s")
    if sequences is None and tokens is None and taken is not None and batch:
        with np.errstate(divide="ignore"):  # a step of 0 s, below the clock's resolution
            sequences = batch / taken
    if sequences is None and tokens is not None and length:
        sequences = tokens / length
    if tokens is None and sequences is not None and length:
        tokens = sequences * length
    return sequences, tokens


def scaling_rows(runs: Sequence[RunFacts]) -> list[ScalingRow]:
    """Return one row per run and node count, grouped by model, the fewest nodes first.

    A run without logged throughput has no row.
    """
    groups: dict[object, list[ScalingRow]] = {}
    for facts in runs:
        config, model = facts.configuration.config, facts.configuration.model
        # Equal for runs that differ only in their nodes.
        key: object = facts.recipe or facts.name
        if config is not None and model is not None:
            key = (model, config.cluster.name)
        for rate in facts.rates:
            if rate.seq_per_s is not None or rate.tokens_per_s is not None:
                groups.setdefault(key, []).append(ScalingRow(facts, rate, None))
    rows = []
    for group in groups.values():
        group.sort(key=lambda row: row.rate.nodes or 0)
        efficiencies = iter(
            scaling([(nodes, s) for row in group if (nodes := row.rate.nodes) and (s := row.speed)])
        )
        rows += [
            row._replace(efficiency=next(efficiencies)) if row.rate.nodes and row.speed else row
            for row in group
        ]
    return rows


def scaling_json(rows: Sequence[ScalingRow]) -> list[dict[str, Any]]:
    return [
        {
            "run": row.facts.name,
            "recipe": row.facts.recipe,
            "parameters": row.facts.parameters,
            "nodes": row.rate.nodes,
            "workers": row.rate.workers,
            **dict(zip(("tensor", "pipeline", "data"), row.degrees, strict=True)),
            "seq_len": row.facts.configuration.count("model.seq_len"),
            "global_batch": row.facts.configuration.count("train.global_batch"),
            "steps": row.rate.steps,
            "first_steps": row.rate.first_steps,
            "seq_per_s": row.speed,
            "tokens_per_s": row.rate.tokens_per_s_first_500 or row.rate.tokens_per_s,
            "mfu": row.rate.mfu,
            "usd_per_hour": row.rate.usd_per_hour,
            "tokens_per_usd": row.rate.tokens_per_usd,
            "scaling_efficiency": row.efficiency,
        }
        for row in rows
    ]
