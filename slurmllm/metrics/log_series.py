"""A log file opened, unpacked if it is a .gz; of one that is cut or damaged, what is whole."""

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
from slurmllm.metrics.tags import STEPS, Choice, choose, listed, per_device, step_keys

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


_MAGIC = b"\x1f\x8b"  # RFC 1952, section 2.3.1
_BLOCK_BYTES = 1 << 16
# A line that has not ended by then is handed on in pieces.
_MOST_LINE_BYTES = 1 << 20


def open_log(path: Path, warnings: list[str]) -> BinaryIO:
    """Open a log to be read from its beginning.

    Args:
        path: The file.
        warnings: Of a .gz that breaks off, one is added when it has been read as far as it goes.

    Raises:
        RunError: it is called .gz and is none.
        OSError: the file cannot be read.
    """
    stream = path.open("rb")
    if path.suffix != ".gz":
        return stream
    with stream:
        begin = stream.read(len(_MAGIC))
    if begin and not _MAGIC.startswith(begin):
        raise RunError(
            f"{path} is no gzip file: it begins with {begin!r}, such a file with {_MAGIC!r}; name "
            f"it {path.stem} if it is not packed, or restore it"
        )
    return cast(BinaryIO, io.BufferedReader(_Unpacked(path, warnings)))


class _Unpacked(io.RawIOBase):
    """What is in a .gz, up to the last whole line where it breaks off."""

    def __init__(self, path: Path, warnings: list[str]) -> None:
        super().__init__()
        self._path, self._warnings = path, warnings
        self._stream = gzip.GzipFile(path, "rb")
        self._blocks, self._left = self._whole_lines(), memoryview(b"")

    def readable(self) -> bool:
        """It can be read."""
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        """Hand on the next bytes; 0 of them at the end."""
        if not self._left:
            self._left = memoryview(next(self._blocks, b""))
        target = memoryview(buffer).cast("B")
        taken = min(len(target), len(self._left))
        target[:taken], self._left = self._left[:taken], self._left[taken:]
        return taken

    def close(self) -> None:
        """Close the file."""
        self._stream.close()
        super().close()

    def _whole_lines(self) -> Iterator[bytes]:
        """Blocks that are not empty; a number at the end of a cut line may lack digits."""
        rest = b""
        try:
            while block := self._stream.read1(_BLOCK_BYTES):
                text = rest + block
                at = text.rfind(b"\n") + 1
                if len(text) - at > _MOST_LINE_BYTES:
                    at = len(text)
                whole, rest = text[:at], text[at:]
                if whole:
                    yield whole
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            # What is cut, and what something else is appended to, is right up to there.
            right = isinstance(error, EOFError) or "Not a gzipped file" in str(error)
            found = f"{self._path} is damaged: {error}; read as far as it goes"
            self._warnings.append(found if right else f"{found}, and some of it may be wrong")
            return
        if rest:
            yield rest


class RowCollector:
    """Rows of numbers; every row may have other keys."""

    def __init__(self) -> None:
        self._rows: dict[str, array[int]] = {}
        self._values: dict[str, array[float]] = {}
        self._count = 0

    def add(self, row: Iterable[tuple[str, float]]) -> None:
        """Append a row."""
        for key, value in row:
            if key not in self._rows:
                self._rows[key], self._values[key] = array("q"), array("d")
            self._rows[key].append(self._count)
            self._values[key].append(value)
        self._count += 1

    def __len__(self) -> int:
        return self._count

    def log(
        self,
        path: Path,
        kind: SourceKind,
        tags: Mapping[str, str],
        warnings: tuple[str, ...] = (),
    ) -> Log:
        """The rows as a log; those without a step are left out.

        Raises:
            RunError: there are no rows, or no key is the step.
        """
        if not self._count:
            raise RunError(
                f"no metrics in {path}: it holds no row of numbers; give a log of a training"
                + "".join(f" ({warning})" for warning in warnings)
            )
        key = self._step_key(path, tags)
        rows = np.frombuffer(self._rows[key], dtype=np.int64)
        steps = np.frombuffer(self._values[key])
        with np.errstate(invalid="ignore"):
            whole = (steps >= 0) & (steps < 2**53) & (steps == np.floor(steps))
        if not whole.all():
            first = steps[~whole][0]
            warnings = (
                *warnings,
                f"{path}: {key} is {first:g} and no whole number in {np.sum(~whole)} of "
                f"{len(steps)} rows; these are left out",
            )
        rows, at = rows[whole], steps[whole].astype(np.int64)
        series = {}
        for name, of_name in self._rows.items():
            mine = np.frombuffer(of_name, dtype=np.int64)
            where = np.minimum(np.searchsorted(rows, mine), max(len(rows) - 1, 0))
            known = rows[where] == mine if len(rows) else np.zeros(len(mine), dtype=bool)
            if name != key and known.any():
                values = np.frombuffer(self._values[name])
                series[name] = TagSeries(mine[known], at[where[known]], values[known])
        return Log(path, kind, series, warnings=warnings)

    def _step_key(self, path: Path, tags: Mapping[str, str]) -> str:
        """The step's key: the first of the table that is there about as often as any."""
        found = step_keys(self._rows, tags)
        if not found:
            looked_for = [tags["step"]] if "step" in tags else STEPS
            raise RunError(
                f"no step in {path}: none of {', '.join(looked_for)}; there are "
                f"{listed(self._rows)}; name it with --tag step=KEY"
            )
        most = max(len(self._rows[key]) for key in found)
        return next(key for key in found if 2 * len(self._rows[key]) >= most)


def plain_suffix(path: Path) -> str:
    """What a file is by its name, in lower case; a .gz by what is packed in it."""
    return (Path(path.stem) if path.suffix == ".gz" else path).suffix.lower()


_MOST_RESTARTS = 1000


@dataclass(frozen=True)
class TagSeries:
    """The values of one tag, in the order in which they were written.

    Attributes:
        order: Where in the log each stands: numbers that grow, the same for all tags. [rows]
        steps: Of each value. [rows]
        values: The values. [rows]
        times: When each was written, Unix time in s; None where the log does not tell. [rows]
    """

    order: Ints
    steps: Ints
    values: Floats
    times: Floats | None = None


@dataclass(frozen=True)
class Log:
    """A log as it was read.

    Attributes:
        path: What was read.
        kind: What it is.
        series: Its tags.
        starts: Places in the log (as `Series.order`) where a new process began to write.
        warnings: What a reader should know.
    """

    path: Path
    kind: SourceKind
    series: Mapping[str, TagSeries]
    starts: Sequence[int] = ()
    warnings: tuple[str, ...] = ()


def curve_of_log(log: Log, name: str, tags: Mapping[str, str]) -> Curve:
    """The metrics of a log as a curve.

    Args:
        log: The log.
        name: What to call the curve.
        tags: Metric → tag, where the user knows better than the table in `tags`.

    Raises:
        RunError: nothing in the log is the loss, or a tag that was asked for is not there.
    """
    counts = {tag: len(series.steps) for tag, series in log.series.items()}
    choice = choose(counts, tags, log.path)
    chosen = {metric: log.series[tag] for metric, tag in choice.tags.items()}
    loss = chosen["loss"]
    if "time" not in chosen and loss.times is not None:
        chosen["time"] = TagSeries(loss.order, loss.steps, loss.times)
    starts = _starts(loss, log.starts)
    part, replaced = _part(chosen, starts)
    curve = merge_rows(
        [part],
        name=name,
        path=log.path,
        kind=log.kind,
        warnings=(*log.warnings, *choice.missing, *_ambiguous(log, choice), *_units(choice)),
    )
    rows, identical, largest = replaced
    return replace(
        curve,
        overlap_rows=rows,
        overlap_identical=identical if rows else None,
        overlap_max_rel_diff=largest if rows else None,
    )


def _starts(loss: TagSeries, known: Sequence[int]) -> Ints:
    """Places from which on the loss is of another attempt: where a process began, or steps go back.

    Processes that wrote no loss are no attempts. Where steps go back as a rule the rows are in no
    order of time, and nothing is made of it.
    """
    falls = loss.order[1:][np.diff(loss.steps) < 0]
    if len(falls) > min(_MOST_RESTARTS, len(loss.steps) / 3):
        falls = falls[:0]
    places = np.union1d(np.asarray(known, dtype=np.int64), falls)
    first = np.searchsorted(loss.order, places)
    inside = (first > 0) & (first < len(loss.order))
    # The place itself, not that of its first loss: other tags of the process may come before it.
    _, which = np.unique(first[inside], return_index=True)
    return np.asarray(places[inside][which], dtype=np.int64)


def _part(
    chosen: Mapping[str, TagSeries], starts: Ints
) -> tuple[RowBlock, tuple[int, bool, float]]:
    """One row a step, and what restarts made a second time: rows, identical, largest difference."""
    lasting: dict[str, tuple[Ints, Ints, Floats]] = {}
    rows, identical, largest = 0, True, 0.0
    for metric, series in chosen.items():
        attempts: Ints = np.searchsorted(starts, series.order, side="right")
        live = ~_passed_over(series.steps, attempts)
        stands, replaced, winners = select_latest(series.steps, attempts)
        again = attempts[replaced] < attempts[winners]
        replaced, winners = replaced[again], winners[again]
        same, difference = compare_overlap({metric: series.values}, replaced, winners)
        identical, largest = identical and same, max(largest, difference)
        rows = len(replaced) if metric == "loss" else rows
        stands = stands[live[stands]]
        lasting[metric] = (series.steps[stands], attempts[stands], series.values[stands])
    steps = np.unique(np.concatenate([of_metric for of_metric, _, _ in lasting.values()]))
    latest = np.zeros(len(steps), dtype=np.int64)
    columns: dict[str, Floats] = {}
    absent: dict[str, Flags] = {}
    for metric, (at, attempts, values) in lasting.items():
        where = np.searchsorted(steps, at)
        columns[metric] = np.full(len(steps), np.nan)
        columns[metric][where] = values
        absent[metric] = np.ones(len(steps), dtype=bool)
        absent[metric][where] = False
        latest[where] = np.maximum(latest[where], attempts)
    return RowBlock(steps, latest, columns, absent), (rows, identical, largest)


def _passed_over(steps: Ints, attempts: Ints) -> Flags:
    """Rows between those of a later attempt, which logged other steps of the same range."""
    passed: Flags = np.zeros(len(steps), dtype=bool)
    for attempt in np.unique(attempts)[1:]:
        later = steps[attempts == attempt]
        passed |= (attempts < attempt) & (steps >= later.min()) & (steps <= later.max())
    return passed


def _ambiguous(log: Log, choice: Choice) -> list[str]:
    """A warning for each metric that several tags fit which do not hold the same."""
    found = []
    for metric, others in choice.others.items():
        ours = log.series[choice.tags[metric]]
        differing = [tag for tag in others if not _agree(ours, log.series[tag])]
        if differing:
            found.append(
                f"{log.path}: {metric} is taken from {choice.tags[metric]!r}, not from "
                f"{', '.join(map(repr, differing))}; --tag {metric}=TAG takes another"
            )
    return found


def _agree(a: TagSeries, b: TagSeries) -> bool:
    """Whether two tags hold the same where both have a value."""
    _, at_a, at_b = np.intersect1d(a.steps, b.steps, return_indices=True)
    return at_a.size > 0 and bool(
        np.allclose(a.values[at_a], b.values[at_b], rtol=1e-6, atol=0.0, equal_nan=True)
    )


def _units(choice: Choice) -> list[str]:
    return [
        f"{metric} is that of one device: {tag!r}"
        for metric, tag in choice.tags.items()
        if metric in ("seq_per_s", "tokens_per_s") and per_device(tag)
    ]
