"""A run to simulate: its recipe and cluster, what fails and when, and how long everything takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from slurmllm.core.config.recipe import Recipe
from slurmllm.core.run.records import EndingClass
from slurmllm.plan.lost_time import (
    HOUR_S,
    REPORTED_S,
    SLURMD_TIMEOUT_S,
    UNWATCHED_S,
    Durations,
    SaveCost,
)

DAY_S = 24 * HOUR_S

FailureKind = Literal[
    "device",  # an accelerator reports a fault: its worker exits at once
    "node",  # a host stops responding
    "network",  # a link or a switch: collectives wait, no node is to blame
    "hang",  # a worker makes no progress
    "storage",  # the shared file system fails: found at the next save or start
    "software",  # an exception in code
    "signal",  # preemption: the run saves and leaves
]
# The ending that the supervisor gives each kind.
ENDINGS: Mapping[FailureKind, EndingClass] = {
    "device": "node_failure",
    "node": "node_failure",
    "network": "node_failure",
    "hang": "hang",
    "storage": "storage_failure",
    "software": "code_error",
    "signal": "advance_signal",
}
BREAKS_NODE: frozenset[FailureKind] = frozenset({"device", "node"})
BLAMES_NODE: frozenset[FailureKind] = frozenset({"device", "node", "hang"})


@dataclass(frozen=True)
class Failure:
    """A failure to come."""

    at: float  # simulated time, s
    kind: FailureKind
    node: str | None = None  # None if no single node failed


@dataclass(frozen=True)
class FailureQuery:
    """The state of a simulation that asks for the next failure; times in s."""

    attempt: int  # number of the running attempt
    started: float  # its start
    trains_at: float  # when its steps begin, without the extra time of the first
    now: float  # earliest time of the failure
    nodes: Sequence[str]


class FailureSource(Protocol):
    """Decides what fails and when."""

    def following(self, query: FailureQuery, rng: np.random.Generator) -> Failure | None:
        """Return the next failure after `query.now`, or None if there is none."""


@dataclass(frozen=True)
class RandomFailures:
    """Independent failures at constant rates."""

    per_node_hour: Mapping[FailureKind, float]

    def following(self, query: FailureQuery, rng: np.random.Generator) -> Failure | None:
        kinds, count = list(self.per_node_hour), len(query.nodes)
        rates = np.array([self.per_node_hour[kind] for kind in kinds])
        per_s = float(rates.sum() * count) / 3600.0
        if per_s <= 0:
            return None
        at = query.now + float(rng.exponential(1.0 / per_s))
        kind = kinds[int(rng.choice(len(kinds), p=rates / rates.sum()))]
        # With weights, as the published figures were drawn.
        node = query.nodes[int(rng.choice(count, p=np.full(count, 1 / count)))]
        return Failure(at, kind, node if kind in BLAMES_NODE else None)


@dataclass(frozen=True)
class Scenario:
    """A run to simulate."""

    recipe: Recipe  # the sections slurm (with spare nodes), checkpoint and watchdog
    nodes: int  # utilization is of these, without spare ones
    step_s: float
    horizon_s: float  # when the simulation ends
    durations: Durations
    save: SaveCost
    failures: FailureSource
    # Phase of `durations`, or `noticing` (from a failure to its first sign) → its values, s
    drawn: Mapping[str, Sequence[float]] = field(default_factory=dict)
    steps: int | None = None  # None: unlimited
    spares: int = 4  # nodes of the partition beyond those of the job
    repair_s: float = DAY_S  # from the failure of a node to its return
    outage_s: float = 600.0  # how long the shared file system fails
    node_mtbf_hours: float = 3300.0  # the cluster profile's figure
    time_limit_s: float | None = None  # of the job
    recovery: Literal["auto", "by_hand"] = "auto"  # by_hand: an engineer restarts every ended job
    engineer_s: float = HOUR_S  # until an engineer restarts a run that has stopped

    def draw(self, phase: str, rng: np.random.Generator) -> float:
        """Return the duration of a phase, s."""
        if values := self.drawn.get(phase):
            return values[int(rng.integers(len(values)))]
        duration: float = getattr(self.durations, phase)
        return duration

    @property
    def names(self) -> tuple[str, ...]:
        total = self.nodes + self.recipe.slurm.spare_nodes + self.spares
        return tuple(f"n{i + 1}" for i in range(total))

    @property
    def restarts_in_job(self) -> bool:
        """Whether new workers start in the same job if it has enough healthy nodes."""
        return self.recovery == "auto" and self.recipe.slurm.restart_in_allocation

    @property
    def hang_limit_s(self) -> float:
        """Duration from which the watchdog takes a step for a hang, s."""
        watchdog = self.recipe.watchdog
        return max(watchdog.min_step_s, watchdog.step_factor * self.step_s)

    def noticing_s(self, kind: FailureKind, training: bool, rng: np.random.Generator) -> float:
        """Seconds from a failure to its first sign."""
        if kind == "signal":
            return 0.0
        if "noticing" in self.drawn:
            return self.draw("noticing", rng)
        if kind in ("device", "storage", "software") or self.recovery == "by_hand":
            return REPORTED_S  # by hand, the delay until somebody notices is in engineer_s
        watchdog = self.recipe.watchdog
        if not watchdog.enabled:
            return SLURMD_TIMEOUT_S if kind == "node" else UNWATCHED_S
        limit_s = self.hang_limit_s if training else watchdog.start_up_s
        return min(limit_s, SLURMD_TIMEOUT_S) if kind == "node" else limit_s
