"""What differs between two runs and can change their curves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath

import numpy as np

from slurmllm.compare.alignment import Alignment
from slurmllm.compare.comparison import Kind
from slurmllm.metrics.curves import (
    Curve,
    Floats,
    Ints,
    Setting,
    bit_identical,
    describe_ranges,
    relative_difference,
)

# Backends may work a schedule out in single precision: two equal schedules then differ by 1e-7.
_LR_TOLERANCE = 1e-6
# Between logged points a schedule is no straight line, and where a warm-up ends it has a corner.
_LR_TOLERANCE_INTERPOLATED = 2e-2
_CORNER_POINTS = 2

_SCHEDULE = ("lr", "min_lr", "warmup_steps", "decay", "decay_steps")
_IN_DATA_RECORD = ("data.", "model.seq_len", "train.global_batch")
_PATHS = ("data.corpus", "data.tokenizer")
_KERNELS = (
    "train.activation_checkpointing", "train.compile", "backend", "cluster.device",
    "cluster.instance_type",
)  # fmt: skip
# A kind's phrase; the settings follow in brackets.
_PHRASES: Mapping[Kind, str] = {
    "data": "the data differ",
    "seed": "seeds differ",
    "batch": "global batches differ",
    "model": "models differ",
    "precision": "precision differs",
    "lr": "schedules differ",
    "optimizer": "optimizers differ",
    "mesh": "meshes differ",
    "rounding": "kernels may differ",
}
_SAID_BY_PHRASE = ("train.precision", "train.seed", "train.global_batch")


@dataclass(frozen=True, order=True)
class Cause:
    """Something that differs.

    Attributes:
        step: The first one at which it does.
        words: What differs.
        kind: For programs.
        weak: It changes roundings at most.
    """

    step: int
    words: str
    kind: Kind
    weak: bool = False


def causes(a: Curve, b: Curve, alignment: Alignment) -> list[Cause]:
    """What differs at the points compared, the earliest first."""
    first, last = int(alignment.steps[0]), int(alignment.steps[-1])
    found = [*_of_data(a, b, first)]
    found += [cause for cause in skipped(a, b) if cause.step <= last]
    lr = _of_lr(alignment)
    if lr is not None:
        found.append(lr)
    tokens = _of_tokens(a, b, alignment)
    if tokens is not None:
        found.append(tokens)
    known = {cause.kind for cause in found}
    found += [cause for cause in _of_settings(a, b, first) if cause.kind not in known]
    return sorted(found, key=lambda cause: (cause.weak, cause.step))


def _of_data(a: Curve, b: Curve, first: int) -> Iterator[Cause]:
    if a.data is None or b.data is None:
        return
    differences = a.data.differences(b.data)
    if not differences:
        return
    names = {
        name for name in ("seed", "global_batch") if getattr(a.data, name) != getattr(b.data, name)
    }
    kind: Kind = "data"
    if len(differences) == 1 and names:
        kind = "batch" if names == {"global_batch"} else "seed"
    start = a.settings.get("train.init_from")
    if kind == "seed" and start is not None and start == b.settings.get("train.init_from"):
        kind = "data"  # the same weights; the seed orders the data alone
    yield Cause(first, f"they did not see the same data: {', '.join(differences)}", kind)


def skipped(a: Curve, b: Curve) -> list[Cause]:
    """Batches that one of the two has passed over and the other has not."""
    windows = [tuple((skip.first, skip.last) for skip in curve.skips) for curve in (a, b)]
    if windows[0] == windows[1]:
        return []
    parts = [
        f"{label} skipped batches {describe_ranges(ranges)}"
        for label, ranges in zip("AB", windows, strict=True)
        if ranges
    ]
    first = min(1 + (skip.roll_back_to or 0) for skip in (*a.skips, *b.skips))
    return [Cause(first, " and ".join(parts), "data")]


def _of_lr(alignment: Alignment) -> Cause | None:
    lr = alignment.of("lr")
    exact = alignment.method == "exact" and alignment.axis == "step"
    tolerance = _LR_TOLERANCE if exact else _LR_TOLERANCE_INTERPOLATED
    same = bit_identical(lr.a, lr.b) | (relative_difference(lr.a, lr.b) <= tolerance)
    apart = ~same
    if alignment.method != "exact":
        for _ in range(_CORNER_POINTS):
            apart &= np.append(apart[1:], False)
    if not apart.any():
        return None
    i = int(np.argmax(apart))
    values = f"{lr.a[i]:.6g} and {lr.b[i]:.6g}"
    step = int(lr.steps[i])
    return Cause(step, f"learning rates differ from step {step} ({values})", "lr")


def _of_tokens(a: Curve, b: Curve, alignment: Alignment) -> Cause | None:
    if alignment.axis != "step" or alignment.method != "exact":
        of_a, of_b = (_per_step(*curve.series("tokens")) for curve in (a, b))
        if of_a is None or of_b is None or np.isclose(of_a, of_b, rtol=1e-6):
            return None
        words = f"tokens per step differ ({of_a:,.0f} and {of_b:,.0f})"
        return Cause(int(alignment.steps[0]), words, "batch")
    tokens = alignment.of("tokens")
    same = bit_identical(tokens.a, tokens.b)
    if same.all():
        return None
    i = int(np.argmin(same))
    step = int(tokens.steps[i])
    here, there = _per_step(tokens.steps, tokens.a), _per_step(tokens.steps, tokens.b)
    if here is None or there is None:
        return None
    if here != there:
        return Cause(step, f"tokens per step differ ({here:,.0f} and {there:,.0f})", "batch")
    values = f"{tokens.a[i]:,.0f} and {tokens.b[i]:,.0f}"
    return Cause(step, f"tokens trained on differ from step {step} ({values})", "data")


def _per_step(steps: Ints, tokens: Floats) -> float | None:
    """Median tokens a step; of a single step, all tokens so far; None without tokens."""
    finite = np.isfinite(tokens)
    steps, tokens = steps[finite], tokens[finite]
    if len(steps) < 2:
        return float(tokens[0]) if len(steps) else None
    return float(np.median(np.diff(tokens) / np.diff(steps)))


def tokens_per_step(curve: Curve) -> float | None:
    """Of most steps; None where that is not known."""
    steps, tokens = curve.series("tokens")
    return _per_step(steps, tokens) if len(steps) > 1 else None


def _of_settings(a: Curve, b: Curve, first: int) -> Iterator[Cause]:
    """Settings that both runs name and that can change what they compute."""
    groups: dict[tuple[Kind, bool], list[str]] = {}
    for key in sorted(a.settings.keys() & b.settings.keys()):
        one, other = a.settings[key], b.settings[key]
        if one == other:
            continue
        kind = _kind(key, one, other, a, b)
        if kind is not None:
            name = "" if key in _SAID_BY_PHRASE else f"{key.split('.', 1)[-1]} "
            weak = kind in ("mesh", "rounding") or (
                key == "train.init_from" and None not in (one, other)
            )
            groups.setdefault((kind, weak), []).append(f"{name}{_shown(one)} and {_shown(other)}")
    sizes = [{len(nodes) for nodes in curve.nodes.values()} for curve in (a, b)]
    if all(sizes) and sizes[0] != sizes[1]:
        here, there = ("/".join(map(str, sorted(size))) for size in sizes)
        groups.setdefault(("mesh", True), []).append(f"{here} and {there} nodes")
    for (kind, weak), differences in groups.items():
        more = f" and {len(differences) - 4} more" if len(differences) > 4 else ""
        words = f"{_PHRASES[kind]} ({', '.join(differences[:4])}{more})"
        yield Cause(first, words, kind, weak)


def _kind(key: str, one: Setting, other: Setting, a: Curve, b: Curve) -> Kind | None:
    """What a setting that differs can be the cause of; None: of nothing in a curve."""
    section, _, name = key.partition(".")
    has_lr = all("lr" in curve.columns for curve in (a, b))
    if a.data is not None and b.data is not None and key.startswith(_IN_DATA_RECORD):
        return None  # the records of what was read say it better
    if key == "train.seed":
        return (
            None
            if a.data is not None and b.data is not None and a.data.seed != b.data.seed
            else "seed"
        )
    if key == "train.precision":
        return "precision"
    if key == "train.global_batch":
        return "batch"
    if key == "train.micro_batch" or section == "parallel":
        return "mesh" if key != "parallel.auto" else None
    if section == "model" or key == "train.init_from":
        return "model"
    if key in _PATHS:
        same = PurePath(str(one)).name == PurePath(str(other)).name
        return None if same else "data"
    if key in ("data.mask", "data.validation"):
        return "data"
    if section == "optim":
        if name in _SCHEDULE:
            return None if has_lr else "lr"
        return "optimizer"
    if key == "train.steps" and not has_lr:
        ends = [curve.settings.get("optim.decay_steps") for curve in (a, b)]
        constant = [curve.settings.get("optim.decay") == "constant" for curve in (a, b)]
        return "lr" if ends == [None, None] and not all(constant) else None
    if key in _KERNELS or section in ("versions", "env"):
        return "rounding"
    return None


def _shown(value: Setting) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return (
        "none"
        if value is None
        else f"{value:.6g}"
        if isinstance(value, float)
        else f"{value:.60}"
        if isinstance(value, str)
        else str(value)
    )
