"""What fails, and when: at random by rates, or as it happened in a real run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from slurmllm.records import EndingClass

Kind = Literal[
    "device",  # an accelerator reports a fault: its worker ends at once
    "node",  # a host is gone without a word
    "network",  # a link or a switch: collectives wait, nobody is to blame
    "hang",  # a worker stands still
    "storage",  # the shared file system refuses: found at the next save or start
    "software",  # an exception in code
    "signal",  # preemption: the run saves and leaves
]
# As the supervisor classifies them.
ENDINGS: Mapping[Kind, EndingClass] = {
    "device": "node_failure",
    "node": "node_failure",
    "network": "node_failure",
    "hang": "hang",
    "storage": "storage_failure",
    "software": "code_error",
    "signal": "advance_signal",
}
BREAKS_NODE: frozenset[Kind] = frozenset({"device", "node"})
BLAMES_NODE: frozenset[Kind] = frozenset({"device", "node", "hang"})


@dataclass(frozen=True)
class Failure:
    """Something that will happen.

    Attributes:
        at: Simulated time, s.
        kind: What.
        node: Where, as far as it is of one node.
    """

    at: float
    kind: Kind
    node: str | None = None


@dataclass(frozen=True)
class Moment:
    """Where a simulation stands when it asks for the next failure.

    Attributes:
        attempt: Number of the attempt under way.
        started: Its start, s.
        trains_at: When its steps begin, less what the first one takes longer, s.
        now: Nothing before this is of interest, s.
        nodes: That the attempt runs on.
    """

    attempt: int
    started: float
    trains_at: float
    now: float
    nodes: Sequence[str]


class Failures(Protocol):
    """Where failures come from."""

    def following(self, moment: Moment, rng: np.random.Generator) -> Failure | None:
        """The next failure after a moment; None: none will come."""
        ...


@dataclass(frozen=True)
class RandomFailures:
    """Failures that come independently of one another, at constant rates.

    Attributes:
        per_node_hour: Kind → failures of one node in an hour.
        offenders: Nodes that fail oftener than others → how many times as often.
    """

    per_node_hour: Mapping[Kind, float]
    offenders: Mapping[str, float] = field(default_factory=dict)

    def following(self, moment: Moment, rng: np.random.Generator) -> Failure | None:
        """See Failures."""
        weights = np.array([self.offenders.get(node, 1.0) for node in moment.nodes])
        kinds = list(self.per_node_hour)
        rates = np.array([self.per_node_hour[kind] for kind in kinds])
        per_s = float(rates.sum() * weights.sum()) / 3600.0
        if per_s <= 0:
            return None
        at = moment.now + float(rng.exponential(1.0 / per_s))
        kind = kinds[int(rng.choice(len(kinds), p=rates / rates.sum()))]
        node = moment.nodes[int(rng.choice(len(weights), p=weights / weights.sum()))]
        return Failure(at, kind, node if kind in BLAMES_NODE else None)


@dataclass(frozen=True)
class Scripted:
    """The failure of one attempt, as it happened.

    Attributes:
        kind: What.
        after_s: Seconds of steps and saves, or from the attempt's start.
        training: Whether they are of steps and saves; what the first step takes longer than
            others is left out.
        node: Index of the node.
    """

    kind: Kind
    after_s: float
    training: bool
    node: int = 0


@dataclass(frozen=True)
class ScriptedFailures:
    """One failure an attempt, in the order of the attempts; None: that one is spared."""

    script: Sequence[Scripted | None]

    def following(self, moment: Moment, rng: np.random.Generator) -> Failure | None:
        """See Failures."""
        one = self.script[moment.attempt] if moment.attempt < len(self.script) else None
        if one is None or moment.now > moment.started:
            return None
        early = min(moment.started + one.after_s, moment.trains_at)
        at = moment.trains_at + one.after_s if one.training else early
        node = moment.nodes[one.node % len(moment.nodes)]
        return Failure(at, one.kind, node if one.kind in BLAMES_NODE else None)
