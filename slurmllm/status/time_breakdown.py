"""Where the time of every attempt went: each second of each allocation has one part.

    allocation: start ─ preflight ─ cache ─ start-up ─ first step ─ steps and saves ─ … ─ end

What is measured is taken from the records; what is left is idle. The parts of an allocation
always add up to its length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from slurmllm.records import TIME_PARTS as PARTS
from slurmllm.records import AttemptRecord, EndingClass
from slurmllm.records import TimePart as Part
from slurmllm.status.history import Incarnation, RunHistory, Steps

_SLACK_S = 2.0  # sacct counts whole seconds


@dataclass(frozen=True)
class AllocationTime:
    """What became of one allocation.

    Attributes:
        attempt: Number of the attempt; None: the supervisor did not come to open one.
        stage: Of the attempt.
        ending: Its class, None where it is open.
        nodes: How many.
        start: Unix time, s.
        end: Likewise.
        parts_s: Seconds by part; times `nodes` they are node seconds.
        steps: That the run went on with.
        steps_lost: That had to be made again, or would have to be.
        overlap_s: Seconds by which what was measured exceeded the allocation; taken off.
    """

    attempt: int | None
    stage: str
    ending: EndingClass | None
    nodes: int
    start: float
    end: float
    parts_s: dict[Part, float]
    steps: int = 0
    steps_lost: int = 0
    overlap_s: float = 0.0


def break_down_time(history: RunHistory) -> list[AllocationTime]:
    """Every allocation of a run, in the order of their starts."""
    kept = _kept(history)
    usual_s = _usual_step_s(history)
    free = list(history.incarnations)
    found = []
    for attempt in sorted(history.attempts, key=lambda a: a.started_at):
        own = _incarnation_of(attempt, free)
        if own is not None:
            free.remove(own)
        start, end, nodes = _span(attempt, own, history)
        if attempt.stage == "precompile":
            found.append(_whole("precompile", attempt, start, end, nodes))
            continue
        steps = history.steps.get(attempt.attempt)
        waited_s = history.waited_s.get(attempt.attempt, attempt.phases_s.get("saving", 0.0))
        if steps is None:
            found.append(_without_steps(attempt, start, end, nodes))
        else:
            found.append(
                _with_steps(
                    attempt, start, end, nodes, steps, kept[attempt.attempt], waited_s, usual_s
                )
            )
    for left in free:
        part: Part = "precompile" if left.stage == "precompile" else "start_up"
        found.append(_whole(part, None, left.start, left.end, left.nodes, left.stage))
    return sorted(found, key=lambda spending: spending.start)


def _kept(history: RunHistory) -> dict[int, int]:
    """Train attempt → the last of its steps that the run went on with.

    That is the last one before a later attempt's first, and of an attempt that has ended the last
    one in a checkpoint.
    """
    limit = math.inf
    kept: dict[int, int] = {}
    train = {a.attempt: a for a in history.attempts if a.stage == "train"}
    for number in sorted(history.steps, reverse=True):
        steps, attempt = history.steps[number], train.get(number)
        own = limit
        if attempt is not None and attempt.ended_at is not None and attempt.ending != "done":
            own = min(limit, (attempt.checkpoint_after or 0) + 1)
        kept[number] = int(min(own - 1, int(steps.numbers[-1])))
        limit = min(limit, int(steps.numbers[0]))
    return kept


def _usual_step_s(history: RunHistory) -> float | None:
    """Median of the run's steps without its first ones; None where there are no others."""
    later = [steps.seconds[1:] for steps in history.steps.values() if len(steps) > 1]
    return float(np.median(np.concatenate(later))) if later else None


def _incarnation_of(attempt: AttemptRecord, free: Sequence[Incarnation]) -> Incarnation | None:
    """The start of the job that an attempt was opened in."""
    if attempt.job_id is None:
        return None
    around = [
        one
        for one in free
        if one.job_id == attempt.job_id
        and one.start - _SLACK_S <= attempt.started_at <= one.end + _SLACK_S
    ]
    return max(around, key=lambda one: one.start, default=None)


def _span(
    attempt: AttemptRecord, own: Incarnation | None, history: RunHistory
) -> tuple[float, float, int]:
    """Start, end and nodes of an attempt's allocation, as far as they are known."""
    start, nodes = attempt.started_at, len(attempt.nodes)
    ends = [start]
    if attempt.ended_at is not None:
        ends.append(attempt.ended_at)
    elif attempt.attempt in history.steps and attempt.stage == "train":
        ends.append(float(history.steps[attempt.attempt].ends[-1]))
    if own is None:
        return start, max(ends), nodes
    # The supervisor cannot outlive its allocation; sacct's seconds are whole.
    return min(own.start, start), max(own.end, *ends), own.nodes


def _whole(
    part: Part,
    attempt: AttemptRecord | None,
    start: float,
    end: float,
    nodes: int,
    stage: str = "precompile",
) -> AllocationTime:
    parts_s = dict.fromkeys(PARTS, 0.0) | {part: end - start}
    return AllocationTime(
        attempt=attempt.attempt if attempt is not None else None,
        stage=attempt.stage if attempt is not None else stage,
        ending=attempt.ending if attempt is not None else None,
        nodes=nodes, start=start, end=end, parts_s=parts_s,
    )  # fmt: skip


def _without_steps(attempt: AttemptRecord, start: float, end: float, nodes: int) -> AllocationTime:
    """An attempt that failed before its first step had ended: what is not known is start-up."""
    phases = attempt.phases_s
    closed = attempt.ended_at if attempt.ended_at is not None else end
    stopping = phases.get("stopping", 0.0)
    measured: dict[Part, float] = {
        "preflight": phases.get("preflight", 0.0),
        "cache": phases.get("cache", 0.0),
        "start_up": max(0.0, closed - start - stopping)
        - phases.get("preflight", 0.0)
        - phases.get("cache", 0.0),
    }
    parts_s, overlap_s = _fill(measured, end - start)
    return AllocationTime(
        attempt=attempt.attempt, stage="train", ending=attempt.ending, nodes=nodes, start=start,
        end=end, parts_s=parts_s, overlap_s=overlap_s,
    )  # fmt: skip


def _with_steps(
    attempt: AttemptRecord,
    start: float,
    end: float,
    nodes: int,
    steps: Steps,
    kept: int,
    waited_s: float,
    usual_s: float | None,
) -> AllocationTime:
    seconds = steps.seconds.copy()
    first_s = max(0.0, float(seconds[0]) - usual_s) if usual_s is not None else 0.0
    seconds[0] -= first_s
    standing = steps.numbers <= kept
    preflight, cache = (attempt.phases_s.get(name, 0.0) for name in ("preflight", "cache"))
    begun = float(steps.ends[0] - steps.seconds[0])
    measured: dict[Part, float] = {
        "productive": math.fsum(seconds[standing]),
        "recomputation": math.fsum(seconds[~standing]),
        "first_step": first_s,
        "preflight": preflight,
        "cache": cache,
        "start_up": begun - start - preflight - cache,
        # Of an asynchronous save a part of the wait may lie within a step's own time.
        "saving": waited_s,
    }
    parts_s, overlap_s = _fill(measured, end - start)
    return AllocationTime(
        attempt=attempt.attempt, stage="train", ending=attempt.ending, nodes=nodes, start=start,
        end=end, parts_s=parts_s, steps=int(standing.sum()), steps_lost=int((~standing).sum()),
        overlap_s=overlap_s,
    )  # fmt: skip


def _fill(measured: dict[Part, float], length_s: float) -> tuple[dict[Part, float], float]:
    """All parts, which add up to an allocation's length, and what was measured beyond it.

    What exceeds it is taken from the waits for saves first, then from everything alike.
    """
    parts = dict.fromkeys(PARTS, 0.0)
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
