"""The learning rate of each step, and the steps after which checkpoints are saved.

`checkpoint.every_steps: auto` saves at the interval that loses least work (`plan.lost_time`), from
the cost of a save and the failures that the run has measured so far.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from statistics import median
from typing import NamedTuple

from slurmllm.core.config.operation import CheckpointConfig
from slurmllm.core.config.recipe import OptimConfig, Recipe
from slurmllm.core.errors import ConfigError, SlurmllmError
from slurmllm.core.metrics.row_reader import read_events
from slurmllm.core.run.records import AttemptRecord
from slurmllm.core.run.rundir import RunDir
from slurmllm.plan.lost_time import FAILURES, HOUR_S, best_interval_s, mtbf_s

FIRST_SAVE_S = 60.0  # of training, so that the cost of a save is known early
MEASURED_STEPS = 3  # after which the step time is known; the first step compiles
_STEPS = 50
_SAVES = 5


def learning_rate(optim: OptimConfig, total_steps: int, step: int) -> float:
    """Return the learning rate of a step, from 1: linear warm-up, `lr`, the decay, then `min_lr`.

    The n-th step of a warm-up over n steps has lr, unless `optim.step_count` gives NeMo's or
    transformers' rates. By default the decay ends at `total_steps`.
    """
    warmup = optim.warmup(total_steps)
    late = optim.step_count != "from_1"
    rise = warmup + (optim.step_count == "nemo")
    if rise and step <= warmup + late:
        return optim.lr * (step - (optim.step_count == "transformers")) / rise
    start = decay_start(optim, total_steps)
    if step <= start:
        return optim.lr
    end = (optim.decay_steps or total_steps) + late
    return optim.min_lr + (optim.lr - optim.min_lr) * _SHAPES[optim.decay](
        min(1.0, (step - start) / (end - start))
    )


def decay_start(optim: OptimConfig, total_steps: int) -> float:
    """Return the step after which the decay begins; infinity without a decay."""
    if optim.decay == "constant":
        return math.inf
    start = optim.warmup(total_steps) if optim.decay_start is None else optim.decay_start
    return start + (optim.step_count != "from_1")


_SHAPES: dict[str, Callable[[float], float]] = {  # progress of the decay → share of lr left
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
    "linear": lambda progress: 1.0 - progress,
    "1-sqrt": lambda progress: 1.0 - math.sqrt(progress),  # Hägele et al. 2024, arXiv 2405.18392
}


def check_decay_start(before: Recipe, after: Recipe, trained: int) -> None:
    """Raise a ConfigError if a resume moves a decay's start among the `trained` steps."""
    starts = [(r.optim.decay_start, r.optim.decay == "constant") for r in (before, after)]
    if starts[0] == starts[1]:
        return
    old, new = (decay_start(recipe.optim, recipe.train.steps) for recipe in (before, after))
    if min(old, new) >= trained:
        return
    fix = (
        f"move the checkpoints after step {min(old, new):.0f} out of the run's directory to resume "
        "from an earlier one, or start again with --from-scratch"
    )
    if old >= trained:
        fault = (
            f"optim.decay_start: {new:.0f} is before step {trained}, up to which the run has "
            f"trained without decay; set {trained} or more, or {fix}"
        )
    else:
        change = "removed" if math.isinf(new) else f"moved to {new:.0f}"
        fault = (
            f"optim.decay_start: the decay began after step {old:.0f} and the run resumes from "
            f"step {trained}, so the decay cannot be {change}; keep "
            f"optim.decay={before.optim.decay} and optim.decay_start={old:.0f}, or {fix}"
        )
    raise ConfigError(f"{after.name}: the schedule differs in trained steps", [fault])


def unfinished_decay(recipe: Recipe) -> list[str]:
    """Return a warning if the run ends before the decay of its learning rate, after the warm-up."""
    optim = recipe.optim
    steps = recipe.train.steps
    if optim.decay == "constant" or not optim.warmup(steps) < steps < (optim.decay_steps or 0):
        return []
    last = learning_rate(optim, steps, steps)
    return [
        f"optim.decay_steps: the run ends at step {steps}, before the decay of its learning rate "
        f"does ({optim.decay_steps}): the last rate is {last:.3g}, not min_lr {optim.min_lr:g}; "
        f"--set optim.decay_steps={steps} ends the decay with the run"
    ]


def moved_decay_end(before: Recipe, after: Recipe, trained: int) -> str | None:
    """Return a warning if a resume moves the end of a decay that has begun, else None.

    Arguments as for `check_decay_start`. The rates of the trained steps are of the former end then.
    """
    start = decay_start(before.optim, before.train.steps)
    old, new = (recipe.optim.decay_steps or recipe.train.steps for recipe in (before, after))
    if old == new or trained <= start or after.optim.decay == "constant":
        return None
    planned, now = (
        learning_rate(recipe.optim, recipe.train.steps, trained + 1) for recipe in (before, after)
    )
    named = {before.optim.decay_steps, after.optim.decay_steps} != {None}
    return (
        f"{'optim.decay_steps' if named else 'train.steps'}: the decay began after step "
        f"{start:.0f}, and its end moves from step {old} to {new}: the learning rate of step "
        f"{trained + 1} is {now:.3g}, not {planned:.3g}, so the schedule has a jump here. To "
        f"keep the planned rates (min_lr, {before.optim.min_lr:g}, after step {old}), add --set "
        f"optim.decay_steps={old}; to restart the decay, move the checkpoints after step "
        f"{start:.0f} out of the run's directory before the resume"
    )


class SaveSchedule:
    """The steps after which a checkpoint is saved, the same on all workers."""

    def __init__(self, config: CheckpointConfig) -> None:
        self._every = config.every_steps
        self.auto = config.every_steps == "auto"
        self.next: int | None = None  # under `auto`, the step of the next save, if known

    def due(self, step: int) -> bool:
        if self._every == "auto":
            return self.next is not None and step >= self.next
        return step % self._every == 0


class NextSave(NamedTuple):
    """The step after which the next checkpoint is saved, with the inputs of the choice."""

    step: int
    values: dict[str, float]
    message: str


class SaveInterval:
    """The choice of the step of the next save, by measured steps and saves.

    The cost of a save is the time that training waits for it plus the slow-down of the steps during
    its write. Of the attempts before `attempt`, those with unreadable records are ignored.
    `started` is the Unix time of this attempt's start, s.
    """

    _failures = 0  # earlier attempts that failed in a way that loses steps
    _earlier_node_s = 0.0  # durations of the earlier attempts times their nodes
    _save_s = 0.0

    def __init__(
        self, run: RunDir, attempt: int, nodes: int, started: float, node_mtbf_hours: float
    ) -> None:
        self._nodes = nodes
        self._started = started
        self._node_mtbf_hours = node_mtbf_hours
        self._costs_s: deque[float] = deque(maxlen=_SAVES)
        self._quiet_s: deque[float] = deque(maxlen=_STEPS)
        self._saving_s: list[float] = []
        for earlier in run.attempts("train"):
            if earlier.number >= attempt:
                continue
            with suppress(SlurmllmError):
                record = AttemptRecord.load(earlier.record)
                self._failures += record.ending in FAILURES
                seconds = max(0.0, (record.ended_at or 0.0) - record.started_at)
                self._earlier_node_s += len(record.nodes) * seconds
            with suppress(SlurmllmError):
                saves = [e.values for e in read_events(run, earlier.number) if e.kind == "save"]
                self._costs_s.extend(v["cost_s"] for v in saves if "cost_s" in v)

    def add_step(self, seconds: float, *, saving: bool) -> None:
        (self._saving_s if saving else self._quiet_s).append(seconds)

    def add_save(self, seconds: float, waited_s: float, waited_in_steps_s: float) -> float:
        """Add a save that took `seconds`; return its cost, s.

        Training waited `waited_s` between steps, and `waited_in_steps_s` as a part of their times.
        """
        slower = sum(self._saving_s) - len(self._saving_s) * self._step_s()
        slower = slower if self._quiet_s else 0.0
        cost = waited_s + max(waited_in_steps_s, min(slower, seconds))
        self._costs_s.append(cost)
        self._saving_s.clear()
        self._save_s = seconds
        return cost

    def choose(self, step: int) -> NextSave:
        step_s = self._step_s()
        node_s = self._earlier_node_s + self._nodes * max(0.0, time.time() - self._started)
        mtbf = mtbf_s(self._nodes, self._failures, node_s, self._node_mtbf_hours)
        values = {"step_s": step_s, "mtbf_s": mtbf, "failures": float(self._failures)}
        if self._costs_s:
            cost = median(self._costs_s)
            values["cost_s"] = cost
            # Never shorter than a save itself: the next one would wait for it.
            interval = max(best_interval_s(cost, mtbf), self._save_s)
            why = f"a save costs {cost:.2f} s, failures every {mtbf / HOUR_S:.1f} h"
        else:
            interval = min(FIRST_SAVE_S, mtbf)
            why = "the first, to measure the cost of a save"
        steps = max(1, math.ceil(interval / step_s) if step_s > 0 else 1)
        values |= {"interval_s": interval, "steps": float(steps)}
        message = f"next checkpoint in {steps} steps (every {interval:.0f} s: {why})"
        return NextSave(step + steps, values, message)

    def _step_s(self) -> float:
        return median(self._quiet_s or self._saving_s or [0.0])
