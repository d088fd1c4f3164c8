"""Recorded settings and columns of two runs that differ, each with the kind of cause it can be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePath

import numpy as np

from slurmllm.analysis.compare.alignment import Alignment, Points
from slurmllm.analysis.compare.result import Kind
from slurmllm.core.format import Texts
from slurmllm.core.metrics.curves import (
    LR_TOLERANCE,
    Curve,
    Flags,
    Floats,
    Ints,
    argmax,
    describe_ranges,
    median,
    relative_difference,
)
from slurmllm.core.run.error_patterns import read_table
from slurmllm.core.run.records import Record

# Between logged points a schedule is not linear, and at the end of a warm-up it has a corner.
_LR_TOLERANCE_INTERPOLATED = 2e-2
_CORNER_POINTS = 2

# data.json has these more exactly.
_DATA_RECORD_SETTINGS = ("data.", "model.seq_len", "train.global_batch")
# The text of their kind names these settings.
_NAMED_BY_KIND = ("train.precision", "train.seed", "train.global_batch")


class SettingGroup(Record):
    """Settings that can be a cause of one kind; see settings.yaml."""

    text: str
    settings: Texts


@cache
def setting_table() -> Mapping[Kind, SettingGroup]:
    rows = read_table(Path(__file__).with_name("settings.yaml"))
    return {kind: SettingGroup(**row) for kind, row in rows.items()}


@dataclass(frozen=True)
class SettingDifference:
    """A recorded setting of two runs that differs."""

    step: int  # the first with it
    text: str
    kind: Kind
    weak: bool = False  # changes roundings at most
    # It may not have changed the training: of schedules one step apart only the logs may differ,
    # and another project's trainer may have the same global batch on another mesh.
    uncertain: bool = False


def find_differences(a: Curve, b: Curve, alignment: Alignment) -> list[SettingDifference]:
    """Find the differences at the compared points, the earliest first."""
    first = alignment.steps[0]
    last = alignment.steps[-1]
    candidates = (
        _compare_data(a, b, first),
        compare_skips(a, b, alignment.letter),
        _compare_learning_rates(a, b, alignment),
        _compare_tokens(a, b, alignment),
    )
    differences = [
        difference for difference in candidates if difference and difference.step <= last
    ]
    kinds = {difference.kind for difference in differences}
    differences += [
        difference for difference in _compare_settings(a, b, first) if difference.kind not in kinds
    ]
    return sorted(differences, key=lambda difference: (difference.weak, difference.step))


def compare_skips(a: Curve, b: Curve, letter: str) -> SettingDifference | None:
    """Find batches that one of the runs skipped and the other did not."""
    windows = {
        label: tuple((skip.first, skip.last) for skip in curve.skips)
        for label, curve in (("A", a), (letter, b))
    }
    if windows["A"] == windows[letter]:
        return None
    texts = [
        f"{label} skipped batches {describe_ranges(ranges)}"
        for label, ranges in windows.items()
        if ranges
    ]
    first = min(1 + (skip.roll_back_to or 0) for skip in (*a.skips, *b.skips))
    return SettingDifference(first, " and ".join(texts), "data")


def tokens_per_step(curve: Curve) -> float | None:
    """Return the tokens of most steps; None if the curve has no tokens."""
    steps, tokens = curve.series("tokens")
    return _median_tokens(steps, tokens) if len(steps) > 1 else None


def _compare_data(a: Curve, b: Curve, first: int) -> SettingDifference | None:
    if not (a.data and b.data):
        return None
    differences = a.data.differences(b.data)
    if not differences:
        return None
    kind: Kind = "data"
    if len(differences) == 1 and a.data.global_batch != b.data.global_batch:
        kind = "batches"
    elif len(differences) == 1 and a.data.seed != b.data.seed:
        # With the same initial weights the seed only orders the data.
        start = a.settings.get("train.init_from")
        if start is None or start != b.settings.get("train.init_from"):
            kind = "seed"
    return SettingDifference(
        first, f"they did not see the same data: {', '.join(differences)}", kind
    )


def describe_schedule_change(curve: Curve, since: int, until: int) -> str:
    """Describe what resumes changed in the schedule, of attempts after `since` up to `until`.

    Returns an empty text if none changed it.
    """
    schedule = setting_table()["lr"].settings
    texts = []
    for attempt, changes in sorted(curve.changes.items()):
        named = [
            f"{path} {format_setting(old)} → {format_setting(new)}"
            for path, (old, new) in changes.items()
            if path in schedule
        ]
        if named and since < attempt <= until:
            texts.append(f"at the resume of attempt {attempt} ({', '.join(named)})")
    return " and ".join(texts)


def format_setting(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return f"{value:.60}" if isinstance(value, str) else str(value).lower()


def _compare_learning_rates(a: Curve, b: Curve, alignment: Alignment) -> SettingDifference | None:
    lr = alignment.points_of("lr").as_printed(a, b)
    exact = alignment.method == "exact" and alignment.axis == "step"
    tolerance = LR_TOLERANCE if exact else _LR_TOLERANCE_INTERPOLATED
    different = ~(lr.same | (relative_difference(lr.a, lr.b) <= tolerance))
    if alignment.method != "exact":
        for _ in range(_CORNER_POINTS):
            different &= np.append(different[1:], False)
    if not different.any():
        return None
    i = argmax(different)
    step = lr.steps[i]
    values = f"{lr.a[i]:.6g} and {lr.b[i]:.6g}"
    sentence = f"learning rates differ from step {step} ({values})"
    shifted = exact and _is_shifted(lr, tolerance)
    if shifted:
        sentence += ": they are the same one step apart, logged or counted so (optim.step_count)"
    for letter, curve in (("A", a), (alignment.letter, b)):
        began = curve.attempts[: np.searchsorted(curve.steps, step) + 1][-1]
        if changed := describe_schedule_change(curve, 0, began):
            sentence += f": the schedule of {letter} was changed {changed}"
    return SettingDifference(step, sentence, "lr", uncertain=shifted)


def _is_shifted(lr: Points, tolerance: float) -> bool:
    """Return whether the rates are the same one step earlier or later: it may be the logging."""
    if len(lr) <= _CORNER_POINTS + 1 or np.any(np.diff(lr.steps) != 1):
        return False
    allowed = np.maximum(tolerance * abs(lr.a), 0.5000001 * lr.units)
    # Rates that print alike without the shift, too, show none.
    moving = abs(lr.a - lr.b) > 2 * allowed
    for a, b in ((slice(-1), slice(1, None)), (slice(1, None), slice(-1))):
        same = abs(lr.a[a] - lr.b[b]) <= np.maximum(allowed[a], 0.5000001 * lr.units[b])
        if same.all() and np.count_nonzero(moving[a]) > _CORNER_POINTS:
            return True
    return False


def _compare_tokens(a: Curve, b: Curve, alignment: Alignment) -> SettingDifference | None:
    by_step = alignment.axis == "step" and alignment.method == "exact"
    tokens = alignment.points_of("tokens").as_printed(a, b)
    step = alignment.steps[0]
    sides = [curve.series("tokens") for curve in (a, b)]
    if by_step:
        different = _other_increments(tokens)
        if not different.any():
            return None
        i = argmax(different)
        step = tokens.steps[i]
        sides = [(tokens.steps, tokens.a), (tokens.steps, tokens.b)]
    # On other axes tokens so far differ anyway; their number per step must not.
    of_a, of_b = (_median_tokens(*side) for side in sides)
    if of_a is None or of_b is None:
        return None
    if of_a != of_b if by_step else not np.isclose(of_a, of_b, rtol=1e-6):
        sentence = f"tokens per step differ ({of_a:,.0f} and {of_b:,.0f})"
        return SettingDifference(step, sentence, "batches")
    if not by_step:
        return None
    values = f"{tokens.a[i]:,.0f} and {tokens.b[i]:,.0f}"
    return SettingDifference(step, f"tokens trained on differ from step {step} ({values})", "data")


def _other_increments(tokens: Points) -> Flags:
    """Return the points since whose predecessors the tokens grew by other numbers. [points]

    A counter that a resume sets back, or that begins elsewhere, counts the same tokens.
    """
    if len(tokens) < 2:
        return ~tokens.same
    growth_a = np.diff(tokens.a)
    growth_b = np.diff(tokens.b)
    different = abs(growth_a - growth_b) > 2 * tokens.units[1:]
    different &= (growth_a > 0) & (growth_b > 0)
    return np.append(different[0] & ~tokens.same[0], different)


def _median_tokens(steps: Ints, tokens: Floats) -> float | None:
    """Return the median per step; with a single step, all tokens so far; None without tokens."""
    finite = np.isfinite(tokens)
    steps = steps[finite]
    tokens = tokens[finite]
    if len(steps) < 2:
        return float(tokens[0]) if len(steps) else None
    return median(np.diff(tokens) / np.diff(steps))


def _compare_settings(a: Curve, b: Curve, first: int) -> Iterator[SettingDifference]:
    """Find settings that both runs have and that can change what they compute."""
    groups: dict[tuple[Kind, bool], list[str]] = {}
    is_command = any(curve.settings.get("command.run") for curve in (a, b))
    for key in sorted(a.settings.keys() & b.settings.keys()):
        values = a.settings[key], b.settings[key]
        kind = _kind_of_setting(key, a, b) if values[0] != values[1] else None
        if kind is None:
            continue
        name = "" if key in _NAMED_BY_KIND else f"{key.split('.', 1)[-1]} "
        weak = kind in ("mesh", "rounding") or (key == "train.init_from" and None not in values)
        sentence = f"{name}{' and '.join(map(format_setting, values))}"
        groups.setdefault((kind, weak), []).append(sentence)
    sizes = [{len(nodes) for nodes in curve.nodes.values()} for curve in (a, b)]
    if all(sizes) and sizes[0] != sizes[1]:
        numbers = " and ".join("/".join(map(str, sorted(size))) for size in sizes)
        groups.setdefault(("mesh", True), []).append(f"{numbers} nodes")
    for (kind, weak), differences in groups.items():
        more = f" and {len(differences) - 4} more" if len(differences) > 4 else ""
        sentence = f"{setting_table()[kind].text} ({', '.join(differences[:4])}{more})"
        uncertain = is_command and kind == "mesh"
        yield SettingDifference(first, sentence, kind, weak and not uncertain, uncertain)


def _kind_of_setting(key: str, a: Curve, b: Curve) -> Kind | None:
    """Return what a setting that differs can cause; None if nothing in a curve."""
    by_key = {name: kind for kind, group in setting_table().items() for name in group.settings}
    kind = by_key.get(key, by_key.get(f"{key.partition('.')[0]}.*"))
    if a.data and b.data:
        other_seed = key == "train.seed" and a.data.seed != b.data.seed
        if other_seed or key.startswith(_DATA_RECORD_SETTINGS):
            return None
    if kind == "lr" and all("lr" in curve.columns for curve in (a, b)):
        return None  # the learning rates themselves are compared
    matters = key != "parallel.auto"
    if key == "train.steps":  # the end of a decay that names none
        ends = [curve.settings.get("optim.decay_steps") for curve in (a, b)]
        constant = [curve.settings.get("optim.decay") == "constant" for curve in (a, b)]
        matters = ends == [None, None] and not all(constant)
    if key in ("data.corpus", "data.tokenizer"):  # paths
        names = {PurePath(str(curve.settings[key])).name for curve in (a, b)}
        matters = len(names) > 1
    return kind if matters else None
