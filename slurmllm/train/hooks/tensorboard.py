"""TensorBoard event files: one curve over all restarts, tags shared by all runs.

Uses TensorBoard's own records: torch.utils.tensorboard takes 1.4 s more to import, and a thread of
its writers ends with a traceback if the file system refuses.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from contextlib import suppress
from typing import BinaryIO

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams import api_pb2, plugin_data_pb2
from tensorboard.plugins.hparams import metadata as hparams_metadata
from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.record_writer import RecordWriter

from slurmllm.core.config.yaml_source import flatten
from slurmllm.core.metrics.curves import TAGS
from slurmllm.core.metrics.row_reader import evaluation_values
from slurmllm.core.run.safe_files import open_append
from slurmllm.core.run.worker_files import diagnostic
from slurmllm.train.hooks import Evaluation, Hook, Scalars, StepEnd
from slurmllm.train.job import Job


class TensorBoardHook(Hook):
    """The metrics of every step, and once per attempt the recipe; on rank 0.

    What cannot be written is left out. A new file is begun at once if the old one was removed, and
    with the next checkpoint after another failure.
    """

    _stream: BinaryIO | None = None
    _files = 0

    def __init__(self, job: Job) -> None:
        self._job = job
        self._open()

    def after_step(self, end: StepEnd) -> None:
        row = end.row
        if self._stream is None and end.saving:
            self._open()
        measured = row.model_dump(include=set(TAGS), exclude_none=True)
        self._add_scalars(row.time, row.step, {TAGS[name]: v for name, v in measured.items()})
        if end.last:  # marks the session as successful
            status = api_pb2.Status.STATUS_SUCCESS
            ended = plugin_data_pb2.SessionEndInfo(status=status, end_time_secs=row.time)
            data = plugin_data_pb2.HParamsPluginData(session_end_info=ended)
            tag = hparams_metadata.SESSION_END_INFO_TAG
            about = hparams_metadata.create_summary_metadata(data)
            tensor = hparams_metadata.NULL_TENSOR
            self._add(row.time, row.step, [Summary.Value(tag=tag, metadata=about, tensor=tensor)])

    def after_evaluation(self, evaluation: Evaluation) -> None:
        self._add_scalars(evaluation.time, evaluation.step, evaluation_values(evaluation.losses))

    def add_scalars(self, step: int, values: Scalars) -> None:
        self._add_scalars(time.time(), step, values)

    def close(self) -> None:
        stream = self._stream
        self._stream = None
        with suppress(OSError):
            if stream is not None:
                stream.close()

    def _open(self) -> None:
        job = self._job
        self.close()
        self._files += 1
        name = f"{time.time():010.0f}.{socket.gethostname()}.{os.getpid()}.{self._files}"
        with diagnostic("TensorBoard", self.close):
            path = job.run.tensorboard / f"events.out.tfevents.{name}"
            self._stream, now = os.fdopen(open_append(path), "ab"), time.time()
            self._write(now, 0, file_version="brain.Event:2")
            # Steps after the checkpoint are recomputed: at a START, TensorBoard drops the steps
            # from this one on that an earlier attempt wrote.
            self._write(now, job.step + 1, session_log=SessionLog(status=SessionLog.START))
            # An id for each run: two runs of one recipe are two rows of the table, not their mean.
            session = hparams_pb(hyperparameters(job), trial_id=str(job.run.path))
            self._write(now, job.step, summary=session)
            recipe = text_pb("run/recipe", [f"```yaml\n{job.config.to_yaml()}```"], "as resolved")
            self._write(now, job.step, summary=recipe)

    def _add_scalars(self, wall_time: float, step: int, values: Scalars) -> None:
        self._add(
            wall_time,
            step,
            [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()],
        )

    def _add(self, wall_time: float, step: int, values: list[Summary.Value]) -> None:
        with diagnostic("TensorBoard", self._open):
            if self._stream is not None and os.fstat(self._stream.fileno()).st_nlink == 0:
                raise FileNotFoundError(errno.ENOENT, "the files were removed; new ones begin")
        with diagnostic("TensorBoard", self.close):
            self._write(wall_time, step, summary=Summary(value=values))

    def _write(self, wall_time: float, step: int, **content: object) -> None:
        if self._stream is not None:
            event = Event(wall_time=wall_time, step=step, **content)
            RecordWriter(self._stream).write(event.SerializeToString())
            self._stream.flush()


# Sections of the recipe whose settings are columns of TensorBoard's table of runs.
_SECTIONS = ("model.", "train.", "optim.", "parallel.")

Setting = str | int | float | bool


def hyperparameters(job: Job) -> dict[str, Setting]:
    """Return the hyperparameters by dotted path; the mesh as resolved, not as in the recipe."""
    config = job.config
    mesh = job.mesh
    settings: dict[str, Setting] = {}
    for path, value in flatten(config.values()).items():
        if path.startswith(_SECTIONS) and value is not None:
            plain = isinstance(value, str | int | float)
            settings[path] = value if plain else ", ".join(map(str, value))
    return settings | {
        "recipe": config.recipe.name,
        "cluster": config.cluster.name,
        "backend": config.backend,
        "nodes": mesh.nodes,
        "world_size": mesh.world_size,
        "model.num_kv_heads": config.recipe.model.kv_heads,
        "train.micro_batch": mesh.micro_batch,
        "parallel.tensor": mesh.tensor,
        "parallel.pipeline": mesh.pipeline,
        "parallel.virtual_pipeline": mesh.virtual_pipeline,
        "parallel.data": mesh.data,
    }
