"""How long a run took from a failure to its next completed step, and in which phase."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

from _chaos.checks import records
from _chaos.running import Course
from slurmllm.run.rundir import RunDir

PHASES = ("notice", "requeue", "begin", "preflight", "cache", "start_up", "first_step", "rest")


@dataclass(frozen=True)
class Recovery:
    """One failure and what followed.

    Attributes:
        kind: What happened.
        seconds: From the failure to the next completed step.
        slurm_s: Of them, from the job's end to its next start: Slurm's own, backoff included.
        phases_s: `notice`: until the job ended; `begin`: from the next start to the new attempt's
            record; then those of the attempt's record; `rest`: what none of them explains.
    """

    kind: str
    seconds: float
    slurm_s: float
    phases_s: dict[str, float]

    @property
    def own_s(self) -> float:
        """Beyond Slurm's own delay."""
        return self.seconds - self.slurm_s


def recoveries(
    run: RunDir, course: Course, incarnations: Sequence[tuple[float, float]]
) -> list[Recovery]:
    """Of the failures that ended an attempt, where the next one came through its first step."""
    found = []
    by_number = {record["attempt"]: record for record in records(run)}
    hit = [i for i in course.injected if i.happened]
    if any(i.failure.kind == "clock_jump" for i in hit):
        return []  # the records' times are of different clocks
    for injected in hit:
        failed, after = by_number.get(injected.attempt), by_number.get(injected.attempt + 1)
        alone = sum(i.attempt in (injected.attempt, injected.attempt + 1) for i in hit) == 1
        if failed is None or after is None or not alone or failed.get("class") == "done":
            continue
        step_at = _first_step_at(run, injected.attempt + 1)
        first, second = failed.get("restart_count", 0), after.get("restart_count", 0)
        if step_at is None or second != first + 1 or second >= len(incarnations):
            continue
        ended, began = incarnations[first][1], incarnations[second][0]
        if math.isnan(ended) or math.isnan(began):
            continue
        phases = after.get("phases_s", {})
        parts = {
            "notice": ended - injected.at,
            "requeue": began - ended,
            "begin": after["started_at"] - began,
            **{name: phases.get(name, 0.0) for name in PHASES[3:7]},
        }
        seconds = step_at - injected.at
        parts["rest"] = seconds - sum(parts.values())
        found.append(Recovery(injected.failure.kind, seconds, began - ended, parts))
    return found


def _first_step_at(run: RunDir, attempt: int) -> float | None:
    try:
        with run.metrics(attempt).open() as stream:
            return float(json.loads(stream.readline())["time"])
    except (OSError, ValueError, KeyError):
        return None
