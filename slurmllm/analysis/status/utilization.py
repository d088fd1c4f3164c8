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
from pydantic import computed_field

from slurmllm.analysis.status.history import Incarnation, RunHistory
from slurmllm.core.format import Texts
from slurmllm.core.metrics.curves import median
from slurmllm.core.run.records import (
    TIME_PARTS,
    AttemptRecord,
    Attempts,
    EndingClass,
    Record,
    TimePart,
)

HOUR_S = 3600.0
Parts = dict[TimePart, float]
_SLACK_S = 2.0  # sacct reports whole seconds


@dataclass
class AllocationTime:
    """The time of one allocation, by part."""

    # number of the attempt; None if the allocation ended before the supervisor opened one
    attempt: int | None
    stage: str  # stage of the attempt
    ending: EndingClass | None  # class of the ending; None if the attempt is open
    nodes: int  # those that the attempt used
    start: float  # Unix time, s
    end: float  # Unix time, s
    parts_s: Parts  # seconds by part
    steps: int = 0  # steps that the run kept
    steps_lost: int = 0  # steps that were, or must be, recomputed
    overlap_s: float = 0.0  # seconds by which the measured parts exceeded the allocation; cut off
    spare_nodes: int = 0  # those that the job held in addition; all of their time is idle

    def node_seconds_of(self, kind: TimePart) -> float:
        return self.nodes * self.parts_s[kind] + (
            self.spare_nodes * (self.end - self.start) if kind == "idle" else 0.0
        )


def break_down_time(history: RunHistory) -> list[AllocationTime]:
    """Return every allocation of a run with its parts, in the order of their starts."""
    last_steps = _last_kept_steps(history)
    # Typical step time: the median without the first step of each attempt, which compiles.
    later = [steps.seconds[1:] for steps in history.steps.values() if len(steps) > 1]
    typical_s = median(np.concatenate(later)) if later else None
    attempts = sorted(history.attempts, key=lambda a: a.started_at)
    incarnations = _incarnations(attempts, history)
    allocations = []
    for index, (attempt, incarnation) in enumerate(zip(attempts, incarnations, strict=True)):
        number = attempt.attempt
        in_training = attempt.stage == "train"
        completed = history.steps.get(number) if in_training else None
        start = attempt.started_at
        nodes = len(attempt.nodes)
        spare = attempt.spare_nodes
        end = start if attempt.ended_at is None else max(start, attempt.ended_at)
        if attempt.ended_at is None and completed is not None:
            end = max(start, float(completed.ends[-1]))
        if incarnation:
            # The supervisor cannot outlive its allocation; sacct's times are whole seconds.
            start = min(incarnation.start, start)
            end = max(incarnation.end, end)
            # Attempts that follow each other in one allocation divide its time.
            if index and incarnations[index - 1] is incarnation:
                start = attempt.started_at
            if index + 1 < len(incarnations) and incarnations[index + 1] == incarnation:
                end = max(start, attempts[index + 1].started_at)
            spare = max(0, incarnation.nodes - nodes)
            nodes = min(incarnation.nodes, nodes)
        last_step = last_steps.get(number, 0)
        measured: Parts = {"precompile": end - start}
        if in_training:
            measured = _measured(attempt, start, end, history, last_step, typical_s)
        parts_s, overlap_s = _fill(measured, end - start)
        time = AllocationTime(number, attempt.stage, attempt.ending, nodes, start, end, parts_s)
        time.overlap_s = overlap_s
        time.spare_nodes = spare
        if attempt.ended_at is None and not incarnation:
            time.overlap_s = 0.0  # the length is a guess: evaluations follow the last step
        if completed is not None:
            time.steps = int(np.count_nonzero(completed.numbers <= last_step))
            time.steps_lost = len(completed) - time.steps
        allocations.append(time)
    opened = {id(incarnation) for incarnation in incarnations}
    for job in history.incarnations:
        if id(job) not in opened:  # it ended before the supervisor opened an attempt
            kind: TimePart = "precompile" if job.stage == "precompile" else "start_up"
            parts_s, _ = _fill({kind: job.end - job.start}, job.end - job.start)
            time = AllocationTime(None, job.stage, None, job.nodes, job.start, job.end, parts_s)
            allocations.append(time)
    return sorted(allocations, key=lambda allocation: allocation.start)


def _incarnations(attempts: Attempts, history: RunHistory) -> list[Incarnation | None]:
    """Return the job start in which each attempt was opened; None if accounting has none."""
    opened_in: list[Incarnation | None] = []
    for attempt in attempts:
        # The closest start by the supervisor's clock, which is a node's: a job that gave up a node
        # has another one right after it.
        opened_at = attempt.started_at
        incarnation = None
        nearest = (_SLACK_S, math.inf)
        for start in history.incarnations:
            distance = max(start.start - opened_at, opened_at - start.end, 0.0), -start.start
            if start.job_id == attempt.job_id and distance < nearest:
                incarnation = start
                nearest = distance
        if incarnation in opened_in:
            earlier = attempts[opened_in.index(incarnation)]
            if earlier.restart_count != attempt.restart_count:
                incarnation = None  # accounting does not have this start yet
        opened_in.append(incarnation)
    return opened_in


def _last_kept_steps(history: RunHistory) -> dict[int, int]:
    """Return train attempt → the last of its steps that the run kept.

    That is the last one before the first step of any later attempt, and for an attempt that has
    ended the last one covered by a checkpoint.
    """
    train = {a.attempt: a for a in history.attempts if a.stage == "train"}
    first_later: float = math.inf  # step
    last_steps = {}
    for number in sorted(history.steps, reverse=True):
        steps = history.steps[number]
        attempt = train.get(number)
        limit = first_later
        if attempt and attempt.ended_at is not None and attempt.ending != "done":
            limit = min(limit, (attempt.checkpoint_after or 0) + 1)
        last_steps[number] = int(min(limit - 1, int(steps.numbers[-1])))
        first_later = min(first_later, int(steps.numbers[0]))
    return last_steps


def _measured(
    attempt: AttemptRecord,
    start: float,
    end: float,
    history: RunHistory,
    last_step: int,
    typical_s: float | None,
) -> Parts:
    """Return the measured parts of a train attempt, s; they may exceed its length."""
    number = attempt.attempt
    phases_s = attempt.phases_s
    preflight, cache = (phases_s.get(name, 0.0) for name in ("preflight", "cache"))
    parts: Parts = {"preflight": preflight, "cache": cache}
    parts["evaluation"] = history.evaluated_s.get(number, 0.0)
    steps = history.steps.get(number)
    if steps is None:  # it failed within its first step: all unmeasured time is start-up
        closed = attempt.ended_at if attempt.ended_at is not None else end
        stopping = phases_s.get("stopping", 0.0)
        return parts | {"start_up": max(0.0, closed - start - stopping) - preflight - cache}
    parts["saving"] = history.waited_s.get(number, phases_s.get("saving", 0.0))
    seconds = steps.seconds.copy()
    first_s = max(0.0, float(seconds[0]) - typical_s) if typical_s is not None else 0.0
    seconds[0] -= first_s
    productive = steps.numbers <= last_step
    begun = float(steps.ends[0] - steps.seconds[0])
    return parts | {
        "productive": math.fsum(seconds[productive]),
        "recomputation": math.fsum(seconds[~productive]),
        "first_step": first_s,
        "start_up": begun - start - preflight - cache,
    }


def _fill(measured: Parts, length_s: float) -> tuple[Parts, float]:
    """Return all parts, which add up to an allocation's length, and the excess that was cut off.

    An excess is taken from the waits for saves first, because the wait for an asynchronous save may
    in part be within a step's time, then from all parts in proportion.
    """
    parts = dict.fromkeys(TIME_PARTS, 0.0)
    parts.update({kind: max(0.0, seconds) for kind, seconds in measured.items()})
    excess = math.fsum(parts.values()) - length_s
    if excess <= 0:
        parts["idle"] = max(0.0, -excess)
        return parts, 0.0
    from_saving = min(parts["saving"], excess)
    parts["saving"] -= from_saving
    if from_saving < excess:
        scale = length_s / math.fsum(parts.values())
        parts = {kind: seconds * scale for kind, seconds in parts.items()}
    return parts, excess - from_saving


class Utilization(Record):
    """The node hours of a run, or of several."""

    node_hours: float  # nodes × time of every allocation
    parts: Parts  # node hours by part; they add up to node_hours
    wall_hours: float  # with an allocation or waiting for one
    queue_hours: float  # part of wall_hours: waiting for an allocation
    productive_hours: float  # part of wall_hours: steps that the run kept
    training_hours: float  # part of wall_hours: steps, saves, evaluations; lost steps included
    attempts: int  # attempts of the train stage
    steps: int  # steps that the run kept
    steps_lost: int  # steps that were, or must be, recomputed
    usd_per_node_hour: float | None = None
    warnings: Texts = ()

    @computed_field  # type: ignore[prop-decorator]
    @property
    def shares(self) -> Parts:
        """Shares of the node hours by part; all 0 without node hours."""
        return {kind: _ratio(hours, self.node_hours) or 0.0 for kind, hours in self.parts.items()}

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
    allocations = break_down_time(history)
    parts: Parts = {
        kind: math.fsum(time.node_seconds_of(kind) for time in allocations) / HOUR_S
        for kind in TIME_PARTS
    }
    # Seconds with an allocation: two at once, such as a precompile of a resume, count once.
    covered = []
    waits = []
    until = -math.inf
    for time in allocations:
        # In the queue since the end of the previous allocation or a later submission: a stopped
        # run does not wait until somebody resumes it.
        since = max((s for s in history.submissions if until < s <= time.start), default=until)
        if since > -math.inf:
            waits.append(max(0.0, time.start - since))
        covered.append(max(0.0, time.end - max(time.start, until)))
        until = max(until, time.end)
    queue_s = math.fsum(waits)
    wall_s = math.fsum(covered) + queue_s
    training: tuple[TimePart, ...] = ("productive", "recomputation", "saving", "evaluation")
    return Utilization(
        node_hours=math.fsum((t.nodes + t.spare_nodes) * (t.end - t.start) for t in allocations)
        / HOUR_S,
        parts=parts,
        wall_hours=wall_s / HOUR_S,
        queue_hours=queue_s / HOUR_S,
        productive_hours=math.fsum(time.parts_s["productive"] for time in allocations) / HOUR_S,
        training_hours=math.fsum(t.parts_s[p] for t in allocations for p in training) / HOUR_S,
        attempts=sum(attempt.stage == "train" for attempt in history.attempts),
        steps=sum(time.steps for time in allocations),
        steps_lost=sum(time.steps_lost for time in allocations),
        usd_per_node_hour=usd_per_node_hour,
        warnings=(*history.warnings, *_warnings(allocations, history)),
    )


def sum_utilization(runs: Sequence[Utilization]) -> Utilization:
    """Return the sum over several runs: node hours and wall times add up."""
    hours = ("node_hours", "wall_hours", "queue_hours", "productive_hours", "training_hours")
    amounts: dict[str, Any] = {name: math.fsum(getattr(r, name) for r in runs) for name in hours}
    for name in ("attempts", "steps", "steps_lost"):
        amounts[name] = sum(getattr(run, name) for run in runs)
    amounts["parts"] = {kind: math.fsum(run.parts[kind] for run in runs) for kind in TIME_PARTS}
    prices = {run.usd_per_node_hour for run in runs}
    return Utilization(**amounts, usd_per_node_hour=prices.pop() if len(prices) == 1 else None)


def _warnings(allocations: Sequence[AllocationTime], history: RunHistory) -> Iterator[str]:
    for time in allocations:
        length_s = time.end - time.start
        if time.overlap_s > 0.01 * length_s:
            yield (
                f"{time.stage} attempt {time.attempt}: the measured parts exceed its "
                f"{length_s:.1f} s by {time.overlap_s:.1f} s; check the nodes' clocks"
            )
    jobs = {attempt.job_id for attempt in history.attempts} - {None}
    unknown = sorted(str(job) for job in jobs - {start.job_id for start in history.incarnations})
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


def _ratio(kind: float, whole: float) -> float | None:
    return kind / whole if whole > 0 else None
