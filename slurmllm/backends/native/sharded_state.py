"""Model, optimizer and random state to files and back, by torch.distributed.checkpoint.

Every worker writes its own shards into one file; `.metadata` maps parameter names to pieces, so
that another number of workers can read them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedWriter, FileIO, IOBase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import (
    FileSystem,
    FileSystemReader,
    FileSystemWriter,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.state_dict_saver import save as save_state
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from slurmllm.backends.base import Worker
from slurmllm.errors import CodeError, SlurmllmError, StorageError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer


def save(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    directory: Path,
    worker: Worker,
    group: dist.ProcessGroup,
) -> list[str]:
    """Write this worker's shards (collective).

    Returns:
        Names of the files that this worker wrote.

    Raises:
        StorageError: the file system refused one of the workers.
    """
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {
        "model": model_state,
        # Not its param_groups: learning rate and the like come from the recipe.
        "optimizer": optimizer_state["state"],
        "random": {_random_key(worker.rank): _random_state()},
    }
    try:
        save_state(
            state,
            storage_writer=_Writer(directory),
            process_group=group,
        )
    except CheckpointException as error:  # on all workers alike
        raise _blamed(error, "cannot write shards") from error
    written = [path.name for path in directory.glob(f"__{worker.rank}_*.distcp")]
    return sorted(written) + ([".metadata"] if worker.rank == 0 else [])


def load(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    directory: Path,
    worker: Worker,
    group: dist.ProcessGroup,
) -> None:
    """Read what `save` wrote, by any number of workers (collective).

    The random state comes back where the number of workers is the same; else it stays as the
    start-up seeded it.
    """
    reader = FileSystemReader(directory)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state["state"]}
    random_state = _saved_random_state(reader, worker)
    if random_state:
        state["random"] = {_random_key(worker.rank): random_state}
    try:
        load_state(state, storage_reader=reader, process_group=group)
    except CheckpointException as error:
        raise _blamed(error, f"cannot read shards from {directory}") from error
    set_state_dict(
        model,
        optimizer,
        model_state_dict=model_state,
        optim_state_dict=optimizer_state,
    )
    _set_random_state(random_state)


class _Files(FileSystem):
    """DCP's files, with the refusals of the file system kept.

    torch.save swallows what its stream raises ("unexpected pos 704 vs 598").
    """

    def __init__(self) -> None:
        self.refusals: list[OSError] = []

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[IOBase]:
        with BufferedWriter(_WatchedFile(path, mode, self.refusals)) as stream:
            yield stream


class _WatchedFile(FileIO):
    def __init__(self, path: str | os.PathLike[str], mode: str, refusals: list[OSError]) -> None:
        super().__init__(os.fspath(path), mode)
        self._refusals = refusals

    def write(self, data: Buffer) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self._refusals.append(error)
            raise


class _Writer(FileSystemWriter):
    """DCP's writer, raising the file system's own error where there is one."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, sync_files=True)
        self.fs: _Files = _Files()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            if self.fs.refusals:
                raise self.fs.refusals[0] from error
            raise


def _blamed(error: CheckpointException, what: str) -> SlurmllmError:
    """The file system's refusals told from faults of the code."""
    rank, (cause, _) = next(iter(error.failures.items()))
    told = cause.strerror if isinstance(cause, OSError) and cause.strerror else str(cause)
    kind = StorageError if isinstance(cause, OSError) else CodeError
    return kind(f"{what}: {told} (rank {rank})")


def _random_key(rank: int) -> str:
    return f"rank_{rank:05d}"


def _random_state() -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _saved_random_state(reader: FileSystemReader, worker: Worker) -> dict[str, Tensor]:
    """Tensors to read this worker's random state into; none if another number of them saved."""
    saved = reader.read_metadata().state_dict_metadata
    savers = {key.split(".")[1] for key in saved if key.startswith("random.")}
    if len(savers) != worker.world_size:
        return {}
    mine = f"random.{_random_key(worker.rank)}"
    return {device: now for device, now in _random_state().items() if f"{mine}.{device}" in saved}


def _set_random_state(state: dict[str, Tensor]) -> None:
    if "cpu" in state:
        torch.set_rng_state(state["cpu"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
