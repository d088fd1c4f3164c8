"""The utilization of a run's node hours: every allocation's time by part, and their sums.

    allocation: start ─ preflight ─ cache ─ start-up ─ first step ─ steps and saves ─ … ─ end

Measured parts are taken from the records; the rest is idle. The parts of an allocation always add
up to its length.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, computed_field

from slurmllm.run.records import TIME_PARTS, AttemptRecord, EndingClass, TimePart
from slurmllm.status.history import Incarnation, RunHistory, Steps

HOUR_S = 3600.0
_SLACK_S = 2.0  # sacct reports whole seconds
_OVERLAP = 0.01  # share of an allocation that is measured twice, above which to warn
# Summed over runs.
_AMOUNTS = (
    "node_hours", "wall_hours", "queue_hours", "productive_hours", "training_hours", "attempts",
    "steps", "steps_lost",
)  # fmt: skip


@dataclass(frozen=True)
class AllocationTime:
    """The time of one allocation, by part."""

    # number of the attempt; None if the allocation ended before the supervisor opened one
    attempt: int | None
    stage: str  # stage of the attempt
    ending: EndingClass | None  # class of the ending; None if the attempt is open
    nodes: int  # those that the attempt used
    start: float  # Unix time, s
    end: float  # Unix time, s
    parts_s: dict[TimePart, float]  # seconds by part
    steps: int = 0  # steps that the run kept
    steps_lost: int = 0  # steps that were, or must be, recomputed
    overlap_s: float = 0.0  # seconds by which the measured parts exceeded the allocation; cut off
    spare_nodes: int = 0  # those that the job held in addition; all of their time is idle

    @property
    def node_seconds(self) -> float:
        return (self.nodes + self.spare_nodes) * (self.end - self.start)

    def node_seconds_of(self, part: TimePart) -> float:
        idle = self.spare_nodes * (self.end - self.start) if part == "idle" else 0.0
        return self.nodes * self.parts_s[part] + idle


def break_down_time(history: RunHistory) -> list[AllocationTime]:
    """Every allocation of a run with its parts, in the order of their starts."""
    kept = _last_kept_steps(history)
    # Typical step time: the median without the first step of each attempt, which compiles.
    later = [steps.seconds[1:] for steps in history.steps.values() if len(steps) > 1]
    typical_s = float(np.median(np.concatenate(later))) if later else None
    attempts = sorted(history.attempts, key=lambda a: a.started_at)
    owns: list[Incarnation | None] = []
    for attempt in attempts:
        own = _incarnation(attempt, history)
        if own in owns and attempts[owns.index(own)].restart_count != attempt.restart_count:
            own = None  # accounting does not have this start yet
        owns.append(own)
    found = []
    for place, (attempt, own) in enumerate(zip(attempts, owns, strict=True)):
        start, end, nodes = _span(attempt, own, history)
        if own is not None:  # attempts that follow each other in one allocation divide its time
            if place and owns[place - 1] is own:
                start = attempt.started_at
            if owns[place + 1 : place + 2] == [own]:
                end = max(start, attempts[place + 1].started_at)
        used = len(attempt.nodes)
        spare = attempt.spare_nodes if own is None else max(0, nodes - used)
        nodes = nodes if own is None else min(nodes, used)
        steps, lost, overlap_s = 0, 0, 0.0
        if attempt.stage == "precompile":
            parts_s = dict.fromkeys(TIME_PARTS, 0.0) | {"precompile": end - start}
        else:
            made = history.steps.get(attempt.attempt)
            last_kept = kept.get(attempt.attempt, 0)
            waited_s = history.waited_s.get(attempt.attempt, attempt.phases_s.get("saving", 0.0))
            measured = _measured(attempt, start, end, made, last_kept, waited_s, typical_s)
            measured["evaluation"] = history.evaluated_s.get(attempt.attempt, 0.0)
            parts_s, overlap_s = _fill(measured, end - start)
            if made is not None:
                steps = int(np.count_nonzero(made.numbers <= last_kept))
                lost = len(made) - steps
        found.append(
            AllocationTime(
                attempt.attempt, attempt.stage, attempt.ending, nodes, start, end, parts_s,
                steps, lost, overlap_s, spare,
            )
        )  # fmt: skip
    for left in history.incarnations:
        if any(own is left for own in owns):
            continue
        # No attempt was opened in it.
        part: TimePart = "precompile" if left.stage == "precompile" else "start_up"
        parts_s = dict.fromkeys(TIME_PARTS, 0.0) | {part: left.end - left.start}
        found.append(
            AllocationTime(None, left.stage, None, left.nodes, left.start, left.end, parts_s)
        )
    return sorted(found, key=lambda one: one.start)


def _incarnation(attempt: AttemptRecord, history: RunHistory) -> Incarnation | None:
    """The job start in which an attempt was opened; the supervisor's clock is a node's."""

    def distance_s(one: Incarnation) -> float:
        return max(one.start - attempt.started_at, attempt.started_at - one.end, 0.0)

    # The closest one: a job that gave up a node has another one right after it.
    of_job = [one for one in history.incarnations if one.job_id == attempt.job_id]
    own = min(of_job, key=lambda one: (distance_s(one), -one.start), default=None)
    return own if own is not None and distance_s(own) <= _SLACK_S else None


def _last_kept_steps(history: RunHistory) -> dict[int, int]:
    """Train attempt → the last of its steps that the run kept.

    That is the last one before the first step of any later attempt, and for an attempt that has
    ended the last one covered by a checkpoint.
    """
    train = {a.attempt: a for a in history.attempts if a.stage == "train"}
    limit: float = math.inf
    kept: dict[int, int] = {}
    for number in sorted(history.steps, reverse=True):
        steps, attempt = history.steps[number], train.get(number)
        own = limit
        if attempt is not None and attempt.ended_at is not None and attempt.ending != "done":
            own = min(limit, (attempt.checkpoint_after or 0) + 1)
        kept[number] = int(min(own - 1, int(steps.numbers[-1])))
        limit = min(limit, int(steps.numbers[0]))
    return kept


def _span(
    attempt: AttemptRecord, own: Incarnation | None, history: RunHistory
) -> tuple[float, float, int]:
    """Start, end and number of nodes of an attempt's allocation, as far as they are known."""
    start, nodes = attempt.started_at, len(attempt.nodes)
    ends = [start]
    if attempt.ended_at is not None:
        ends.append(attempt.ended_at)
    elif attempt.attempt in history.steps and attempt.stage == "train":
        ends.append(float(history.steps[attempt.attempt].ends[-1]))
    if own is None:
        return start, max(ends), nodes
    # The supervisor cannot outlive its allocation; sacct's times are whole seconds.
    return min(own.start, start), max(own.end, *ends), own.nodes


def _measured(
    attempt: AttemptRecord,
    start: float,
    end: float,
    steps: Steps | None,
    last_kept: int,
    waited_s: float,
    typical_s: float | None,
) -> dict[TimePart, float]:
    """The measured parts of a train attempt, s; they may exceed its length."""
    preflight, cache = (attempt.phases_s.get(name, 0.0) for name in ("preflight", "cache"))
    parts: dict[TimePart, float] = {"preflight": preflight, "cache": cache}
    if steps is None:  # it failed within its first step: all unmeasured time is start-up
        closed = attempt.ended_at if attempt.ended_at is not None else end
        stopping = attempt.phases_s.get("stopping", 0.0)
        return parts | {"start_up": max(0.0, closed - start - stopping) - preflight - cache}
    seconds = steps.seconds.copy()
    first_s = max(0.0, float(seconds[0]) - typical_s) if typical_s is not None else 0.0
    seconds[0] -= first_s
    kept = steps.numbers <= last_kept
    begun = float(steps.ends[0] - steps.seconds[0])
    return parts | {
        "productive": math.fsum(seconds[kept]),
        "recomputation": math.fsum(seconds[~kept]),
        "first_step": first_s,
        "start_up": begun - start - preflight - cache,
        # The wait for an asynchronous save may in part be within a step's own time.
        "saving": waited_s,
    }


def _fill(measured: dict[TimePart, float], length_s: float) -> tuple[dict[TimePart, float], float]:
    """All parts, which add up to an allocation's length, and the excess that was cut off.

    An excess is taken from the waits for saves first, then from all parts in proportion.
    """
    parts = dict.fromkeys(TIME_PARTS, 0.0)
    parts.update({part: max(0.0, seconds) for part, seconds in measured.items()})
    excess = math.fsum(parts.values()) - length_s
    if excess <= 0:
        parts["idle"] = -excess
        return parts, 0.0
    from_saving = min(parts["saving"], excess)
    parts["saving"] -= from_saving
    if from_saving < excess:
        total = math.fsum(parts.values())
        scale = length_s / total if total > 0 else 0.0
        parts = {part: seconds * scale for part, seconds in parts.items()}
    return parts, excess - from_saving


class Utilization(BaseModel):
    """The node hours of a run, or of several."""

    model_config = ConfigDict(frozen=True, defer_build=True)

    node_hours: float  # nodes × time of every allocation
    parts: dict[TimePart, float]  # node hours by part; they add up to node_hours
    wall_hours: float  # with an allocation or waiting for one
    queue_hours: float  # part of wall_hours: waiting for an allocation
    productive_hours: float  # part of wall_hours: steps that the run kept
    training_hours: float  # part of wall_hours: steps, saves, evaluations; lost steps included
    attempts: int  # attempts of the train stage
    steps: int  # steps that the run kept
    steps_lost: int  # steps that were, or must be, recomputed
    usd_per_node_hour: float | None = None
    warnings: tuple[str, ...] = ()

    @computed_field  # type: ignore[prop-decorator]
    @property
    def shares(self) -> dict[TimePart, float]:
        """Each part's share of the node hours; all 0 without node hours."""
        return {part: _ratio(hours, self.node_hours) or 0.0 for part, hours in self.parts.items()}

    @computed_field  # type: ignore[prop-decorator]
    @property
    def effective(self) -> float | None:
        """Effective utilization: productive node hours / node hours."""
        return _ratio(self.parts["productive"], self.node_hours)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def goodput(self) -> float | None:
        """Productive time / wall time, which includes the queue."""
        return _ratio(self.productive_hours, self.wall_hours)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def uptime(self) -> float | None:
        """Time in steps and saves / wall time: lost steps are included."""
        return _ratio(self.training_hours, self.wall_hours)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def usd(self) -> float | None:
        """Cost of the node hours."""
        price = self.usd_per_node_hour
        return None if price is None else price * self.node_hours

    @computed_field  # type: ignore[prop-decorator]
    @property
    def wasted_usd(self) -> float | None:
        """Cost of the node hours that were not productive."""
        price = self.usd_per_node_hour
        return None if price is None else price * (self.node_hours - self.parts["productive"])


def account_node_hours(history: RunHistory, usd_per_node_hour: float | None = None) -> Utilization:
    """Account for a run's node hours; without a price, no dollars are computed."""
    found = break_down_time(history)
    parts: dict[TimePart, float] = {
        part: math.fsum(one.node_seconds_of(part) for one in found) / HOUR_S for part in TIME_PARTS
    }
    # Seconds with an allocation: two at once, such as a precompile of a resume, count once.
    covered, waits, until = [], [], -math.inf
    for one in found:
        # In the queue since the end of the previous allocation or a later submission: a stopped
        # run does not wait until somebody resumes it.
        since = max((s for s in history.submissions if until < s <= one.start), default=until)
        if since > -math.inf:
            waits.append(max(0.0, one.start - since))
        covered.append(max(0.0, one.end - max(one.start, until)))
        until = max(until, one.end)
    queue_s = math.fsum(waits)
    wall_s = math.fsum(covered) + queue_s
    training: tuple[TimePart, ...] = ("productive", "recomputation", "saving", "evaluation")
    return Utilization(
        node_hours=math.fsum(one.node_seconds for one in found) / HOUR_S,
        parts=parts,
        wall_hours=wall_s / HOUR_S,
        queue_hours=queue_s / HOUR_S,
        productive_hours=math.fsum(one.parts_s["productive"] for one in found) / HOUR_S,
        training_hours=math.fsum(one.parts_s[p] for one in found for p in training) / HOUR_S,
        attempts=sum(attempt.stage == "train" for attempt in history.attempts),
        steps=sum(one.steps for one in found),
        steps_lost=sum(one.steps_lost for one in found),
        usd_per_node_hour=usd_per_node_hour,
        warnings=(*history.warnings, *_warnings(found, history)),
    )


def sum_utilization(runs: Sequence[Utilization]) -> Utilization:
    """The sum over several runs: node hours and wall times add up."""
    amounts: dict[str, Any] = {
        name: math.fsum(getattr(one, name) for one in runs) for name in _AMOUNTS
    }
    counts = {name: int(amounts[name]) for name in ("attempts", "steps", "steps_lost")}
    parts: dict[TimePart, float] = {
        part: math.fsum(one.parts[part] for one in runs) for part in TIME_PARTS
    }
    prices = {one.usd_per_node_hour for one in runs}
    price = prices.pop() if len(prices) == 1 else None
    return Utilization(**(amounts | counts), parts=parts, usd_per_node_hour=price)


def _warnings(found: Sequence[AllocationTime], history: RunHistory) -> Iterator[str]:
    for one in found:
        if one.overlap_s > _OVERLAP * (one.end - one.start):
            yield (
                f"{one.stage} attempt {one.attempt}: the measured parts exceed its "
                f"{one.end - one.start:.1f} s by {one.overlap_s:.1f} s; check the nodes' clocks"
            )
    jobs = {attempt.job_id for attempt in history.attempts} - {None}
    unknown = sorted(str(job) for job in jobs - {one.job_id for one in history.incarnations})
    if unknown:
        yield (
            f"job {', '.join(unknown)} is not in Slurm's accounting: its node hours are taken from "
            "the attempt records"
        )
    for attempt in history.attempts:
        if attempt.ended_at is None:
            yield (
                f"{attempt.stage} attempt {attempt.attempt} has no recorded end: it is counted up "
                "to its last step"
            )


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None
