"""Parameters with a row for each entry of the vocabulary, and padding rows after them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from slurmllm.checkpoint.formats.dcp_read import METADATA, DcpFiles
from slurmllm.checkpoint.formats.nxd_files import NxdFiles
from slurmllm.checkpoint.formats.nxd_layout import LAYOUT, read_layout
from slurmllm.checkpoint.formats.safetensors_files import (
    Region,
    StoredTensor,
    TensorFiles,
    open_safetensors,
)
from slurmllm.checkpoint.origin import INDEX, MODEL, Origin, require_model
from slurmllm.checkpoint.shards import WeightReader
from slurmllm.checkpoint.state import TRAIN_STATE
from slurmllm.config.recipe import ModelConfig
from slurmllm.errors import StorageError

VOCABULARY = ("embed.weight", "head.weight")


def read_padded(
    name: str,
    region: Region,
    stored: StoredTensor,
    read: Callable[[str, Region | None], Tensor],
    filled: int,
) -> Tensor:
    """A part of a parameter, or of a moment of it; rows of the vocabulary not read are 0.

    Args:
        name: The parameter's.
        region: Of the parameter with as many padding rows as the reader wants.
        stored: What the files have.
        read: Reads from them, by the parameter's name and a region; None: all of it.
        filled: Rows of the vocabulary that are read; those after them are 0.

    Raises:
        StorageError: the region lies outside of what is stored.
    """
    size = [part.stop - part.start for part in region]
    rows = size[0]
    if name in VOCABULARY:
        rows = min(max(filled - region[0].start, 0), rows)
        region = (slice(region[0].start, region[0].start + rows), *region[1:])
    if rows == 0 or 0 in size:  # nothing but padding; more workers than rows
        return torch.zeros(size, dtype=stored.dtype)
    shape = stored.shape
    if len(shape) != len(region) or any(r.stop > s for r, s in zip(region, shape, strict=True)):
        raise StorageError(
            f"{name} is {list(shape)} in the checkpoint, too small for "
            f"{[r.stop for r in region]}; restore the checkpoint, or import the model again"
        )
    whole = tuple(slice(0, length) for length in shape)
    values = read(name, None if region == whole else region)
    if rows == size[0]:
        return values
    return torch.cat([values, values.new_zeros(size[0] - rows, *size[1:])])


def open_weights(origin: Origin) -> TensorFiles:
    """The tensors of a checkpoint folder, under our names and in our layout.

    Raises:
        StorageError: files are missing or damaged.
    """
    directory = origin.directory
    if origin.imported is None or is_backend_format(directory):
        return backend_files(origin)
    path = directory / INDEX
    try:
        weight_map: dict[str, str] = json.loads(path.read_bytes())["weight_map"]
        names = sorted(set(weight_map.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise StorageError(f"cannot read {path}: {error}; import the model again") from error
    files, faults = open_safetensors(directory, names, weight_map)
    if faults:
        raise StorageError("\n".join([f"{directory} is damaged:", *(f"  {f}" for f in faults)]))
    return files


def weight_reader(directory: Path, config: ModelConfig) -> WeightReader:
    """Reads parts of a model's parameters from a checkpoint folder.

    Every worker does it for itself; nothing is sent. Padding rows of the vocabulary are 0.

    Args:
        directory: What `checkpoint import` made, or a run's checkpoint, of any mesh.
        config: The model's.

    Raises:
        RunError: it is no checkpoint, or another model's.
        StorageError: it is damaged; so does the reader.
    """
    weights = open_weights(require_model(directory, config))

    def read(name: str, region: Region) -> Tensor:
        if name not in weights.tensors:
            raise StorageError(f"{directory} holds no {name}; restore it, or import it again")
        stored = weights.tensors[name]
        return read_padded(name, region, stored, weights.read, config.vocab_size)

    return read


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


def is_backend_format(directory: Path) -> bool:
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
    return DcpFiles(origin.directory)


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
        require_model(directory, config) if named else Origin(directory, config, None)
    )
    if not files.moments:
        raise StorageError(
            f"{directory} holds weights and no optimizer state; a run starts from it by "
            "train.init_from"
        )
    return _Fitted(files)
