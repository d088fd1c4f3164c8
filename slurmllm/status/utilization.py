"""How many of the node hours that a run bought trained it, and where the others went."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, computed_field

from slurmllm.records import TIME_PARTS as PARTS
from slurmllm.records import TimePart as Part
from slurmllm.status.history import RunHistory
from slurmllm.status.time_breakdown import AllocationTime, break_down_time

HOUR_S = 3600.0
_OVERLAP = 0.01  # of an allocation: measured twice, from which on a reader should know
# Summed over runs.
_AMOUNTS = (
    "node_hours", "wall_hours", "queue_hours", "productive_hours", "training_hours", "attempts",
    "steps", "steps_lost",
)  # fmt: skip


class Utilization(BaseModel):
    """The node hours of a run, or of several."""

    model_config = ConfigDict(frozen=True)

    node_hours: float = Field(description="bought: nodes × time of every allocation")
    parts: dict[Part, float] = Field(description="node hours by part; they add up to node_hours")
    wall_hours: float = Field(description="with an allocation or waiting for one")
    queue_hours: float = Field(description="of it, waiting for one")
    productive_hours: float = Field(description="of it, in steps that the run went on with")
    training_hours: float = Field(description="of it, in steps and saves, lost ones included")
    attempts: int = Field(description="of the train stage")
    steps: int = Field(description="that the run went on with")
    steps_lost: int = Field(description="made, and to be made again")
    usd_per_node_hour: float | None = None
    warnings: tuple[str, ...] = ()

    @computed_field(description="of node_hours; all 0 where nothing was bought")  # type: ignore[prop-decorator]
    @property
    def shares(self) -> dict[Part, float]:
        """Each part's share of the node hours."""
        return {part: _ratio(hours, self.node_hours) or 0.0 for part, hours in self.parts.items()}

    @computed_field  # type: ignore[prop-decorator]
    @property
    def effective(self) -> float | None:
        """Effective utilization: productive node hours / node hours; None where there are none."""
        return _ratio(self.parts["productive"], self.node_hours)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def goodput(self) -> float | None:
        """Productive time / wall time, which counts the waits in the queue."""
        return _ratio(self.productive_hours, self.wall_hours)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def uptime(self) -> float | None:
        """Time in steps and saves / wall time: lost steps count as well."""
        return _ratio(self.training_hours, self.wall_hours)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def usd(self) -> float | None:
        """What the node hours cost."""
        price = self.usd_per_node_hour
        return None if price is None else price * self.node_hours

    @computed_field  # type: ignore[prop-decorator]
    @property
    def wasted_usd(self) -> float | None:
        """What those cost that were not productive."""
        price = self.usd_per_node_hour
        return None if price is None else price * (self.node_hours - self.parts["productive"])


def account_node_hours(history: RunHistory, usd_per_node_hour: float | None = None) -> Utilization:
    """Account for a run's node hours.

    Args:
        history: What it did.
        usd_per_node_hour: Price of a node; None: no dollars.
    """
    found = break_down_time(history)
    parts: dict[Part, float] = {
        part: math.fsum(one.nodes * one.parts_s[part] for one in found) / HOUR_S for part in PARTS
    }
    queue_s = math.fsum(queue_waits(found, history.submissions))
    wall_s = _covered(found) + queue_s
    trained: tuple[Part, ...] = ("productive", "recomputation", "saving")
    return Utilization(
        node_hours=math.fsum(one.nodes * (one.end - one.start) for one in found) / HOUR_S,
        parts=parts,
        wall_hours=wall_s / HOUR_S,
        queue_hours=queue_s / HOUR_S,
        productive_hours=math.fsum(one.parts_s["productive"] for one in found) / HOUR_S,
        training_hours=math.fsum(one.parts_s[p] for one in found for p in trained) / HOUR_S,
        attempts=sum(attempt.stage == "train" for attempt in history.attempts),
        steps=sum(one.steps for one in found),
        steps_lost=sum(one.steps_lost for one in found),
        usd_per_node_hour=usd_per_node_hour,
        warnings=(*history.warnings, *_warnings(found, history)),
    )


def sum_utilization(several: Sequence[Utilization]) -> Utilization:
    """Several runs taken together: their node hours and their wall times add up."""
    amounts: dict[str, Any] = {
        name: math.fsum(getattr(one, name) for one in several) for name in _AMOUNTS
    }
    counts = {name: int(amounts[name]) for name in ("attempts", "steps", "steps_lost")}
    parts: dict[Part, float] = {
        part: math.fsum(one.parts[part] for one in several) for part in PARTS
    }
    prices = {one.usd_per_node_hour for one in several}
    price = prices.pop() if len(prices) == 1 else None
    return Utilization(**(amounts | counts), parts=parts, usd_per_node_hour=price)


def queue_waits(found: Sequence[AllocationTime], submissions: Sequence[float]) -> Iterator[float]:
    """Seconds in the queue before each allocation.

    From the end of what was before, or from the last submission after it: a run that has stopped
    waits for nobody until somebody resumes it.

    Args:
        found: The allocations in the order of their starts.
        submissions: When the run was submitted and resumed, Unix time, s.
    """
    before: float | None = None
    for one in found:
        since = [s for s in submissions if s <= one.start and (before is None or s > before)]
        begin = max(since, default=before)
        if begin is not None:
            yield max(0.0, one.start - begin)
        before = one.end if before is None else max(before, one.end)


def _covered(found: Sequence[AllocationTime]) -> float:
    """Seconds in which there was an allocation, however many at once."""
    covered, until = [], -math.inf
    for one in found:
        covered.append(max(0.0, one.end - max(one.start, until)))
        until = max(until, one.end)
    return math.fsum(covered)


def _warnings(found: Sequence[AllocationTime], history: RunHistory) -> Iterator[str]:
    for one in found:
        if one.overlap_s > _OVERLAP * (one.end - one.start):
            yield (
                f"{one.stage} attempt {one.attempt}: {one.overlap_s:.1f} s were measured beyond "
                f"its {one.end - one.start:.1f} s; are the nodes' clocks off?"
            )
    jobs = {attempt.job_id for attempt in history.attempts} - {None}
    unknown = sorted(str(job) for job in jobs - {one.job_id for one in history.incarnations})
    if unknown:
        yield (
            f"Slurm's accounting knows nothing of job {', '.join(unknown)}: its node hours are "
            "those of the attempts' records"
        )
    for attempt in history.attempts:
        if attempt.ended_at is None:
            yield (
                f"{attempt.stage} attempt {attempt.attempt} has no end yet: it is counted up to "
                "what it has written"
            )


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None
