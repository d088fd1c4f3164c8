"""The conversion of another framework's log to a curve: the metrics of each step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from slurmllm.core.format import format_plural
from slurmllm.core.metrics.curves import Curve, DamageWarning, Ints, bit_identical, median
from slurmllm.core.metrics.log_series import Log, TagSeries
from slurmllm.core.metrics.merge import RowBlock, compare_overlap, merge_rows, select_latest
from slurmllm.core.metrics.row_selection import rows_with, select_rows
from slurmllm.core.metrics.tags import TagChoice, Tags, choose_tags, find_tags, per_device

_MAX_RESTARTS = 1000
# Share of values that are recomputed, and differ, beyond which a log seems to hold two runs
_MIXED = 0.3

_MOST_RESUMES = 100
_FEW = 5  # losses whose median is compared
# Of what the loss has changed in a run: how far it may be, after a resume, from where it was
_NEAR = 0.25


def curve_of_log(
    log: Log,
    name: str,
    tags: Tags,
    selection: Mapping[str, str] | None,
) -> Curve:
    """Convert a log to a curve; arguments as of `source.read_curve`.

    Raises RunError without a loss or a requested tag, or for several splits.
    """
    for column, value in (selection or {}).items():
        log = rows_with(log, column, value)
    choice = _choose_tags(log, tags)
    log = select_rows(log, choice.tags)
    choice = _choose_tags(log, tags)  # a rank may lack some
    log = _continue_steps(log, choice.tags)
    chosen = {metric: log.series[tag] for metric, tag in choice.tags.items()}
    if choice.tags.get("step_time_s", "").endswith(("_ms", "(ms)")):
        in_ms = chosen["step_time_s"]
        chosen["step_time_s"] = replace(in_ms, values=in_ms.values / 1e3)
    loss = chosen.get("loss") or chosen["grad_norm"]
    if "time" not in chosen and loss.times is not None:
        chosen["time"] = replace(loss, values=loss.times)
    starts = _attempt_starts(loss, log.starts)
    block, (overlap_rows, identical, max_difference) = _merge_tags(chosen, starts)
    if choice.format is not None and choice.format.counts == "samples":
        block = replace(block, columns={"samples": block.steps.astype(float), **block.columns})
    read = {"", *choice.tags.values()}
    warnings = [  # damage to a column that is not read is none
        str(warning)
        if isinstance(warning, DamageWarning) and warning.column not in read
        else warning
        for warning in log.warnings
    ]
    warnings += [*choice.missing, *_tag_warnings(log, choice)]
    if log.invented_steps:
        warnings.append(f"{log.path}: {log.invented_steps}")
    if overlap_rows > _MIXED * len(loss.steps) and max_difference > 1e-3:
        warnings.append(
            f"{log.location(int(starts[0]))}: {format_plural(overlap_rows, 'step')} of "
            f"{len(block.steps)} occur a second time with other values, as if the log held two "
            "runs; those read last count: split it at the line where the steps begin again"
        )
        overlap_rows = 0  # not of a restart
    else:
        warnings += _order_warnings(log, loss, starts)
    return replace(
        merge_rows([block], name=name, path=log.path, kind=log.kind, warnings=warnings),
        convention=choice.format,
        overlap_rows=overlap_rows,
        overlap_identical=identical if overlap_rows else None,
        overlap_max_rel_diff=max_difference if overlap_rows else None,
        invented_steps=log.invented_steps,
        tags=tuple(log.series),
    )


def _choose_tags(log: Log, tags: Tags) -> TagChoice:
    return choose_tags(
        {tag: len(series.steps) for tag, series in log.series.items()}, tags, log.path, log.format
    )


def _tag_warnings(log: Log, choice: TagChoice) -> Iterator[str]:
    for metric, rivals in choice.rivals.items():
        used = log.series[choice.tags[metric]]
        differing = []
        for tag in rivals:
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
            f"{log.location(min([*decreases, *repeats]))}: steps are not in order: "
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
    positions = np.union1d(np.asarray(process_starts, np.int64), decreases)
    first_loss = np.searchsorted(loss.order, positions)
    within = (first_loss > 0) & (first_loss < len(loss.order))
    # Return the start, not the first loss after it: the process may log other tags first.
    _, index = np.unique(first_loss[within], return_index=True)
    return np.asarray(positions[within][index], np.int64)


def _merge_tags(
    chosen: Mapping[str, TagSeries], starts: Ints
) -> tuple[RowBlock, tuple[int, bool, float]]:
    """Merge the series of the metrics to one row per step.

    Also returns the overlap after restarts: the number of recomputed rows that have a loss, whether
    all metrics are bit-identical, and their largest relative difference.
    """
    used = {}
    rows = 0
    identical = True
    largest = 0.0
    for metric, series in chosen.items():
        attempts = np.searchsorted(starts, series.order, side="right")
        latest, replaced, replacements = select_latest(series.steps, attempts)
        recomputed = attempts[replaced] < attempts[replacements]
        replaced = replaced[recomputed]
        replacements = replacements[recomputed]
        same, difference = compare_overlap({metric: series.values}, replaced, replacements)
        identical = identical and same
        largest = max(largest, difference)
        rows = len(replaced) if metric == "loss" else rows
        # A later attempt may log different steps: all rows of earlier attempts in the range that it
        # covers are superseded.
        superseded = np.zeros(len(series.steps), bool)
        for attempt in np.unique(attempts)[1:]:
            later = series.steps[attempts == attempt]
            superseded |= (
                (attempts < attempt) & (series.steps >= later.min()) & (series.steps <= later.max())
            )
        latest = latest[~superseded[latest]]
        values = series.values[latest]
        goes_back = (np.diff(values) <= 0) & (np.diff(attempts[latest]) > 0)
        if metric in ("tokens", "samples") and goes_back.any():
            continue  # a count that began again with an attempt
        used[metric] = (series.steps[latest], attempts[latest], values)
    steps = np.unique(np.concatenate([metric_steps for metric_steps, _, _ in used.values()]))
    row_attempts = np.zeros(len(steps), np.int64)
    columns = {}
    absent = {}
    for metric, (metric_steps, attempts, values) in used.items():
        index = np.searchsorted(steps, metric_steps)
        columns[metric] = np.full(len(steps), np.nan)
        columns[metric][index] = values
        absent[metric] = ~np.isin(steps, metric_steps)
        row_attempts[index] = np.maximum(row_attempts[index], attempts)
    return RowBlock(steps, row_attempts, columns, absent), (rows, identical, largest)


class _Resume(NamedTuple):
    offset: int  # steps before it
    evidence: str  # tag that goes on
    exact: bool  # whether the evidence gives the number of steps, not only that they go on


def _continue_steps(log: Log, metrics: Tags) -> Log:
    """Count on the steps of resumes that begin again at the log's first step.

    Two runs in one file look alike. What else was logged tells them apart: tokens, samples or
    epochs go on in a resumed run, and so does the loss.
    """
    loss = log.series[metrics.get("loss") or metrics["grad_norm"]]
    resumes = []
    starts = 1 + np.flatnonzero((np.diff(loss.steps) < 0) & (loss.steps[1:] <= loss.steps[:1]))
    begin = offset = 0
    for start in starts.tolist() if len(starts) <= _MOST_RESUMES else ():
        resume = _find_resume(log, metrics, loss, begin, start, offset)
        if resume is None:
            return log
        resumes.append(resume)
        begin = start
        offset = resume.offset
    if not resumes:
        return log
    orders = loss.order[starts]
    offsets = np.array([0, *(resume.offset for resume in resumes)])
    log = replace(
        log,
        series={
            tag: replace(s, steps=s.steps + offsets[np.searchsorted(orders, s.order, side="right")])
            for tag, s in log.series.items()
        },
    )
    more = f", and {len(resumes) - 1} more times" if len(resumes) > 1 else ""
    message = (
        f"the steps begin again at {loss.steps[starts[0]]} ({log.location(orders[0])}{more}), and "
        f"{resumes[0].evidence} goes on: counted on from step {resumes[0].offset}"
    )
    if all(resume.exact for resume in resumes):
        return replace(log, warnings=(*log.warnings, message))
    return replace(log, invented_steps=log.invented_steps or f"{message}, as a guess")


def _find_resume(
    log: Log, metrics: Tags, loss: TagSeries, begin: int, start: int, offset: int
) -> _Resume | None:
    """Return the resume before row `start` of the loss, in a part that began at row `begin`."""
    before = slice(begin, start)
    after = slice(start, len(loss.steps))
    _, at_a, at_b = np.intersect1d(loss.steps[before], loss.steps[after], return_indices=True)
    if bit_identical(loss.values[before][at_a], loss.values[after][at_b]).all():
        return None  # started again
    intervals = np.diff(loss.steps[before])
    interval = int(median(intervals)) if intervals.size else 1
    next_step = offset + int(loss.steps[start - 1]) + interval - int(loss.steps[start])
    for metric in {"tokens", "samples"} & metrics.keys():
        counter = log.series[metrics[metric]]
        steps = counter.steps
        values = counter.values
        first, row = np.searchsorted(counter.order, loss.order[[begin, start]]).tolist()
        if not 1 < row < len(steps):
            continue
        if values[row] > values[first] < values[row - 1] and steps[row - 1] > steps[first]:
            per_step = (values[row - 1] - values[first]) / (steps[row - 1] - steps[first])
            step = steps[first] + (values[row] - values[first]) / per_step
            count = round(float(step - steps[row]))
            if count > 0 and abs(step - steps[row] - count) < 0.05:
                return _Resume(offset + count, metrics[metric], True)
    for tag in find_tags(log.series, ["epoch"])[:1]:
        epochs = log.series[tag]
        split = np.searchsorted(epochs.order, loss.order[start])
        earlier = epochs.values[:split]
        later = epochs.values[split:]
        if earlier.size and later.size and earlier[0] < later[0] >= earlier[-1]:
            return _Resume(next_step, tag, False)
    # Whether the loss is, after a resume, near its last values and not its first ones
    few = max(1, min(_FEW, (start - begin) // 4))
    first_loss, last_loss, new_loss = (
        median(loss.values[row : row + few]) for row in (begin, start - few, start)
    )
    moved = abs(first_loss - last_loss)
    goes_on = moved > 0.02 * abs(first_loss) and abs(new_loss - last_loss) < _NEAR * moved
    return _Resume(next_step, "the loss", False) if goes_on else None
