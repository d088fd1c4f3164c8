"""The throughput of a run by node count: seq/s, tokens/s, tokens per dollar, MFU.

The measure is that of Table 1 in AWS's "Frugality meets Accuracy: Cost-efficient training of GPT
NeoX and Pythia models with AWS Trainium" (2023-12-12): the mean of the steps' throughput over the
first 500 steps, each step once, first steps after a start included; and the tokens of an hour at
that rate per dollar of the nodes' price. Failures and saves are not included.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from slurmllm.config.resolve import RunConfig
from slurmllm.metrics.curves import Curve, Flags, Floats
from slurmllm.plan.estimate import peak_flops
from slurmllm.plan.flops import model_flops

FIRST_STEPS = 500
_HOUR_S = 3600.0


@dataclass(frozen=True)
class Rate:
    """The throughput of a run's steps on one number of nodes.

    Attributes:
        nodes: Number of nodes; None if no record has it.
        workers: Number of workers; None if no record has it.
        steps: Steps on so many nodes that the run kept.
        first_steps: Those among the run's first 500 steps.
        seq_per_s: Mean over all steps.
        tokens_per_s: Mean over all steps.
        seq_per_s_first_500: Mean over the first steps.
        tokens_per_s_first_500: Mean over the first steps.
        step_s: Median step time, s.
        mfu: Model-FLOPs utilization at the mean throughput; None if the peak is unknown.
        usd_per_hour: Price of all nodes; None without a price.
    """

    nodes: int | None
    workers: int | None
    steps: int
    first_steps: int
    seq_per_s: float | None
    tokens_per_s: float | None
    seq_per_s_first_500: float | None
    tokens_per_s_first_500: float | None
    step_s: float | None
    mfu: float | None = None
    usd_per_hour: float | None = None

    @property
    def tokens_per_usd(self) -> float | None:
        """Tokens per dollar while training, at the mean of the first 500 steps."""
        rate = self.tokens_per_s_first_500 or self.tokens_per_s
        return rate * _HOUR_S / self.usd_per_hour if rate and self.usd_per_hour else None


def throughput_by_nodes(
    curve: Curve,
    sizes: Mapping[int, tuple[int, int]],
    config: RunConfig | None,
    usd_per_node_hour: float | None,
) -> list[Rate]:
    """The throughput by node count, the count with the most steps first.

    Args:
        curve: The run's metrics.
        sizes: Attempt → its nodes and workers, if known.
        config: The run's configuration.
        usd_per_node_hour: Price of a node.
    """
    sequences, tokens = per_s(curve)
    # A curve may begin later than step 1: the first 500 of the steps that it has.
    begin = max(0, int(curve.steps[0]) - 1)
    first_rows = int(np.searchsorted(curve.steps, begin + FIRST_STEPS, side="right"))
    groups: dict[tuple[int, int] | None, list[int]] = {}
    for attempt in np.unique(curve.attempts).tolist():
        groups.setdefault(sizes.get(attempt), []).append(attempt)
    found = []
    for size, attempts in groups.items():
        own: Flags = np.isin(curve.attempts, attempts)
        first: Flags = own & (np.arange(len(own)) < first_rows)
        nodes, workers = size or (None, None)
        seq_per_s = _mean(sequences, own)
        found.append(
            Rate(
                nodes=nodes,
                workers=workers,
                steps=int(own.sum()),
                first_steps=int(first.sum()),
                seq_per_s=seq_per_s,
                tokens_per_s=_mean(tokens, own),
                seq_per_s_first_500=_mean(sequences, first),
                tokens_per_s_first_500=_mean(tokens, first),
                step_s=_median(curve.columns.get("step_time_s"), own),
                mfu=_mfu(config, workers, seq_per_s),
                usd_per_hour=(
                    nodes * usd_per_node_hour if nodes and usd_per_node_hour is not None else None
                ),
            )
        )
    return sorted(found, key=lambda rate: -rate.steps)


def per_s(curve: Curve) -> tuple[Floats | None, Floats | None]:
    """Sequences/s and tokens/s of each row; a missing one is computed from the other."""
    sequences, tokens = curve.columns.get("seq_per_s"), curve.columns.get("tokens_per_s")
    length, batch = (_number(curve, key) for key in ("model.seq_len", "train.global_batch"))
    taken = curve.columns.get("step_time_s")
    if sequences is None and tokens is None and taken is not None and batch:
        with np.errstate(divide="ignore"):
            sequences = batch / taken
    if sequences is None and tokens is not None and length:
        sequences = tokens / length
    if tokens is None and sequences is not None and length:
        tokens = sequences * length
    return sequences, tokens


def _number(curve: Curve, key: str) -> float | None:
    value = curve.settings.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if value > 0 else None


def _mean(values: Floats | None, rows: Flags) -> float | None:
    finite = _finite(values, rows)
    return float(np.mean(finite)) if len(finite) else None


def _median(values: Floats | None, rows: Flags) -> float | None:
    finite = _finite(values, rows)
    return float(np.median(finite)) if len(finite) else None


def _finite(values: Floats | None, rows: Flags) -> Floats:
    if values is None:
        return np.empty(0)
    own = values[rows]
    return own[np.isfinite(own)]


def _mfu(config: RunConfig | None, workers: int | None, seq_per_s: float | None) -> float | None:
    # A peak that is only a guess would give a figure that looks measured.
    hardware = None if config is None else config.cluster.hardware
    if config is None or hardware is None or hardware.rough or not workers or not seq_per_s:
        return None
    return model_flops(config.recipe.model, 1) * seq_per_s / (workers * peak_flops(config))
