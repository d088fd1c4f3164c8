"""What each ending of a run cost: steps, and seconds to the next completed step by phase.

last completed step ─ noticing ─ stopping ─ requeue ─ preflight ─ cache ─ start-up ─ first step
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, computed_field

from slurmllm.records import AttemptRecord, EndingClass
from slurmllm.status.history import RunHistory
from slurmllm.status.time_breakdown import break_down_time

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
RECOVERY_PHASES: tuple[RecoveryPhase, ...] = get_args(RecoveryPhase)


class FailureRecovery(BaseModel):
    """From an ending to the next completed step."""

    model_config = ConfigDict(frozen=True)

    attempt: int = Field(description="that ended")
    ending: EndingClass = Field(serialization_alias="class")
    further: tuple[EndingClass, ...] = Field(
        description="classes of the attempts after it that completed no step"
    )
    nodes: int
    last_step: int | None = Field(description="completed before the end")
    steps_lost: int
    lost_s: float = Field(description="that the lost steps had taken")
    seconds: float | None = Field(
        description="from the last completed step to the next one; None: there is none yet"
    )
    phases_s: dict[RecoveryPhase, float] = Field(description="of these seconds; they add up")

    @computed_field  # type: ignore[prop-decorator]
    @property
    def beyond_requeue_s(self) -> float | None:
        """The seconds without those between the attempts, which are Slurm's and the queue's."""
        return None if self.seconds is None else self.seconds - self.phases_s["requeue"]


class EndingLoss(BaseModel):
    """All recoveries after endings of one class."""

    model_config = ConfigDict(frozen=True)

    ending: EndingClass = Field(serialization_alias="class")
    times: int
    steps_lost: int
    node_hours: float = Field(description="of lost steps and of the seconds without steps")
    mean_s: float | None = Field(description="to the next completed step; None: there was none")


def find_recoveries(history: RunHistory) -> list[FailureRecovery]:
    """One for each ending after which the run was not done, oldest first.

    Endings of attempts that completed no step belong to the recovery that they delayed.
    """
    return list(_recoveries(history))


def sum_by_ending(several: Sequence[FailureRecovery]) -> list[EndingLoss]:
    """The recoveries summed by class, the costliest first."""
    found = []
    for ending in dict.fromkeys(one.ending for one in several):
        own = [one for one in several if one.ending == ending]
        known = [one.seconds for one in own if one.seconds is not None]
        lost_s = math.fsum(one.nodes * (one.lost_s + (one.seconds or 0.0)) for one in own)
        found.append(
            EndingLoss(
                ending=ending,
                times=len(own),
                steps_lost=sum(one.steps_lost for one in own),
                node_hours=lost_s / 3600.0,
                mean_s=math.fsum(known) / len(known) if known else None,
            )
        )
    return sorted(found, key=lambda loss: -loss.node_hours)


def _recoveries(history: RunHistory) -> Iterator[FailureRecovery]:
    train = sorted((a for a in history.attempts if a.stage == "train"), key=lambda a: a.attempt)
    spent = {one.attempt: one for one in break_down_time(history) if one.stage == "train"}
    at = 0
    while at < len(train):
        ended = train[at]
        following = at + 1
        while following < len(train) and train[following].attempt not in history.steps:
            following += 1
        if ended.ending is not None and ended.ended_at is not None and ended.ending != "done":
            then = train[following] if following < len(train) else None
            between = train[at + 1 : following]
            own = spent[ended.attempt]
            seconds, phases = _outage(history, ended, between, then)
            yield FailureRecovery(
                attempt=ended.attempt,
                ending=ended.ending,
                further=tuple(a.ending for a in between if a.ending is not None),
                nodes=own.nodes,
                last_step=_last_step(history, ended),
                steps_lost=own.steps_lost,
                lost_s=own.parts_s["recomputation"],
                seconds=seconds,
                phases_s=phases,
            )
        at = following


def _outage(
    history: RunHistory,
    ended: AttemptRecord,
    between: Sequence[AttemptRecord],
    then: AttemptRecord | None,
) -> tuple[float | None, dict[RecoveryPhase, float]]:
    """Seconds from the last completed step of an attempt to the first one of the next."""
    assert ended.ended_at is not None
    phases: dict[RecoveryPhase, float] = dict.fromkeys(RECOVERY_PHASES, 0.0)
    steps = history.steps.get(ended.attempt)
    begin = float(steps.ends[-1]) if steps is not None else ended.started_at
    until_closed = max(0.0, ended.ended_at - begin)
    phases["stopping"] = min(ended.phases_s.get("stopping", 0.0), until_closed)
    phases["noticing"] = until_closed - phases["stopping"]
    if then is None:
        return None, phases
    first = history.steps[then.attempt]
    end, closed = float(first.ends[0]), max(begin, ended.ended_at)
    phases["failed_attempts"] = math.fsum(
        a.ended_at - a.started_at for a in between if a.ended_at is not None
    )
    phases["requeue"] = max(0.0, then.started_at - closed - phases["failed_attempts"])
    left = max(0.0, end - then.started_at)
    measured: dict[RecoveryPhase, float] = {
        "first_step": float(first.seconds[0]),
        "preflight": then.phases_s.get("preflight", 0.0),
        "cache": then.phases_s.get("cache", 0.0),
    }
    for phase, seconds in measured.items():
        phases[phase] = min(seconds, left)
        left -= phases[phase]
    phases["start_up"] = left
    return math.fsum(phases.values()), phases


def _last_step(history: RunHistory, attempt: AttemptRecord) -> int | None:
    steps = history.steps.get(attempt.attempt)
    return int(steps.numbers[-1]) if steps is not None else attempt.last_step
