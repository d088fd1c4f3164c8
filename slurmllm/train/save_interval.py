"""`checkpoint.every_steps: auto`: the next step to save after, from what the run has seen."""

from __future__ import annotations

import math
import time
from collections import deque
from contextlib import suppress
from statistics import median
from typing import NamedTuple

from slurmllm.errors import SlurmllmError
from slurmllm.metrics.row_reader import read_events
from slurmllm.plan.losses import FAILURES, HOUR_S, best_interval_s, mtbf_s
from slurmllm.records import AttemptRecord
from slurmllm.rundir import RunDir
from slurmllm.train.job import Job

FIRST_SAVE_S = 60.0  # of training, so that the cost of a save is soon known
MEASURED_STEPS = 3  # after which the time of a step is known; the first compiles
_STEPS = 50
_SAVES = 5


class Choice(NamedTuple):
    """When the next checkpoint is written.

    Attributes:
        step: After which.
        values: What that rests on: `interval_s`, `steps`, `step_s`, `mtbf_s`, `failures`, and
            `cost_s` where it is known.
        message: For people.
    """

    step: int
    values: dict[str, float]
    message: str


class History(NamedTuple):
    """What earlier attempts of a run have seen.

    Attributes:
        failures: How many of them failed in a way that loses steps.
        node_s: Their seconds times nodes.
        costs_s: What their last saves cost.
    """

    failures: int
    node_s: float
    costs_s: tuple[float, ...]


def read_history(run: RunDir, attempt: int) -> History:
    """The attempts of a run before one; what cannot be read counts for nothing."""
    failures, node_s, costs = 0, 0.0, list[float]()
    for earlier in run.attempts("train"):
        if earlier.number >= attempt:
            continue
        with suppress(SlurmllmError):
            record = AttemptRecord.load(earlier.record)
            failures += record.ending in FAILURES
            node_s += len(record.nodes) * max(0.0, (record.ended_at or 0.0) - record.started_at)
        with suppress(SlurmllmError):
            saves = [e.values for e in read_events(run, earlier.number) if e.kind == "save"]
            costs += [values["cost_s"] for values in saves if "cost_s" in values]
    return History(failures, node_s, tuple(costs[-_SAVES:]))


class SaveInterval:
    """Measures steps and saves, and chooses.

    A save costs what training waits for it and what steps take longer while it is written.

    Args:
        job: Whose run, nodes and profile it is.
    """

    def __init__(self, job: Job) -> None:
        self._nodes, self._started = job.mesh.nodes, job.started
        self._node_mtbf_hours = job.config.cluster.node_mtbf_hours
        self._history = read_history(job.run, job.attempt)
        self._costs_s = deque(self._history.costs_s, maxlen=_SAVES)
        self._quiet_s: deque[float] = deque(maxlen=_STEPS)
        self._during_s: list[float] = []
        self._save_s = 0.0

    def made_step(self, seconds: float, *, saving: bool) -> None:
        """Count a step in; `saving`: while a checkpoint was written."""
        if saving:
            self._during_s.append(seconds)
        else:
            self._quiet_s.append(seconds)

    def saved(self, seconds: float, waited_s: float, waited_in_steps_s: float) -> float:
        """Count a save in.

        Args:
            seconds: From begin to end.
            waited_s: That training waited between steps.
            waited_in_steps_s: That it waited within them, which their times hold.

        Returns:
            What it cost, s.
        """
        slower = sum(self._during_s) - len(self._during_s) * self._step_s()
        if not self._quiet_s:
            slower = 0.0
        cost = waited_s + max(waited_in_steps_s, min(slower, seconds))
        self._costs_s.append(cost)
        self._during_s.clear()
        self._save_s = seconds
        return cost

    def choose(self, step: int) -> Choice:
        """The next step to save after; `step` was the last."""
        step_s = self._step_s()
        node_s = self._history.node_s + self._nodes * max(0.0, time.time() - self._started)
        mtbf = mtbf_s(self._nodes, self._history.failures, node_s, self._node_mtbf_hours)
        values = {"step_s": step_s, "mtbf_s": mtbf, "failures": float(self._history.failures)}
        if self._costs_s:
            cost = median(self._costs_s)
            values["cost_s"] = cost
            interval = max(best_interval_s(cost, mtbf), self._save_s)
            why = f"a save costs {cost:.2f} s, failures every {mtbf / HOUR_S:.1f} h"
        else:
            interval = min(FIRST_SAVE_S, mtbf)
            why = "the first, to see what a save costs"
        steps = max(1, math.ceil(interval / step_s) if step_s > 0 else 1)
        values |= {"interval_s": interval, "steps": float(steps)}
        message = f"next checkpoint in {steps} steps (every {interval:.0f} s: {why})"
        return Choice(step + steps, values, message)

    def _step_s(self) -> float:
        return median(self._quiet_s or self._during_s or [0.0])
