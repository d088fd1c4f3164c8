"""Curves: the metrics of a training by step, whatever wrote them.

`source.read_curve` reads them from run directories and from logs of other frameworks; compare,
spikes and report work on them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel

from slurmllm.core.display.tables import data_frame
from slurmllm.core.format import Texts, format_names, format_plural
from slurmllm.core.metrics.row_reader import json_number
from slurmllm.core.run.artifact_records import DataRecord
from slurmllm.core.run.records import MetricsRow, SkippedBatches

if TYPE_CHECKING:
    import pandas

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Range = tuple[int, int]  # first and last step, both included
Ranges = tuple[Range, ...]
Axis = Literal["step", "tokens", "samples"]
SourceKind = Literal["run", "tensorboard", "jsonl", "csv", "text"]
StepUnit = Literal["steps", "micro-iterations", "samples"]
Setting = str | int | float | bool | None
Number = TypeVar("Number", float, Floats)

VAL_LOSS = "val_loss"
# Only logs of other frameworks have `samples`, and rows with `val_loss`.
COLUMNS = (
    *(name for name in MetricsRow.model_fields if name not in ("step", "attempt")),
    "samples",
    VAL_LOSS,
)
# Metric → tag in TensorBoard and in trackers, which group charts by the part before the slash.
TAGS = {
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "param_norm": "train/param_norm",
    "lr": "train/lr",
    "tokens": "train/tokens",
    "seq_per_s": "throughput/seq_per_s",
    "tokens_per_s": "throughput/tokens_per_s",
    "step_time_s": "time/step_time_s",
    "data_wait_s": "time/data_wait_s",
    "forward_backward_s": "time/forward_backward_s",
    "optimizer_s": "time/optimizer_s",
    "attempt": "run/attempt",
}
# What an exact resume reproduces bit by bit; others are times and rates, or counters such as
# `tokens` that another trainer may begin again at 0.
REPRODUCED = ("loss", "grad_norm", "param_norm", "lr")


class DamageWarning(str):
    """A warning of rows or values that cannot be read, and were left out.

    Attributes:
        lines: Numbers of the lines, if known.
        column: Of values; empty: whole rows.
    """

    lines: Sequence[int]
    column: str

    def __new__(cls, message: str, lines: Sequence[int] = (), column: str = "") -> DamageWarning:
        warning = super().__new__(cls, message)
        warning.lines = lines
        warning.column = column
        return warning

    @property
    def with_lines(self) -> str:
        """The text and the first lines, if there are several."""
        more = " …" if len(self.lines) > 5 else ""
        first = f" (lines {', '.join(map(str, self.lines[:5]))}{more})"
        return f"{self}{first if len(self.lines) > 1 else ''}"


class Convention(BaseModel, frozen=True, extra="forbid"):
    """How a format of logs counts steps and averages the loss."""

    name: str
    steps_from: Literal[0, 1] | None = None  # number of the first optimizer step; None: not known
    counts: StepUnit = "steps"
    loss_is_mean: bool = False  # of all steps since the row before


# Backends may compute a schedule in single precision: two equal schedules then differ by 1e-7.
LR_TOLERANCE = 1e-6


class NewSchedule(NamedTuple):
    """Another learning rate in an attempt than in the attempt before it, for the same step."""

    step: int  # the first
    attempts: tuple[int, int]  # the one whose row was replaced, and that of the row used
    values: tuple[float, float]


@dataclass(frozen=True)
class Curve:
    """The metrics of a run, by step."""

    name: str  # the run's name, or the file's
    path: Path  # the directory or file that was read
    steps: Ints  # ascending, each once [rows]
    attempts: Ints  # the attempt of each row [rows]
    columns: Mapping[str, Floats]  # values by metric name, of metrics that a row has [rows]
    # For a metric that some rows lack, which rows those are [rows]
    absent: Mapping[str, Flags] = field(default_factory=dict)
    overlap_rows: int = 0  # number of recomputed rows: those that a later attempt replaced
    # Whether these are bit-identical to the rows that replaced them; None without overlap.
    overlap_identical: bool | None = None
    # Largest difference between them; None without overlap.
    overlap_max_rel_diff: float | None = None
    gaps: Ranges = ()  # steps that are missing between the first and the last
    warnings: Texts = ()
    kind: SourceKind = "run"
    data: DataRecord | None = None  # the data that the run read; None if not recorded
    skips: tuple[SkippedBatches, ...] = ()  # roll-backs; rows that one of them undid are no overlap
    # Known settings of the training: dotted path in the recipe (`optim.lr`) → value.
    settings: Mapping[str, Setting] = field(default_factory=dict)
    nodes: Mapping[int, Texts] = field(default_factory=dict)  # by attempt, if recorded
    schedules: tuple[NewSchedule, ...] = ()  # rows from these steps on are no overlap
    # Attempt that a `resume` began → dotted path → old and new value of what that changed.
    changes: Mapping[int, Mapping[str, tuple[Any, Any]]] = field(default_factory=dict)
    convention: Convention | None = None  # how it counts steps; None: format not recognized
    texts: Texts = ()  # names of the evaluated texts; the first is `val_loss`
    tags: Texts = ()  # all that another framework's log has
    invented_steps: str = ""  # why its steps are none that the training counted; empty: they are

    def __repr__(self) -> str:
        return (
            f"<Curve {self.name}: {format_plural(len(self.steps), 'step')} of "
            f"{format_names(list(self.columns), 4)}>"
        )

    def series(self, metric: str) -> tuple[Ints, Floats]:
        """Return the steps that have a metric, and its values; both empty if no row has it."""
        if metric not in self.columns:
            return self.steps[:0], np.empty(0)
        if metric not in self.absent:
            return self.steps, self.columns[metric]
        present = ~self.absent[metric]
        return self.steps[present], self.columns[metric][present]

    def present(self, metric: str) -> Flags:
        """Return which rows have a metric. [rows]"""
        absent = self.absent.get(metric)
        return np.ones(len(self.steps), bool) if absent is None else ~absent

    @property
    def validation(self) -> dict[str, str]:
        """The metrics that are validation losses, with the name of the text, if recorded."""
        names = [name for name in self.columns if name.partition("/")[0] == VAL_LOSS]
        return dict(zip(names, self.texts or ("",), strict=False))

    def positions(self, axis: Axis) -> Floats:
        """Return the position of each row on an axis. [rows]

        Tokens and samples (sequences) are those trained on so far, the row's step included. They
        are taken from the log; else samples from the tokens and `model.seq_len`; else both from
        the steps and `train.global_batch`. NaN if a row lacks the figure, or if nothing has it.
        """
        if axis == "step":
            return self.steps.astype(np.float64)
        if axis in self.columns:
            return self.columns[axis]
        seq_len = self.positive_setting("model.seq_len")
        batch = self.positive_setting("train.global_batch")
        if axis == "samples" and "tokens" in self.columns and seq_len is not None:
            return np.divide(self.columns["tokens"], seq_len)
        per_sample = 1.0 if axis == "samples" else seq_len
        if batch is None or per_sample is None:
            return np.full(len(self.steps), np.nan)
        return self.steps.astype(np.float64) * (batch * per_sample)

    def positive_setting(self, key: str) -> float | None:
        """Return a setting that is a number above 0; other versions may have stored any type."""
        value = json_number(self.settings.get(key))
        return value if value is not None and 0 < value < math.inf else None

    def take(self, rows: Ints | Flags) -> Curve:
        """Return the curve of some rows; gaps and overlaps stay those of all."""
        return replace(
            self,
            steps=self.steps[rows],
            attempts=self.attempts[rows],
            columns={name: column[rows] for name, column in self.columns.items()},
            absent={name: flags[rows] for name, flags in self.absent.items() if flags[rows].any()},
        )

    @property
    def restarts(self) -> Ints:
        """The first step of each attempt after the first."""
        steps: Ints = self.steps[1:][np.diff(self.attempts) != 0]
        return steps

    def to_dict(self) -> dict[str, Any]:
        """Return it for JSON; a value that a row lacks, or that is not finite, is None."""
        return {
            "name": self.name,
            "path": str(self.path),
            "warnings": list(self.warnings),
            "steps": self.steps.tolist(),
            "attempts": self.attempts.tolist(),
            "metrics": {
                name: [value if math.isfinite(value) else None for value in column.tolist()]
                for name, column in self.columns.items()
            },
            "settings": dict(self.settings),
        }

    def to_pandas(self) -> pandas.DataFrame:
        """Return a row for each step, with its attempt and a column for each metric."""
        columns = {"step": self.steps, "attempt": self.attempts, **self.columns}
        return data_frame(columns).set_index("step")


def median(values: npt.NDArray[Any] | Sequence[float]) -> float:
    return float(np.median(values))


def argmax(values: npt.NDArray[Any]) -> int:
    """Return the index of the largest value, of flags that of the first set one."""
    return int(np.argmax(values))


def signed_difference(a: Floats, b: Floats) -> Floats:
    """Return (b - a) / max(|a|, |b|), from -2 to 2; 0 if both are 0, NaN if one is not finite."""
    with np.errstate(over="ignore", invalid="ignore"):
        scale = np.maximum(np.maximum(np.abs(a), np.abs(b)), np.finfo(np.float64).tiny)
        difference = np.clip((b - a) / scale, -2.0, 2.0)
    # An infinite value may give any number.
    difference[~np.isfinite(scale)] = np.nan
    return difference


def relative_difference(a: Floats, b: Floats) -> Floats:
    return np.abs(signed_difference(a, b))


def bit_identical(a: Floats, b: Floats) -> Flags:
    """Return where columns have the same 64 bits: 0.0 and -0.0 differ, NaN and NaN do not."""
    same: Flags = a.view(np.int64) == b.view(np.int64)
    return same


def describe_ranges(ranges: Ranges) -> str:
    """Format ranges of steps: "12, 40–43, 50–60 and 7 more ranges"."""
    spans = [f"{first}–{last}" if first < last else f"{first}" for first, last in ranges[:3]]
    more = len(ranges) - 3
    return ", ".join(spans) + (f" and {more} more ranges" if more > 0 else "")


def thin_rows(values: Floats, limit: int, *, keep_short_gaps: bool = True) -> Ints:
    """Select the rows to draw: of each of equally long pieces the first, lowest and highest.

    So no spike is lost. The last row is selected too, and the first of each gap (values that are
    not finite), so that it stays a gap; if not `keep_short_gaps`, only those of whole pieces.
    """
    if len(values) <= limit:
        return np.arange(len(values), dtype=np.int64)
    table = _split(values, max(1, (limit - 1) // 3))
    begins = np.arange(len(table), dtype=np.int64) * table.shape[1]
    bad = ~np.isfinite(table)
    lowest = np.argmin(np.where(bad, np.inf, table), axis=1) + begins
    highest = np.argmax(np.where(bad, -np.inf, table), axis=1) + begins
    gaps = (np.argmax(bad, axis=1) + begins)[bad.any(axis=1)]
    rows = np.unique(np.concatenate([begins, lowest, highest, gaps, [len(values) - 1]]))
    rows = rows[rows < len(values)]
    if not keep_short_gaps:
        rows = rows[np.isfinite(values[rows]) | np.all(bad, axis=1)[rows // table.shape[1]]]
    return rows


def piece_means(values: Floats, limit: int) -> Floats:
    """Return the mean of the finite values of each of at most `limit` equally long pieces.

    NaN if a piece has none; shorter curves are returned as they are. [pieces]
    """
    if len(values) <= limit:
        return values
    table = _split(values, limit)
    good = np.isfinite(table)
    count = good.sum(axis=1)
    total = np.where(good, table, 0.0).sum(axis=1)
    means: Floats = np.divide(total, count, out=np.full(len(count), np.nan), where=count > 0)
    return means


def _split(values: Floats, limit: int) -> Floats:
    """Split values into at most `limit` equally long pieces, the last one padded with NaN."""
    length = -(-len(values) // limit)
    pieces = -(-len(values) // length)
    table = np.full(pieces * length, np.nan)
    table[: len(values)] = values
    return table.reshape(pieces, length)


def spike_height(value: Number, mean: Number, factor: float = 1.0) -> Number:
    """Return `value - factor * mean` (a running mean): where it exceeds a limit, there is a spike.

    AWS defines spikes of HLAT's gradient norm so (Fan et al. 2024, arXiv 2404.10630).
    """
    return value - factor * mean
