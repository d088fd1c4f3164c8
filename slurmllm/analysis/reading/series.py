"""What another framework's log holds, tag by tag, put together into a curve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from slurmllm.analysis.curves import Curve, Flags, Floats, Ints, SourceKind
from slurmllm.analysis.reading.table import Part, curve_of, overlap, standing
from slurmllm.analysis.reading.tags import Choice, choose, per_device

_MOST_RESTARTS = 1000


@dataclass(frozen=True)
class Series:
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
    series: Mapping[str, Series]
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
        chosen["time"] = Series(loss.order, loss.steps, loss.times)
    starts = _starts(loss, log.starts)
    part, replaced = _part(chosen, starts)
    curve = curve_of(
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


def _starts(loss: Series, known: Sequence[int]) -> Ints:
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


def _part(chosen: Mapping[str, Series], starts: Ints) -> tuple[Part, tuple[int, bool, float]]:
    """One row a step, and what restarts made a second time: rows, identical, largest difference."""
    lasting: dict[str, tuple[Ints, Ints, Floats]] = {}
    rows, identical, largest = 0, True, 0.0
    for metric, series in chosen.items():
        attempts: Ints = np.searchsorted(starts, series.order, side="right")
        live = ~_passed_over(series.steps, attempts)
        stands, replaced, winners = standing(series.steps, attempts)
        again = attempts[replaced] < attempts[winners]
        replaced, winners = replaced[again], winners[again]
        same, difference = overlap({metric: series.values}, replaced, winners)
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
    return Part(steps, latest, columns, absent), (rows, identical, largest)


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


def _agree(a: Series, b: Series) -> bool:
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
