"""Weights and optimizer state of a run's checkpoint, whichever backend and mesh wrote it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Protocol

from torch import Tensor

from slurmllm.checkpoint.nxd_files import NxdFiles
from slurmllm.checkpoint.nxd_layout import LAYOUT, read_layout
from slurmllm.checkpoint.origin import MODEL, Origin, check_fit
from slurmllm.checkpoint.padding import read_padded
from slurmllm.checkpoint.safetensors_files import Region, StoredTensor, TensorFiles
from slurmllm.checkpoint.sharded_files import METADATA, ShardedFiles
from slurmllm.checkpoint.state import TRAIN_STATE
from slurmllm.config.recipe import ModelConfig
from slurmllm.errors import StorageError


class TrainingFiles(TensorFiles, Protocol):
    """Weights as `tensors` and `read` have them, and AdamW's state."""

    @property
    def moments(self) -> Mapping[tuple[str, str], StoredTensor]:
        """By kind, `exp_avg` or `exp_avg_sq`, and parameter; empty where there are none."""
        ...

    def read_moment(self, kind: str, name: str, region: Region | None = None) -> Tensor:
        """One of a parameter's moments, or a part of it; for reading only."""
        ...

    def step(self, name: str) -> float:
        """How often a parameter was updated."""
        ...


def of_backend(directory: Path) -> bool:
    """Whether a folder is in a backend's format."""
    return any((directory / name).is_file() for name in (LAYOUT, METADATA))


def backend_files(origin: Origin) -> TrainingFiles:
    """The files of a folder in a backend's format, as they are.

    Raises:
        StorageError: they are missing or damaged.
    """
    layout = read_layout(origin.directory)
    if layout is not None:
        return NxdFiles(origin.directory, origin.model, layout)
    return ShardedFiles(origin.directory)


class _Fitted:
    """Files of a checkpoint with as many padding rows as a run has: those stored, then 0."""

    def __init__(self, files: TrainingFiles) -> None:
        self._files = files
        self.tensors, self.moments = files.tensors, files.moments

    def read(self, name: str, region: Region | None = None) -> Tensor:
        """A weight or a part of it."""
        return self._read(name, region, name, self.tensors.get(name), self._files.read)

    def read_moment(self, kind: str, name: str, region: Region | None = None) -> Tensor:
        """One of a parameter's moments or a part of it."""
        read = partial(self._files.read_moment, kind)
        return self._read(name, region, f"{kind} of {name}", self.moments.get((kind, name)), read)

    def _read(
        self,
        name: str,
        region: Region | None,
        what: str,
        stored: StoredTensor | None,
        read: Callable[[str, Region | None], Tensor],
    ) -> Tensor:
        if stored is None:
            raise StorageError(f"the checkpoint holds no {what}; restore it")
        region = region or tuple(slice(0, size) for size in stored.shape)
        return read_padded(name, region, stored, read, stored.shape[0])

    def step(self, name: str) -> float:
        """How often a parameter was updated."""
        return self._files.step(name)


def open_training(directory: Path, config: ModelConfig) -> TrainingFiles:
    """What a run continues from: parts of weights and moments.

    Every worker reads for itself; nothing is sent.

    Args:
        directory: A run's checkpoint, of any backend and mesh.
        config: The model of the run that continues; a folder of shards alone is taken to be its.

    Raises:
        RunError: it is no checkpoint, or another model's.
        StorageError: it is damaged, or has no optimizer state; so do the readings.
    """
    named = any((directory / name).is_file() for name in (TRAIN_STATE, MODEL))
    files = backend_files(
        check_fit(directory, config) if named else Origin(directory, config, None)
    )
    if not files.moments:
        raise StorageError(
            f"{directory} holds weights and no optimizer state; a run starts from it by "
            "train.init_from"
        )
    return _Fitted(files)
