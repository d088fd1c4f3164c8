"""TensorBoard: one curve over all restarts.

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
from slurmllm.train.job import Job

TAGS = (
    *("loss", "grad_norm", "param_norm", "lr"),
    *("seq_per_s", "tokens_per_s", "step_time_s"),
    *("data_wait_s", "forward_backward_s", "optimizer_s"),
)


class TensorBoardHook(Hook):
    """Writes every step's figures; on rank 0."""

    def __init__(self, job: Job) -> None:
        self._writer = EventFileWriter(str(job.run.tensorboard))
        # Steps that an earlier attempt made after the checkpoint are made again: TensorBoard
        # drops what it has from the step of a START on.
        start = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(wall_time=time.time(), step=job.step + 1, session_log=start))

    def after_step(self, moment: Moment) -> None:
        """Hand the figures to the writer's thread."""
        row = moment.row
        measured = row.model_dump(include=set(TAGS), exclude_none=True)
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in measured.items()]
        self._writer.add_event(
            Event(wall_time=row.time, step=row.step, summary=Summary(value=values))
        )
        if moment.saving:
            self._writer.flush()

    def close(self) -> None:
        """Write what is left."""
        with contextlib.suppress(Exception):  # whatever its thread met with
            self._writer.close()
