"""Whether the loss after a resume says that its checkpoint is damaged.

A flipped bit of a weight has a valid header, size and, if it was flipped before the save, checksum:
only the loss shows it. On record are 44 restarts from one bad copy, each with NaN in the third step
(NVIDIA/Megatron-LM#5281). The limit is that of the run's own curve, of the rows up to the step of
the checkpoint: the lowest of the first `_ROWS` losses must be further above the level than

- twice what as many rows in a row ever were, in its spikes too,
- ten times its noise, robustly,
- a quarter of what the run has gained since its start, and of the level itself: other data, or a
  new epoch, have another loss.
"""

from __future__ import annotations

import logging
import math
import re
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
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

_ROWS = 5  # that must all be too high; a spike of less is none of the checkpoint's
_NAN_ROWS = 10  # after the resume, in which two in a row that are not finite count
_LEVEL = 40  # rows whose median is the level
_LEAST = 60  # rows before the resume, for a limit
_MOST = 1000
# Of a trainer that stops by itself before it prints the loss, as Megatron's rerun_state_machine
_SAYS_NAN = re.compile(r"\bnan\b|not finite|non-finite", re.IGNORECASE)


def loss_fault(before: Sequence[float], after: Sequence[float], first: float | None = None) -> str:
    """Return what is wrong with the losses after a resume; empty if nothing is.

    Args:
        before: Losses up to the checkpoint's step, oldest first.
        after: Losses of the resumed attempt, oldest first.
        first: Median of the run's first losses, if known.
    """
    finite = [math.isfinite(loss) for loss in after[:_NAN_ROWS]]
    if any(not (here or following) for here, following in pairwise(finite)):
        return "the loss is not finite"
    curve = [loss for loss in before if math.isfinite(loss)]
    rows = after[:_ROWS]
    if len(rows) < _ROWS or len(curve) < _LEAST or not all(finite[:_ROWS]):
        return ""
    level = statistics.median(curve[-_LEVEL:])
    excess = [
        min(curve[end - _ROWS : end]) - statistics.median(curve[end - _ROWS - _LEVEL : end - _ROWS])
        for end in range(_LEVEL + _ROWS, len(curve) + 1)
    ]
    noise = 1.4826 * statistics.median(abs(loss - level) for loss in curve[-_LEVEL:])
    gained = level if first is None else first - level
    limit = max(2 * max(excess), 10 * noise, gained / 4, abs(level) / 4)
    if min(rows) <= level + limit:
        return ""
    return (
        f"the loss is {min(rows):.4g} or more in {_ROWS} rows, it was {level:.4g} before (limit "
        f"{level + limit:.4g})"
    )


class ResumeCheck:
    """The check of one attempt's losses."""

    def __init__(self, run: RunDir, record: AttemptRecord, first_attempt: int, older: bool) -> None:
        """`first_attempt`: of the submission; `older`: whether there is an older checkpoint."""
        self._run, self._record = run, record
        rejected = (SkipsRecord.find(run.skips) or SkipsRecord()).rejected
        gone_back = any(entry.attempt >= first_attempt for entry in rejected)
        self.is_active = bool(record.checkpoint_before) and older and not gone_back
        self._before: list[float] = []
        self._first: float | None = None

    def fault(self) -> str:
        """Return what is wrong with the losses so far; no more is read than the check needs."""
        step = self._record.checkpoint_before
        if not self.is_active or step is None:
            return ""
        with suppress(RunError, StorageError, OSError):
            path = self._run.metrics(self._record.attempt)
            rows = [row for _, row in islice(read_rows(path), _NAN_ROWS)]
            if rows and rows[0]["step"] <= step:  # it did not resume
                self.is_active = False
                return ""
            losses = [*_losses(rows)]
            if len(losses) >= _ROWS and not self._before:
                self._read_curve(step)
            if fault := loss_fault(self._before, losses, self._first):
                return f"after the resume from step {step}: {fault}"
            self.is_active = len(losses) < _NAN_ROWS
        return ""

    def crash_fault(self, evidence: Sequence[str]) -> str:
        """Return the line by which a trainer failed for its loss within few rows, or none."""
        self.fault()
        line = next(filter(_SAYS_NAN.search, evidence), "") if self.is_active else ""
        return (
            f"after the resume from step {self._record.checkpoint_before}: {line}" if line else ""
        )

    def _read_curve(self, step: int) -> None:
        paths = [path for path in self._run.metrics_files() if path.is_file()]
        own = self._run.metrics(self._record.attempt)
        curve: dict[int, float] = {}
        for path in reversed([path for path in paths if path != own]):
            rows = [row for row in last_rows(path, 4 * _MOST) if row["step"] <= step]
            # A later attempt's row counts where several have made a step.
            curve = dict(zip((r["step"] for r in rows), _losses(rows), strict=False)) | curve
            if len(curve) >= _MOST:
                break
        self._before = [curve[number] for number in sorted(curve)][-_MOST:]
        start = [*_losses(row for _, row in islice(read_rows(paths[0]), _ROWS))]
        self._first = statistics.median(start) if start else None


def _losses(rows: Iterable[Row]) -> Iterator[float]:
    """Yield the losses of rows; NaN stands for null."""
    for row in rows:
        if "loss" in row and (loss := json_number(row["loss"])) is not None:
            yield loss


def resume_check_of(run: RunDir, config: RunConfig, record: AttemptRecord) -> ResumeCheck | None:
    """Return the check of an attempt's losses; None if its stage does not train."""
    if record.stage != "train":
        return None
    steps = usable_steps(run) if config.recipe.command is None else saved_steps(run, config)
    older = any(step < (record.checkpoint_before or 0) for step in steps)
    return ResumeCheck(run, record, first_attempt(run), older)


def judge_resume(
    run: RunDir, record: AttemptRecord, ending: Ending, check: ResumeCheck, fault: str
) -> Ending:
    """Reject the checkpoint that an attempt resumed from if its loss was wrong."""
    if ending.ending in ("done", "cancelled", "superseded", "hang"):
        return ending
    if not fault and ending.ending in ("code_error", "divergence"):
        fault = check.fault() or check.crash_fault(ending.evidence)
    if not fault or record.checkpoint_before is None:
        return ending
    skips = SkipsRecord.find(run.skips) or SkipsRecord()
    rejected = RejectedCheckpoint(
        step=record.checkpoint_before,
        attempt=record.attempt,
        since=record.started_at,
        until=time.time(),
        reason=fault,
    )
    try:
        skips.model_copy(update={"rejected": (*skips.rejected, rejected)}).save(run.skips)
    except StorageError as error:
        log.warning("%s", error)
        return ending
    return Ending("divergence", (f"{fault}; the run goes back one checkpoint, once",))
