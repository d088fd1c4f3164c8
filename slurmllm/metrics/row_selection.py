"""The rows of a log that hold one curve: those of one split, one rank, one run.

Rows of the validation set, of other ranks or of other data sets may have the same keys and steps.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from slurmllm.errors import RunError
from slurmllm.metrics.curves import Flags, Ints, bit_identical
from slurmllm.metrics.log_series import Log, TagSeries, TextSeries
from slurmllm.metrics.tags import list_tags

_MOST_VALUES = 200  # different ones of a column that separates rows
_TRAIN = re.compile(r"(train|trn|fit)", re.IGNORECASE)
_EVALUATION = re.compile(r"(val|eval|dev|test|held[ _-]?out)", re.IGNORECASE)
_TRUTH = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
_RANK = re.compile(r"(.*[^a-z])?(rank|process|worker|host|device|gpu)(_?id(x)?)?", re.IGNORECASE)


_NUMBERED = re.compile(
    r"(?:^|[^a-z])(?:rank|process|worker|host|device|gpu|split|fold|seed|trial|replica|train|val|eval"
    r"|test|training)(?:_?idx?)?$",
    re.IGNORECASE,
)


def select_rows(log: Log, metrics: Mapping[str, str], where: Mapping[str, str]) -> Log:
    """Return the log with the rows of one curve; `metrics` has the tag of each metric.

    Without `where`, which has the value of each column, these are the rows of the training split
    and of the lowest rank, with a warning.

    Raises:
        RunError: `where` fits no row, or another column separates rows of the same steps.
    """
    for name, text in where.items():
        log = _apply(log, name, text)
    if where:
        return log
    loss = log.series[metrics.get("loss") or metrics["grad_norm"]]
    for name, column in _columns(log, metrics):
        codes = _codes_at(column, loss)
        present = [int(code) for code in np.unique(codes)]
        roles = {code: _role(name, column.texts[code]) for code in present if code >= 0}
        evaluated = [code for code, role in roles.items() if role == "evaluation"]
        if evaluated and (-1 in present or "train" in roles.values()):
            return _without_evaluation(log, metrics, loss, name, column, evaluated)
        shared, differ = _separates(loss, codes) if len(roles) > 1 else (False, False)
        counts = _describe(column, codes)
        if shared and _RANK.fullmatch(name):
            rank = min((column.texts[code] for code in roles), key=_natural_key)
            warning = (
                f"{log.path}: several write the same steps, by {name!r} ({counts}); read "
                f"{name}={rank}; --where {name}=… selects another"
            )
            warnings = (*log.warnings, warning) if differ else log.warnings
            return _apply(replace(log, warnings=warnings), name, rank)
        if shared and differ:
            text = column.texts[present[-1]]
            raise RunError(
                f"{log.path}: steps have several rows with other values, which the column {name!r} "
                f"separates ({counts}); name one, such as --where {name}={text}"
            )
    return log


def _columns(log: Log, metrics: Mapping[str, str]) -> Iterator[tuple[str, TextSeries]]:
    """Yield the columns that may separate rows: of texts, or of whole numbers such as a rank."""
    yield from log.texts.items()
    for tag, series in log.series.items():
        if tag in metrics.values() or not _NUMBERED.search(tag):
            continue
        if np.all(series.values == np.floor(series.values)):
            numbers, codes = np.unique(series.values, return_inverse=True)
            if 1 < len(numbers) <= min(_MOST_VALUES, len(series.steps) / 2):
                texts = tuple(f"{number:.0f}" for number in numbers.tolist())
                yield tag, TextSeries(series.order, codes.astype(np.int64), texts)


def _codes_at(column: TextSeries, series: TagSeries) -> Ints:
    """Return the code of each row of a series; -1 if the row lacks the column. [rows]"""
    index = np.minimum(np.searchsorted(column.order, series.order), len(column.order) - 1)
    there = column.order[index] == series.order
    codes: Ints = np.where(there, column.codes[index], -1)
    return codes


def _separates(loss: TagSeries, codes: Ints) -> tuple[bool, bool]:
    """Return whether rows of one step have different codes, and whether different values.

    A restart repeats steps too: then the codes, if they change, change once, and later steps with
    them.
    """
    order = np.lexsort((codes, loss.steps))
    steps, values, codes_by_step = loss.steps[order], loss.values[order], codes[order]
    repeated = steps[1:] == steps[:-1]
    within = repeated & (codes_by_step[1:] == codes_by_step[:-1])
    changes = 1 + np.flatnonzero(np.diff(codes))
    blocks = len(changes) + 1 == len(np.unique(codes))
    if blocks and np.any(loss.steps[changes] > loss.steps[0]):
        return False, False
    differ = np.any(repeated & ~bit_identical(values[1:], values[:-1]))
    return 2 * int(within.sum()) < int(repeated.sum()), bool(differ)


def _role(column: str, text: str) -> Literal["train", "evaluation"] | None:
    """Return what a text says of its row; `is_train` or `eval` may be a truth value."""
    truth = _TRUTH.get(text.lower())
    if truth is not None:
        train = bool(re.search("train", column, re.IGNORECASE))
        evaluation = bool(re.search(r"(?:\b|_)(?:val|eval|test)", column, re.IGNORECASE))
        if train == evaluation:
            return None
        return "train" if truth == train else "evaluation"
    if _TRAIN.match(text):
        return "train"
    return "evaluation" if _EVALUATION.match(text) else None


def _without_evaluation(
    log: Log,
    metrics: Mapping[str, str],
    loss: TagSeries,
    name: str,
    column: TextSeries,
    evaluated: Sequence[int],
) -> Log:
    """Leave evaluations out of the training's metrics; the first one is the validation loss."""
    codes = _codes_at(column, loss)
    series = dict(log.series)
    for metric, tag in metrics.items():
        if metric != "val_loss":
            series[tag] = _take(series[tag], ~np.isin(_codes_at(column, series[tag]), evaluated))
    chosen = min(evaluated, key=lambda code: column.texts[code].lower().startswith("test"))
    text = column.texts[chosen]
    warning = (
        f"{log.path}: rows of several splits, by {name!r} ({_describe(column, codes)}); read those "
        f"of the training, and {text} as val_loss; --where {name}={text} selects others"
    )
    warnings = (*log.warnings, warning)
    return replace(log, series=series, val_loss=_take(loss, codes == chosen), warnings=warnings)


def _describe(column: TextSeries, codes: Ints) -> str:
    numbers = np.bincount(codes[codes >= 0], minlength=len(column.texts)).tolist()
    parts = [f"{text} {n}" for text, n in zip(column.texts, numbers, strict=True) if n]
    more = f", … {len(parts) - 4} more" if len(parts) > 4 else ""
    return ", ".join(parts[:4]) + more


def _natural_key(text: str) -> list[tuple[int, str]]:
    return [(int(part or 0), rest) for rest, part in re.findall(r"(\D*)(\d*)", text)]


def _take(series: TagSeries, rows: Flags) -> TagSeries:
    times = None if series.times is None else series.times[rows]
    return TagSeries(series.order[rows], series.steps[rows], series.values[rows], times)


def _apply(log: Log, name: str, text: str) -> Log:
    """Return the log with the rows whose column `name` is `text`."""
    if name in log.texts:
        column = log.texts[name]
        orders = column.order[[column.texts[code] == text for code in column.codes]]
        values = column.texts
    elif name in log.series:
        number, series = _as_number(text), log.series[name]
        orders = series.order[series.values == number]
        values = tuple(f"{value:g}" for value in np.unique(series.values)[:20].tolist())
    else:
        names = [*log.texts, *log.series]
        raise RunError(
            f"{log.path} has no column {name!r} (--where {name}={text}); there are "
            f"{list_tags(names)}"
        )
    parts = {tag: _take(part, np.isin(part.order, orders)) for tag, part in log.series.items()}
    if not orders.size:
        raise RunError(
            f"{log.path}: no row has {text!r} in column {name!r} (--where {name}={text}); there "
            f"are {list_tags(values)}"
        )
    return replace(log, series={tag: part for tag, part in parts.items() if part.order.size})


def _as_number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")
