"""One JSON line a step, in a file of this attempt's own."""

from __future__ import annotations

import contextlib
import os

from slurmllm.train.hooks.base import Hook, Moment
from slurmllm.train.job import Job


class MetricsHook(Hook):
    """Appends to `metrics/attempt_NNN.jsonl`."""

    def __init__(self, job: Job) -> None:
        path = job.run.metrics(job.attempt)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._stream = path.open("a", encoding="utf-8")

    def after_step(self, moment: Moment) -> None:
        """Write and flush the row; make it durable before a checkpoint that leaves it behind."""
        self._stream.write(moment.row.model_dump_json(exclude_none=True) + "\n")
        self._stream.flush()
        if moment.saving:
            os.fsync(self._stream.fileno())

    def close(self) -> None:
        """Close the file."""
        with contextlib.suppress(OSError):
            self._stream.close()
