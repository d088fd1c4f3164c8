"""The breakdown of every allocation's time into parts, and node hours.

    allocation: start ─ preflight ─ cache ─ start-up ─ first step ─ steps and saves ─ … ─ end

Measured parts are taken from the records; the rest is idle. The parts of an allocation always add
up to its length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from slurmllm.records import TIME_PARTS, AttemptRecord, EndingClass, TimePart
from slurmllm.status.history import Incarnation, RunHistory, Steps

HOUR_S = 3600.0
_SLACK_S = 2.0  # sacct reports whole seconds


@dataclass(frozen=True)
class AllocationTime:
    """The time of one allocation, by part.

    Attributes:
        attempt: Number of the attempt; None if the allocation ended before the supervisor opened
            one.
        stage: Stage of the attempt.
        ending: Class of the ending; None if the attempt is open.
        nodes: Number of nodes.
        start: Unix time, s.
        end: Unix time, s.
        parts_s: Seconds by part; multiplied by `nodes` they are node seconds.
        steps: Steps that the run kept.
        steps_lost: Steps that were, or must be, recomputed.
        overlap_s: Seconds by which the measured parts exceeded the allocation; cut off.
    """

    attempt: int | None
    stage: str
    ending: EndingClass | None
    nodes: int
    start: float
    end: float
    parts_s: dict[TimePart, float]
    steps: int = 0
    steps_lost: int = 0
    overlap_s: float = 0.0


def break_down_time(history: RunHistory) -> list[AllocationTime]:
    """Every allocation of a run with its parts, in the order of their starts."""
    kept = _last_kept_steps(history)
    # Typical step time: the median without the first step of each attempt, which compiles.
    later = [steps.seconds[1:] for steps in history.steps.values() if len(steps) > 1]
    typical_s = float(np.median(np.concatenate(later))) if later else None
    free = list(history.incarnations)
    found = []
    for attempt in sorted(history.attempts, key=lambda a: a.started_at):
        own = _incarnation_of(attempt, free)
        if own is not None:
            free.remove(own)
        start, end, nodes = _span(attempt, own, history)
        steps, lost, overlap_s = 0, 0, 0.0
        if attempt.stage == "precompile":
            parts_s = dict.fromkeys(TIME_PARTS, 0.0) | {"precompile": end - start}
        elif (made := history.steps.get(attempt.attempt)) is None:
            parts_s, overlap_s = _fill(_measured_without_steps(attempt, start, end), end - start)
        else:
            waited_s = history.waited_s.get(attempt.attempt, attempt.phases_s.get("saving", 0.0))
            last_kept = kept[attempt.attempt]
            measured = _measured_with_steps(attempt, start, made, last_kept, waited_s, typical_s)
            parts_s, overlap_s = _fill(measured, end - start)
            steps = int(np.count_nonzero(made.numbers <= last_kept))
            lost = len(made) - steps
        found.append(
            AllocationTime(
                attempt.attempt, attempt.stage, attempt.ending, nodes, start, end, parts_s,
                steps, lost, overlap_s,
            )
        )  # fmt: skip
    for left in free:  # no attempt was opened in these
        part: TimePart = "precompile" if left.stage == "precompile" else "start_up"
        parts_s = dict.fromkeys(TIME_PARTS, 0.0) | {part: left.end - left.start}
        found.append(
            AllocationTime(None, left.stage, None, left.nodes, left.start, left.end, parts_s)
        )
    return sorted(found, key=lambda one: one.start)


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


def _incarnation_of(attempt: AttemptRecord, free: Sequence[Incarnation]) -> Incarnation | None:
    """The job start in which an attempt was opened."""
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


def _measured_without_steps(
    attempt: AttemptRecord, start: float, end: float
) -> dict[TimePart, float]:
    """Parts of an attempt that failed within its first step: all unmeasured time is start-up."""
    preflight, cache, stopping = (
        attempt.phases_s.get(name, 0.0) for name in ("preflight", "cache", "stopping")
    )
    closed = attempt.ended_at if attempt.ended_at is not None else end
    start_up = max(0.0, closed - start - stopping) - preflight - cache
    return {"preflight": preflight, "cache": cache, "start_up": start_up}


def _measured_with_steps(
    attempt: AttemptRecord,
    start: float,
    steps: Steps,
    last_kept: int,
    waited_s: float,
    typical_s: float | None,
) -> dict[TimePart, float]:
    seconds = steps.seconds.copy()
    first_s = max(0.0, float(seconds[0]) - typical_s) if typical_s is not None else 0.0
    seconds[0] -= first_s
    kept = steps.numbers <= last_kept
    preflight, cache = (attempt.phases_s.get(name, 0.0) for name in ("preflight", "cache"))
    begun = float(steps.ends[0] - steps.seconds[0])
    return {
        "productive": math.fsum(seconds[kept]),
        "recomputation": math.fsum(seconds[~kept]),
        "first_step": first_s,
        "preflight": preflight,
        "cache": cache,
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
