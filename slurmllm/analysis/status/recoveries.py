"""The cost of each failure: recomputed steps, and seconds to the next completed step by phase.

last completed step ─ noticing ─ stopping ─ requeue ─ preflight ─ cache ─ start-up ─ first step
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal, get_args

from pydantic import Field, computed_field

from slurmllm.analysis.status.history import RunHistory
from slurmllm.analysis.status.utilization import HOUR_S, break_down_time
from slurmllm.core.run.records import AttemptRecord, Attempts, EndingClass, Record

RecoveryPhase = Literal[
    "noticing",  # from the last completed step to the first sign of the end
    "stopping",  # from there until the attempt was closed
    "requeue",  # until the next attempt was opened: Slurm's delay, the queue, a backoff
    "failed_attempts",  # attempts in between that completed no step
    "preflight",
    "cache",
    "start_up",  # until the first step began
    "first_step",
]
Phases = dict[RecoveryPhase, float]
RECOVERY_PHASES: tuple[RecoveryPhase, ...] = get_args(RecoveryPhase)


class FailureRecovery(Record):
    """The recovery from the ending of an attempt to the next completed step."""

    attempt: int  # the attempt that ended
    ending: EndingClass = Field(serialization_alias="class")
    further: tuple[EndingClass, ...]  # classes of the attempts after it that completed no step
    nodes: int
    last_step: int | None  # last step completed before the end
    steps_lost: int
    lost_s: float  # duration of the lost steps
    seconds: float | None  # from the last completed step to the next one; None: there is none yet
    phases_s: Phases  # parts of these seconds; they add up

    @computed_field  # type: ignore[prop-decorator]
    @property
    def beyond_requeue_s(self) -> float | None:
        """The seconds without those between the attempts, which are Slurm's and the queue's."""
        return None if self.seconds is None else self.seconds - self.phases_s["requeue"]


class EndingLoss(Record):
    """All recoveries after endings of one class."""

    ending: EndingClass = Field(serialization_alias="class")
    times: int
    steps_lost: int
    node_hours: float  # of lost steps and of the seconds without steps
    mean_s: float | None  # to the next completed step; None: there was none


def find_recoveries(history: RunHistory) -> Iterator[FailureRecovery]:
    """Yield the recovery after each ending before the run was done, oldest first.

    An attempt that completed no step is part of the recovery that it delayed.
    """
    train = sorted((a for a in history.attempts if a.stage == "train"), key=lambda a: a.attempt)
    allocations = {time.attempt: time for time in break_down_time(history) if time.stage == "train"}
    index = 0
    while index < len(train):
        ended = train[index]
        following = index + 1
        while following < len(train) and train[following].attempt not in history.steps:
            following += 1
        if ended.ending is not None and ended.ended_at is not None and ended.ending != "done":
            # Without a step of its own the outage begins with the attempt.
            time = allocations[ended.attempt]
            steps = history.steps.get(ended.attempt)
            last_step_at = float(steps.ends[-1]) if steps is not None else ended.started_at
            if following < len(train):
                first = history.steps[train[following].attempt]
                phases = recovery_phases(
                    last_step_at,
                    train[index : following + 1],
                    float(first.ends[0]),
                    float(first.seconds[0]),
                )
            else:
                phases = _closing_phases(last_step_at, ended)
            yield FailureRecovery(
                attempt=ended.attempt,
                ending=ended.ending,
                further=[a.ending for a in train[index + 1 : following] if a.ending],
                nodes=time.nodes,
                last_step=int(steps.numbers[-1]) if steps is not None else ended.last_step,
                steps_lost=time.steps_lost,
                lost_s=time.parts_s["recomputation"],
                seconds=math.fsum(phases.values()) if following < len(train) else None,
                phases_s=phases,
            )
        index = following


def sum_by_ending(recoveries: Sequence[FailureRecovery]) -> list[EndingLoss]:
    """Return the recoveries summed by class, the costliest first."""
    losses = []
    for ending in dict.fromkeys(recovery.ending for recovery in recoveries):
        same = [recovery for recovery in recoveries if recovery.ending == ending]
        seconds = [recovery.seconds for recovery in same if recovery.seconds is not None]
        losses.append(
            EndingLoss(
                ending=ending,
                times=len(same),
                steps_lost=sum(recovery.steps_lost for recovery in same),
                node_hours=math.fsum(r.nodes * (r.lost_s + (r.seconds or 0.0)) for r in same)
                / HOUR_S,
                mean_s=math.fsum(seconds) / len(seconds) if seconds else None,
            )
        )
    return sorted(losses, key=lambda loss: -loss.node_hours)


def recovery_phases(
    since: float, attempts: Attempts, completed_at: float, first_step_s: float
) -> Phases:
    """Return the seconds of each phase of a recovery.

    Args:
        since: Begin of the outage, Unix time, s: the last completed step, or the injected fault.
        attempts: The attempt that ended, those after it without a step, and the next with steps.
        completed_at: Unix time at which the last of them completed its first step, s.
        first_step_s: Duration of that step.
    """
    ended, *between, then = attempts
    phases = _closing_phases(since, ended)
    closed = max(since, ended.ended_at or since)
    # Attempts in between may lack an end: the supervisor was killed with its node.
    phases["failed_attempts"] = math.fsum(
        a.ended_at - a.started_at for a in between if a.ended_at is not None
    )
    phases["requeue"] = max(0.0, then.started_at - closed - phases["failed_attempts"])
    # Clocks of several nodes: no measured phase may exceed what is left of the outage.
    left = max(0.0, completed_at - then.started_at)
    measured = then.phases_s | {"first_step": first_step_s}
    order: tuple[RecoveryPhase, ...] = ("first_step", "preflight", "cache")
    for phase in order:
        phases[phase] = min(measured.get(phase, 0.0), left)
        left -= phases[phase]
    phases["start_up"] = left
    return phases


def _closing_phases(since: float, ended: AttemptRecord) -> Phases:
    """Return all phases, with those up to the close of the attempt filled in."""
    phases: Phases = dict.fromkeys(RECOVERY_PHASES, 0.0)
    until_closed = max(0.0, (ended.ended_at or since) - since)
    phases["stopping"] = min(ended.phases_s.get("stopping", 0.0), until_closed)
    phases["noticing"] = until_closed - phases["stopping"]
    return phases
