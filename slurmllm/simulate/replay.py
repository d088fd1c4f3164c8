"""The simulator held against a real run: the same failures at the same moments, its own phases."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from slurmllm.analysis.history import History
from slurmllm.analysis.utilization import Utilization, utilization
from slurmllm.config.recipe import Recipe
from slurmllm.errors import RunError
from slurmllm.records import AttemptRecord, EndingClass
from slurmllm.simulate.failures import Kind, Scripted, ScriptedFailures
from slurmllm.simulate.measured import Measured
from slurmllm.simulate.scenario import DAY_S, Scenario
from slurmllm.simulate.simulation import simulate

# Failures that break no node: where a replay runs is not of interest.
_KINDS: Mapping[EndingClass, Kind] = {
    "node_failure": "network",
    "storage_failure": "network",
    "hang": "hang",
    "advance_signal": "signal",
}


@dataclass(frozen=True)
class Compared:
    """A figure of a real run and what the simulator makes of it.

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
        """Relative to the actual; None where that is 0."""
        return (self.predicted - self.actual) / self.actual if self.actual else None


def compare(
    history: History, recipe: Recipe, measured: Measured, seeds: Sequence[int]
) -> list[Compared]:
    """Simulate a run's training with its own failures, and lay both accounts side by side.

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
    real = utilization(replace(history, attempts=train, submissions=(), incarnations=tuple(
        one for one in history.incarnations if one.stage == "train"
    )))  # fmt: skip
    scenario = Scenario(
        recipe=recipe, nodes=len(train[0].nodes), step_s=measured.step_s, gap_s=measured.gap_s,
        horizon_s=365 * DAY_S, durations=measured.durations, save=measured.save,
        failures=ScriptedFailures(tuple(_script(history, train, measured.step_s))),
        steps=int(history.steps[last].numbers[-1]), repair_s=0.0, engineer_s=0.0,
    )  # fmt: skip
    predicted = [utilization(simulate(scenario, seed)) for seed in seeds]
    real_figures, several = _figures(real), [_figures(one) for one in predicted]
    return [
        Compared(name, actual, math.fsum(one[name] for one in several) / len(several))
        for name, actual in real_figures.items()
    ]


def _figures(used: Utilization) -> dict[str, float]:
    figures: dict[str, float] = {str(part): hours for part, hours in used.parts.items()}
    figures |= {"node_hours": used.node_hours, "wall_hours": used.wall_hours}
    return figures | {"steps_lost": float(used.steps_lost), "effective": used.effective or 0.0}


def _script(
    history: History, train: Sequence[AttemptRecord], step_s: float
) -> Iterator[Scripted | None]:
    """What ended each attempt, and when: right after the last step that it completed."""
    for attempt in train:
        if attempt.ending is None or attempt.ended_at is None or attempt.ending == "done":
            yield None
            continue
        kind = _KINDS.get(attempt.ending, "software")
        steps = history.steps.get(attempt.attempt)
        if steps is None:
            yield Scripted(kind, attempt.ended_at - attempt.started_at, training=False)
            continue
        begin = float(steps.ends[0] - steps.seconds[0])
        half_s = 0.5 * step_s
        after_s = float(steps.ends[-1]) - begin + (-half_s if kind == "signal" else half_s)
        yield Scripted(kind, after_s, training=True)
