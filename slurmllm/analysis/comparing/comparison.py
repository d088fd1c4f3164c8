"""The schemas of a comparison: what is asked, what was read and what came out."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from slurmllm.analysis.curves import Range
from slurmllm.records import Record


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
    first_departure_step: int | None = Field(description="first step beyond the tolerance")
    first_departure_rel_diff: float | None = Field(description="None where a value is not finite")
    departures: int = Field(description="steps beyond the tolerance")
    bit_identical: bool
    non_finite_a: int = Field(description="steps at which A is NaN or infinite")
    non_finite_b: int
    first_non_finite_step_a: int | None
    first_non_finite_step_b: int | None


class DataComparison(Record):
    """Whether both runs read the same tokens in the same rows of the same steps."""

    same: bool
    differences: tuple[str, ...] = Field(description="A's and B's, a phrase each")


class Comparison(Record):
    """What `slurmllm compare --json` prints."""

    verdict: Literal["match", "differ"]
    match: bool
    reason: str
    causes: tuple[str, ...] = Field(description="settings that differ")
    data: DataComparison | None = Field(description="None where a side has no data.json")
    tolerance: Tolerances
    a: Side
    b: Side
    steps_compared: int
    first_step: int
    last_step: int
    only_in_a: tuple[Range, ...] = Field(description="ranges of steps, both ends included")
    only_in_b: tuple[Range, ...]
    metrics: dict[str, MetricComparison]
    overlaps: dict[Literal["a", "b"], Overlap]
    warnings: tuple[str, ...]
    plot: str | None = Field(default=None, description="path of the picture")
