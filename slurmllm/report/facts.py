"""The facts of a run that a report shows, independent of their presentation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from slurmllm.config.load import LenientConfig
from slurmllm.evaluate.scores import ScoreTable
from slurmllm.metrics.curves import Curve, SourceKind
from slurmllm.plan.mesh import Mesh
from slurmllm.plan.parameters import parameters
from slurmllm.plan.prices import NodePrice
from slurmllm.run.artifact_records import DataRecord
from slurmllm.run.records import CONTINUES, AttemptRecord, Event
from slurmllm.spikes import SpikeAnalysis
from slurmllm.status.recoveries import FailureRecovery
from slurmllm.status.utilization import Utilization

if TYPE_CHECKING:
    from slurmllm.compare.comparison import Comparison

State = Literal["done", "stopped", "cancelled", "requeued", "open", "not started", "log"]
CheckpointState = Literal["kept", "invalidated", "damaged", "removed"]


@dataclass(frozen=True)
class CheckpointFacts:
    """A checkpoint that a run saved."""

    step: int
    attempt: int | None  # the attempt that saved it
    tokens: int | None  # tokens trained by then
    bytes: int | None  # size of all its files
    saved_at: float | None  # Unix time, s
    seconds: float | None  # duration of the save
    waited_s: float | None  # part of it that training waited
    # kept; invalidated (by a roll-back); damaged (no readable manifest, or half-written); removed
    state: CheckpointState


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
    attempts: tuple[AttemptRecord, ...] = ()
    cancelled: bool = False  # whether the last submission was cancelled
    used: Utilization | None = None  # node hours; None for a log of another framework
    lost: tuple[FailureRecovery, ...] = ()  # one per failure
    # throughput by node count, the count with the most steps first
    rates: tuple[Rate, ...] = ()
    saved: tuple[CheckpointFacts, ...] = ()  # checkpoints, removed ones included
    scores: tuple[ScoreTable, ...] = ()  # evaluation scores of its checkpoints
    spikes: SpikeAnalysis | None = None
    # with the first run that has a loss; a text if they cannot be compared
    comparison: Comparison | str | None = None
    data: DataRecord | None = None  # the corpora that it read
    # name → version on its nodes, with commas if nodes differ
    versions: Mapping[str, str] = field(default_factory=dict)
    events: tuple[Event, ...] = ()  # events, oldest first
    price: NodePrice | None = None
    warnings: tuple[str, ...] = ()  # unreadable files and other doubts

    @property
    def train(self) -> tuple[AttemptRecord, ...]:
        return tuple(attempt for attempt in self.attempts if attempt.stage == "train")

    @property
    def state(self) -> State:
        """Its state by its own records, without Slurm."""
        if self.kind != "run":
            return "log"
        newest = -1 if self.curve is None else int(self.curve.attempts.max())
        if not self.train or newest > self.train[-1].attempt:  # its record is missing
            if self.curve is None:
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
    def recipe(self) -> str | None:
        return self.configuration.text("name")

    @property
    def parameters(self) -> int | None:
        model = self.configuration.model
        return None if model is None else parameters(model)

    @property
    def steps(self) -> int:
        """The last step that the run kept; the number of steps of a log that begins with step 0."""
        if self.curve is None:
            return 0
        return int(self.curve.steps[-1]) + (self.kind != "run" and int(self.curve.steps[0]) == 0)

    @property
    def planned_steps(self) -> int | None:
        return self.configuration.count("train.steps") or self.configuration.count("command.steps")

    @property
    def tokens(self) -> int | None:
        if self.curve is None:
            return None
        last = self.curve.positions("tokens")[-1]
        return int(last) if last == last else None

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
        if self.rate is not None and self.rate.nodes is not None:
            return self.rate.nodes
        if self.train:
            return len(self.train[-1].nodes)
        return self.mesh.nodes if self.mesh is not None else None

    @property
    def restarts(self) -> int:
        with_steps = set() if self.curve is None else set(self.curve.attempts.tolist())
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
        if self.curve is None:
            return None
        _, values = self.curve.series(metric)
        finite = values[abs(values) < float("inf")]
        return float(finite[-1]) if len(finite) else None
