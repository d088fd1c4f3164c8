"""Causes of different curves, and the recorded settings of two runs that can be one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Literal

import numpy as np
from pydantic import Field

from slurmllm.compare.alignment import Alignment
from slurmllm.metrics.curves import (
    Curve,
    Floats,
    Ints,
    bit_identical,
    describe_ranges,
    relative_difference,
)
from slurmllm.records import Record

Kind = Literal[
    "lr", "seed", "data", "batches", "precision", "rounding", "model", "optimizer", "mesh",
    "gradient", "not_finite", "logging", "unknown",
]  # fmt: skip
Confidence = Literal["certain", "likely", "possible"]

# Backends may compute a schedule in single precision: two equal schedules then differ by 1e-7.
_LR_TOLERANCE = 1e-6
# Between logged points a schedule is not linear, and at the end of a warm-up it has a corner.
_LR_TOLERANCE_INTERPOLATED = 2e-2
_CORNER_POINTS = 2

_SCHEDULE_SETTINGS = ("lr", "min_lr", "warmup_steps", "decay", "decay_steps")
_DATA_RECORD_SETTINGS = ("data.", "model.seq_len", "train.global_batch")
_PATH_SETTINGS = ("data.corpus", "data.tokenizer")
_KERNEL_SETTINGS = (
    "train.activation_checkpointing", "train.compile", "backend", "cluster.device",
    "cluster.instance_type",
)  # fmt: skip
# The settings follow in parentheses.
_PHRASES: Mapping[Kind, str] = {
    "data": "the data differ",
    "seed": "seeds differ",
    "batches": "global batches differ",
    "model": "models differ",
    "precision": "precision differs",
    "lr": "schedules differ",
    "optimizer": "optimizers differ",
    "mesh": "meshes differ",
    "rounding": "kernels may differ",
}
# The phrase names these settings.
_NAMED_BY_PHRASE = ("train.precision", "train.seed", "train.global_batch")


class Cause(Record):
    """What can have made two curves differ."""

    kind: Kind
    confidence: Confidence = Field(
        description="certain: a recorded setting differs, or an identity of the columns proves it"
    )
    step: int = Field(description="first step with it, or the first point that shows it")
    evidence: str


@dataclass(frozen=True, order=True)
class SettingDifference:
    """A recorded setting of two runs that differs."""

    step: int  # the first with it
    text: str
    kind: Kind
    weak: bool = False  # changes roundings at most


def find_differences(a: Curve, b: Curve, alignment: Alignment) -> list[SettingDifference]:
    """Find the differences at the compared points, the earliest first."""
    first, last = int(alignment.steps[0]), int(alignment.steps[-1])
    candidates = (
        _compare_data(a, b, first),
        *(cause for cause in compare_skips(a, b) if cause.step <= last),
        _compare_learning_rates(alignment),
        _compare_tokens(a, b, alignment),
    )
    found = [cause for cause in candidates if cause is not None]
    known = {cause.kind for cause in found}
    found += [cause for cause in _compare_settings(a, b, first) if cause.kind not in known]
    return sorted(found, key=lambda cause: (cause.weak, cause.step))


def compare_skips(a: Curve, b: Curve) -> list[SettingDifference]:
    """Find batches that one of the runs skipped and the other did not."""
    windows = [tuple((skip.first, skip.last) for skip in curve.skips) for curve in (a, b)]
    if windows[0] == windows[1]:
        return []
    texts = [
        f"{label} skipped batches {describe_ranges(ranges)}"
        for label, ranges in zip("AB", windows, strict=True)
        if ranges
    ]
    first = min(1 + (skip.roll_back_to or 0) for skip in (*a.skips, *b.skips))
    return [SettingDifference(first, " and ".join(texts), "data")]


def tokens_per_step(curve: Curve) -> float | None:
    """Returns the tokens of most steps; None if the curve has no tokens."""
    steps, tokens = curve.series("tokens")
    return _median_tokens(steps, tokens) if len(steps) > 1 else None


def _compare_data(a: Curve, b: Curve, first: int) -> SettingDifference | None:
    if a.data is None or b.data is None:
        return None
    differences = a.data.differences(b.data)
    if not differences:
        return None
    names = {
        name for name in ("seed", "global_batch") if getattr(a.data, name) != getattr(b.data, name)
    }
    kind: Kind = "data"
    if len(differences) == 1 and names:
        kind = "batches" if names == {"global_batch"} else "seed"
    start = a.settings.get("train.init_from")
    if kind == "seed" and start is not None and start == b.settings.get("train.init_from"):
        kind = "data"  # with the same initial weights the seed only orders the data
    return SettingDifference(
        first, f"they did not see the same data: {', '.join(differences)}", kind
    )


def _compare_learning_rates(alignment: Alignment) -> SettingDifference | None:
    lr = alignment.of("lr")
    exact = alignment.method == "exact" and alignment.axis == "step"
    tolerance = _LR_TOLERANCE if exact else _LR_TOLERANCE_INTERPOLATED
    different = ~bit_identical(lr.a, lr.b)
    different &= ~(relative_difference(lr.a, lr.b) <= tolerance)
    if alignment.method != "exact":
        for _ in range(_CORNER_POINTS):
            different &= np.append(different[1:], False)
    if not different.any():
        return None
    i = int(np.argmax(different))
    step, values = int(lr.steps[i]), f"{lr.a[i]:.6g} and {lr.b[i]:.6g}"
    return SettingDifference(step, f"learning rates differ from step {step} ({values})", "lr")


def _compare_tokens(a: Curve, b: Curve, alignment: Alignment) -> SettingDifference | None:
    if alignment.axis != "step" or alignment.method != "exact":
        # Tokens so far differ at other steps anyway; their number per step must not.
        of_a, of_b = (_median_tokens(*curve.series("tokens")) for curve in (a, b))
        if of_a is None or of_b is None or np.isclose(of_a, of_b, rtol=1e-6):
            return None
        text = f"tokens per step differ ({of_a:,.0f} and {of_b:,.0f})"
        return SettingDifference(int(alignment.steps[0]), text, "batches")
    tokens = alignment.of("tokens")
    same = bit_identical(tokens.a, tokens.b)
    if same.all():
        return None
    i = int(np.argmin(same))
    step = int(tokens.steps[i])
    of_a, of_b = (_median_tokens(tokens.steps, values) for values in (tokens.a, tokens.b))
    if of_a is None or of_b is None:
        return None
    if of_a != of_b:
        return SettingDifference(
            step, f"tokens per step differ ({of_a:,.0f} and {of_b:,.0f})", "batches"
        )
    values = f"{tokens.a[i]:,.0f} and {tokens.b[i]:,.0f}"
    return SettingDifference(step, f"tokens trained on differ from step {step} ({values})", "data")


def _median_tokens(steps: Ints, tokens: Floats) -> float | None:
    """Median tokens per step; with a single step, all tokens so far; None without tokens."""
    finite = np.isfinite(tokens)
    steps, tokens = steps[finite], tokens[finite]
    if len(steps) < 2:
        return float(tokens[0]) if len(steps) else None
    return float(np.median(np.diff(tokens) / np.diff(steps)))


def _compare_settings(a: Curve, b: Curve, first: int) -> Iterator[SettingDifference]:
    """Find settings that both runs have and that can change what they compute."""
    groups: dict[tuple[Kind, bool], list[str]] = {}
    for key in sorted(a.settings.keys() & b.settings.keys()):
        values = a.settings[key], b.settings[key]
        kind = _kind_of_setting(key, a, b) if values[0] != values[1] else None
        if kind is None:
            continue
        name = "" if key in _NAMED_BY_PHRASE else f"{key.split('.', 1)[-1]} "
        weak = kind in ("mesh", "rounding") or (key == "train.init_from" and None not in values)
        shown = [
            f"{value:.6g}" if isinstance(value, float)
            else f"{value:.60}" if isinstance(value, str)
            else str(value).lower()
            for value in values
        ]  # fmt: skip
        text = f"{name}{' and '.join(shown)}"
        groups.setdefault((kind, weak), []).append(text)
    sizes = [{len(nodes) for nodes in curve.nodes.values()} for curve in (a, b)]
    if all(sizes) and sizes[0] != sizes[1]:
        of_a, of_b = ("/".join(map(str, sorted(size))) for size in sizes)
        groups.setdefault(("mesh", True), []).append(f"{of_a} and {of_b} nodes")
    for (kind, weak), differences in groups.items():
        more = f" and {len(differences) - 4} more" if len(differences) > 4 else ""
        text = f"{_PHRASES[kind]} ({', '.join(differences[:4])}{more})"
        yield SettingDifference(first, text, kind, weak)


def _kind_of_setting(key: str, a: Curve, b: Curve) -> Kind | None:
    """Returns what a setting that differs can cause; None if nothing in a curve."""
    section, _, name = key.partition(".")
    has_lr = all("lr" in curve.columns for curve in (a, b))
    have_data = a.data is not None and b.data is not None
    if have_data and key.startswith(_DATA_RECORD_SETTINGS):
        return None  # data.json is more exact
    if key == "train.seed":
        same = a.data is None or b.data is None or a.data.seed == b.data.seed
        return "seed" if same else None
    if key == "train.precision":
        return "precision"
    if key == "train.global_batch":
        return "batches"
    if key == "train.micro_batch" or section == "parallel":
        return "mesh" if key != "parallel.auto" else None
    if section == "model" or key == "train.init_from":
        return "model"
    if key in _PATH_SETTINGS:
        names = {PurePath(str(curve.settings[key])).name for curve in (a, b)}
        return None if len(names) == 1 else "data"
    if key in ("data.mask", "data.validation"):
        return "data"
    if section == "optim":
        if name in _SCHEDULE_SETTINGS:
            return None if has_lr else "lr"
        return "optimizer"
    if key == "train.steps" and not has_lr:
        ends = [curve.settings.get("optim.decay_steps") for curve in (a, b)]
        constant = [curve.settings.get("optim.decay") == "constant" for curve in (a, b)]
        return "lr" if ends == [None, None] and not all(constant) else None
    if key in _KERNEL_SETTINGS or section in ("versions", "env"):
        return "rounding"
    return None
