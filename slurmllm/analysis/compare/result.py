"""The result of a comparison: its records; and the logs that an exact one refuses."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

from pydantic import Field

from slurmllm.analysis.compare.statistics import Statistics
from slurmllm.core.display.tables import data_frame
from slurmllm.core.errors import RunError, UserError
from slurmllm.core.metrics.curves import Axis, Curve, DamageWarning, Range
from slurmllm.core.run.records import Record

if TYPE_CHECKING:
    import pandas

Verdict = Literal["identical", "match", "equivalent", "differ"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)  # from the strongest
BasisKind = Literal["tolerance", "precision", "seeds", "exact"]
Kind = (
    Literal["lr", "seed", "data", "batches", "precision", "rounding", "model", "optimizer"]
    | Literal["mesh", "gradient", "not_finite", "transient", "resume", "logging", "unknown"]
)
Confidence = Literal["certain", "likely", "possible"]
RuleName = Literal["not_finite", "exact", "pointwise", "lasting", "noise", "outlier", "band"]


class Cause(Record):
    """What can have made two curves differ."""

    kind: Kind
    # certain: a recorded setting differs, or an identity of the columns proves it.
    confidence: Confidence
    step: int  # first step with it, or the first point that shows it
    evidence: str


class Tolerances(Record):
    """Tolerances within which two curves match."""

    loss: float = Field(default=1e-3, ge=0, allow_inf_nan=False)  # relative
    grad_norm: float = Field(default=1e-2, ge=0, allow_inf_nan=False)  # relative
    exact: bool = False  # every value must be bit-identical instead

    def limit(self, metric: str) -> float:
        if self.exact:
            return 0.0
        return self.grad_norm if metric == "grad_norm" else self.loss


class Basis(Record):
    """What a verdict is measured by."""

    kind: BasisKind
    reason: str = ""  # why the precisions of A and B are compared
    precisions: tuple[str, str] | None = None  # of A and B; None unless the kind is `precision`


class Side(Record):
    """One of the two curves, as read."""

    name: str
    path: str
    steps: int  # steps that have a row
    first_step: int
    last_step: int
    attempts: int  # attempts that these rows come from
    restarts: tuple[int, ...]  # steps at which another attempt takes over
    missing: tuple[Range, ...]  # ranges of steps without a row, between the first and the last step
    shift: int = 0  # added to its steps
    shift_reason: str = ""  # why
    averaged: int | None = None  # steps over which its loss was averaged, as in the other log


class Overlap(Record):
    """Steps that a run recomputed, because an attempt resumed from before them."""

    rows: int  # rows that a later attempt replaced
    identical: bool | None  # bit-identical to the rows that replaced them; None: no rows
    max_rel_diff: float | None  # largest relative difference to those


class Scattering(Record):
    """Noise of the difference of two curves, and how far their own noise is correlated."""

    size: float | None  # as `noise`
    # Of the noise of A and B: 1 if their batches are the same, 0 if independent.
    correlation: float | None
    allowed: float  # size up to which it is no difference of the runs


class Differences(Record):
    """The sizes and first steps of the differences of one metric."""

    tolerance: float  # relative
    steps_compared: int
    max_rel_diff: float | None  # None if no step is finite on both sides
    max_rel_diff_step: int | None
    mean_rel_diff: float | None
    first_difference_step: int | None  # first step without the same bits
    first_visible_step: int | None  # likewise, with the digits that both logs print
    first_departure_step: int | None  # first step beyond the tolerance
    first_departure_rel_diff: float | None  # None if a value is not finite
    departures: int  # steps beyond the tolerance
    bit_identical: bool
    non_finite_a: int  # steps at which A is NaN or infinite
    non_finite_b: int
    first_non_finite_step_a: int | None
    first_non_finite_step_b: int | None


class Departure(Record):
    """Whether, by which rule and from which step one metric makes the runs differ."""

    departs: bool  # whether this metric makes the runs differ
    rule: RuleName | None  # rule by which it does
    onset_step: int | None  # at which the curves begin to diverge
    onset_rel_diff: float | None  # at that step; None if a value is not finite
    lasting_departure_step: int | None = None  # first step of one that lasts
    lasting_departure_last_step: int | None = None
    lasting_departure_points: int | None = None
    lasting_departure_rel_diff: float | None = None  # median over these points


class MetricComparison(Differences, Departure):
    """One metric of both curves at their common steps."""

    noise: float | None  # robust standard deviation of the relative difference from point to point
    bias: float  # mean of the signed relative difference
    power: float  # smallest lasting relative bias that would have been found
    scattered: bool  # beyond the tolerance by independent scatter
    scatter: Scattering


class DataComparison(Record):
    """Whether both runs read the same tokens in the same rows of the same steps."""

    same: bool
    differences: tuple[str, ...]  # A's and B's, a phrase each


class AlignmentRecord(Record):
    """Points at which the curves were compared."""

    axis: Axis
    # At common points, or at the sparser curve's, the other interpolated.
    method: Literal["exact", "interpolated"]
    points: int


class Diagnosis(Record):
    """The likely cause of a difference."""

    kind: Kind
    step: int  # first step with it
    text: str


class BandOfMetric(Record):
    """A metric of B against the spread of the seeds."""

    within: bool
    spread: float  # median relative standard deviation of the seeds
    excess: float  # largest distance / allowed distance; above 1: outside
    width: int  # window of the running mean that is farthest out, in points
    first_outside_step: int | None
    power: float  # smallest relative bias over all points that is outside


class Band(Record):
    """The tolerance that several seeds of A give."""

    seeds: tuple[str, ...]  # names of the runs, A first
    chance: float  # probability that another such seed is reported as different, at most
    metrics: dict[str, BandOfMetric]


class ComparedSteps(Record):
    """The two curves, and the points at which they are compared."""

    a: Side
    b: Side
    steps_compared: int
    first_step: int
    last_step: int
    only_in_a: tuple[Range, ...]  # ranges of steps, both ends included
    only_in_b: tuple[Range, ...]
    alignment: AlignmentRecord
    overlaps: dict[Literal["a", "b"], Overlap]


class Conclusion(Record):
    """The verdict and its reasons."""

    verdict: Verdict
    match: bool  # whether the verdict is not `differ`
    bit_identical_to_step: int | None  # None if the first step differs
    power: dict[str, float]  # smallest lasting relative bias that would have been found, by metric
    reason: str
    causes: tuple[Cause, ...]  # of the difference or the scatter, the likeliest first
    diagnosis: Diagnosis | None  # the first cause if the runs differ
    settings: tuple[str, ...]  # recorded settings that differ
    warnings: tuple[str, ...]


class Comparison(Conclusion, ComparedSteps):
    """The output of `slurmllm compare --json`."""

    data: DataComparison | None  # None if a run has no data.json
    tolerance: Tolerances
    basis: Basis
    metrics: dict[str, MetricComparison]  # those that decide the verdict
    statistics: dict[str, Statistics]  # of all metrics that both have
    band: Band | None  # None without seeds
    plot: str | None = None  # path of the picture
    html: str | None = None  # path of the page

    def __repr__(self) -> str:
        return f"<Comparison: {self.verdict}, {self.reason}>"

    def to_dict(self) -> dict[str, Any]:
        """Return it for JSON; a number that is not finite is None."""
        # Not pydantic's JSON, which refuses names that are no UTF-8
        content = json.dumps(self.model_dump())
        document: dict[str, Any] = json.loads(content, parse_constant=lambda _: None)
        return document

    def to_pandas(self) -> pandas.DataFrame:
        """Return a row for each metric that decides the verdict."""
        rows = [{"metric": name, **values} for name, values in self.to_dict()["metrics"].items()]
        return data_frame(rows).set_index("metric")


def curve_letter(position: int) -> str:
    """Return the name of a curve by its position from 0: A to Z, then #27, …"""
    return chr(ord("A") + position) if position < 26 else f"#{position + 1}"


def refuse_incomplete_logs(curves: Sequence[Curve], option: str) -> None:
    """Raise an error if `option` requires equal points and a log lost some or shows no steps."""
    for curve in curves:
        damages = [warning for warning in curve.warnings if isinstance(warning, DamageWarning)]
        if damages:
            texts = "; ".join(damage.with_lines for damage in damages)
            raise RunError(
                f"{option}: not all of {curve.name} can be read: {texts}; restore the file, or "
                f"leave out {option} to compare the rest"
            )
        if curve.invented_steps:
            raise UserError(
                f"{option}: the steps of {curve.name} are invented, so that its points are not "
                f"those of the other run: {curve.invented_steps}; leave out {option}, or give a "
                "log with steps"
            )


def format_figure(value: float) -> str:
    """Format a small number with up to three digits: 0, 1e-3, 1.25e-2."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
