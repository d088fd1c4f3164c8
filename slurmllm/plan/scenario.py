"""What a simulation starts from: the run, the cluster, and how long everything takes."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Literal

import numpy as np

from slurmllm.config.recipe import Recipe
from slurmllm.plan.failures import Failures, Kind

HOUR_S = 3600.0
DAY_S = 24 * HOUR_S
# Slurm's default SlurmdTimeout: a node without a word for so long is down.
SLURMD_TIMEOUT_S = 300.0
# A failure that somebody reports: the peers' grace and that of the other launchers.
REPORTED_S = 10.0
# Without a watchdog a stuck collective ends by its own time-out: torch.distributed's default.
UNWATCHED_S = 1800.0


@dataclass(frozen=True)
class Durations:
    """Seconds of the phases of an attempt; of several values one is drawn each time.

    Attributes:
        requeue: From the end of an attempt to the start of the next.
        preflight: Checks of the nodes.
        cache: Compiled graphs to the nodes.
        start_up: From the launchers' start to the first step, resume included.
        first_step: What the first step takes longer than others.
        stopping: From the first sign of an end until the attempt is closed.
        noticing: From a failure to its first sign; empty: by its kind (`Scenario.noticing_s`).
    """

    requeue: tuple[float, ...]
    preflight: tuple[float, ...]
    cache: tuple[float, ...]
    start_up: tuple[float, ...]
    first_step: tuple[float, ...]
    stopping: tuple[float, ...] = (5.0,)
    noticing: tuple[float, ...] = ()

    def draw(self, phase: str, rng: np.random.Generator) -> float:
        """One value of a phase."""
        values: tuple[float, ...] = getattr(self, phase)
        return values[int(rng.integers(len(values)))] if len(values) > 1 else values[0]

    def describe(self) -> str:
        """`requeue 125 s, preflight 15 s, …`, the mean of each."""
        named = ((one.name, getattr(self, one.name)) for one in fields(self))
        means = ((name, float(np.mean(values))) for name, values in named if values)
        return ", ".join(f"{name.replace('_', ' ')} {mean:.3g} s" for name, mean in means)


@dataclass(frozen=True)
class SaveCost:
    """What a checkpoint costs.

    Attributes:
        waited_s: That training waits.
        total_s: Until it counts; the same where training waits for all of it.
    """

    waited_s: float
    total_s: float


@dataclass(frozen=True)
class Scenario:
    """A run to simulate.

    Attributes:
        recipe: Its policy: the sections slurm, checkpoint and watchdog.
        nodes: That it runs on.
        step_s: A step, s.
        horizon_s: When the simulation ends, s.
        durations: Of the phases.
        save: What a checkpoint costs.
        failures: What fails.
        steps: Of the run; None: more than it can make.
        gap_s: Between two steps, s.
        spares: Nodes of the partition beyond `nodes`.
        repair_s: From the failure of a node to its return.
        outage_s: How long the shared file system refuses.
        node_mtbf_hours: What the cluster profile says of its nodes.
        time_limit_s: Of the job; None: no limit.
        recovery: auto: the policy decides; by_hand: an engineer restarts whatever has ended.
        engineer_s: Until an engineer restarts a run that has stopped.
    """

    recipe: Recipe
    nodes: int
    step_s: float
    horizon_s: float
    durations: Durations
    save: SaveCost
    failures: Failures
    steps: int | None = None
    gap_s: float = 0.0
    spares: int = 4
    repair_s: float = DAY_S
    outage_s: float = 600.0
    node_mtbf_hours: float = 3300.0
    time_limit_s: float | None = None
    recovery: Literal["auto", "by_hand"] = "auto"
    engineer_s: float = HOUR_S
    names: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        total = self.nodes + self.spares
        object.__setattr__(self, "names", tuple(f"n{i + 1}" for i in range(total)))

    @property
    def hang_limit_s(self) -> float:
        """How long a step may take before the watchdog calls it a hang."""
        watchdog = self.recipe.watchdog
        return max(watchdog.min_step_s, watchdog.step_factor * self.step_s)

    def noticing_s(self, kind: Kind, training: bool, rng: np.random.Generator) -> float:
        """Seconds from a failure to its first sign."""
        if kind == "signal":
            return 0.0
        if self.durations.noticing:
            return self.durations.draw("noticing", rng)
        if kind in ("device", "storage", "software") or self.recovery == "by_hand":
            return REPORTED_S  # by hand: what goes unnoticed is part of the engineer's delay
        watchdog = self.recipe.watchdog
        if not watchdog.enabled:
            return SLURMD_TIMEOUT_S if kind == "node" else UNWATCHED_S
        limit_s = self.hang_limit_s if training else watchdog.start_up_s
        return min(limit_s, SLURMD_TIMEOUT_S) if kind == "node" else limit_s
