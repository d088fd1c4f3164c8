"""Checkpoints that evaluations beside training have not read yet."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress

from slurmllm.core.config.operation import EvaluateConfig
from slurmllm.core.errors import StorageError
from slurmllm.core.run.artifact_records import CheckpointEvaluation
from slurmllm.core.run.rundir import RunDir, read_all


def read_evaluations(run: RunDir) -> list[CheckpointEvaluation]:
    """Return the evaluations of a run's checkpoints by step, of removed ones too."""
    return read_all(CheckpointEvaluation.load, sorted(run.evaluating(0).parent.glob("*.json")))


def held_steps(
    run: RunDir, config: EvaluateConfig | None, saved_at: Mapping[int, float]
) -> set[int]:
    """Return the steps, of those with the Unix time of a checkpoint, that are yet to be read.

    A hold ends by itself, `hold_hours` after the save: a queue that is full must not fill the disk.
    """
    if config is None:
        return set()
    since = time.time() - config.hold_hours * 3600
    held = {step for step, saved in saved_at.items() if saved > since}
    for step in tuple(held):
        with suppress(StorageError):
            record = CheckpointEvaluation.find(run.evaluating(step))
            if record and record.settled and record.saved_at == saved_at[step]:
                held.remove(step)
    return held
