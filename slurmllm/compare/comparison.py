"""The schemas of a comparison: what is asked, what was read and what came out."""

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
    """How far two curves may lie apart and still match."""

    loss: float = Field(default=1e-3, ge=0, allow_inf_nan=False, description="relative")
    grad_norm: float = Field(default=1e-2, ge=0, allow_inf_nan=False, description="relative")
    exact: bool = Field(default=False, description="every value must be bit-identical instead")

    def of(self, metric: str) -> float:
        """The relative tolerance of a metric; 0 where bit-identical is asked for."""
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
    """Steps that a run made more than once, because an attempt resumed from before them."""

    rows: int = Field(description="rows that a later attempt replaced")
    identical: bool | None = Field(description="bit-identical to those that stand; None: no rows")
    max_rel_diff: float | None = Field(description="largest relative difference to those")


class MetricComparison(Record):
    """One metric of both curves at their common steps."""

    tolerance: float = Field(description="relative")
    steps_compared: int
    max_rel_diff: float | None = Field(description="None where no step is finite on both sides")
    max_rel_diff_step: int | None
    mean_rel_diff: float | None
    first_difference_step: int | None = Field(description="first step without the same bits")
    first_departure_step: int | None = Field(description="first step beyond the tolerance")
    first_departure_rel_diff: float | None = Field(description="None where a value is not finite")
    departures: int = Field(description="steps beyond the tolerance")
    bit_identical: bool
    non_finite_a: int = Field(description="steps at which A is NaN or infinite")
    non_finite_b: int
    first_non_finite_step_a: int | None
    first_non_finite_step_b: int | None
    departs: bool = Field(description="whether this metric makes the runs differ")
    rule: RuleName | None = Field(description="by which it does")
    noise: float | None = Field(
        description="robust standard deviation of the relative difference from point to point"
    )
    onset_step: int | None = Field(description="at which the curves begin to part")
    lasting_departure_step: int | None = Field(description="first step of one that lasts")
    lasting_departure_last_step: int | None
    lasting_departure_points: int | None
    lasting_departure_rel_diff: float | None = Field(description="median over these points")


class DataComparison(Record):
    """Whether both runs read the same tokens in the same rows of the same steps."""

    same: bool
    differences: tuple[str, ...] = Field(description="A's and B's, a phrase each")


class AlignmentRecord(Record):
    """Where the curves were compared."""

    axis: Axis
    method: Literal["exact", "interpolated"] = Field(
        description="at common points, or at the sparser curve's, the other linear in between"
    )
    points: int


class Diagnosis(Record):
    """The likely cause of a difference."""

    kind: Kind
    step: int = Field(description="from which on")
    words: str


class BandOfMetric(Record):
    """A metric of B against the spread of the seeds."""

    within: bool
    spread: float = Field(description="median relative standard deviation of the seeds")
    excess: float = Field(description="largest distance over what chance allows; above 1: outside")
    width: int = Field(description="points that the mean is over which leaves the band, or is next")
    first_outside_step: int | None


class Band(Record):
    """The tolerance that several seeds of A give."""

    seeds: tuple[str, ...] = Field(description="names of the runs, A first")
    chance: float = Field(description="that another such seed were called different, at most")
    metrics: dict[str, BandOfMetric]


class Comparison(Record):
    """What `slurmllm compare --json` prints."""

    verdict: Literal["match", "differ"]
    match: bool
    reason: str
    causes: tuple[str, ...] = Field(description="settings that differ")
    diagnosis: Diagnosis | None = Field(description="the main cause; None on a match")
    data: DataComparison | None = Field(description="None where a side has no data.json")
    tolerance: Tolerances
    a: Side
    b: Side
    steps_compared: int
    first_step: int
    last_step: int
    only_in_a: tuple[Range, ...] = Field(description="ranges of steps, both ends included")
    only_in_b: tuple[Range, ...]
    alignment: AlignmentRecord
    metrics: dict[str, MetricComparison] = Field(description="those that make the verdict")
    statistics: dict[str, Statistics] = Field(description="of all metrics that both have")
    band: Band | None = Field(description="None without seeds")
    overlaps: dict[Literal["a", "b"], Overlap]
    warnings: tuple[str, ...]
    plot: str | None = Field(default=None, description="path of the picture")


def letter_of(place: int) -> str:
    """What a curve is called by its place on the command line, from 0: A to Z, then #27 and on."""
    return chr(ord("A") + place) if place < 26 else f"#{place + 1}"
