"""Sources of failures: random at given rates, or the failures of a real run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from slurmllm.plan.lost_time import FailureKind
from slurmllm.run.records import EndingClass

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
    """A failure to come.

    Attributes:
        at: Simulated time, s.
        kind: Kind of failure.
        node: The node that failed; None if no single node did.
    """

    at: float
    kind: FailureKind
    node: str | None = None


@dataclass(frozen=True)
class FailureQuery:
    """The state of a simulation that asks for the next failure.

    Attributes:
        attempt: Number of the running attempt.
        started: Its start, s.
        trains_at: When its steps begin, without the extra time of the first step, s.
        now: Earliest time of the failure, s.
        nodes: Nodes of the attempt.
    """

    attempt: int
    started: float
    trains_at: float
    now: float
    nodes: Sequence[str]


class Failures(Protocol):
    """A source of failures."""

    def following(self, query: FailureQuery, rng: np.random.Generator) -> Failure | None:
        """Returns the next failure after `query.now`, or None if there is none."""
        ...


@dataclass(frozen=True)
class RandomFailures:
    """Independent failures at constant rates.

    Attributes:
        per_node_hour: Kind → failures of one node in an hour.
        offenders: Node → factor on its rates; 1 for nodes left out.
    """

    per_node_hour: Mapping[FailureKind, float]
    offenders: Mapping[str, float] = field(default_factory=dict)

    def following(self, query: FailureQuery, rng: np.random.Generator) -> Failure | None:
        weights = np.array([self.offenders.get(node, 1.0) for node in query.nodes])
        kinds = list(self.per_node_hour)
        rates = np.array([self.per_node_hour[kind] for kind in kinds])
        per_s = float(rates.sum() * weights.sum()) / 3600.0
        if per_s <= 0:
            return None
        at = query.now + float(rng.exponential(1.0 / per_s))
        kind = kinds[int(rng.choice(len(kinds), p=rates / rates.sum()))]
        node = query.nodes[int(rng.choice(len(weights), p=weights / weights.sum()))]
        return Failure(at, kind, node if kind in BLAMES_NODE else None)


@dataclass(frozen=True)
class Scripted:
    """The failure of one attempt of a real run.

    Attributes:
        kind: Kind of failure.
        after_s: Seconds of steps and saves, or from the attempt's start.
        training: Whether `after_s` counts steps and saves, without the extra time of the first
            step.
        node: Index of the node.
    """

    kind: FailureKind
    after_s: float
    training: bool
    node: int = 0


@dataclass(frozen=True)
class ScriptedFailures:
    """One failure for each attempt, in order; None: that attempt does not fail."""

    script: Sequence[Scripted | None]

    def following(self, query: FailureQuery, rng: np.random.Generator) -> Failure | None:
        one = self.script[query.attempt] if query.attempt < len(self.script) else None
        if one is None or query.now > query.started:
            return None
        early = min(query.started + one.after_s, query.trains_at)
        at = query.trains_at + one.after_s if one.training else early
        node = query.nodes[one.node % len(query.nodes)]
        return Failure(at, one.kind, node if one.kind in BLAMES_NODE else None)
