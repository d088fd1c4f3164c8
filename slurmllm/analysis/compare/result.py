"""The result of a comparison: its records, the figures of each metric, refused logs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
from pydantic import Field
from pydantic_core import to_jsonable_python
from scipy.ndimage import uniform_filter1d

from slurmllm.analysis.compare.alignment import Alignment, Points, StepMatch
from slurmllm.core.display.tables import data_frame
from slurmllm.core.errors import RunError, UserError
from slurmllm.core.format import Json, Texts
from slurmllm.core.metrics.curves import (
    Axis,
    Curve,
    DamageWarning,
    Floats,
    Ints,
    Ranges,
    argmax,
)
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
NUM_WINDOWS = 10  # parts of the points, each described by itself
_SMOOTHING = 1 / 50  # of all points: the width of the running mean that smooths the curves
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


def check_tolerances(values: Mapping[str, float | None], exact: str = "") -> None:
    """Raise UserError if the value of an option is no tolerance, or contradicts option `exact`."""
    for option, value in values.items():
        if value is None:
            continue
        if exact:
            raise UserError(f"{option} {value:g} and {exact} exclude each other; give one of them")
        if not 0 <= value < math.inf:
            raise UserError(f"{option} {value:g}: a tolerance is 0 or more, such as 1e-3")


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
    missing: Ranges  # ranges of steps without a row, between the first and the last step
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


Metrics = Mapping[str, MetricComparison]


class DataComparison(Record):
    """Whether both runs read the same tokens in the same rows of the same steps."""

    same: bool
    differences: Texts  # A's and B's, a phrase each


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

    @classmethod
    def from_cause(cls, cause: Cause) -> Diagnosis:
        return cls(kind=cause.kind, step=cause.step, text=cause.evidence)


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

    seeds: Texts  # names of the runs, A first
    chance: float  # probability that another such seed is reported as different, at most
    metrics: dict[str, BandOfMetric]


class Window(Record):
    """A tenth of the points compared."""

    first_step: int
    last_step: int
    points: int
    mean_rel_diff: float | None  # None if no point is finite
    mean_signed_rel_diff: float | None  # above 0 if B is above A


class Statistics(Record):
    """One metric of both curves; None: no figure, as of points that are not finite."""

    points: int  # that both have
    max_rel_diff: float | None
    max_rel_diff_step: int | None
    mean_rel_diff: float | None
    median_rel_diff: float | None
    p99_rel_diff: float | None  # 99 % of the points differ by no more
    correlation: float | None  # Pearson's, of the values
    correlation_detrended: float | None  # Pearson's, of the values less their running means
    area_between: float | None  # between the running means of both, over the area under A's
    ratio: float | None  # median of B / A
    windows: tuple[Window, ...]


class ComparedSteps(Record):
    """The two curves, and the points at which they are compared."""

    a: Side
    b: Side
    steps_compared: int
    first_step: int
    last_step: int
    only_in_a: Ranges  # ranges of steps, both ends included
    only_in_b: Ranges
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
    settings: Texts  # recorded settings that differ
    contrary_settings: Texts  # of these, those that change a training: the curves match
    advice: Texts  # further options that judge the difference by its own noise
    warnings: Texts


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
        return f"<Comparison of {self.a.name} and {self.b.name}: {self.verdict}, {self.reason}>"

    def to_dict(self) -> Json:
        """Return it for JSON; a number that is not finite is None."""
        # Not pydantic's JSON, which refuses names that are no UTF-8
        return dict(to_jsonable_python(self.model_dump(), inf_nan_mode="null"))

    def to_pandas(self) -> pandas.DataFrame:
        """Return a row for each metric that decides the verdict."""
        rows = [{"metric": name, **values} for name, values in self.to_dict()["metrics"].items()]
        return data_frame(rows).set_index("metric")


def compared_steps(matches: Sequence[StepMatch], alignment: Alignment) -> Json:
    """Return the fields of `ComparedSteps`."""
    sides: Json = {}
    overlaps = {}
    for letter, match, only in zip("ab", matches, alignment.only, strict=True):
        curve = match.read
        sides[f"only_in_{letter}"] = only
        sides[letter] = Side(
            name=curve.name,
            path=str(curve.path),
            steps=len(curve.steps),
            first_step=curve.steps[0],
            last_step=curve.steps[-1],
            attempts=len(np.unique(curve.attempts)),
            restarts=curve.restarts.tolist(),
            missing=curve.gaps,
            shift=match.shift,
            shift_reason=match.reason if match.shift else "",
            averaged=match.averaged,
        )
        overlaps[letter] = Overlap(
            rows=curve.overlap_rows,
            identical=curve.overlap_identical,
            max_rel_diff=curve.overlap_max_rel_diff,
        )
    steps = alignment.steps
    return {
        **sides,
        "steps_compared": len(steps),
        "first_step": steps[0],
        "last_step": steps[-1],
        "alignment": AlignmentRecord(
            axis=alignment.axis, method=alignment.method, points=len(steps)
        ),
        "overlaps": overlaps,
    }


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


@np.errstate(all="ignore")
def statistics(points: Points, signed: Floats, shape: bool) -> Statistics:
    """Describe how a metric differs, by its points and their signed relative differences.

    `shape`: also correlate and smooth, which is meaningless for times and rates.
    """
    finite = np.isfinite(signed)
    a = points.a[finite]
    b = points.b[finite]
    size = abs(signed[finite])
    if not len(size):
        none = dict.fromkeys(Statistics.model_fields)
        return Statistics.model_validate(none | {"points": len(points), "windows": ()})
    worst = argmax(size)
    median, p99 = np.percentile(size, [50, 99])
    nonzero = a != 0
    ratio = float(np.median(b[nonzero] / a[nonzero])) if nonzero.any() else None
    correlation = detrended = area = None
    if shape:
        width = max(1, round(len(a) * _SMOOTHING))
        # Large values must not overflow in a running sum or a product.
        scale = float(max(abs(a).max(), abs(b).max())) or 1.0
        if scale > 1e100:
            a = a / scale
            b = b / scale
        smooth_a = running_mean(a, width)
        smooth_b = running_mean(b, width)
        correlation = _correlation(a, b)
        detrended = _correlation(a - smooth_a, b - smooth_b) if width > 1 else None
        under = np.abs(smooth_a)
        between = np.abs(smooth_b - smooth_a)
        if len(a) > 1:
            positions = points.positions[finite]
            under, between = (np.trapezoid(y, positions) for y in (under, between))
        area = float(between.sum() / under.sum()) if under.sum() > 0 else None
    count = min(NUM_WINDOWS, len(points))
    bounds = np.linspace(0, len(points), count + 1).round().astype(int).tolist()
    return Statistics(
        points=len(points),
        max_rel_diff=size[worst],
        max_rel_diff_step=points.steps[finite][worst],
        mean_rel_diff=size.mean(),
        median_rel_diff=median,
        p99_rel_diff=p99,
        correlation=correlation,
        correlation_detrended=detrended,
        area_between=area,
        ratio=ratio,
        windows=[_window(points.steps[i:j], signed[i:j]) for i, j in pairwise(bounds)],
    )


def running_mean(values: Floats, width: int) -> Floats:
    """Return means over `width` neighbours, centred; fewer at the ends. [points]"""
    sums, counts = (
        uniform_filter1d(x, width, mode="constant", origin=width % 2 - 1)
        for x in (values, np.ones(len(values)))
    )
    means: Floats = sums / counts
    return means


def _correlation(a: Floats, b: Floats) -> float | None:
    """Return Pearson's correlation; None of fewer than 3 points or of a constant."""
    # The deviation of a constant is rounding.
    if len(a) < 3 or any(x.std() <= 1e-13 * abs(x.mean()) for x in (a, b)):
        return None
    return float(np.corrcoef(a, b)[0, 1])


def _window(steps: Ints, r: Floats) -> Window:
    r = r[np.isfinite(r)]
    return Window(
        first_step=steps[0],
        last_step=steps[-1],
        points=len(steps),
        mean_rel_diff=abs(r).mean() if len(r) else None,
        mean_signed_rel_diff=r.mean() if len(r) else None,
    )
