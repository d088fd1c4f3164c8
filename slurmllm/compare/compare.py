"""The comparison of two curves: their alignment, the verdict, and the causes of a difference."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from slurmllm.compare import comparison, reasons
from slurmllm.compare.alignment import (
    Alignment,
    StepMatch,
    match_steps,
    no_common_step,
    shift_steps,
)
from slurmllm.compare.causes import Cause, compare_skips, find_differences
from slurmllm.compare.comparison import Comparison, MetricComparison, Tolerances
from slurmllm.compare.diagnosis import explain
from slurmllm.compare.divergence import (
    IDENTICAL,
    DivergenceResult,
    Stretch,
    detect_divergence,
)
from slurmllm.compare.precision_band import PrecisionLimits, precision_basis, precision_limits
from slurmllm.compare.seed_band import SeedBand
from slurmllm.compare.statistics import roughness, shared_noise, statistics
from slurmllm.errors import RunError
from slurmllm.metrics.curves import (
    Axis,
    Curve,
    Flags,
    Floats,
    Ints,
    bit_identical,
    signed_difference,
)
from slurmllm.metrics.tags import list_tags

METRICS = ("loss", "grad_norm")
# Statistics only, no part of the verdict.
RATES = ("seq_per_s", "tokens_per_s", "step_time_s")
OTHERS = ("param_norm", "lr", "val_loss", *RATES)


@np.errstate(all="ignore")  # logs may hold any value; those that are not finite are handled below
def compare(
    a: Curve,
    b: Curve,
    tolerances: Tolerances | None = None,
    *,
    axis: Axis = "step",
    from_step: int | None = None,
    to_step: int | None = None,
    seeds: Sequence[Curve] = (),
    letter: str = "B",
    shifts: tuple[int | None, int | None] = (None, None),
    basis: comparison.BasisKind | None = None,
    precisions: tuple[str, str] = ("", ""),
) -> Comparison:
    """Compare two curves at their common points.

    Args:
        a: The reference.
        from_step, to_step: Steps to compare, both included. By tokens or samples: of A's.
        seeds: More runs of A's training with other seeds: their spread is the tolerance then.
        shifts: What to add to the steps of A and B; None: by their formats and values.
        basis: None: `precision` if the runs are recorded and nothing else can be the difference.
        precisions: Of A and B; empty: as recorded.

    Raises:
        RunError: no point in common, no loss, or the positions on the axis are unknown.
        UserError: a precision that the basis needs is unknown.
    """
    for curve in (a, b):
        if "loss" not in curve.columns:
            there = list_tags(curve.tags or curve.columns)
            raise RunError(
                f"no loss in {curve.path}: there are {there}; name it with --tag loss=TAG"
            )
    matches = match_steps(a, b, shifts, by_step=axis == "step")
    alignment = Alignment(matches[0].used, matches[1].used, axis, from_step, to_step, letter)
    if not len(alignment.steps):
        raise RunError(no_common_step(*alignment.curves, from_step, to_step))
    pair = _Pair(matches, alignment, tolerances or Tolerances())
    pair.choose_measure(seeds, basis, precisions)
    return pair.compare()


class _Pair:
    """Two curves, aligned, the differences of their metrics, and what they are measured by."""

    def __init__(
        self,
        matches: tuple[StepMatch, StepMatch],
        alignment: Alignment,
        tolerances: Tolerances,
    ) -> None:
        self.matches, self.alignment, self.tolerances = matches, alignment, tolerances
        self.letter = alignment.letter
        self.a, self.b = alignment.curves
        # The losses on further texts are those of one name.
        names = dict.fromkeys((*METRICS, *OTHERS, *self.a.validation))
        self.points = {name: shared for name in names if len(shared := alignment.of(name))}
        if "loss" not in self.points:
            raise RunError(
                f"{self.a.name} and {self.b.name} have a loss at different steps only; log it at "
                "the same steps"
            )
        self.differences = {n: signed_difference(p.a, p.b) for n, p in self.points.items()}
        self.statistics = {
            name: statistics(points, self.differences[name], name not in RATES)
            for name, points in self.points.items()
        }
        # Digits that only one of the logs has are no difference of the runs.
        self.printed = {n: p.as_printed(self.a, self.b) for n, p in self.points.items()}
        self.visible = {n: signed_difference(p.a, p.b) for n, p in self.printed.items()}

    def choose_measure(
        self,
        seeds: Sequence[Curve],
        basis: comparison.BasisKind | None,
        precisions: tuple[str, str],
    ) -> None:
        """Choose what the verdict is measured by, and the metrics that decide."""
        tolerances, curves = self.tolerances, (self.a, self.b)
        self.warnings = reasons.warnings_of(self.alignment, self.points)
        if tolerances.exact:
            self.warnings += reasons.precision_warnings(curves, self.letter)
        self.settings = find_differences(self.a, self.b, self.alignment)
        if seeds:  # they allow for another seed
            self.settings = [setting for setting in self.settings if setting.kind != "seed"]
        kind: comparison.BasisKind = "seeds" if seeds else "tolerance"
        self.basis = comparison.Basis(kind="exact" if tolerances.exact else kind)
        if self.basis.kind == "tolerance" and basis != "tolerance":
            requested = basis == "precision" or any(precisions)
            of_precision = precision_basis(
                curves, precisions, self.settings, requested, self.letter
            )
            self.basis = of_precision or self.basis
        by_precision = self.basis.precisions
        names = METRICS if by_precision is None else (*METRICS, "param_norm")
        deciding = {name: self.points[name] for name in names if name in self.points}
        self.limits = {name: PrecisionLimits(tolerances.of(name)) for name in deciding}
        if by_precision is not None:
            self.limits = precision_limits(
                self.a, by_precision, deciding, self.differences, tolerances
            )
        steps = (_first_step(p.steps, ~bit_identical(p.a, p.b)) for p in deciding.values())
        # First step at which one of these differs; infinite: none
        self.changed = min((step for step in steps if step is not None), default=math.inf)
        self.band: comparison.Band | None = None
        if seeds:
            shifted = [shift_steps(seed, self.matches[0].shift) for seed in seeds]
            seed_band = SeedBand(self.a, shifted, self.alignment.axis)
            self.band = seed_band.compare(deciding, self.letter)
            self.warnings += seed_band.warnings

    def compare(self) -> Comparison:
        metrics = {name: self._compare_metric(name) for name in self.limits}
        verdict: comparison.Verdict = "match"
        if any(metric.departs for metric in metrics.values()):
            verdict = "differ"
        elif self.changed == math.inf and not self.alignment.one_sided & set(METRICS):
            verdict = "identical"
        elif self.band is not None or any(metric.scattered for metric in metrics.values()):
            verdict = "equivalent"
        return self._record(verdict, metrics, self._causes(verdict, metrics))

    def _causes(
        self, verdict: comparison.Verdict, metrics: Mapping[str, MetricComparison]
    ) -> tuple[Cause, ...]:
        differ, banded = verdict == "differ", self.band is not None
        if not differ and (verdict != "equivalent" or banded):
            return ()
        onsets = [m.onset_step for m in metrics.values() if m.onset_step is not None]
        # Scatter of their own came before the departure: its causes are not those of the scatter.
        apart = differ and all(m.scattered for m in metrics.values() if m.departs)
        # The band allows for another precision, so that anything else is the cause.
        others = [setting for setting in self.settings if setting.kind != self.basis.kind]
        return explain(
            self.a,
            self.b,
            self.printed,
            self.visible,
            self.settings if all(setting.weak for setting in others) else others,
            min(onsets, default=None),
            exact=self.alignment.method == "exact",
            shared=not banded and not apart,
            letter=self.letter,
        )

    def _record(
        self,
        verdict: comparison.Verdict,
        metrics: dict[str, MetricComparison],
        causes: tuple[Cause, ...],
    ) -> Comparison:
        a, b, alignment, letter, basis = self.a, self.b, self.alignment, self.letter, self.basis
        match = verdict != "differ"
        commands = reasons.command_differences(a, b)
        warnings = [*self.warnings, *commands]
        if match:
            warnings += [
                f"the curves match although {setting.text}"
                for setting in self.settings
                if not setting.weak and setting.kind != basis.kind
            ]
        data = None
        if a.data is not None and b.data is not None:
            skips = (skip.text for skip in compare_skips(a, b, letter))
            unlike = (*a.data.differences(b.data), *skips)
            data = comparison.DataComparison(same=not unlike, differences=unlike)
        steps = self.points["loss"].steps
        identical = steps[steps < self.changed]
        diagnosis = None
        if not match:
            kind, step, text = causes[0].kind, causes[0].step, causes[0].evidence
            diagnosis = comparison.Diagnosis(kind=kind, step=step, text=text)
        only_in_a, only_in_b = alignment.only
        return Comparison(
            verdict=verdict,
            match=match,
            bit_identical_to_step=int(identical[-1]) if len(identical) else None,
            power={name: metric.power for name, metric in metrics.items()},
            reason=reasons.invented_steps((a, b), letter)
            + reasons.reason(
                verdict, metrics, basis, self.band, () if match else causes, letter, steps
            ),
            causes=causes,
            diagnosis=diagnosis,
            settings=(*(setting.text for setting in self.settings), *commands),
            data=data,
            tolerance=self.tolerances,
            basis=basis,
            a=_side(self.matches[0]),
            b=_side(self.matches[1]),
            steps_compared=len(alignment.steps),
            first_step=int(alignment.steps[0]),
            last_step=int(alignment.steps[-1]),
            only_in_a=only_in_a,
            only_in_b=only_in_b,
            alignment=comparison.AlignmentRecord(
                axis=alignment.axis, method=alignment.method, points=len(alignment.steps)
            ),
            metrics=metrics,
            statistics=self.statistics,
            band=self.band,
            overlaps={"a": _overlap(a), "b": _overlap(b)},
            warnings=tuple(warnings),
        )

    def _compare_metric(self, name: str) -> MetricComparison:
        """Apply the limits, or the band of seeds, to a metric."""
        points, limits, signed = self.points[name], self.limits[name], self.differences[name]
        unequal, exact, shown = self.visible[name] != 0, self.tolerances.exact, points
        if exact and {"text", "tensorboard"} & {self.a.kind, self.b.kind}:
            shown, signed = self.printed[name], self.visible[name]
        if not unequal.any() and not exact:
            signed = self.visible[name]
        steps, finite, described = points.steps, np.isfinite(signed), self.statistics[name]
        bad_a, bad_b = ~np.isfinite(points.a), ~np.isfinite(points.b)
        differ = ~bit_identical(shown.a, shown.b) if exact else np.abs(signed) > limits.bias
        # Two NaNs have the same bits and yet do not match: neither run has a value there.
        beyond = ~finite | differ
        departure = _first_step(steps, beyond)
        size = float(np.abs(signed[np.argmax(beyond)]))
        result, correlation = self._detect(name, signed, unequal)
        rule, onset = self._decide(name, result, finite, departure)
        if not unequal.any():
            # At a chance of 1 in 200 a larger bias leaves all printed digits as they are.
            hidden = 10.6 * (described.max_rel_diff or 0.0) / len(steps)
            result = replace(result, power=max(result.power, hidden))
        lasting = result.lasting if rule is not None else None
        at_onset = math.nan if onset is None else float(abs(signed[np.searchsorted(steps, onset)]))
        same = bit_identical(points.a, points.b)
        return MetricComparison(
            tolerance=limits.bias,
            steps_compared=len(steps),
            max_rel_diff=described.max_rel_diff,
            max_rel_diff_step=described.max_rel_diff_step,
            mean_rel_diff=described.mean_rel_diff,
            first_difference_step=_first_step(steps, ~same),
            first_visible_step=_first_step(steps, unequal),
            first_departure_step=departure,
            first_departure_rel_diff=size if beyond.any() and math.isfinite(size) else None,
            departures=int(np.count_nonzero(beyond)),
            bit_identical=bool(np.all(same)),
            non_finite_a=int(np.count_nonzero(bad_a)),
            non_finite_b=int(np.count_nonzero(bad_b)),
            first_non_finite_step_a=_first_step(steps, bad_a),
            first_non_finite_step_b=_first_step(steps, bad_b),
            departs=rule is not None,
            rule=rule,
            noise=result.noise,
            bias=result.mean,
            scattered=rule in (None, result.rule)
            and (result.scattered or (limits.unstable and rule is None)),
            scatter=comparison.Scattering(
                size=result.noise, correlation=correlation, allowed=max(limits.bias, limits.scatter)
            ),
            power=result.power if self.band is None else self.band.metrics[name].power,
            onset_step=onset,
            onset_rel_diff=at_onset if math.isfinite(at_onset) else None,
            lasting_departure_step=None if lasting is None else int(steps[finite][lasting.first]),
            lasting_departure_last_step=None
            if lasting is None
            else int(steps[finite][lasting.last]),
            lasting_departure_points=None if lasting is None else lasting.last - lasting.first + 1,
            lasting_departure_rel_diff=None if lasting is None else lasting.size,
        )

    def _decide(
        self, name: str, result: DivergenceResult, finite: Flags, departure: int | None
    ) -> tuple[comparison.RuleName | None, int | None]:
        """Return the rule by which a metric differs, and the step from which it does."""
        steps, exact = self.points[name].steps, self.tolerances.exact
        onset = None if result.onset is None else int(steps[finite][result.onset])
        if not finite.all():
            # They may diverge before that; but a single point beyond the tolerance may be noise.
            starts = (departure if exact else onset, _first_step(steps, ~finite))
            return "not_finite", min(step for step in starts if step is not None)
        if exact:
            return None if departure is None else "exact", departure
        if self.band is None:
            return result.rule, onset
        band = self.band.metrics[name]
        return (None, None) if band.within else ("band", band.first_outside_step)

    def _detect(
        self, name: str, signed: Floats, unequal: Flags
    ) -> tuple[DivergenceResult, float | None]:
        """Detect a divergence from an `unequal` point on; also return the noise's correlation."""
        points, limits, finite = self.points[name], self.limits[name], np.isfinite(signed)
        if not finite.any():
            return DivergenceResult(), None
        a, b, r, unequal = points.a[finite], points.b[finite], signed[finite], unequal[finite]
        rough = roughness(a, b) if self.alignment.method == "interpolated" else 0.0
        rough += max(0.0, limits.scatter - limits.bias)
        correlation = shared_noise(a, b, r)
        shared = 1.0 if correlation is None else 0.0 if limits.unstable else correlation
        # After a change of precision there is noise.
        identical = (
            0 if limits.scatter else int(np.searchsorted(points.steps[finite], self.changed))
        )
        # A few that are identical are no noise, but too few to say that what follows is none.
        skipped = identical if identical < min(IDENTICAL, len(r)) else 0
        result = detect_divergence(r[skipped:], limits.bias, rough, identical - skipped, shared)
        if result.onset is None:
            return result, correlation
        begin = result.onset + skipped
        onset = begin + int(np.argmax(unequal[begin:]))
        if (lasting := result.lasting) is not None:
            first, last = max(lasting.first + skipped, onset), lasting.last + skipped
            lasting = Stretch(min(first, last), last, lasting.size)
        return replace(result, onset=onset, lasting=lasting), correlation


def _first_step(steps: Ints, flags: Flags) -> int | None:
    return int(steps[np.argmax(flags)]) if flags.any() else None


def _side(match: StepMatch) -> comparison.Side:
    curve = match.read
    return comparison.Side(
        name=curve.name,
        path=str(curve.path),
        steps=len(curve.steps),
        first_step=int(curve.steps[0]),
        last_step=int(curve.steps[-1]),
        attempts=len(np.unique(curve.attempts)),
        restarts=tuple(curve.restarts.tolist()),
        missing=curve.gaps,
        shift=match.shift,
        shift_reason=match.reason if match.shift else "",
        averaged=match.averaged,
    )


def _overlap(curve: Curve) -> comparison.Overlap:
    identical, largest = curve.overlap_identical, curve.overlap_max_rel_diff
    return comparison.Overlap(rows=curve.overlap_rows, identical=identical, max_rel_diff=largest)
