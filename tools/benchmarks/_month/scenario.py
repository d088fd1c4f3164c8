"""A run to simulate: its recipe and cluster, and how long everything takes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from _month.failures import Failures
from slurmllm.config.recipe import Recipe
from slurmllm.plan.lost_time import (
    HOUR_S,
    REPORTED_S,
    SLURMD_TIMEOUT_S,
    UNWATCHED_S,
    Durations,
    FailureKind,
    SaveCost,
)

DAY_S = 24 * HOUR_S


def draw(durations: Durations, phase: str, rng: np.random.Generator) -> float:
    """One of the values of a phase, s."""
    values: tuple[float, ...] = getattr(durations, phase)
    return values[int(rng.integers(len(values)))] if len(values) > 1 else values[0]


@dataclass(frozen=True)
class Scenario:
    """A run to simulate.

    Attributes:
        recipe: Its policy: the sections slurm, checkpoint and watchdog. The job holds
            `slurm.spare_nodes` in addition to `nodes`; utilization is of `nodes`.
        nodes: Number of nodes.
        step_s: Duration of a step, s.
        horizon_s: When the simulation ends, s.
        durations: Of the phases.
        save: What a checkpoint costs.
        failures: Source of failures.
        steps: Of the run; None: unlimited.
        spares: Nodes of the partition beyond those of the job.
        repair_s: From the failure of a node to its return.
        outage_s: How long the shared file system fails.
        node_mtbf_hours: The cluster profile's figure.
        time_limit_s: Of the job; None: no limit.
        recovery: auto: the policy decides; by_hand: an engineer restarts every ended job.
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
    spares: int = 4
    repair_s: float = DAY_S
    outage_s: float = 600.0
    node_mtbf_hours: float = 3300.0
    time_limit_s: float | None = None
    recovery: Literal["auto", "by_hand"] = "auto"
    engineer_s: float = HOUR_S
    names: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        total = self.nodes + self.recipe.slurm.spare_nodes + self.spares
        object.__setattr__(self, "names", tuple(f"n{i + 1}" for i in range(total)))

    @property
    def restarts_in_job(self) -> bool:
        """Whether new workers start in the same job if it has enough healthy nodes."""
        return self.recovery == "auto" and self.recipe.slurm.restart_in_allocation

    @property
    def hang_limit_s(self) -> float:
        """Duration from which the watchdog takes a step for a hang, s."""
        watchdog = self.recipe.watchdog
        return max(watchdog.min_step_s, watchdog.step_factor * self.step_s)

    def noticing_s(self, kind: FailureKind, training: bool, rng: np.random.Generator) -> float:
        """Seconds from a failure to its first sign."""
        if kind == "signal":
            return 0.0
        if self.durations.noticing:
            return draw(self.durations, "noticing", rng)
        if kind in ("device", "storage", "software") or self.recovery == "by_hand":
            return REPORTED_S  # by hand, the delay until somebody notices is in engineer_s
        watchdog = self.recipe.watchdog
        if not watchdog.enabled:
            return SLURMD_TIMEOUT_S if kind == "node" else UNWATCHED_S
        limit_s = self.hang_limit_s if training else watchdog.start_up_s
        return min(limit_s, SLURMD_TIMEOUT_S) if kind == "node" else limit_s
