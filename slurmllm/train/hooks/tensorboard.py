"""TensorBoard: one curve over all restarts, in groups that several runs share.

Written by TensorBoard's own event writer: torch.utils.tensorboard takes 1.4 s more to import.
"""

from __future__ import annotations

import contextlib
import time

from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # type: ignore[import-untyped]
from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
from tensorboard.summary.writer.event_file_writer import (  # type: ignore[import-untyped]
    EventFileWriter,
)

from slurmllm.train.hooks.base import Hook, Moment
from slurmllm.train.hooks.tensorboard_start import session_end, start_values
from slurmllm.train.job import Job

# Metric → tag; TensorBoard groups cards by the part before the slash.
TAGS = {
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "param_norm": "train/param_norm",
    "lr": "train/lr",
    "tokens": "train/tokens",
    "seq_per_s": "throughput/seq_per_s",
    "tokens_per_s": "throughput/tokens_per_s",
    "step_time_s": "time/step_time_s",
    "data_wait_s": "time/data_wait_s",
    "forward_backward_s": "time/forward_backward_s",
    "optimizer_s": "time/optimizer_s",
    "attempt": "run/attempt",
}


class TensorBoardHook(Hook):
    """Writes every step's figures, and once an attempt what the run is; on rank 0."""

    def __init__(self, job: Job) -> None:
        self._writer = EventFileWriter(str(job.run.tensorboard))
        # Steps that an earlier attempt made after the checkpoint are made again: TensorBoard
        # drops what it has from the step of a START on.
        start = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(wall_time=time.time(), step=job.step + 1, session_log=start))
        for step, value in start_values(job):
            self._add(time.time(), step, [value])

    def after_step(self, moment: Moment) -> None:
        """Hand the figures to the writer's thread."""
        row = moment.row
        measured = row.model_dump(include=set(TAGS), exclude_none=True)
        values = [
            Summary.Value(tag=TAGS[name], simple_value=value) for name, value in measured.items()
        ]
        self._add(row.time, row.step, values)
        if moment.last:
            self._add(row.time, row.step, [session_end(row.time)])
        if moment.saving:
            self._writer.flush()

    def close(self) -> None:
        """Write what is left."""
        with contextlib.suppress(Exception):  # whatever its thread met with
            self._writer.close()

    def _add(self, wall_time: float, step: int, values: list[Summary.Value]) -> None:
        self._writer.add_event(Event(wall_time=wall_time, step=step, summary=Summary(value=values)))
