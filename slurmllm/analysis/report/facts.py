"""The facts of a run that a report shows, independent of their presentation.

Throughput is measured as in Table 1 of AWS's "Frugality meets Accuracy: Cost-efficient training of
GPT NeoX and Pythia models with AWS Trainium" (2023-12-12): the mean over the first 500 steps, each
step once, first steps after a start included; and the tokens of an hour at that rate per dollar of
the nodes' price. Failures and saves are not included.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from slurmllm.analysis.evaluate.scores import ScoreTable
from slurmllm.analysis.spikes import SpikeAnalysis
from slurmllm.analysis.status.recoveries import FailureRecovery
from slurmllm.analysis.status.utilization import Utilization
from slurmllm.core.config.load import LenientConfig
from slurmllm.core.config.resolve import RunConfig
from slurmllm.core.format import Json, Texts, by_key
from slurmllm.core.metrics.curves import Curve, Flags, Floats, SourceKind
from slurmllm.core.run.artifact_records import DataRecord
from slurmllm.core.run.records import CONTINUES, AttemptRecord, Event
from slurmllm.plan.mesh import Mesh
from slurmllm.plan.parameters import parameters
from slurmllm.plan.prices import NodePrice
from slurmllm.plan.step import flops_utilization

if TYPE_CHECKING:
    from slurmllm.analysis.compare.result import Comparison

State = Literal["done", "stopped", "cancelled", "requeued", "open", "not started", "log"]
FIRST_STEPS = 500
CheckpointState = Literal["kept", "invalidated", "damaged", "removed"]


@dataclass(frozen=True)
class CheckpointFacts:
    """A checkpoint that a run saved."""

    step: int
    attempt: int | None = None  # the attempt that saved it
    tokens: int | None = None  # tokens trained by then
    bytes: int | None = None  # size of all its files
    saved_at: float | None = None  # Unix time, s
    seconds: float | None = None  # duration of the save
    waited_s: float | None = None  # part of it that training waited
    # kept; invalidated (by a roll-back); damaged (no readable manifest, or half-written); removed
    state: CheckpointState = "removed"


@dataclass(frozen=True)
class Rate:
    """The throughput of a run's steps on one number of nodes."""

    nodes: int | None  # None if no record has it
    workers: int | None  # None if no record has it
    steps: int  # steps on so many nodes that the run kept
    first_steps: int  # those among the run's first 500 steps
    seq_per_s: float | None  # mean over all steps
    tokens_per_s: float | None  # mean over all steps
    seq_per_s_first_500: float | None  # mean over the first steps
    tokens_per_s_first_500: float | None  # mean over the first steps
    step_s: float | None  # median step time, s
    # Model-FLOPs utilization at the mean throughput; None if the peak is unknown
    mfu: float | None = None
    usd_per_hour: float | None = None  # price of all nodes; None without a price

    @property
    def tokens_per_usd(self) -> float | None:
        """Tokens per dollar while training, at the mean of the first 500 steps."""
        rate = self.tokens_per_s_first_500 or self.tokens_per_s
        return rate * 3600.0 / self.usd_per_hour if rate and self.usd_per_hour else None


@dataclass(frozen=True)
class RunFacts:
    """A run, or a log of another framework."""

    name: str  # unique in the report
    path: Path  # the file or directory that was read
    kind: SourceKind
    configuration: LenientConfig = field(default_factory=LenientConfig)
    curve: Curve | None = None  # metrics; None if there are none
    mesh: Mesh | None = None  # the mesh of the last submission
    # attempts of both stages, in the order of their starts
    attempts: Sequence[AttemptRecord] = ()
    cancelled: bool = False  # whether the last submission was cancelled
    used: Utilization | None = None  # node hours; None for a log of another framework
    lost: Sequence[FailureRecovery] = ()  # one per failure
    # throughput by node count, the count with the most steps first
    rates: Sequence[Rate] = ()
    saved: Sequence[CheckpointFacts] = ()  # checkpoints, removed ones included
    scores: Sequence[ScoreTable] = ()  # evaluation scores of its checkpoints
    spikes: SpikeAnalysis | None = None
    # with the first run that has a loss; a text if they cannot be compared
    comparison: Comparison | str | None = None
    # by metric, the step from which it differs from the curve that it is compared with
    diverges_at: Mapping[str, int] = field(default_factory=dict)
    data: DataRecord | None = None  # the corpora that it read
    # name → version on its nodes, with commas if nodes differ
    versions: Mapping[str, str] = field(default_factory=dict)
    events: Sequence[Event] = ()  # events, oldest first
    price: NodePrice | None = None
    warnings: Texts = ()  # unreadable files and other doubts

    @property
    def train(self) -> list[AttemptRecord]:
        return [attempt for attempt in self.attempts if attempt.stage == "train"]

    @property
    def state(self) -> State:
        """Its state by its own records, without Slurm."""
        if self.kind != "run":
            return "log"
        newest = int(self.curve.attempts.max()) if self.curve else -1
        if not self.train or newest > self.train[-1].attempt:  # its record is missing
            if not self.curve:
                return "not started"
            return "done" if self.steps == self.planned_steps else "open"
        last = self.train[-1]
        if last.action == "finish" or last.ending == "done":
            return "done"
        if last.ending == "cancelled" or (self.cancelled and last.action != "stop"):
            return "cancelled"
        if last.ended_at is None:
            return "open"
        return "requeued" if last.action in CONTINUES else "stopped"

    @property
    def state_text(self) -> str:
        """The state; `done early` of a command that ended before its last step."""
        early = self.state == "done" and self.train and self.train[-1].done_early
        return "done early" if early else self.state

    @property
    def recipe(self) -> str | None:
        return self.configuration.text("name")

    @property
    def parameters(self) -> int | None:
        model = self.configuration.model
        return parameters(model) if model else None

    @property
    def steps(self) -> int:
        """The last step that the run kept; the number of steps of a log that begins with step 0."""
        if not self.curve:
            return 0
        return int(self.curve.steps[-1]) + (self.kind != "run" and int(self.curve.steps[0]) == 0)

    @property
    def planned_steps(self) -> int | None:
        return self.configuration.count("train.steps") or self.configuration.count("command.steps")

    @property
    def tokens(self) -> int | None:
        if not self.curve:
            return None
        last = self.curve.positions("tokens")[-1]
        return int(last) if np.isfinite(last) else None

    @property
    def loss(self) -> float | None:
        """The last finite loss."""
        return self._last("loss")

    @property
    def val_loss(self) -> float | None:
        """The last finite validation loss."""
        return self._last("val_loss")

    @property
    def rate(self) -> Rate | None:
        """The throughput on the node count with the most steps."""
        return self.rates[0] if self.rates else None

    @property
    def nodes(self) -> int | None:
        """Node count with the most steps, else of the last attempt or of the plan."""
        if self.rate and self.rate.nodes is not None:
            return self.rate.nodes
        if self.train:
            return len(self.train[-1].nodes)
        return self.mesh.nodes if self.mesh else None

    @property
    def restarts(self) -> int:
        with_steps = set(self.curve.attempts.tolist()) if self.curve else set()
        return max(len(self.train), len(with_steps), 1) - 1

    @property
    def usd(self) -> float | None:
        """Cost of its node hours; None without a price or without attempt records."""
        return self.used.usd if self.used is not None and self.attempts else None

    @property
    def tokens_per_usd_bought(self) -> float | None:
        """Tokens trained per dollar of all node hours, lost ones included."""
        return self.tokens / self.usd if self.tokens and self.usd else None

    def _last(self, metric: str) -> float | None:
        if not self.curve:
            return None
        _, values = self.curve.series(metric)
        finite = values[np.isfinite(values)]
        return float(finite[-1]) if len(finite) else None


Runs = Sequence[RunFacts]


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
        mesh = self.facts.mesh
        workers = self.rate.workers
        if not mesh:
            return None, None, None
        # The plan is of the last submission: on other nodes only data parallelism differs.
        replica = mesh.tensor * mesh.pipeline
        divides = workers is not None and workers % replica == 0
        return mesh.tensor, mesh.pipeline, (workers or 0) // replica if divides else mesh.data

    @property
    def speed(self) -> float | None:
        """Sequences/s over the first steps, else over all."""
        return self.rate.seq_per_s_first_500 or self.rate.seq_per_s

    def to_json(self) -> Json:
        facts = self.facts
        rate = self.rate
        return {
            "run": facts.name,
            "recipe": facts.recipe,
            "parameters": facts.parameters,
            "nodes": rate.nodes,
            "workers": rate.workers,
            **dict(zip(("tensor", "pipeline", "data"), self.degrees, strict=True)),
            "seq_len": facts.configuration.count("model.seq_len"),
            "global_batch": facts.configuration.count("train.global_batch"),
            "steps": rate.steps,
            "first_steps": rate.first_steps,
            "seq_per_s": self.speed,
            "tokens_per_s": rate.tokens_per_s_first_500 or rate.tokens_per_s,
            "mfu": rate.mfu,
            "usd_per_hour": rate.usd_per_hour,
            "tokens_per_usd": rate.tokens_per_usd,
            "scaling_efficiency": self.efficiency,
        }


def throughput_by_nodes(
    curve: Curve,
    sizes: Mapping[int, tuple[int, int]],
    config: RunConfig | None,
    usd: float | None,
) -> list[Rate]:
    """Return the throughput by node count, the count with the most steps first.

    `sizes` has the nodes and workers of each attempt, if known; `usd` is the price of a node hour.
    """
    sequences, tokens = per_s(curve)
    # A curve may begin later than step 1: the first 500 of the steps that it has.
    begin = max(0, int(curve.steps[0]) - 1)
    first_rows = int(curve.steps.searchsorted(begin + FIRST_STEPS, side="right"))
    numbers = np.unique(curve.attempts).tolist()
    rates = []
    for size, attempts in by_key((sizes.get(number), number) for number in numbers).items():
        rows: Flags = np.isin(curve.attempts, attempts)
        first: Flags = rows & (np.arange(len(rows)) < first_rows)
        nodes, workers = size or (None, None)
        seq_per_s = _reduce(np.mean, sequences, rows)
        mfu = None
        if config and workers and seq_per_s:
            mfu = flops_utilization(config, workers, seq_per_s)
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
    sequences = curve.columns.get("seq_per_s")
    tokens = curve.columns.get("tokens_per_s")
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


def scaling_rows(runs: Runs) -> list[ScalingRow]:
    """Return one row per run and node count, grouped by model, the fewest nodes first.

    A run without logged throughput has no row.
    """
    groups: dict[object, list[ScalingRow]] = {}
    for facts in runs:
        config = facts.configuration.config
        model = facts.configuration.model
        # Equal for runs that differ only in their nodes.
        key: object = facts.recipe or facts.name
        if config and model:
            key = (model, config.cluster.name)
        for rate in facts.rates:
            if rate.seq_per_s is not None or rate.tokens_per_s is not None:
                groups.setdefault(key, []).append(ScalingRow(facts, rate, None))
    rows = []
    for group in groups.values():
        group.sort(key=lambda row: row.rate.nodes or 0)
        measured = [(n, s) for row in group if (n := row.rate.nodes) and (s := row.speed)]
        fewest, base = min(measured, default=(1, 1.0))
        for row in group:
            if row.rate.nodes and row.speed:
                row = row._replace(efficiency=row.speed / row.rate.nodes * fewest / base)
            rows.append(row)
    return rows
