"""Durations of the phases of real runs, for the simulation of similar runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from slurmllm.errors import RunError
from slurmllm.plan.lost_time import Durations, SaveCost
from slurmllm.run.records import TimePart
from slurmllm.status.history import RunHistory
from slurmllm.status.recoveries import find_recoveries
from slurmllm.status.utilization import AllocationTime, break_down_time


@dataclass(frozen=True)
class MeasuredRuns:
    """What real runs took.

    Attributes:
        durations: Of the phases, every one that was seen.
        step_s: A step without an attempt's first, mean, s.
        gap_s: Between two steps, saves apart, mean, s.
        save: What a checkpoint cost, mean; nothing where no save is known.
    """

    durations: Durations
    step_s: float
    gap_s: float
    save: SaveCost


def measure(histories: Sequence[RunHistory]) -> MeasuredRuns:
    """Collect the durations of runs of one kind.

    Raises:
        RunError: no attempt of any of them made two steps.
    """
    spent = [[one for one in break_down_time(h) if one.stage == "train"] for h in histories]
    begun = [one for run in spent for one in run if one.steps + one.steps_lost > 0]
    later = [s.seconds[1:] for h in histories for s in h.steps.values() if len(s) > 1]
    if not later:
        names = ", ".join(history.name for history in histories)
        raise RunError(f"no attempt of {names} made two steps: the step time is unknown")
    saves = [save for history in histories for save in history.saves]
    waited_s, total_s = np.mean(saves, axis=0) if saves else (0.0, 0.0)
    durations = Durations(
        requeue=tuple(seconds for run in spent for seconds in _between(run)) or (0.0,),
        preflight=_of("preflight", begun),
        cache=_of("cache", begun),
        start_up=_of("start_up", begun),
        first_step=_of("first_step", begun),
        stopping=tuple(s for h in histories for s in _stopping(h)) or (0.0,),
        noticing=tuple(
            one.phases_s["noticing"]
            for history in histories
            for one in find_recoveries(history)
            if one.last_step is not None and one.ending != "advance_signal"
        ),
    )
    steps = np.concatenate(later)
    gap_s = float(np.mean([gap for history in histories for gap in _gaps(history)]))
    return MeasuredRuns(
        durations, float(steps.mean()), gap_s, SaveCost(float(waited_s), float(total_s))
    )


def _of(part: TimePart, begun: Sequence[AllocationTime]) -> tuple[float, ...]:
    return tuple(one.parts_s[part] for one in begun)


def _between(run: Sequence[AllocationTime]) -> Iterator[float]:
    for one, following in pairwise(run):
        yield max(0.0, following.start - one.end)


def _stopping(history: RunHistory) -> Iterator[float]:
    """From the first sign of an end to the end of the allocation, Slurm's own included.

    Of an attempt that was done: from its last step on, its last save apart.
    """
    ends = {one.attempt: one.end for one in break_down_time(history) if one.stage == "train"}
    for attempt in history.attempts:
        steps = history.steps.get(attempt.attempt)
        if attempt.stage != "train" or attempt.ended_at is None or steps is None:
            continue
        tail_s = max(0.0, ends[attempt.attempt] - attempt.ended_at)
        yield attempt.phases_s.get("stopping", 0.0) + tail_s


def _gaps(history: RunHistory) -> Iterator[float]:
    """Of each attempt: the mean time between two steps."""
    for number, steps in history.steps.items():
        if len(steps) > 1:
            span_s = float(steps.ends[-1] - steps.ends[0])
            rest_s = span_s - float(steps.seconds[1:].sum()) - history.waited_s.get(number, 0.0)
            yield max(0.0, rest_s) / (len(steps) - 1)
