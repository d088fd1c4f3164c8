"""What a report says of a run: figures alone, however they are shown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from slurmllm.evaluate.scores import ScoreTable
from slurmllm.metrics.curves import Curve, SourceKind
from slurmllm.plan.mesh import Mesh
from slurmllm.plan.parameters import parameters
from slurmllm.records import AttemptRecord, DataRecord, Event
from slurmllm.report.configuration import Configuration
from slurmllm.report.throughput import Rate
from slurmllm.spikes import SpikeAnalysis
from slurmllm.status.recoveries import FailureRecovery
from slurmllm.status.utilization import Utilization

State = Literal["done", "stopped", "cancelled", "requeued", "open", "not started", "log"]
CheckpointState = Literal["kept", "set aside", "damaged", "removed"]


@dataclass(frozen=True)
class CheckpointFacts:
    """A checkpoint that a run saved.

    Attributes:
        step: Its step.
        attempt: That saved it.
        tokens: Trained on by then.
        num_bytes: Of all its files.
        saved_at: Unix time, s.
        seconds: From begin to end of the save.
        waited_s: Of these, that training waited.
        state: kept; set aside (by a roll-back); damaged (no readable manifest); removed.
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
        name: What it is called here; no two of a report have one name.
        path: What was read.
        kind: What that is.
        configuration: Of a run.
        curve: Its metrics; None where there are none.
        mesh: As it was planned last.
        attempts: Of both stages, in the order of their starts.
        cancelled: Whether somebody cancelled it, and nobody has resumed it since.
        used: Its node hours; None of another framework's log.
        lost: What its failures cost.
        rates: Its throughput by node count, the count with the most steps first.
        saved: Its checkpoints, also those that are gone.
        scores: What its checkpoints scored.
        spikes: Of its loss.
        data: What it read.
        versions: Name → version on its nodes; several, where nodes differ, with commas.
        events: Beside the steps, oldest first.
        usd_per_node_hour: Price of a node.
        warnings: What a reader should know.
    """

    name: str
    path: Path
    kind: SourceKind
    configuration: Configuration = field(default_factory=Configuration)
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
        """The attempts of the train stage."""
        return tuple(attempt for attempt in self.attempts if attempt.stage == "train")

    @property
    def state(self) -> State:
        """Where it stands, as far as its own records tell."""
        if self.kind != "run":
            return "log"
        newest = -1 if self.curve is None else int(self.curve.attempts.max())
        if not self.train or newest > self.train[-1].attempt:  # its record is not there
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
        """The recipe's name."""
        return self.configuration.text("name")

    @property
    def parameters(self) -> int | None:
        """Numbers that the model learns."""
        config = self.configuration.config
        return None if config is None else parameters(config.recipe.model)

    @property
    def steps(self) -> int:
        """The last step that was made and stands."""
        return 0 if self.curve is None else int(self.curve.steps[-1])

    @property
    def planned_steps(self) -> int | None:
        """Steps that the recipe asks for."""
        return self.configuration.count("train.steps")

    @property
    def tokens(self) -> int | None:
        """Trained on up to the last step."""
        if self.curve is None:
            return None
        last = self.curve.positions("tokens")[-1]
        return int(last) if last == last else None

    @property
    def loss(self) -> float | None:
        """The last finite one."""
        return self._last("loss")

    @property
    def val_loss(self) -> float | None:
        """Likewise on held-out text."""
        return self._last("val_loss")

    @property
    def rate(self) -> Rate | None:
        """The throughput on the node count that most steps were made on."""
        return self.rates[0] if self.rates else None

    @property
    def nodes(self) -> int | None:
        """That most steps were made on, else those of the last attempt or of the plan."""
        if self.rate is not None and self.rate.nodes is not None:
            return self.rate.nodes
        if self.train:
            return len(self.train[-1].nodes)
        return self.mesh.nodes if self.mesh is not None else None

    @property
    def restarts(self) -> int:
        """How often training began again."""
        made = set() if self.curve is None else {int(a) for a in set(self.curve.attempts.tolist())}
        return max(len(self.train), len(made), 1) - 1

    @property
    def usd(self) -> float | None:
        """What its node hours cost; None without a price or without records of attempts."""
        return self.used.usd if self.used is not None and self.attempts else None

    @property
    def tokens_per_usd_bought(self) -> float | None:
        """Tokens trained on for each dollar spent, whatever was lost on the way."""
        return self.tokens / self.usd if self.tokens and self.usd else None

    def _last(self, metric: str) -> float | None:
        if self.curve is None:
            return None
        _, values = self.curve.series(metric)
        finite = values[abs(values) < float("inf")]
        return float(finite[-1]) if len(finite) else None
