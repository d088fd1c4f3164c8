"""Checkpoints by neuronx-distributed's own functions, each in a folder of its own.

NxD writes in a thread of each worker once the tensors are copied to the host. Three of its habits
would lose a checkpoint and are avoided here:

- It marks a checkpoint as done at the next save or at exit. `finish` does so at once, before the
  process groups close; our manifest, written after that, is what a resume looks for.
- It keeps the folder's name and writes into it again at its next save and at exit. By then the
  folder has been renamed, so `forget` removes NxD's state.
- If the write of a worker fails, NxD makes the others wait. `wait` reports the error before that.
"""

from __future__ import annotations

import atexit
import concurrent.futures
from pathlib import Path
from typing import Any

import neuronx_distributed as nxd
import torch.distributed as dist
from neuronx_distributed.trainer import checkpoint as nxd_checkpoint

from slurmllm.core.errors import StorageError
from slurmllm.core.run.rundir import fsync_dir
from slurmllm.train.checkpoint.folder import fsync_file
from slurmllm.train.checkpoint.formats.nxd_files import (
    LAYOUT,
    TAG,
    NxdLayout,
    model_file,
    optimizer_file,
)
from slurmllm.train.checkpoint.shards import ShardWrite


class NxdSaving(ShardWrite):
    """A checkpoint that NxD writes into an existing folder.

    `rank`: this worker's ranks in its pipeline, data-parallel and tensor-parallel groups.
    """

    def __init__(
        self,
        directory: Path,
        layout: NxdLayout,
        rank: tuple[int, int, int],
        model: Any,
        optimizer: Any,
    ) -> None:
        self._directory = directory
        self._layout = layout
        self._rank = rank
        # In a thread even if training waits, so that a failed write can be reported.
        nxd.save_checkpoint(
            str(directory),
            TAG,
            model=model,
            optimizer=optimizer,
            async_save=True,
            num_kept_ckpts=None,
        )
        self._task: concurrent.futures.Future[None] | None = nxd_checkpoint.g_iostate._save_task

    def wait(self) -> list[str]:
        try:
            if self._task is not None:
                self._task.result()
            data = self._rank[1]
            model, optimizer = files_of(self._layout, self._rank)
            names = [model] if data == 0 else []
            if self._layout.zero or data == 0:
                names.append(optimizer)
            for name in names:
                fsync_file(self._directory / name)
        except RuntimeError as error:  # torch.save wraps the file system's error
            raise StorageError(
                f"NxD cannot write shards into {self._directory}: {error}"
            ) from error
        return names

    def finish(self) -> list[str]:
        """Make NxD mark the checkpoint as done, then `forget` it (collective)."""
        nxd.finalize_checkpoint()
        forget()
        if dist.get_rank() != 0:
            return []
        self._layout.save(self._directory / LAYOUT)
        for folder in (TAG, f"{TAG}/model", f"{TAG}/optim"):
            fsync_dir(self._directory / folder)
        return [LAYOUT, f"{TAG}/checkpoint", f"{TAG}/done"]

    def abandon(self) -> None:
        forget()


def files_of(layout: NxdLayout, rank: tuple[int, int, int]) -> tuple[str, str]:
    """Return the files that a worker loads: weights and optimizer state."""
    pipeline, data, tensor = rank
    replica = data if layout.zero else 0
    return model_file(tensor, pipeline), optimizer_file(replica, tensor, pipeline)


def forget() -> None:
    """Remove NxD's state of the last checkpoint, and its actions at exit."""
    state = nxd_checkpoint.CheckpointIOState
    nxd_checkpoint.g_iostate = None
    atexit.unregister(state.wait_all)
    atexit.unregister(state.finalize_shutdown)


def load(directory: Path, model: Any, optimizer: Any) -> None:
    """Load a checkpoint written on the same mesh (collective).

    Two calls: in a single one ZeRO-1 would take its shards from weights not loaded yet. The tag is
    passed because NxD would otherwise choose by the files' times.
    """
    nxd.load_checkpoint(str(directory), tag=TAG, model=model)
    nxd.load_checkpoint(str(directory), tag=TAG, optimizer=optimizer)
