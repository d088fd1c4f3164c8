"""The utilization of a run's node hours: how many were productive, and what the others were."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, computed_field

from slurmllm.records import TIME_PARTS, TimePart
from slurmllm.status.history import RunHistory
from slurmllm.status.time_breakdown import HOUR_S, AllocationTime, break_down_time

_OVERLAP = 0.01  # share of an allocation that is measured twice, above which to warn
# Summed over runs.
_AMOUNTS = (
    "node_hours", "wall_hours", "queue_hours", "productive_hours", "training_hours", "attempts",
    "steps", "steps_lost",
)  # fmt: skip


class Utilization(BaseModel):
    """The node hours of a run, or of several."""

    model_config = ConfigDict(frozen=True)

    node_hours: float = Field(description="nodes × time of every allocation")
    parts: dict[TimePart, float] = Field(
        description="node hours by part; they add up to node_hours"
    )
    wall_hours: float = Field(description="with an allocation or waiting for one")
    queue_hours: float = Field(description="part of wall_hours: waiting for an allocation")
    productive_hours: float = Field(description="part of wall_hours: steps that the run kept")
    training_hours: float = Field(
        description="part of wall_hours: steps and saves, lost steps included"
    )
    attempts: int = Field(description="attempts of the train stage")
    steps: int = Field(description="steps that the run kept")
    steps_lost: int = Field(description="steps that were, or must be, recomputed")
    usd_per_node_hour: float | None = None
    warnings: tuple[str, ...] = ()

    @computed_field(description="of node_hours; all 0 without node hours")  # type: ignore[prop-decorator]
    @property
    def shares(self) -> dict[TimePart, float]:
        """Each part's share of the node hours."""
        return {part: _ratio(hours, self.node_hours) or 0.0 for part, hours in self.parts.items()}

    @computed_field  # type: ignore[prop-decorator]
    @property
    def effective(self) -> float | None:
        """Effective utilization: productive node hours / node hours."""
        return _ratio(self.parts["productive"], self.node_hours)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def goodput(self) -> float | None:
        """Productive time / wall time, which includes the queue."""
        return _ratio(self.productive_hours, self.wall_hours)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def uptime(self) -> float | None:
        """Time in steps and saves / wall time: lost steps are included."""
        return _ratio(self.training_hours, self.wall_hours)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def usd(self) -> float | None:
        """Cost of the node hours."""
        price = self.usd_per_node_hour
        return None if price is None else price * self.node_hours

    @computed_field  # type: ignore[prop-decorator]
    @property
    def wasted_usd(self) -> float | None:
        """Cost of the node hours that were not productive."""
        price = self.usd_per_node_hour
        return None if price is None else price * (self.node_hours - self.parts["productive"])


def account_node_hours(history: RunHistory, usd_per_node_hour: float | None = None) -> Utilization:
    """Account for a run's node hours; without a price, no dollars are computed."""
    found = break_down_time(history)
    parts: dict[TimePart, float] = {
        part: math.fsum(one.nodes * one.parts_s[part] for one in found) / HOUR_S
        for part in TIME_PARTS
    }
    queue_s = math.fsum(_queue_waits(found, history.submissions))
    # Seconds with an allocation: two at once, such as a precompile of a resume, count once.
    covered, until = [], -math.inf
    for one in found:
        covered.append(max(0.0, one.end - max(one.start, until)))
        until = max(until, one.end)
    wall_s = math.fsum(covered) + queue_s
    training: tuple[TimePart, ...] = ("productive", "recomputation", "saving")
    return Utilization(
        node_hours=math.fsum(one.nodes * (one.end - one.start) for one in found) / HOUR_S,
        parts=parts,
        wall_hours=wall_s / HOUR_S,
        queue_hours=queue_s / HOUR_S,
        productive_hours=math.fsum(one.parts_s["productive"] for one in found) / HOUR_S,
        training_hours=math.fsum(one.parts_s[p] for one in found for p in training) / HOUR_S,
        attempts=sum(attempt.stage == "train" for attempt in history.attempts),
        steps=sum(one.steps for one in found),
        steps_lost=sum(one.steps_lost for one in found),
        usd_per_node_hour=usd_per_node_hour,
        warnings=(*history.warnings, *_warnings(found, history)),
    )


def sum_utilization(runs: Sequence[Utilization]) -> Utilization:
    """The sum over several runs: node hours and wall times add up."""
    amounts: dict[str, Any] = {
        name: math.fsum(getattr(one, name) for one in runs) for name in _AMOUNTS
    }
    counts = {name: int(amounts[name]) for name in ("attempts", "steps", "steps_lost")}
    parts: dict[TimePart, float] = {
        part: math.fsum(one.parts[part] for one in runs) for part in TIME_PARTS
    }
    prices = {one.usd_per_node_hour for one in runs}
    price = prices.pop() if len(prices) == 1 else None
    return Utilization(**(amounts | counts), parts=parts, usd_per_node_hour=price)


def _queue_waits(
    allocations: Sequence[AllocationTime], submissions: Sequence[float]
) -> Iterator[float]:
    """Seconds in the queue before each allocation, which are in the order of their starts.

    Counted from the end of the previous allocation or from a later submission: a stopped run does
    not wait until somebody resumes it.
    """
    before: float | None = None
    for one in allocations:
        since = [s for s in submissions if s <= one.start and (before is None or s > before)]
        begin = max(since, default=before)
        if begin is not None:
            yield max(0.0, one.start - begin)
        before = one.end if before is None else max(before, one.end)


def _warnings(found: Sequence[AllocationTime], history: RunHistory) -> Iterator[str]:
    for one in found:
        if one.overlap_s > _OVERLAP * (one.end - one.start):
            yield (
                f"{one.stage} attempt {one.attempt}: the measured parts exceed its "
                f"{one.end - one.start:.1f} s by {one.overlap_s:.1f} s; check the nodes' clocks"
            )
    jobs = {attempt.job_id for attempt in history.attempts} - {None}
    unknown = sorted(str(job) for job in jobs - {one.job_id for one in history.incarnations})
    if unknown:
        yield (
            f"job {', '.join(unknown)} is not in Slurm's accounting: its node hours are taken from "
            "the attempt records"
        )
    for attempt in history.attempts:
        if attempt.ended_at is None:
            yield (
                f"{attempt.stage} attempt {attempt.attempt} has no recorded end: it is counted up "
                "to its last step"
            )


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None
