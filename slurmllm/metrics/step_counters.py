"""Step counters that begin again after a resume, and are counted on.

Two runs in one file look alike. What else was logged tells them apart: tokens, samples or epochs
go on in a resumed run, and so does the loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from slurmllm.metrics.curves import Floats, Ints, bit_identical
from slurmllm.metrics.log_series import Log, TagSeries
from slurmllm.metrics.tags import find_tags

_MOST_RESUMES = 100
_FEW = 5  # losses whose median is compared
# Of what the loss has changed in a run: how far it may be, after a resume, from where it was
_NEAR = 0.25


class _Resume(NamedTuple):
    order: int  # position in the log of the first row after it
    offset: int  # steps before it
    evidence: str  # tag that goes on
    exact: bool  # whether the evidence gives the number of steps, not only that they go on


def continue_steps(log: Log, metrics: Mapping[str, str]) -> Log:
    """Count on the steps of resumes that begin again at the log's first step."""
    loss = log.series.get(metrics.get("loss") or metrics["grad_norm"])
    if loss is None or len(loss.steps) < 2:
        return log
    resumes: list[_Resume] = []
    starts = 1 + np.flatnonzero((np.diff(loss.steps) < 0) & (loss.steps[1:] <= loss.steps[0]))
    begin = offset = 0
    for start in starts.tolist() if len(starts) <= _MOST_RESUMES else ():
        resume = _find_resume(log, metrics, loss, begin, start, offset)
        if resume is None:
            return log
        resumes.append(resume)
        begin, offset = start, resume.offset
    if not resumes:
        return log
    orders: Ints = np.array([resume.order for resume in resumes])
    offsets: Ints = np.array([0, *(resume.offset for resume in resumes)])
    series = {
        tag: replace(s, steps=s.steps + offsets[np.searchsorted(orders, s.order, side="right")])
        for tag, s in log.series.items()
    }
    first, place = resumes[0], log.place(resumes[0].order)
    more = f", and {len(resumes) - 1} more times" if len(resumes) > 1 else ""
    text = (
        f"the steps begin again at {loss.steps[starts[0]]} ({place}{more}), and {first.evidence} "
        f"goes on: counted on from step {first.offset}"
    )
    if all(resume.exact for resume in resumes):
        return replace(log, series=series, warnings=(*log.warnings, text))
    return replace(log, series=series, invented_steps=log.invented_steps or f"{text}, as a guess")


def _find_resume(
    log: Log, metrics: Mapping[str, str], loss: TagSeries, begin: int, start: int, offset: int
) -> _Resume | None:
    """Return the resume before row `start` of the loss, in a part that began at row `begin`."""
    before, after = slice(begin, start), slice(start, len(loss.steps))
    _, at_a, at_b = np.intersect1d(loss.steps[before], loss.steps[after], return_indices=True)
    if bit_identical(loss.values[before][at_a], loss.values[after][at_b]).all():
        return None  # started again
    order = int(loss.order[start])
    intervals = np.diff(loss.steps[before])
    interval = int(np.median(intervals)) if intervals.size else 1
    next_step = offset + int(loss.steps[start - 1]) + interval - int(loss.steps[start])
    for metric in {"tokens", "samples"} & metrics.keys():
        counter = log.series.get(metrics[metric])
        if (
            counter is None
            or not (counter.order < order).sum() > 1 <= (counter.order >= order).sum()
        ):
            continue
        steps, values = counter.steps, counter.values
        row = int(np.argmax(counter.order >= order))
        first = int(np.argmax(counter.order >= loss.order[begin]))
        if values[row] > values[first] and steps[row - 1] > steps[first]:
            per_step = (values[row - 1] - values[first]) / (steps[row - 1] - steps[first])
            step = steps[first] + (values[row] - values[first]) / per_step
            count = round(float(step - steps[row]))
            if count > 0 and abs(step - steps[row] - count) < 0.05:
                return _Resume(order, offset + count, metrics[metric], True)
    for tag in find_tags(log.series, ["epoch"])[:1]:
        epochs = log.series[tag]
        earlier, later = (epochs.values[epochs.order < order], epochs.values[epochs.order >= order])
        if earlier.size and later.size and later[0] >= earlier[-1] > earlier[0]:
            return _Resume(order, next_step, "epoch", False)
    goes_on = _goes_on(loss.values[before], loss.values[after])
    return _Resume(order, next_step, "the loss", False) if goes_on else None


def _goes_on(before: Floats, after: Floats) -> bool:
    """Return whether a loss is, after a resume, near its last values and not its first ones."""
    few = max(1, min(_FEW, len(before) // 4))
    first, last, new = (float(np.median(v)) for v in (before[:few], before[-few:], after[:few]))
    moved = abs(first - last)
    return moved > 0.02 * abs(first) and abs(new - last) < _NEAR * moved
