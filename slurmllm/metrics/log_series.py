"""Logs of other frameworks (also .gz): a series for each tag, and the conversion to a curve."""

from __future__ import annotations

import codecs
import gzip
import tempfile
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np

from slurmllm.errors import RunError
from slurmllm.format import format_plural
from slurmllm.metrics.curves import Curve, Flags, Floats, Ints, SourceKind, bit_identical
from slurmllm.metrics.merge import RowBlock, compare_overlap, merge_rows, select_latest
from slurmllm.metrics.tags import (
    LogFormat,
    TagChoice,
    choose_tags,
    common_names,
    list_tags,
    per_device,
    step_keys,
)
from slurmllm.run.safe_files import open_regular

_GZIP_MAGIC = b"\x1f\x8b"  # RFC 1952, section 2.3.1
_BLOCK_BYTES = 1 << 16
_SPOOLED_BYTES = 256 << 20  # in memory; what is longer is in a file
_MAX_RESTARTS = 1000
_FRACTIONAL = 0.1  # share of steps that are not whole numbers
# Share of values that are recomputed, and differ, beyond which a log seems to hold two runs
_MIXED = 0.3


@dataclass(frozen=True)
class TagSeries:
    """The values of one tag, in the order in which they were written."""

    order: Ints  # position of each value in the log: ascending, counted over all tags [rows]
    steps: Ints  # [rows]
    values: Floats  # [rows]
    times: Floats | None = None  # when written, Unix time in s; None if not logged [rows]


@dataclass(frozen=True)
class Log:
    """A log as it was read."""

    path: Path  # file or folder
    kind: SourceKind
    series: Mapping[str, TagSeries]  # by tag
    starts: Sequence[int] = ()  # positions (`TagSeries.order`) at which a process began to write
    warnings: tuple[str, ...] = ()
    format: LogFormat | None = None  # if its lines have shown it
    lines: Sequence[int] = ()  # number of the line at each position, from 1; 0: unknown

    def place(self, order: int) -> str:
        line = self.lines[order] if len(self.lines) else 0
        return f"{self.path}:{line}" if line else str(self.path)


def log_suffix(path: Path) -> str:
    """Return the suffix in lower case, without .gz: `.csv` for both `x.CSV` and `x.csv.gz`."""
    return (Path(path.stem) if path.suffix == ".gz" else path).suffix.lower()


def open_log(path: Path, warnings: list[str]) -> BinaryIO:
    """Open a log; a .gz is decompressed to a temporary file.

    If a .gz is damaged, it ends at the last complete line, and a warning is appended to `warnings`.

    Raises:
        RunError: the name ends in .gz but the file is not gzip.
        OSError: the file cannot be read.
    """
    stream = open_regular(path)
    begin = stream.read(2)
    stream.seek(0)
    if path.suffix != ".gz":
        if begin in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            stream.close()
            raise RunError(
                f"{path} is UTF-16 text, as PowerShell writes it; convert it: iconv -f UTF-16 -t "
                f"UTF-8 {path} > {path.stem}.utf8{path.suffix}"
            )
        return stream
    with stream:
        if begin and not _GZIP_MAGIC.startswith(begin):
            raise RunError(
                f"{path} is not a gzip file: it begins with {begin!r} instead of {_GZIP_MAGIC!r}; "
                f"rename it to {path.stem} if it is not compressed, or restore it"
            )
        content = cast(BinaryIO, tempfile.SpooledTemporaryFile(_SPOOLED_BYTES))  # noqa: SIM115
        # Bytes of complete lines: in a truncated line, the last number may lack digits
        complete = 0
        try:
            with gzip.open(stream) as compressed:
                while block := compressed.read1(_BLOCK_BYTES):
                    content.write(block)
                    if end := block.rfind(b"\n") + 1:
                        complete = content.tell() - len(block) + end
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            # If the file is truncated, or other data are appended to it, all lines before that are
            # correct; if a checksum fails, any line may be wrong.
            correct = isinstance(error, EOFError) or "Not a gzipped file" in str(error)
            warning = f"{path} is damaged: {error}; read as far as possible"
            warnings.append(warning if correct else f"{warning}, and some of it may be wrong")
            content.truncate(complete)
    content.seek(0)
    return content


class RowCollector:
    """Columns of rows of numbers that each have their own keys."""

    def __init__(self) -> None:
        self._rows: dict[str, array[int]] = {}
        self._values: dict[str, array[float]] = {}
        self._lines = array("q")

    def add(self, row: Iterable[tuple[str, float]], line: int = 0) -> None:
        """Add a row, and the number of its line if it has one."""
        number = len(self._lines)
        for key, value in row:
            if key not in self._rows:
                self._rows[key], self._values[key] = array("q"), array("d")
            self._rows[key].append(number)
            self._values[key].append(value)
        self._lines.append(line)

    def __len__(self) -> int:
        return len(self._lines)

    def log(
        self,
        path: Path,
        kind: SourceKind,
        tags: Mapping[str, str],
        warnings: Sequence[str] = (),
        log_format: LogFormat | None = None,
    ) -> Log:
        """Return the rows as a log, without those that have no step.

        Raises:
            RunError: there are no rows, or no key is the step.
        """
        if not len(self):
            raise RunError(
                f"no metrics in {path}: it has no row of numbers; give the log of a training run"
                + "".join(f" ({warning})" for warning in warnings)
            )
        candidates = step_keys(self._rows, tags)
        if not candidates:
            names = [tags["step"]] if "step" in tags else common_names("step")
            raise RunError(
                f"no step in {path}: it has none of the keys {', '.join(names)}; its keys are "
                f"{list_tags(self._rows)}; name the step's key with --tag step=KEY"
            )
        # Some rows may lack the preferred key: take the first candidate that occurs at least half
        # as often as the most frequent one.
        most = max(len(self._rows[key]) for key in candidates)
        step_key = next(key for key in candidates if 2 * len(self._rows[key]) >= most)
        rows = np.frombuffer(self._rows[step_key], dtype=np.int64)
        steps = np.frombuffer(self._values[step_key])
        with np.errstate(invalid="ignore"):
            # Beyond 2**53 a float64 cannot represent every integer.
            valid = (steps >= 0) & (steps < 2**53) & (steps == np.floor(steps))
        fractional = np.flatnonzero(np.isfinite(steps) & (steps != np.floor(steps)))
        # A few may be damage; the whole ones among many would be another curve.
        if fractional.size > _FRACTIONAL * len(steps):
            place, line = fractional[0], self._lines[rows[fractional[0]]]
            raise RunError(
                f"{path}{f':{line}' if line else ''}: {step_key} is {steps[place]:g}, not a whole "
                "number; name the column of the step with --tag step=KEY"
            )
        if not valid.all():
            warnings = (
                *warnings,
                f"{path}: skipped {np.sum(~valid)} of {len(steps)} rows: {step_key} is "
                f"{steps[~valid][0]:g}, not an integer of 0 or more",
            )
        rows, row_steps = rows[valid], steps[valid].astype(np.int64)
        series = {}
        for key, positions in self._rows.items():
            key_rows = np.frombuffer(positions, dtype=np.int64)
            index = np.minimum(np.searchsorted(rows, key_rows), max(len(rows) - 1, 0))
            has_step = rows[index] == key_rows if len(rows) else np.zeros(len(key_rows), dtype=bool)
            if key != step_key and has_step.any():
                values = np.frombuffer(self._values[key])
                series[key] = TagSeries(
                    key_rows[has_step], row_steps[index[has_step]], values[has_step]
                )
        return Log(path, kind, series, (), tuple(warnings), log_format, self._lines)


def curve_of_log(log: Log, name: str, tags: Mapping[str, str]) -> Curve:
    """Convert a log to a curve.

    Raises:
        RunError: no tag is the loss, or a requested tag is missing.
    """
    counts = {tag: len(series.steps) for tag, series in log.series.items()}
    choice = choose_tags(counts, tags, log.path, log.format)
    chosen = {metric: log.series[tag] for metric, tag in choice.tags.items()}
    if choice.tags.get("step_time_s", "").endswith(("_ms", "(ms)")):
        in_ms = chosen["step_time_s"]
        chosen["step_time_s"] = replace(in_ms, values=in_ms.values / 1e3)
    loss = chosen.get("loss") or chosen["grad_norm"]
    if "time" not in chosen and loss.times is not None:
        chosen["time"] = TagSeries(loss.order, loss.steps, loss.times)
    starts = _attempt_starts(loss, log.starts)
    block, (overlap_rows, identical, max_difference) = _merge_tags(chosen, starts)
    convention = None if choice.format is None else choice.format.convention
    if convention is not None and convention.counts == "samples":
        block = replace(block, columns={"samples": block.steps.astype(float), **block.columns})
    warnings = [*log.warnings, *choice.missing, *_tag_warnings(log, choice)]
    if overlap_rows > _MIXED * len(loss.steps) and max_difference > 1e-3:
        warnings.append(
            f"{log.place(int(starts[0]))}: {format_plural(overlap_rows, 'step')} of "
            f"{len(block.steps)} occur a second time with other values, as if the log held two "
            "runs; those read last count: split it at the line where the steps begin again"
        )
    else:
        warnings += _order_warnings(log, loss, starts)
    curve = merge_rows([block], name=name, path=log.path, kind=log.kind, warnings=warnings)
    return replace(
        curve,
        convention=convention,
        overlap_rows=overlap_rows,
        overlap_identical=identical if overlap_rows else None,
        overlap_max_rel_diff=max_difference if overlap_rows else None,
    )


def _tag_warnings(log: Log, choice: TagChoice) -> Iterator[str]:
    for metric, others in choice.others.items():
        used, differing = log.series[choice.tags[metric]], []
        for tag in others:
            other = log.series[tag]
            _, at_a, at_b = np.intersect1d(used.steps, other.steps, return_indices=True)
            if not at_a.size or not np.allclose(
                used.values[at_a], other.values[at_b], rtol=1e-6, atol=0.0, equal_nan=True
            ):
                differing.append(tag)
        if differing:
            yield (
                f"{log.path}: {metric} is taken from {choice.tags[metric]!r}, not from "
                f"{', '.join(map(repr, differing))}; select another with --tag {metric}=TAG"
            )
    for metric, tag in choice.tags.items():
        if metric in ("seq_per_s", "tokens_per_s") and per_device(tag):
            yield f"{metric} is the value of one device, not of the run: {tag!r}"


def _order_warnings(log: Log, loss: TagSeries, starts: Ints) -> Iterator[str]:
    """Warn of steps that decrease within an attempt, or occur twice with different values."""
    attempts = np.searchsorted(starts, loss.order, side="right")
    decreases = loss.order[1:][(np.diff(loss.steps) < 0) & (np.diff(attempts) == 0)]
    _, replaced, winners = select_latest(loss.steps, attempts)
    differ = ~bit_identical(loss.values[replaced], loss.values[winners])
    repeats = loss.order[winners[(attempts[replaced] == attempts[winners]) & differ]]
    if decreases.size or repeats.size:
        yield (
            f"{log.place(min([*decreases, *repeats]))}: steps are not in order: "
            f"{len(decreases)} decrease and {len(repeats)} occur again with another value; sorted, "
            "and the last value of a step counts; name another column with --tag step=KEY"
        )


def _attempt_starts(loss: TagSeries, process_starts: Sequence[int]) -> Ints:
    """Return the positions at which the second and later attempts begin.

    An attempt begins where a process began to write (unless it wrote no loss), or where the step
    decreases. If the step decreases often, the rows are not ordered by time, and only
    `process_starts` are used.
    """
    decreases = loss.order[1:][np.diff(loss.steps) < 0]
    if len(decreases) > min(_MAX_RESTARTS, len(loss.steps) / 3):
        decreases = decreases[:0]
    positions = np.union1d(np.asarray(process_starts, dtype=np.int64), decreases)
    first_loss = np.searchsorted(loss.order, positions)
    within = (first_loss > 0) & (first_loss < len(loss.order))
    # Return the start, not the first loss after it: the process may log other tags first.
    _, index = np.unique(first_loss[within], return_index=True)
    return np.asarray(positions[within][index], dtype=np.int64)


def _merge_tags(
    chosen: Mapping[str, TagSeries], starts: Ints
) -> tuple[RowBlock, tuple[int, bool, float]]:
    """Merge the series of the metrics to one row per step.

    Also returns the overlap after restarts: the number of recomputed rows that have a loss, whether
    all metrics are bit-identical, and their largest relative difference.
    """
    used: dict[str, tuple[Ints, Ints, Floats]] = {}
    rows, identical, largest = 0, True, 0.0
    for metric, series in chosen.items():
        attempts: Ints = np.searchsorted(starts, series.order, side="right")
        latest, replaced, replacements = select_latest(series.steps, attempts)
        recomputed = attempts[replaced] < attempts[replacements]
        replaced, replacements = replaced[recomputed], replacements[recomputed]
        same, difference = compare_overlap({metric: series.values}, replaced, replacements)
        identical, largest = identical and same, max(largest, difference)
        rows = len(replaced) if metric == "loss" else rows
        # A later attempt may log different steps: all rows of earlier attempts in the range that it
        # covers are superseded.
        superseded: Flags = np.zeros(len(series.steps), dtype=bool)
        for attempt in np.unique(attempts)[1:]:
            later = series.steps[attempts == attempt]
            superseded |= (
                (attempts < attempt) & (series.steps >= later.min()) & (series.steps <= later.max())
            )
        latest = latest[~superseded[latest]]
        used[metric] = (series.steps[latest], attempts[latest], series.values[latest])
    steps = np.unique(np.concatenate([metric_steps for metric_steps, _, _ in used.values()]))
    row_attempts = np.zeros(len(steps), dtype=np.int64)
    columns: dict[str, Floats] = {}
    absent: dict[str, Flags] = {}
    for metric, (metric_steps, attempts, values) in used.items():
        index = np.searchsorted(steps, metric_steps)
        columns[metric] = np.full(len(steps), np.nan)
        columns[metric][index] = values
        absent[metric] = np.ones(len(steps), dtype=bool)
        absent[metric][index] = False
        row_attempts[index] = np.maximum(row_attempts[index], attempts)
    return RowBlock(steps, row_attempts, columns, absent), (rows, identical, largest)
