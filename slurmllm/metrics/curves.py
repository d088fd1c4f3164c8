"""Curves: the metrics of a training by step, whatever wrote them.

`analysis.reading` makes them of run directories and of other frameworks' logs; everything that
compares, counts or draws takes them from here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, cast

import numpy as np
import numpy.typing as npt

from slurmllm.records import DataRecord, MetricsRow, SkippedBatches

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Range = tuple[int, int]  # first and last step, both included
Axis = Literal["step", "tokens", "samples"]
SourceKind = Literal["run", "tensorboard", "jsonl", "csv", "text"]
Setting = str | int | float | bool | None

# `samples` and `val_loss` are in other frameworks' logs alone.
COLUMNS = (
    *(name for name in MetricsRow.model_fields if name not in ("step", "attempt")),
    *("samples", "val_loss"),
)
REPRODUCED = ("loss", "grad_norm", "param_norm", "lr", "tokens")  # the rest are times and rates


@dataclass(frozen=True)
class Curve:
    """The metrics of a run, by step.

    Attributes:
        name: What to call it: the run's name, or the file's.
        path: What was read.
        steps: The steps, ascending, each once. [rows]
        attempts: The attempt that each row is of. [rows]
        columns: Values by metric name; only metrics that at least one row has. [rows]
        absent: For a metric that some rows lack, which rows those are. [rows]
        overlap_rows: Rows that a later attempt replaced.
        overlap_identical: Whether these were bit-identical to the rows that replaced them;
            None without overlap.
        overlap_max_rel_diff: Largest relative difference between them; None without overlap.
        gaps: Ranges of steps that are missing between the first and the last.
        warnings: What a reader of the curve should know.
        data: What the run read; None where that is not known.
        kind: What it was read from.
        skips: Its roll-backs; rows that one of them undid are no overlap.
        settings: What is known of how it was trained: dotted path in the recipe (`optim.lr`,
            `train.precision`) → value; empty where nothing is.
        nodes: Attempt → the nodes that it ran on, where that is known.
    """

    name: str
    path: Path
    steps: Ints
    attempts: Ints
    columns: Mapping[str, Floats]
    absent: Mapping[str, Flags]
    overlap_rows: int
    overlap_identical: bool | None
    overlap_max_rel_diff: float | None
    gaps: tuple[Range, ...]
    warnings: tuple[str, ...]
    kind: SourceKind = "run"
    data: DataRecord | None = None
    skips: tuple[SkippedBatches, ...] = ()
    settings: Mapping[str, Setting] = field(default_factory=dict)
    nodes: Mapping[int, tuple[str, ...]] = field(default_factory=dict)

    def series(self, metric: str) -> tuple[Ints, Floats]:
        """The steps that have a metric, and its values there; both empty where none has it."""
        if metric not in self.columns:
            return self.steps[:0], np.empty(0)
        if metric not in self.absent:
            return self.steps, self.columns[metric]
        there = ~self.absent[metric]
        return self.steps[there], self.columns[metric][there]

    def positions(self, axis: Axis) -> Floats:
        """Where each row lies on an axis. [rows]

        Tokens and samples (sequences) are those trained on so far, the row's step included. They
        are taken from what was logged, else samples from the tokens and `model.seq_len`, else from
        the steps and `train.global_batch`.

        Returns:
            Positions; NaN for rows that lack the figure, for all of them where nothing tells.
        """
        if axis == "step":
            return self.steps.astype(np.float64)
        if axis in self.columns:
            return self.columns[axis]
        seq_len, batch = (self.settings.get(key) for key in ("model.seq_len", "train.global_batch"))
        if axis == "samples" and "tokens" in self.columns and _positive(seq_len):
            return np.divide(self.columns["tokens"], float(cast(float, seq_len)))
        if _positive(batch) and (axis == "samples" or _positive(seq_len)):
            each = float(cast(float, batch))
            each *= 1.0 if axis == "samples" else float(cast(float, seq_len))
            return self.steps.astype(np.float64) * each
        return np.full(len(self.steps), np.nan)

    @property
    def restarts(self) -> Ints:
        """The steps at which another attempt takes over."""
        steps: Ints = self.steps[1:][np.diff(self.attempts) != 0]
        return steps


def relative_difference(a: Floats, b: Floats) -> Floats:
    """|a - b| / max(|a|, |b|), elementwise; 0 where both are 0, never more than 2.

    NaN where either is not a finite number.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        scale = np.maximum(np.maximum(np.abs(a), np.abs(b)), np.finfo(np.float64).tiny)
        difference = np.minimum(np.abs(a - b) / scale, 2.0)
    return np.where(np.isfinite(a) & np.isfinite(b), difference, np.nan)


def bit_identical(a: Floats, b: Floats) -> Flags:
    """Where two columns hold the same 64 bits; 0.0 and -0.0 are not the same, NaN and NaN are."""
    same: Flags = a.view(np.int64) == b.view(np.int64)
    return same


def align(a: Curve, b: Curve, metric: str, first: int, last: int) -> tuple[Ints, Floats, Floats]:
    """The steps from `first` to `last` that both curves have a metric at, and its values."""
    steps_a, values_a = a.series(metric)
    steps_b, values_b = b.series(metric)
    steps, at_a, at_b = np.intersect1d(steps_a, steps_b, assume_unique=True, return_indices=True)
    inside = (steps >= first) & (steps <= last)
    return steps[inside], values_a[at_a][inside], values_b[at_b][inside]


def describe_ranges(ranges: tuple[Range, ...], most: int = 3) -> str:
    """Ranges of steps in words: "12, 40–43, 50–60 and 7 more ranges"."""
    shown = [f"{first}–{last}" if first < last else f"{first}" for first, last in ranges[:most]]
    more = len(ranges) - most
    return ", ".join(shown) + (f" and {more} more ranges" if more > 0 else "")


def _positive(value: Setting) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def thin_rows(values: Floats, most: int) -> Ints:
    """The rows to draw: of each of equally long pieces the first, lowest and highest.

    The first row that is not finite is there as well, so that a gap stays one, and the last row of
    all.

    Args:
        values: Of the curve. [rows]
        most: Rows at most, but for those that are not finite.

    Returns:
        Rows, ascending. [at most `most` + pieces with a gap]
    """
    rows = len(values)
    if rows <= most:
        return np.arange(rows, dtype=np.int64)
    table, begins = _pieces(values, max(1, (most - 1) // 3))
    bad = ~np.isfinite(table)
    lowest = np.argmin(np.where(bad, np.inf, table), axis=1) + begins
    highest = np.argmax(np.where(bad, -np.inf, table), axis=1) + begins
    gaps = (np.argmax(bad, axis=1) + begins)[bad.any(axis=1)]
    found = np.concatenate([begins, lowest, highest, gaps, [rows - 1]])
    return np.unique(found[found < rows])


def piece_means(values: Floats, most: int) -> Floats:
    """The mean of each of equally long pieces, without what is not finite.

    Args:
        values: Of the curve. [rows]
        most: Pieces at most; shorter curves stay as they are.

    Returns:
        Means; NaN where a piece has nothing finite. [pieces]
    """
    if len(values) <= most:
        return values
    table, _ = _pieces(values, most)
    good = np.isfinite(table)
    count = good.sum(axis=1)
    total = np.where(good, table, 0.0).sum(axis=1)
    found: Floats = np.divide(total, count, out=np.full(len(count), np.nan), where=count > 0)
    return found


def _pieces(values: Floats, most: int) -> tuple[Floats, Ints]:
    """Rows as a table of pieces, the last one filled up with NaN, and where each begins."""
    length = -(-len(values) // most)
    pieces = -(-len(values) // length)
    table = np.full(pieces * length, np.nan)
    table[: len(values)] = values
    return table.reshape(pieces, length), np.arange(pieces, dtype=np.int64) * length


MOST = 1200  # points of a line: one for each column of the picture


def thin(x: Floats, y: Floats, most: int = MOST) -> tuple[Floats, Floats]:
    """Keep the lowest and the highest value of each of many equal parts, so that no spike is lost.

    Args:
        x: Ascending. [points]
        y: Values; those that are no number are gaps, kept where a whole part is one. [points]
        most: Points to keep, about.
    """
    if len(y) <= most:
        return x, y
    width = -(-len(y) // (most // 2))
    whole = len(y) // width * width
    parts = y[:whole].reshape(-1, width)
    gaps = np.isnan(parts)
    low = np.argmin(np.where(gaps, np.inf, parts), axis=1)
    high = np.argmax(np.where(gaps, -np.inf, parts), axis=1)
    begins = np.arange(len(parts)) * width
    picked = np.stack([np.minimum(low, high), np.maximum(low, high)]) + begins
    places = np.concatenate((picked.T.ravel(), np.arange(whole, len(y))))
    return x[places], y[places]
