"""The rows of a log that hold one curve: those of one split, one rank, one run.

Rows of the validation set, of other ranks or of other data sets may have the same keys and steps.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from slurmllm.core.errors import RunError
from slurmllm.core.metrics.curves import Ints, bit_identical
from slurmllm.core.metrics.log_series import Log, TagSeries, TextSeries
from slurmllm.core.metrics.tags import Tags, list_tags

_RANK = re.compile(r"(.*[^a-z])?(rank|process|worker|host|device|gpu)(_?idx?)?", re.I)
# Columns of whole numbers that may separate rows
_NUMBERED = re.compile(rf"{_RANK.pattern}|.*(train|val|eval|test|split|fold|seed|trial).*", re.I)


def select_rows(log: Log, metrics: Tags) -> Log:
    """Return the log with the rows of the lowest rank.

    Raises RunError if another column separates rows of the same steps. `metrics`: metric → tag.
    """
    loss = log.series[metrics.get("loss") or metrics["grad_norm"]]
    for name, column in _columns(log, metrics):
        is_rank = _RANK.fullmatch(name) is not None
        codes = _codes_at(column, loss)
        if is_rank:
            counts = _counts(column.texts, codes[codes >= 0])
        else:  # rows without the column may be of another split too
            counts = _counts(("", *column.texts), codes + 1)
        if not 1 < len(counts) <= len(codes) / 2:
            continue
        shared, differ = _separates(loss, codes, is_rank)
        listed = ", ".join(
            f"{label or 'none'} {count}" for label, count in list(counts.items())[:5]
        )
        if shared and is_rank:
            rank = min(counts, key=lambda label: (len(label), label))
            warning = (
                f"{log.path}: several write the same steps, by {name!r} ({listed}); read "
                f"{name}={rank}; --where {name}=… selects another"
            )
            warnings = (*log.warnings, warning) if differ else log.warnings
            return select_rows(rows_with(replace(log, warnings=warnings), name, rank), metrics)
        if shared and differ:
            most_frequent = max(counts, key=lambda label: counts[label])
            raise RunError(
                f"{log.path}: steps have several rows with other values, which the column {name!r} "
                f"separates ({listed}); name one, such as --where {name}={most_frequent}"
            )
    return log


def _counts(texts: Sequence[str], codes: Ints) -> dict[str, int]:
    numbers = np.bincount(codes, minlength=len(texts)).tolist()
    return {name: number for name, number in zip(texts, numbers, strict=True) if number}


def _columns(log: Log, metrics: Tags) -> Iterator[tuple[str, TextSeries]]:
    """Yield the columns that may separate rows: of texts, or of numbers such as a rank."""
    yield from log.texts.items()
    for tag, series in log.series.items():
        if tag not in metrics.values() and _NUMBERED.fullmatch(tag):
            column = _as_texts(series)
            if len(column.texts) <= len(series.steps) / 2:
                yield tag, column


def _as_texts(series: TagSeries) -> TextSeries:
    numbers, codes = np.unique(series.values, return_inverse=True)
    return TextSeries(
        series.order, codes.astype(np.int64), tuple(f"{number:g}" for number in numbers.tolist())
    )


def _codes_at(column: TextSeries, series: TagSeries) -> Ints:
    """Return the code of each row of a series; -1 if the row lacks the column. [rows]"""
    index = np.minimum(np.searchsorted(column.order, series.order), len(column.order) - 1)
    return np.where(column.order[index] == series.order, column.codes[index], -1)


def _separates(loss: TagSeries, codes: Ints, is_rank: bool) -> tuple[bool, bool]:
    """Return whether rows of one step have different codes, and whether different values.

    A restart repeats steps too: its codes, if they change, change once, and at a later step, or
    with every few rows, as a remaining time does.
    """
    order = np.lexsort((codes, loss.steps))
    steps = loss.steps[order]
    values = loss.values[order]
    codes_by_step = codes[order]
    repeated = steps[1:] == steps[:-1]
    within = repeated & (codes_by_step[1:] == codes_by_step[:-1])
    changes = 1 + np.flatnonzero(np.diff(codes))
    in_blocks = len(changes) + 1 == len(np.unique(codes))
    in_turn = (np.diff(loss.steps) == 0) & (np.diff(codes) != 0)
    if in_blocks and np.any(loss.steps[changes] > loss.steps[0]):
        return False, False
    if not (in_blocks or is_rank or in_turn.any()):
        return False, False
    differ = np.any(repeated & ~bit_identical(values[1:], values[:-1]))
    # The counter of a rank may begin again each epoch: then its rows take turns with another's.
    shared = 2 * within.sum() < repeated.sum() or 3 * in_turn.sum() > len(codes)
    return bool(shared), bool(differ)


def rows_with(log: Log, name: str, value: str) -> Log:
    """Return the log with the rows whose column `name` is `value`; raise RunError without any.

    An empty text selects the rows that lack the column.
    """
    column = log.texts.get(name)
    if column is None and name in log.series:
        column = _as_texts(log.series[name])
    if column is None or (value and value not in column.texts):
        missing = f"column {name!r}" if column is None else f"row with {value!r} in column {name!r}"
        names = (*log.texts, *log.series) if column is None else column.texts
        raise RunError(
            f"{log.path} has no {missing} (--where {name}={value}); there are {list_tags(names)}; "
            f"for one of the sources only, give its letter: --where B:{name}={value}"
        )
    code = column.texts.index(value) if value else -1
    series = {tag: s.take(_codes_at(column, s) == code) for tag, s in log.series.items()}
    return replace(log, series={tag: s for tag, s in series.items() if s.order.size})
