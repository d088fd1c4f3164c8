"""What two curves show of the cause of their difference, as clues.

A step's loss is that of the weights before it on its batch; its gradient norm is of the same
weights and batch; its parameter norm is of the weights after it. So the order in which columns
begin to differ shows which part of a step changed: its forward pass, its gradients or its update.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, cached_property
from pathlib import Path

import numpy as np

from slurmllm.analysis.compare.alignment import Points, decimals, num_digits, ranges
from slurmllm.analysis.compare.divergence import largest_rise
from slurmllm.analysis.compare.result import Cause, Confidence, Kind
from slurmllm.core.metrics.curves import Floats, Ints, describe_ranges, median, signed_difference
from slurmllm.core.run.error_patterns import read_table
from slurmllm.core.run.records import Record

_TRAINED = ("loss", "grad_norm", "param_norm")  # what the training changes, in a step's order
# Sizes: relative differences up to which they are called tiny or small
TINY = {"loss": 1e-4, "grad_norm": 2e-3}
SMALL = {"loss": 2**-8, "grad_norm": 10 * 2**-8}
_TINY_AT_MOST = {name: 5 * limit for name, limit in TINY.items()}  # the largest one
ROUNDED = {"loss": 2**-5}  # a larger one is no rounding of a number format
_JUMP = 30.0  # times the largest difference before: roundings do not grow so fast
_UNITS = 10.0  # of the last printed digit: a larger difference is no rounding of the print
_LAST_DIGITS = 1e-6  # of fp32
_CLIPPED = 1e-5  # a norm after clipping is so near its limit
_MIN_CLIPPED = 3  # at so many points
_FACTOR = 1e-6  # by which a constant factor may vary
_FAR = 1e3  # times the last digit of grad_norm: a larger difference of losses would show there
_MIN_POINTS = 6  # fewer show no correlation, factor or identity
EARLY_POINTS = 5
_CORRELATED = 512  # points after the first difference whose changes are correlated
_NOTHING_IN_COMMON = 0.6
# An update changes the parameter norm by less than this part of the learning rate.
_UPDATE = 0.5
_MIN_WEIGHTS = 1e-5
_OTHER_NORM = 0.25  # a gradient norm that differs by more is of other gradients
_AT_ONCE = 0.3  # of the median of the points after it: a smaller first difference grew
# Times the loss's digits: weights that make such a difference of norms show in the loss
_SHOWN = 100.0  # if it is as large at once
_SHOWN_GROWING = 300.0  # if it grows
_LEVEL = 0.03  # relative difference of the later losses of two seeds, at most
_RATIO = 0.2  # logarithm of a factor between losses that no seed makes at the first point
_JUMP_POINTS = 16  # in which the columns follow the one that jumps first
SLACK_POINTS = 3  # by which an onset that emerges from noise may be wrong


class Clue(Record):
    """What the columns show: a sentence, why it is evidence, and a score for each kind of cause."""

    text: str
    reason: str
    points: dict[Kind, int]


@cache
def clue_table() -> Mapping[str, Clue]:
    rows = read_table(Path(__file__).with_name("clues.yaml"))
    return {name: Clue(**row) for name, row in rows.items()}


class Observation:
    """What two curves show of the cause of their difference.

    Attributes:
        onset: Step at which the curves begin to diverge; None if they are equivalent.
        starts: Step at which each of the columns begins to differ; those that do not are left out.
        first: The first of these; None if no column differs.
        rows: Index of it in each column; their number of points if no column differs.
        before: The point before it; None if it is the first point.
    """

    def __init__(self, points: Mapping[str, Points], onset: int | None) -> None:
        self.onset = onset
        self.points = {name: points[name] for name in _TRAINED if name in points}
        self.lr = points.get("lr")
        # Signed relative differences; NaN if a value is not finite.
        self.r = {name: signed_difference(p.a, p.b) for name, p in self.points.items()}
        self.finite = all(np.isfinite(r).all() for r in self.r.values())
        self.starts = {
            name: self.points[name].steps[(r != 0).argmax()]
            for name, r in self.r.items()
            if r.any()
        }
        self.jumped = self._find_jump()
        self.first = min(self.starts.values(), default=None)
        self.rows = {
            name: len(p) if self.first is None else int(p.steps.searchsorted(self.first))
            for name, p in self.points.items()
        }
        row = self.rows["loss"]
        self.before = points["loss"].steps[row - 1] if row else None
        self.gap = 1 if self.first is None else max(1, self.first - (self.before or 0))

    def _find_jump(self) -> bool:
        """Replace the starts if differences as small as noise jump up, up to the onset."""
        onset = self.onset
        if onset is None or not self.starts:
            return False
        rises = {}
        for name, r in self.r.items():
            steps = self.points[name].steps
            begin = int(steps.searchsorted(min(self.starts.values())))
            end = int(steps.searchsorted(onset, side="right")) + _JUMP_POINTS
            segment = r[begin:end]
            offset = largest_rise(segment, len(segment))
            if offset is not None and abs(segment[offset]) > _LAST_DIGITS:
                rises[name] = (begin + offset, steps[begin + offset])
        if not rises or min(step for _, step in rises.values()) > onset:
            return False
        end = min(rises.values())[0] + _JUMP_POINTS
        self.starts = {name: step for name, (row, step) in rises.items() if row <= end}
        return True

    def values(self, name: str) -> tuple[Floats, Floats]:
        """Return both curves' values of a column from the first difference on. [points] each"""
        points = self.points[name]
        begin = self.rows[name]
        return points.a[begin:], points.b[begin:]

    def after(self, name: str) -> Floats:
        """Return the finite differences of a column from the first difference on. [points]"""
        if name not in self.r:
            return np.empty(0)
        r = self.r[name][self.rows[name] :]
        return r[np.isfinite(r)]

    def size(self, name: str) -> Floats:
        """Return the sizes of these differences. [points]"""
        return abs(self.after(name))

    @property
    def moment(self) -> str:
        if self.gap > 1 and self.before is not None:
            return f"between steps {self.before} and {self.first}"
        return f"{'at' if self.gap == 1 else 'by'} step {self.first}"

    def identity(self) -> str | None:
        """Return the clue if equal columns prove that only the logging differs."""
        if self.first is None:
            return "digits"
        for clue, name, other in (
            ("only_loss", "loss", "grad_norm"),
            ("only_norm", "grad_norm", "loss"),
        ):
            same = self.after(other)
            differ = self.size(name).max(initial=0.0) > _LAST_DIGITS
            if not (self.finite and name in self.starts and differ and len(same) >= _MIN_POINTS):
                continue
            # A constant column, or one of few digits, may be the same of another training: losses
            # of other gradients may part slowly, gradients of other losses show in their first
            # digits.
            values = self.values(other)[0][:_CORRELATED]
            digits = num_digits(decimals(values))
            far = name == "loss" and median(self.size(name)) > _FAR * 10.0**-digits
            varied = (digits > 6 or far) and len(np.unique(values)) >= _MIN_POINTS
            if varied and not same.any() and not self.factor("grad_norm"):
                return clue
        return None

    def clipped(self, letter: str) -> str | None:
        """Return that the gradient norm of A, or of B (`letter`), is logged after clipping.

        It is never above a limit, and the same as the other wherever that is below.
        """
        norm = self.points.get("grad_norm")
        if not norm or "loss" in self.starts or not self.finite:
            return None
        sides = ("A", norm.a), (letter, norm.b)
        for (side, values), (other, whole) in (sides, sides[::-1]):
            limit = values.max()
            above = whole > limit * (1 + _CLIPPED)
            expected = np.where(above, limit, whole)
            same = abs(values - expected) <= np.maximum(norm.unit, _CLIPPED * expected)
            if same.all() and np.count_nonzero(above) >= _MIN_CLIPPED:
                return clue_table()["clipped"].text.format(letter=side, other=other, limit=limit)
        return None

    def factor(self, name: str) -> bool:
        """Return whether a column differs by a constant factor, of values that vary."""
        if name not in self.starts:
            return False
        a, b = self.values(name)
        if len(a) < _MIN_POINTS or not (np.isfinite(a) & np.isfinite(b) & (a != 0)).all():
            return False
        ratio = b / a
        constant = np.ptp(ratio) <= _FACTOR * abs(ratio[0])
        return bool(constant and abs(ratio[0] - 1) > 10 * _FACTOR < np.ptp(a) / abs(a[0]))

    @cached_property
    def correlation(self) -> float | None:
        """Rank correlation of the changes of both losses from point to point."""
        changes = [np.diff(values[:_CORRELATED]) for values in self.values("loss")]
        if len(changes[0]) < _MIN_POINTS - 1 or not np.isfinite(changes).all():
            return None
        ranks = [np.argsort(np.argsort(values)) for values in changes]
        return float(np.corrcoef(ranks[0], ranks[1])[0, 1])

    def transient(self) -> Cause | None:
        """Return the cause of differences after which both curves are the same again.

        Curves that differed by roundings before do so again. The weights are the same then.
        """
        loss = self.points["loss"]
        for largest in (dict.fromkeys(self.r, 0.0), _TINY_AT_MOST):
            off = {}
            clear = False
            for name, limit in largest.items():
                if name in self.r:
                    points = self.points[name]
                    size = abs(self.r[name])
                    different = ~(size <= limit) & ~points.same
                    if different.any():
                        off[name] = points.steps[different]
                    of_digits = abs(points.b - points.a) < _UNITS * points.unit
                    clear |= bool((~(size <= _UNITS * limit) & ~of_digits).any())
            if not off:
                continue
            steps = np.unique(np.concatenate(list(off.values())))
            later = loss.steps > steps[-1]
            varied = len(np.unique(loss.a[later]))
            identical = not any(largest.values())
            # A column that differs alone, and for long, is logged in another way: see `identity`.
            alone = len(off) == 1 < len(self.r) and len(steps) > _JUMP_POINTS
            enough = varied >= (1 if identical else _MIN_POINTS)
            if not clear or not enough or alone or not self._calm_again(steps[0], steps[-1]):
                continue
            confidence: Confidence = "likely" if varied >= SLACK_POINTS else "possible"
            if identical and varied >= _MIN_POINTS:
                confidence = "certain"
            verb = "differs" if len(off) == 1 else "differ"
            evidence = clue_table()["transient"].text.format(
                before="" if identical else " than before",
                columns=f"{' and '.join(off)} {verb}",
                steps=describe_steps(steps, loss.steps),
                step=loss.steps[later][0],
            )
            return Cause(kind="transient", confidence=confidence, step=steps[0], evidence=evidence)
        return None

    def _calm_again(self, first: int, last: int) -> bool:
        """Return whether the columns differ after some steps by no more than before these."""
        for name, r in self.r.items():
            size = abs(r)
            steps = self.points[name].steps
            before = size[steps < first]
            after = size[steps > last]
            usual = median(before) if len(before) else 0.0
            if len(after) and not median(after) <= SLACK_POINTS * usual:
                return False
        return True

    @property
    def sudden(self) -> bool:
        """Whether the loss jumps further than any number format rounds, and not by growth."""
        size = self.size("loss")
        before = np.maximum.accumulate(np.append(0.0, size[:-1]))[: len(size)]
        return bool(((size > ROUNDED["loss"]) & (size > _JUMP * before)).any())

    def below(self, limits: Mapping[str, float], which: slice) -> bool:
        """Return whether loss and gradient norm differ by no more, in the median of some points."""
        for name, limit in limits.items():
            size = self.size(name)[which]
            if len(size) and not median(size) <= limit:
                return False
        return len(self.after("loss")) > 0

    def clues(self) -> list[str]:
        if self.first is None:
            return []
        loss, norm, weights = (self.starts.get(name, 2**62) for name in _TRAINED)
        clues = []
        without_lr = [] if self.lr else ["update_without_lr"]
        if self.factor("loss"):
            clues.append("loss_factor")
        elif self.factor("grad_norm") and not self.after("loss").any():
            return ["norm_factor"]
        if self.gap > 1:
            clues.append("undated")
        elif weights < min(loss, norm):
            clues += ["update_first", *without_lr]
            r = self.after("param_norm")
            if len(r) > 2 and median(abs(np.diff(r))) > median(abs(r)) / 10:
                clues.append("weights_scatter")
        elif norm < loss and (self.size("grad_norm")[:1] > _LAST_DIGITS).any():
            clues.append(self._clue_of_gradients())
        else:
            # Noise and the last digits of fp32 hide what the weights before were.
            decided = (self.size("loss")[:1] > _LAST_DIGITS).any() and not self.jumped
            decided &= "param_norm" in self.r
            if self._first_update():
                return [*clues, "first_update", *without_lr]
            clues.append("together" if decided else "together_or_update")
        if len(self.points) == 1:
            clues.append("loss_only")
        num_points = len(self.after("loss"))
        early = slice(EARLY_POINTS)
        late = slice(-(num_points // 4 or 1), None)
        tiny = self.finite and num_points >= _MIN_POINTS
        tiny &= all((self.size(name) <= limit).all() for name, limit in _TINY_AT_MOST.items())
        if tiny and self.below(TINY, early) and self.below(TINY, late):
            return [*clues, "tiny"]
        if {"undated", "together", "together_or_update"} & set(clues):
            clues += self._clues_of_size(early)
        return clues

    def _first_update(self) -> bool:
        """Return whether step 1 is the same in all digits, and what follows small and growing."""
        if self.rows["loss"] != 1 or self.points["loss"].steps[0] > 1 or self.gap > 1:
            return False
        for name, limit in SMALL.items():
            size = self.size(name)[:_JUMP_POINTS]
            if len(size) < _MIN_POINTS or size[0] > min(limit, _AT_ONCE * median(size)):
                return False
            points = self.points[name]
            if np.max(points.unit) > _LAST_DIGITS * abs(points.a[0]):
                return False
        return bool(self.size("grad_norm")[0] > _LAST_DIGITS)

    @property
    def emerged(self) -> bool:
        """Whether the first difference is near the last digit, so that it may have begun before."""
        for name, start in self.starts.items():
            a, b = (values[0] for values in self.values(name))
            unit = max(self.points[name].units[self.rows[name]], _LAST_DIGITS * abs(a))
            if start == self.first and abs(b - a) > _UNITS * unit:
                return False
        return True

    def _clue_of_gradients(self) -> str:
        """Return the clue of a gradient norm that differs before the loss.

        The weights are the same at the first step, or if the loss, as it is logged, would show
        those that make such a difference. A fault of gradients differs in full at once.
        """
        size = self.size("grad_norm")[:_JUMP_POINTS]
        at_once = size[0] > _AT_ONCE * median(size)
        loss = self.points["loss"]
        first = self.first or 0
        row = self.rows["loss"]
        value = abs(loss.a[row])
        digits = max(loss.units[row] / value if value else 0.0, _LAST_DIGITS)
        visible = (_SHOWN if at_once else _SHOWN_GROWING) * digits
        if first <= 1 or size[0] > min(visible, _OTHER_NORM):
            return "gradient_first"
        return "gradient_or_update" if at_once else "small_gradient_first"

    def lost_state(self, points: int) -> str:
        """Return the clue of what a resume did not restore, `points` before the first difference.

        It is `gradient_first` if the first step's loss is the same, and its gradient norm is not.
        Its first step is of the weights, the batch and the random numbers that it restored; the
        optimizer's state first shows in the step after it.
        """
        size = self.size("loss")[:_JUMP_POINTS]
        if self.starts.get("loss") != self.first and self.gap == 1 and not points:
            clue = self._clue_of_gradients()
            return clue if clue == "gradient_first" else "resume"
        if self.gap > 1 or len(size) < _MIN_POINTS or self.correlation is None:
            return "resume"
        if points:
            return "lost_optimizer"
        if self.correlation < _NOTHING_IN_COMMON:
            return "lost_place"
        at_once = size[0] > _AT_ONCE * median(size)
        return "lost_random" if at_once and size.max() < ROUNDED["loss"] else "lost_weights"

    def ratio(self, at_first: bool) -> float:
        """Return B's loss over A's at the first difference, or the median from there on."""
        a, b = self.values("loss")
        ratios = (b / a)[: 1 if at_first else None]
        ratios = ratios[np.isfinite(ratios)]
        return median(ratios) if len(ratios) else 1.0

    def unexplained(self, letter: str) -> str:
        """Return what another seed does not explain: losses at another level in the last half."""
        r = self.after("loss")
        late = r[len(r) // 2 :]
        if len(late) < _MIN_POINTS:
            return ""
        level = median(late)
        a, b = (median(values[len(values) // 2 :]) for values in self.values("loss"))
        if not a or abs(level) < max(_LEVEL, 2 * median(abs(late - level))):
            return ""
        return f"the loss of {letter} stays at {b / a:.3g} times that of A, which no seed explains"

    def _ratio_clue(self) -> str | None:
        """Return the clue if the losses differ by a factor from the first point on."""
        a, b = (values[:_CORRELATED] for values in self.values("loss"))
        if self.before is not None or not ((a > 0) & (b > 0)).all():
            return None
        logs = np.log(b / a)
        level = median(logs)
        interval = int(median(np.diff(self.points["loss"].steps))) if len(logs) > 1 else 1
        # Of a log that begins later, the weights are not those of the start.
        if abs(logs[0]) < _RATIO or self.first is None or self.first > interval:
            return None
        steady = median(abs(logs - level)) < abs(level) / 4 > abs(logs[0] - level)
        if len(logs) >= _MIN_POINTS and steady:
            return "loss_ratio"
        return "first_ratio" if self.first <= 1 else None

    def _clues_of_size(self, early: slice) -> list[str]:
        if ratio := self._ratio_clue():
            return [ratio]
        weights = self.after("param_norm")
        norm = self.after("grad_norm")
        if self.before is None and len(weights):
            limit = _MIN_WEIGHTS
            if self.lr:
                limit = max(limit, _UPDATE * float(self.lr.a[0]))
            if self.gap == 1 and abs(weights[0]) > limit:
                return ["other_weights"]
            if self.gap > 1 and abs(weights[0]) > 0.9 * abs(weights).max():
                return ["weights_offset"]
        if self.correlation is not None and self.correlation < _NOTHING_IN_COMMON:
            unknown_weights = self.gap > 1 or not len(weights)
            start = self.before is None and unknown_weights
            return ["other_batches"] + (["other_batches_from_start"] if start else [])
        if len(norm) >= _MIN_POINTS <= len(self.after("loss")):
            level = median(norm)
            scatter = median(abs(np.diff(norm)))
            steady = abs(level) > max(3 * scatter, _OTHER_NORM) and abs(norm[0]) > abs(level) / 2
            if steady and abs(level) > 3 * median(self.size("loss")):
                return ["norm_ratio"]
        signs = self.after("loss")[: 2 * EARLY_POINTS] > 0
        if self.below(SMALL, early) and 1 < signs.sum() < len(signs) - 1:
            return ["small"]
        return ["growing"] if self.below(TINY, early) else []


def describe_steps(steps: Ints, among: Ints) -> str:
    noun = "steps" if len(steps) > 1 else "step"
    return f"at {noun} {describe_ranges(ranges(steps, among))}"
