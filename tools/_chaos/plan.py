"""The failures of a run and their moments: a pure function of a seed."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# The classes that an attempt may have after a failure; `done` and `advance_signal` if the failure
# was over before it was noticed.
EXPECTED: Mapping[str, frozenset[str]] = {
    "worker_killed": frozenset({"node_failure"}),
    "node_dies": frozenset({"node_failure"}),
    "first_node_dies": frozenset({"node_failure"}),
    "node_replaced": frozenset({"node_failure"}),  # gone and back, empty, before Slurm has looked
    "node_frozen": frozenset({"node_failure", "hang", "superseded", "advance_signal", "done"}),
    "slurmctld_restart": frozenset({"done"}),
    # Slurm ends what it can reach by SIGTERM: the workers save and leave, on all nodes.
    "slurmd_dies": frozenset({"node_failure", "advance_signal", "done"}),
    "time_limit": frozenset({"advance_signal"}),
    "read_only": frozenset({"storage_failure", "node_failure", "done"}),
    "disk_full": frozenset({"storage_failure", "node_failure", "done"}),
    "hang": frozenset({"hang"}),
    "network_bad": frozenset({"done", "node_failure", "hang"}),
    "disk_slow": frozenset({"done", "hang", "storage_failure"}),
    "disk_frozen": frozenset({"done", "hang", "storage_failure"}),
    "node_disk_frozen": frozenset({"done"}),
    "clock_jump": frozenset({"done"}),
    "memory_short": frozenset({"node_failure", "done"}),
    # Of a process that is stopped and continued later, mostly nobody notices.
    "supervisor_stopped": frozenset({"done"}),
    "launcher_stopped": frozenset({"done"}),
    "worker_stopped": frozenset({"done", "hang"}),
    "srun_stopped": frozenset({"done"}),
    "slurmstepd_stopped": frozenset({"done", "node_failure", "advance_signal"}),
    "slurmd_stopped": frozenset({"node_failure", "advance_signal", "done"}),
    "slurmdbd_away": frozenset({"done"}),
    # The second takes over: it ends the first one's attempt and, when that leaves, its own.
    "two_supervisors": frozenset({"done", "superseded", "node_failure"}),
}
KINDS = tuple(EXPECTED)
# Seconds until a failure is undone; of the others, 2 to 25.
LASTS_S: Mapping[str, tuple[float, float]] = {
    "read_only": (1, 8),
    "disk_full": (1, 8),
    "memory_short": (1, 8),
    "node_replaced": (0, 0),
}
DBD_AWAY_S = 20.0
FIRST_MOMENTS = ("starting", "stepping", "stepping", "stepping", "saving")
LATER_MOMENTS = (*FIRST_MOMENTS, "requeueing", "recovering", "recovering")


@dataclass(frozen=True)
class Failure:
    """One failure.

    Its moment: while an attempt is `starting` or `stepping`, in the middle of its first save after
    `step` (`saving`), while the job waits to start again after the failure before (`requeueing`),
    or while the attempt that follows that one starts (`recovering`).
    """

    kind: str
    moment: str
    step: int  # for `stepping` and `saving`: the first step after which it happens
    delay_s: float  # from the moment on
    lasts_s: float  # until it is undone, if it is
    victim: float  # which node or worker, as a fraction of those that may be hit
    hard: bool  # `slurmctld_restart`: by SIGKILL; `network_bad`: more; `clock_jump`: ahead


def make_plan(
    seed: int, steps: int, kinds: Sequence[str] = KINDS, dbd_away_s: float = DBD_AWAY_S
) -> tuple[Failure, ...]:
    """One to three failures, in the order in which they happen."""
    rng = random.Random(f"chaos {seed}")
    count = rng.choice((1, 1, 2, 2, 3))
    at = sorted(rng.randint(2, max(2, steps - 4)) for _ in range(count))
    plan = []
    for index in range(count):
        kind = rng.choice(tuple(kinds))
        moment = rng.choice(LATER_MOMENTS if index else FIRST_MOMENTS)
        delay_s = rng.choice((0.0, rng.uniform(0, 0.3), rng.uniform(0, 3)))
        if moment in ("stepping", "saving"):
            delay_s = 0.0
        lasts_s = rng.uniform(*LASTS_S.get(kind, (2, 25)))
        if kind == "slurmdbd_away":
            lasts_s = dbd_away_s
        if kind == "slurmctld_restart":
            lasts_s = rng.choice((0.0, rng.uniform(0, 8)))
        plan.append(
            Failure(
                kind,
                moment,
                at[index],
                round(delay_s, 3),
                round(lasts_s, 1),
                rng.random(),
                rng.random() < 0.5,
            )
        )
    return tuple(plan)


def describe(plan: Sequence[Failure]) -> str:
    """`node_dies@stepping 12, hang@recovering`."""
    parts = []
    for failure in plan:
        where = f" {failure.step}" if failure.moment in ("stepping", "saving") else ""
        parts.append(f"{failure.kind}@{failure.moment}{where}")
    return ", ".join(parts)
