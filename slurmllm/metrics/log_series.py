"""Logs of other frameworks: opened (.gz too), collected into a series per tag, made a curve."""

from __future__ import annotations

import gzip
import io
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

import numpy as np

from slurmllm.errors import RunError
from slurmllm.metrics.curves import Curve, Flags, Floats, Ints, SourceKind
from slurmllm.metrics.merge import RowBlock, compare_overlap, merge_rows, select_latest
from slurmllm.metrics.tags import STEPS, choose_tags, list_tags, per_device, step_keys

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_GZIP_MAGIC = b"\x1f\x8b"  # RFC 1952, section 2.3.1
_BLOCK_BYTES = 1 << 16
# A longer line is passed on in pieces.
_MAX_LINE_BYTES = 1 << 20
_MAX_RESTARTS = 1000


@dataclass(frozen=True)
class TagSeries:
    """The values of one tag, in the order in which they were written."""

    order: Ints  # position of each value in the log: ascending, common to all tags [rows]
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


def log_suffix(path: Path) -> str:
    """Returns the suffix of a file in lower case; of a .gz that of the file packed in it."""
    return (Path(path.stem) if path.suffix == ".gz" else path).suffix.lower()


def open_log(path: Path, warnings: list[str]) -> BinaryIO:
    """Open a log, unpacked if it is a .gz.

    A warning is appended once a damaged .gz has been read as far as possible.

    Raises:
        RunError: the name ends in .gz but the file is not gzip.
        OSError: the file cannot be read.
    """
    stream = path.open("rb")
    if path.suffix != ".gz":
        return stream
    with stream:
        begin = stream.read(len(_GZIP_MAGIC))
    if begin and not _GZIP_MAGIC.startswith(begin):
        raise RunError(
            f"{path} is no gzip file: it begins with {begin!r}, such a file with {_GZIP_MAGIC!r}; "
            f"name it {path.stem} if it is not packed, or restore it"
        )
    return cast(BinaryIO, io.BufferedReader(_GzipLines(path, warnings)))


class _GzipLines(io.RawIOBase):
    """The content of a .gz; of a damaged one up to the last whole line before the damage."""

    def __init__(self, path: Path, warnings: list[str]) -> None:
        super().__init__()
        self._path, self._warnings = path, warnings
        self._stream = gzip.GzipFile(path, "rb")
        self._blocks, self._left = self._whole_lines(), memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        if not self._left:
            self._left = memoryview(next(self._blocks, b""))
        target = memoryview(buffer).cast("B")
        size = min(len(target), len(self._left))
        target[:size], self._left = self._left[:size], self._left[size:]
        return size

    def close(self) -> None:
        self._stream.close()
        super().close()

    def _whole_lines(self) -> Iterator[bytes]:
        """Yield blocks of whole lines: a number at the end of a cut line may lack digits."""
        rest = b""
        try:
            while block := self._stream.read1(_BLOCK_BYTES):
                text = rest + block
                end = text.rfind(b"\n") + 1
                if len(text) - end > _MAX_LINE_BYTES:
                    end = len(text)
                whole, rest = text[:end], text[end:]
                if whole:
                    yield whole
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            # A file that is cut, or that something else is appended to, is correct up to there;
            # after a failed checksum any of it may be wrong.
            correct = isinstance(error, EOFError) or "Not a gzipped file" in str(error)
            warning = f"{self._path} is damaged: {error}; read as far as it goes"
            self._warnings.append(warning if correct else f"{warning}, and some of it may be wrong")
            return
        if rest:
            yield rest


class RowCollector:
    """Collects rows of numbers, each with its own keys, into columns."""

    def __init__(self) -> None:
        self._rows: dict[str, array[int]] = {}
        self._values: dict[str, array[float]] = {}
        self._count = 0

    def add(self, row: Iterable[tuple[str, float]]) -> None:
        for key, value in row:
            if key not in self._rows:
                self._rows[key], self._values[key] = array("q"), array("d")
            self._rows[key].append(self._count)
            self._values[key].append(value)
        self._count += 1

    def __len__(self) -> int:
        return self._count

    def log(
        self, path: Path, kind: SourceKind, tags: Mapping[str, str], warnings: Sequence[str] = ()
    ) -> Log:
        """Returns the rows as a log, without those that have no step.

        Raises:
            RunError: there are no rows, or no key is the step.
        """
        if not self._count:
            raise RunError(
                f"no metrics in {path}: it holds no row of numbers; give a log of a training"
                + "".join(f" ({warning})" for warning in warnings)
            )
        found = step_keys(self._rows, tags)
        if not found:
            names = [tags["step"]] if "step" in tags else STEPS
            raise RunError(
                f"no step in {path}: none of {', '.join(names)}; there are "
                f"{list_tags(self._rows)}; name it with --tag step=KEY"
            )
        # The first known name that is about as frequent as any: some rows may lack `step`.
        most = max(len(self._rows[key]) for key in found)
        step_key = next(key for key in found if 2 * len(self._rows[key]) >= most)
        rows = np.frombuffer(self._rows[step_key], dtype=np.int64)
        steps = np.frombuffer(self._values[step_key])
        with np.errstate(invalid="ignore"):
            # Beyond 2**53 a float64 no longer holds every whole number.
            whole = (steps >= 0) & (steps < 2**53) & (steps == np.floor(steps))
        if not whole.all():
            warnings = (
                *warnings,
                f"{path}: {step_key} is {steps[~whole][0]:g}, not a whole number, in "
                f"{np.sum(~whole)} of {len(steps)} rows; skipped these rows",
            )
        rows, row_steps = rows[whole], steps[whole].astype(np.int64)
        series = {}
        for name, of_name in self._rows.items():
            mine = np.frombuffer(of_name, dtype=np.int64)
            index = np.minimum(np.searchsorted(rows, mine), max(len(rows) - 1, 0))
            known = rows[index] == mine if len(rows) else np.zeros(len(mine), dtype=bool)
            if name != step_key and known.any():
                values = np.frombuffer(self._values[name])
                series[name] = TagSeries(mine[known], row_steps[index[known]], values[known])
        return Log(path, kind, series, warnings=tuple(warnings))


def curve_of_log(log: Log, name: str, tags: Mapping[str, str]) -> Curve:
    """Convert a log to a curve.

    Raises:
        RunError: no tag is the loss, or a requested tag is missing.
    """
    counts = {tag: len(series.steps) for tag, series in log.series.items()}
    choice = choose_tags(counts, tags, log.path)
    chosen = {metric: log.series[tag] for metric, tag in choice.tags.items()}
    loss = chosen["loss"]
    if "time" not in chosen and loss.times is not None:
        chosen["time"] = TagSeries(loss.order, loss.steps, loss.times)
    warnings = [*log.warnings, *choice.missing]
    for metric, others in choice.others.items():
        ours, differing = log.series[choice.tags[metric]], []
        for tag in others:
            other = log.series[tag]
            _, at_a, at_b = np.intersect1d(ours.steps, other.steps, return_indices=True)
            if not at_a.size or not np.allclose(
                ours.values[at_a], other.values[at_b], rtol=1e-6, atol=0.0, equal_nan=True
            ):
                differing.append(tag)
        if differing:
            warnings.append(
                f"{log.path}: {metric} is taken from {choice.tags[metric]!r}, not from "
                f"{', '.join(map(repr, differing))}; --tag {metric}=TAG takes another"
            )
    warnings += [
        f"{metric} is that of one device: {tag!r}"
        for metric, tag in choice.tags.items()
        if metric in ("seq_per_s", "tokens_per_s") and per_device(tag)
    ]
    block, (rows, identical, largest) = _merge_tags(chosen, _attempt_starts(loss, log.starts))
    curve = merge_rows([block], name=name, path=log.path, kind=log.kind, warnings=warnings)
    return replace(
        curve,
        overlap_rows=rows,
        overlap_identical=identical if rows else None,
        overlap_max_rel_diff=largest if rows else None,
    )


def _attempt_starts(loss: TagSeries, known: Sequence[int]) -> Ints:
    """Returns the positions at which an attempt begins: a process began, or steps go back.

    Processes that wrote no loss are no attempts. If steps go back as a rule, the rows are not
    ordered by time, and only known starts count.
    """
    falls = loss.order[1:][np.diff(loss.steps) < 0]
    if len(falls) > min(_MAX_RESTARTS, len(loss.steps) / 3):
        falls = falls[:0]
    places = np.union1d(np.asarray(known, dtype=np.int64), falls)
    first = np.searchsorted(loss.order, places)
    inside = (first > 0) & (first < len(loss.order))
    # The position itself, not that of its first loss: the process may write other tags before it.
    _, index = np.unique(first[inside], return_index=True)
    return np.asarray(places[inside][index], dtype=np.int64)


def _merge_tags(
    chosen: Mapping[str, TagSeries], starts: Ints
) -> tuple[RowBlock, tuple[int, bool, float]]:
    """Merge the series of the metrics to one row per step.

    Also returns the overlap of restarts: number of rows of the loss, whether all metrics are
    bit-identical, and the largest relative difference.
    """
    used: dict[str, tuple[Ints, Ints, Floats]] = {}
    rows, identical, largest = 0, True, 0.0
    for metric, series in chosen.items():
        attempts: Ints = np.searchsorted(starts, series.order, side="right")
        latest, replaced, winners = select_latest(series.steps, attempts)
        recomputed = attempts[replaced] < attempts[winners]
        replaced, winners = replaced[recomputed], winners[recomputed]
        same, difference = compare_overlap({metric: series.values}, replaced, winners)
        identical, largest = identical and same, max(largest, difference)
        rows = len(replaced) if metric == "loss" else rows
        # A later attempt may log other steps of the range that it recomputed: the rows of the
        # earlier one between them are superseded too.
        superseded: Flags = np.zeros(len(series.steps), dtype=bool)
        for attempt in np.unique(attempts)[1:]:
            later = series.steps[attempts == attempt]
            superseded |= (
                (attempts < attempt) & (series.steps >= later.min()) & (series.steps <= later.max())
            )
        latest = latest[~superseded[latest]]
        used[metric] = (series.steps[latest], attempts[latest], series.values[latest])
    steps = np.unique(np.concatenate([of_metric for of_metric, _, _ in used.values()]))
    row_attempts = np.zeros(len(steps), dtype=np.int64)
    columns: dict[str, Floats] = {}
    absent: dict[str, Flags] = {}
    for metric, (of_metric, attempts, values) in used.items():
        index = np.searchsorted(steps, of_metric)
        columns[metric] = np.full(len(steps), np.nan)
        columns[metric][index] = values
        absent[metric] = np.ones(len(steps), dtype=bool)
        absent[metric][index] = False
        row_attempts[index] = np.maximum(row_attempts[index], attempts)
    return RowBlock(steps, row_attempts, columns, absent), (rows, identical, largest)
