"""Comparison of the simulator with a real run: the same failures after the same steps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Literal

from _month.failures import Scripted, ScriptedFailures
from _month.measured import MeasuredRuns
from _month.scenario import DAY_S, Scenario
from _month.simulation import simulate
from slurmllm.config.recipe import Recipe
from slurmllm.errors import RunError
from slurmllm.plan.lost_time import FailureKind
from slurmllm.run.records import AttemptRecord, EndingClass
from slurmllm.status.history import RunHistory
from slurmllm.status.utilization import Utilization, account_node_hours

# Failures that break no node: where a replay runs is not of interest.
_KINDS: Mapping[EndingClass, FailureKind] = {
    "node_failure": "network",
    "storage_failure": "network",
    "hang": "hang",
    "advance_signal": "signal",
}


@dataclass(frozen=True)
class ComparedFigure:
    """A figure of a real run and its simulated value.

    Attributes:
        name: Of the figure.
        actual: Of the run.
        predicted: Mean over the seeds.
    """

    name: str
    actual: float
    predicted: float

    @property
    def error(self) -> float | None:
        """Error relative to `actual`; None if that is 0."""
        return (self.predicted - self.actual) / self.actual if self.actual else None


def compare(
    history: RunHistory, recipe: Recipe, measured: MeasuredRuns, seeds: Sequence[int]
) -> list[ComparedFigure]:
    """Simulate a run's training with its own failures, and compare both accounts.

    Args:
        history: The real run; it must be done.
        recipe: Its own.
        measured: Durations, of this run or of others like it.
        seeds: One simulation each.

    Raises:
        RunError: the run is not done, or made no step.
    """
    train = sorted((a for a in history.attempts if a.stage == "train"), key=lambda a: a.attempt)
    if not train or train[-1].ending != "done" or not history.steps:
        raise RunError(f"{history.name} is not done: only a run from its start to its end compares")
    last = max(history.steps)
    # The measured time from an attempt to the next is that of requeues and restarts alike.
    slurm = recipe.slurm.model_copy(update={"restart_in_allocation": False})
    recipe = recipe.model_copy(update={"slurm": slurm})
    real = account_node_hours(replace(history, attempts=train, submissions=(), incarnations=tuple(
        one for one in history.incarnations if one.stage == "train"
    )))  # fmt: skip
    scenario = Scenario(
        recipe=recipe, nodes=len(train[0].nodes), step_s=measured.step_s, gap_s=measured.gap_s,
        horizon_s=365 * DAY_S, durations=measured.durations, save=measured.save,
        failures=ScriptedFailures(tuple(_script(history, train, recipe, measured))),
        steps=int(history.steps[last].numbers[-1]), repair_s=0.0, engineer_s=0.0,
    )  # fmt: skip
    predicted = [account_node_hours(simulate(scenario, seed)) for seed in seeds]
    real_figures, several = _figures(real), [_figures(one) for one in predicted]
    return [
        ComparedFigure(name, actual, math.fsum(one[name] for one in several) / len(several))
        for name, actual in real_figures.items()
    ]


def _figures(used: Utilization) -> dict[str, float]:
    figures: dict[str, float] = {str(part): hours for part, hours in used.parts.items()}
    figures |= {"node_hours": used.node_hours, "wall_hours": used.wall_hours}
    return figures | {"steps_lost": float(used.steps_lost), "effective": used.effective or 0.0}


def _script(
    history: RunHistory, train: Sequence[AttemptRecord], recipe: Recipe, measured: MeasuredRuns
) -> Iterator[Scripted | None]:
    """The failure of each attempt: after as many steps, or seconds of its start-up."""
    durations, every = measured.durations, recipe.checkpoint.every_steps
    ending_s = fmean(durations.stopping) + fmean(durations.noticing or (0.0,))
    for attempt in train:
        if attempt.ending is None or attempt.ended_at is None or attempt.ending == "done":
            yield None
            continue
        kind = _KINDS.get(attempt.ending, "software")
        steps = history.steps.get(attempt.attempt)
        if steps is None:
            lasted_s = attempt.ended_at - attempt.started_at - ending_s
            yield Scripted(kind, max(0.0, lasted_s), training=False)
            continue
        first, last = int(steps.numbers[0]), int(steps.numbers[-1])
        # A running step is finished at a signal, and lost at a failure.
        margin_s = (-0.5 if kind == "signal" else 0.5) * measured.step_s - measured.gap_s
        if every != "auto":
            due = last // every * every
            if first <= due and (attempt.checkpoint_after or 0) < due:  # it fell into that save
                last, margin_s = due, 0.5 * measured.save.waited_s - measured.gap_s
        after_s = (last - first + 1) * (measured.step_s + measured.gap_s)
        after_s += _saves(first, last, every) * measured.save.waited_s
        yield Scripted(kind, after_s + margin_s, training=True)


def _saves(first: int, last: int, every: int | Literal["auto"]) -> int:
    """Number of saves at a fixed interval before the last of an attempt's steps."""
    if every == "auto":
        return 0  # they are rare
    return (last - 1) // every - (first - 1) // every
