"""What happens beside training, a file each; the order is the one in which a step's end runs."""

from __future__ import annotations

from slurmllm.train.hooks.base import Hook
from slurmllm.train.hooks.checkpoint import CheckpointHook
from slurmllm.train.hooks.monitoring import (
    GuardHook,
    MemoryHook,
    MetricsHook,
    ProgressHook,
    StartUpHook,
)
from slurmllm.train.job import Job


def make_hooks(job: Job) -> list[Hook]:
    """The hooks of this worker.

    Metrics come before the checkpoint: where a checkpoint is, the rows up to it are on disk. The
    guard comes between them: what has diverged is told and not saved. Memory is read before a
    save takes some.
    """
    hooks: list[Hook] = []
    if job.worker.local_rank == 0:
        hooks.append(StartUpHook(job))
    if job.stage == "precompile":
        return hooks
    if job.worker.rank == 0:
        from slurmllm.train.hooks.tensorboard import TensorBoardHook

        hooks += [MetricsHook(job), TensorBoardHook(job), ProgressHook(job)]
    if not job.backend.deferred_metrics:  # no Neuron runtime was seen to count its memory so
        hooks.append(MemoryHook(job))
    hooks += [GuardHook(job), CheckpointHook(job)]
    return hooks
