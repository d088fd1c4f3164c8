"""Runs of one training with several seeds, as the tolerance of a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from slurmllm.compare.alignment import Alignment, Points
from slurmllm.compare.comparison import BandOfMetric
from slurmllm.compare.seed_band import BandResult, compare_with_band
from slurmllm.errors import RunError
from slurmllm.metrics.curves import Axis, Curve, Floats, Ints


@dataclass(frozen=True)
class BandCheck:
    """Result of the comparison of a metric with the band.

    Attributes:
        record: The result for --json.
        first: Place of the first point outside, among the finite ones; None: there is none.
        steps: Of the band. [points]
        mean: Mean of the seeds. [points]
        half_width: What single points may differ from it by. [points]
    """

    record: BandOfMetric
    first: int | None
    steps: Ints
    mean: Floats
    half_width: Floats


class SeedBand:
    """A and further runs that differ from it in the seed alone.

    Attributes:
        names: Of the runs, A first.
        warnings: Warnings for the user.
    """

    def __init__(self, a: Curve, others: Sequence[Curve], axis: Axis) -> None:
        self._aligned = [Alignment(a, other, axis, None, None) for other in others]
        self.names = (a.name, *(other.name for other in others))
        self.warnings = [
            f"seed {curve.name}: {warning}" for curve in others for warning in curve.warnings
        ]
        for curve, alignment in zip(others, self._aligned, strict=True):
            if alignment.method != "exact" or not len(alignment.steps):
                raise RunError(
                    f"--seed {curve.name} logged other steps than {a.name}; the runs that make a "
                    "band log the same ones"
                )
            loss = alignment.of("loss")
            if np.array_equal(loss.a, loss.b):
                raise RunError(
                    f"--seed {curve.name} has the very losses of {a.name}: it is no other seed; "
                    "name runs that were trained with another train.seed"
                )

    def check(self, metric: str, points: Points) -> BandCheck:
        """Compare B's values with the band, at their common points.

        Raises:
            RunError: a seed lacks the metric at nearly all of them, or has the losses of B or of
                another seed.
        """
        steps = points.steps
        rows = [points.a]
        there = np.isfinite(points.a) & np.isfinite(points.b)
        for name, alignment in zip(self.names[1:], self._aligned, strict=True):
            own = alignment.of(metric)
            at = np.searchsorted(own.steps, steps)
            at[at == len(own.steps)] = 0
            found = own.steps[at] == steps if len(own) else np.zeros(len(steps), dtype=bool)
            if np.count_nonzero(found) < 2:
                raise RunError(
                    f"--seed {name} has {metric} at none of the steps compared; name runs that "
                    "logged the same steps"
                )
            values = np.where(found, own.b[at], np.nan)
            if metric == "loss":
                self._refuse_twins(name, values, points.b, rows[1:])
            there &= np.isfinite(values)
            rows.append(values)
        if not there.any():
            raise RunError(
                f"the seeds {', '.join(self.names)} and B have {metric} at no step in common; "
                "name runs that logged the same steps"
            )
        verdict = compare_with_band(np.stack(rows)[:, there], points.b[there])
        return BandCheck(
            record=_record(verdict, steps[there]),
            first=verdict.first,
            steps=steps[there],
            mean=verdict.mean,
            half_width=verdict.half_width,
        )

    def _refuse_twins(self, name: str, values: Floats, b: Floats, seeds: Sequence[Floats]) -> None:
        """Refuse a band that contains B, which makes it too wide, or a seed twice: too narrow."""
        others = zip(("B", *self.names[1:]), (b, *seeds), strict=False)
        for whose, losses in others:
            if np.array_equal(values, losses, equal_nan=True):
                raise RunError(
                    f"--seed {name} has the very losses of {whose}: it is no other seed; name "
                    "runs that were trained with another train.seed, each once"
                )


def _record(verdict: BandResult, steps: Ints) -> BandOfMetric:
    outside = None if verdict.first is None else int(steps[verdict.first])
    return BandOfMetric(
        within=verdict.excess <= 1,
        spread=verdict.spread,
        excess=verdict.excess,
        width=verdict.width,
        first_outside_step=outside,
    )
