"""Detects a damaged checkpoint by the loss after a resume from it.

A checkpoint with a flipped bit in a weight has valid headers and sizes and, if the bit flipped
before the save, a valid checksum: only the loss shows it. One run restarted 44 times from one bad
copy, each time with NaN in the third step (NVIDIA/Megatron-LM#5281). The limit follows from the
run's own curve up to the step of the checkpoint: the lowest of the first `_ROWS` losses must exceed
the level by more than

- twice the highest such excess in the curve, its spikes included,
- ten times its noise, as a robust standard deviation,
- a quarter of the decrease since the run's start, and a quarter of the level: new data, or a new
  epoch, change the loss.
"""

from __future__ import annotations

import logging
import math
import re
import statistics
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import islice, pairwise

from slurmllm.core.config.resolve import RunConfig
from slurmllm.core.errors import RunError, StorageError
from slurmllm.core.metrics.row_reader import Row, json_number, last_rows, read_rows
from slurmllm.core.run.records import AttemptRecord, RejectedCheckpoint, SkipsRecord
from slurmllm.core.run.rundir import RunDir
from slurmllm.launch.supervise.attempts import first_attempt
from slurmllm.launch.supervise.classify import Ending
from slurmllm.train.checkpoint.catalogue import usable_steps
from slurmllm.train.checkpoint.foreign import saved_steps

log = logging.getLogger(__name__)

_ROWS = 5  # that must all be too high; a shorter spike is not the checkpoint's
_NAN_ROWS = 10  # after the resume; two in a row that are not finite are a fault
_LEVEL = 40  # rows whose median is the level
_MIN_ROWS = 60  # before the resume, for a limit
_MAX_ROWS = 1000
# Messages of trainers that stop before they print the loss, as Megatron's rerun_state_machine;
# not `np.nan`, nor that NumPy has no 'NaN'
_NAN_MESSAGE = re.compile(r"(?<![.`'\w])nan\b|not finite|non-finite", re.IGNORECASE)


def loss_fault(before: Sequence[float], after: Sequence[float]) -> str:
    """Return what is wrong with the losses after a resume; empty if nothing is.

    Args:
        before: Finite losses up to the checkpoint's step, those of the run's first rows first.
        after: Losses of the resumed attempt, oldest first.
    """
    finite = [math.isfinite(loss) for loss in after[:_NAN_ROWS]]
    if any(not (here or following) for here, following in pairwise(finite)):
        return "the loss is not finite"
    if len(after) < _ROWS or len(before) < _MIN_ROWS or not all(finite[:_ROWS]):
        return ""
    recent, lowest = before[-_LEVEL:], min(after[:_ROWS])
    level = statistics.median(recent)
    windows = (
        before[end : end + _LEVEL + _ROWS] for end in range(len(before) - _LEVEL - _ROWS + 1)
    )
    spike = max(min(rows[_LEVEL:]) - statistics.median(rows[:_LEVEL]) for rows in windows)
    noise = 1.4826 * statistics.median(abs(loss - level) for loss in recent)
    gained = statistics.median(before[:_ROWS]) - level
    limit = level + max(2 * spike, 10 * noise, gained / 4, abs(level) / 4)
    if lowest <= limit:
        return ""
    return (
        f"the loss is at least {lowest:.4g} in {_ROWS} rows; before the resume it was {level:.4g} "
        f"(limit {limit:.4g})"
    )


class ResumeCheck:
    """Checks the losses of an attempt that has resumed from a checkpoint."""

    def __init__(self, run: RunDir, record: AttemptRecord) -> None:
        self.fault = ""  # what is wrong with the losses
        self._path, self._step = run.metrics(record.attempt), record.checkpoint_before or 0
        paths, curve = run.metrics_files(), dict[int, float]()
        for path in reversed(paths):
            with suppress(RunError, OSError):
                rows = (row for row in last_rows(path, 4 * _MAX_ROWS) if row["step"] <= self._step)
                # Of a step in several attempts, the last one's row counts.
                curve = _losses(rows) | curve
            if len(curve) >= _MAX_ROWS:
                break
        with suppress(RunError, OSError):
            curve |= _losses(row for path in paths[:1] for _, row in islice(read_rows(path), _ROWS))
        losses = [curve[step] for step in sorted(curve) if math.isfinite(curve[step])]
        self._before = losses[:_ROWS] + losses[_ROWS:][-_MAX_ROWS:]
        self._is_finished = False

    def look(self, evidence: Sequence[str] = ()) -> str:
        """Return what is wrong with the first losses, or a failed trainer's message about them."""
        if self._is_finished:
            return self.fault
        rows = list[Row]()
        with suppress(RunError, OSError):
            rows += (row for _, row in islice(read_rows(self._path), _NAN_ROWS))
        if rows and rows[0]["step"] <= self._step:  # it did not resume
            return ""
        self._is_finished = len(rows) == _NAN_ROWS
        fault = loss_fault(self._before, [*_losses(rows).values()])
        if not fault and not self._is_finished:
            fault = next(filter(_NAN_MESSAGE.search, evidence), "")
        self.fault = fault and f"after the resume from step {self._step}: {fault}"
        return self.fault


def _losses(rows: Iterable[Row]) -> dict[int, float]:
    """Return step → loss of the rows that have one; null is NaN."""
    losses = {row["step"]: json_number(row["loss"]) for row in rows if "loss" in row}
    return {step: loss for step, loss in losses.items() if loss is not None}


def resume_check_of(run: RunDir, config: RunConfig, record: AttemptRecord) -> ResumeCheck | None:
    """Return the check of an attempt's losses; None if the run cannot go back, or already has."""
    if record.stage != "train" or not record.checkpoint_before:
        return None
    steps = usable_steps(run) if config.recipe.command is None else saved_steps(run, config)
    begin = first_attempt(run)
    if any(entry.attempt >= begin for entry in SkipsRecord.of(run).rejected):
        return None
    return (
        ResumeCheck(run, record) if any(step < record.checkpoint_before for step in steps) else None
    )


def judge_resume(run: RunDir, record: AttemptRecord, ending: Ending, check: ResumeCheck) -> Ending:
    """Reject the checkpoint that an attempt resumed from if its loss was wrong."""
    if not check.fault and ending.ending in ("code_error", "divergence"):
        check.look(ending.evidence)
    if not check.fault or ending.ending in ("done", "cancelled", "superseded", "hang"):
        return ending
    skips = SkipsRecord.of(run)
    rejected = RejectedCheckpoint(
        onset=record.checkpoint_before or 0,
        attempt=record.attempt,
        until=time.time(),
        reason=check.fault,
    )
    try:
        skips.model_copy(update={"rejected": (*skips.rejected, rejected)}).save(run.skips)
    except StorageError as error:
        log.warning("%s", error)
        return ending
    return Ending(
        "divergence", (f"{check.fault}; the run resumes once from the checkpoint before",)
    )
