"""The facts of a run that a report shows, independent of their presentation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from slurmllm.config.load import LenientConfig
from slurmllm.evaluate.scores import ScoreTable
from slurmllm.metrics.curves import Curve, SourceKind
from slurmllm.plan.mesh import Mesh
from slurmllm.plan.parameters import parameters
from slurmllm.records import AttemptRecord, DataRecord, Event
from slurmllm.report.throughput import Rate
from slurmllm.spikes import SpikeAnalysis
from slurmllm.status.recoveries import FailureRecovery
from slurmllm.status.utilization import Utilization

State = Literal["done", "stopped", "cancelled", "requeued", "open", "not started", "log"]
CheckpointState = Literal["kept", "invalidated", "damaged", "removed"]


@dataclass(frozen=True)
class CheckpointFacts:
    """A checkpoint that a run saved.

    Attributes:
        step: Its step.
        attempt: The attempt that saved it.
        tokens: Tokens trained by then.
        num_bytes: Size of all its files.
        saved_at: Unix time, s.
        seconds: Duration of the save.
        waited_s: Part of it that training waited.
        state: kept; invalidated (by a roll-back); damaged (no readable manifest); removed.
    """

    step: int
    attempt: int | None
    tokens: int | None
    num_bytes: int | None
    saved_at: float | None
    seconds: float | None
    waited_s: float | None
    state: CheckpointState


@dataclass(frozen=True)
class RunFacts:
    """A run, or a log of another framework.

    Attributes:
        name: Its name, unique in the report.
        path: The file or directory that was read.
        kind: Kind of that source.
        configuration: The configuration of a run.
        curve: Its metrics; None if there are none.
        mesh: The mesh of the last submission.
        attempts: Attempts of both stages, in the order of their starts.
        cancelled: Whether the last submission was cancelled.
        used: Its node hours; None for a log of another framework.
        lost: The recovery from each of its failures.
        rates: Its throughput by node count, the count with the most steps first.
        saved: Its checkpoints, removed ones included.
        scores: Evaluation scores of its checkpoints.
        spikes: Spikes of its loss.
        data: The corpora that it read.
        versions: Name → version on its nodes, with commas if nodes differ.
        events: Its events, oldest first.
        usd_per_node_hour: Price of a node.
        warnings: Unreadable files and other doubts.
    """

    name: str
    path: Path
    kind: SourceKind
    configuration: LenientConfig = field(default_factory=LenientConfig)
    curve: Curve | None = None
    mesh: Mesh | None = None
    attempts: tuple[AttemptRecord, ...] = ()
    cancelled: bool = False
    used: Utilization | None = None
    lost: tuple[FailureRecovery, ...] = ()
    rates: tuple[Rate, ...] = ()
    saved: tuple[CheckpointFacts, ...] = ()
    scores: tuple[ScoreTable, ...] = ()
    spikes: SpikeAnalysis | None = None
    data: DataRecord | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    events: tuple[Event, ...] = ()
    usd_per_node_hour: float | None = None
    warnings: tuple[str, ...] = ()

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
        return "requeued" if last.action == "requeue" else "stopped"

    @property
    def recipe(self) -> str | None:
        return self.configuration.text("name")

    @property
    def parameters(self) -> int | None:
        config = self.configuration.config
        return None if config is None else parameters(config.recipe.model)

    @property
    def steps(self) -> int:
        """The last step that the run kept."""
        return 0 if self.curve is None else int(self.curve.steps[-1])

    @property
    def planned_steps(self) -> int | None:
        return self.configuration.count("train.steps")

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
        made = set() if self.curve is None else {int(a) for a in set(self.curve.attempts.tolist())}
        return max(len(self.train), len(made), 1) - 1

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
