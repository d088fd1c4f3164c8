"""The records of a comparison: its tolerances, what was read, and the result."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from slurmllm.compare.statistics import Statistics
from slurmllm.metrics.curves import Axis, Range
from slurmllm.records import Record

Kind = Literal[
    "data", "seed", "batch", "model", "precision", "lr", "optimizer", "mesh", "rounding",
    "gradient", "batches", "not_finite", "unknown",
]  # fmt: skip

RuleName = Literal["not_finite", "exact", "pointwise", "lasting", "noise", "outlier", "band"]


class Tolerances(Record):
    """Tolerances within which two curves match."""

    loss: float = Field(default=1e-3, ge=0, allow_inf_nan=False, description="relative")
    grad_norm: float = Field(default=1e-2, ge=0, allow_inf_nan=False, description="relative")
    exact: bool = Field(default=False, description="every value must be bit-identical instead")

    def of(self, metric: str) -> float:
        """The relative tolerance of a metric; 0 if `exact`."""
        if self.exact:
            return 0.0
        return self.loss if metric == "loss" else self.grad_norm


class Side(Record):
    """One of the two curves, as read."""

    name: str
    path: str
    steps: int = Field(description="steps that have a row")
    first_step: int
    last_step: int
    attempts: int = Field(description="attempts that these rows come from")
    restarts: tuple[int, ...] = Field(description="steps at which another attempt takes over")
    missing: tuple[Range, ...] = Field(description="ranges of steps without a row in between")


class Overlap(Record):
    """Steps that a run recomputed, because an attempt resumed from before them."""

    rows: int = Field(description="rows that a later attempt replaced")
    identical: bool | None = Field(
        description="bit-identical to the rows that replaced them; None: no rows"
    )
    max_rel_diff: float | None = Field(description="largest relative difference to those")


class MetricComparison(Record):
    """One metric of both curves at their common steps."""

    tolerance: float = Field(description="relative")
    steps_compared: int
    max_rel_diff: float | None = Field(description="None if no step is finite on both sides")
    max_rel_diff_step: int | None
    mean_rel_diff: float | None
    first_difference_step: int | None = Field(description="first step without the same bits")
    first_departure_step: int | None = Field(description="first step beyond the tolerance")
    first_departure_rel_diff: float | None = Field(description="None if a value is not finite")
    departures: int = Field(description="steps beyond the tolerance")
    bit_identical: bool
    non_finite_a: int = Field(description="steps at which A is NaN or infinite")
    non_finite_b: int
    first_non_finite_step_a: int | None
    first_non_finite_step_b: int | None
    departs: bool = Field(description="whether this metric makes the runs differ")
    rule: RuleName | None = Field(description="rule by which it does")
    noise: float | None = Field(
        description="robust standard deviation of the relative difference from point to point"
    )
    onset_step: int | None = Field(description="at which the curves begin to diverge")
    lasting_departure_step: int | None = Field(description="first step of one that lasts")
    lasting_departure_last_step: int | None
    lasting_departure_points: int | None
    lasting_departure_rel_diff: float | None = Field(description="median over these points")


class DataComparison(Record):
    """Whether both runs read the same tokens in the same rows of the same steps."""

    same: bool
    differences: tuple[str, ...] = Field(description="A's and B's, a phrase each")


class AlignmentRecord(Record):
    """Points at which the curves were compared."""

    axis: Axis
    method: Literal["exact", "interpolated"] = Field(
        description="at common points, or at the sparser curve's, the other interpolated"
    )
    points: int


class Diagnosis(Record):
    """The likely cause of a difference."""

    kind: Kind
    step: int = Field(description="first step with it")
    text: str


class BandOfMetric(Record):
    """A metric of B against the spread of the seeds."""

    within: bool
    spread: float = Field(description="median relative standard deviation of the seeds")
    excess: float = Field(description="largest distance over the allowed one; above 1: outside")
    width: int = Field(description="points of the mean that leaves the band, or is closest to it")
    first_outside_step: int | None


class Band(Record):
    """The tolerance that several seeds of A give."""

    seeds: tuple[str, ...] = Field(description="names of the runs, A first")
    chance: float = Field(
        description="probability that another such seed is reported as different, at most"
    )
    metrics: dict[str, BandOfMetric]


class Comparison(Record):
    """The output of `slurmllm compare --json`."""

    verdict: Literal["match", "differ"]
    match: bool
    reason: str
    causes: tuple[str, ...] = Field(description="settings that differ")
    diagnosis: Diagnosis | None = Field(description="the main cause; None on a match")
    data: DataComparison | None = Field(description="None if a run has no data.json")
    tolerance: Tolerances
    a: Side
    b: Side
    steps_compared: int
    first_step: int
    last_step: int
    only_in_a: tuple[Range, ...] = Field(description="ranges of steps, both ends included")
    only_in_b: tuple[Range, ...]
    alignment: AlignmentRecord
    metrics: dict[str, MetricComparison] = Field(description="those that decide the verdict")
    statistics: dict[str, Statistics] = Field(description="of all metrics that both have")
    band: Band | None = Field(description="None without seeds")
    overlaps: dict[Literal["a", "b"], Overlap]
    warnings: tuple[str, ...]
    plot: str | None = Field(default=None, description="path of the picture")


def curve_letter(position: int) -> str:
    """Returns the name of a curve by its position from 0: A to Z, then #27, …"""
    return chr(ord("A") + position) if position < 26 else f"#{position + 1}"
