"""Defines a correct answer. The criteria were fixed before any answer was seen.

Row t holds the loss and the gradient norm at the weights before update t, the learning rate of
update t, and the norm of the weights after it. Each kind of departure has one of a few signatures.
Some kinds share a signature, and more do if fewer columns are logged. An answer is correct if its
first cause is the true kind, or if the logged columns cannot tell the first cause from the true
kind and the true kind is also in the list of causes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Verdict = Literal["identical", "match", "equivalent", "differ"]
Signature = Literal[
    "schedule", "update", "gradient", "forward", "weights", "rounding", "logging", "not_finite"
]
ColumnSet = Literal["four", "three", "loss"]

COLUMN_SETS: Mapping[ColumnSet, tuple[str, ...]] = {
    "four": ("loss", "grad_norm", "lr", "param_norm"),
    "three": ("loss", "grad_norm", "lr"),
    "loss": ("loss",),
}
TOLERANCES = {"loss": 1e-3, "grad_norm": 1e-2}  # compare's defaults

# The loss of step k differs: another batch, another forward pass, or other weights before it.
_FORWARD = frozenset({"data", "batches", "model", "mesh", "precision", "seed"})
# Without the weights' norm an update of step k - 1 looks the same.
_FORWARD_OR_UPDATE = _FORWARD | {"optimizer"}
# A loss by itself cannot date a cause to the update, the gradient or the forward pass.
_ANY = _FORWARD_OR_UPDATE | {"gradient", "lr"}
_ROUNDING = frozenset({"rounding", "precision", "mesh"})
# Loss equal, gradient norm not: a fault of the backward pass, of the reduction or of what is
# averaged; frozen weights leave the norm likewise.
_GRADIENT = frozenset({"gradient", "mesh", "batches", "model"})

INDISTINCT: Mapping[ColumnSet, Mapping[Signature, frozenset[str]]] = {
    "four": {
        "schedule": frozenset({"lr"}),
        # Loss, gradient norm and learning rate of step k equal, weights after it not.
        "update": frozenset({"optimizer", "mesh"}),
        "gradient": _GRADIENT,
        "forward": _FORWARD,
        # The weights' norm differs at step 1 by more than an update makes.
        "weights": frozenset({"seed", "model"}),
        "rounding": _ROUNDING,
        # One column differs and the others never do.
        "logging": frozenset({"logging"}),
        "not_finite": frozenset({"not_finite"}),
    },
    "three": {
        "schedule": frozenset({"lr"}),
        "update": _FORWARD_OR_UPDATE,
        "gradient": _GRADIENT,
        "forward": _FORWARD_OR_UPDATE,
        "weights": _FORWARD_OR_UPDATE,
        "rounding": _ROUNDING,
        "logging": frozenset({"logging"}),
        "not_finite": frozenset({"not_finite"}),
    },
    "loss": {
        "schedule": _ANY,
        "update": _ANY,
        "gradient": _ANY,
        "forward": _ANY,
        "weights": _ANY,
        "rounding": _ROUNDING,
        # A factor or a shift is an identity that the loss alone shows; other changes of what is
        # logged are not.
        "logging": _ANY | {"logging"},
        "not_finite": frozenset({"not_finite"}),
    },
}

_WINDOW = 8  # points whose mean counts as lasting
_CLEAR = 1.5  # times the tolerance: beyond doubt lasting
_SCATTER = 3.0  # times the tolerance, as a root mean square: beyond doubt different


def visible_verdicts(a: Mapping[str, Floats], b: Mapping[str, Floats]) -> frozenset[Verdict]:
    """Returns the right verdicts of a departure, by what its log shows of it.

    Two runs whose logged loss and gradient norm have the same bits are identical, whatever was
    changed; within the tolerance at every point they match. Where only single points are beyond
    it, or a mean is beyond it by less than half, the verdict is a matter of judgement and any but
    `identical` is right.

    Args:
        a, b: Columns at the same steps. [points] each
    """
    deciding = [name for name in TOLERANCES if name in a]
    pairs = [(a[name], b[name], TOLERANCES[name]) for name in deciding]
    if all(np.array_equal(x, y) for x, y, _ in pairs):
        return frozenset({"identical"})
    sizes = []
    for x, y, tolerance in pairs:
        if not (np.isfinite(x).all() and np.isfinite(y).all()):
            return frozenset({"differ"})
        scale = np.maximum(np.abs(x), np.abs(y))
        sizes.append((y - x) / np.where(scale > 0, scale, 1.0) / tolerance)
    if all(np.abs(r).max() <= 1 for r in sizes):
        return frozenset({"match"})
    for r in sizes:
        width = min(_WINDOW, len(r))
        windows = np.lib.stride_tricks.sliding_window_view(r, width)
        if np.abs(windows.mean(axis=1)).max() > _CLEAR:
            return frozenset({"differ"})
        if np.sqrt((windows**2).mean(axis=1)).max() > _SCATTER:
            return frozenset({"differ"})
    return frozenset({"match", "equivalent", "differ"})


def first_difference(
    steps: npt.NDArray[np.int64], a: Mapping[str, Floats], b: Mapping[str, Floats]
) -> int | None:
    """Returns the first step at which a column has other bits; None if none has."""
    different = np.zeros(len(steps), dtype=bool)
    for name in a:
        different |= a[name] != b[name]
    return int(steps[np.argmax(different)]) if different.any() else None
