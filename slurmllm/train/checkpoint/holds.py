"""Records of evaluations during training, and the checkpoints that are kept for them."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from slurmllm.core.config.operation import EvaluateConfig
from slurmllm.core.errors import StorageError
from slurmllm.core.run.artifact_records import CheckpointEvaluation
from slurmllm.core.run.rundir import RunDir

log = logging.getLogger(__name__)


def read_evaluations(run: RunDir) -> list[CheckpointEvaluation]:
    """Return the evaluations of a run's checkpoints by step, of removed ones too."""
    records = []
    for path in sorted(run.evaluating(0).parent.glob("*.json")):
        with suppress(StorageError):  # the evaluator writes it again
            records.append(CheckpointEvaluation.load(path))
    return records


def save_evaluation(run: RunDir, record: CheckpointEvaluation, **changes: Any) -> None:
    """Change and save the record of an evaluation; a new error is logged."""
    record = record.model_copy(update=changes)
    record.save(run.evaluating(record.step))
    if changes.get("error"):
        log.warning("step %d: evaluation %s: %s", record.step, record.state, record.error)


def held_steps(
    run: RunDir, config: EvaluateConfig | None, saved_at: Mapping[int, float]
) -> set[int]:
    """Return the steps whose checkpoints still wait for their evaluation.

    `saved_at`: step → Unix time of the save, s. A checkpoint is kept for at most `hold_hours` after
    it: a full queue must not fill the disk.
    """
    if config is None:
        return set()
    since = time.time() - config.hold_hours * 3600
    finished = {(r.step, r.saved_at) for r in read_evaluations(run) if r.finished}
    return {step for step, saved in {*saved_at.items()} - finished if saved > since}
