"""Weights and optimizer state of a checkpoint folder, whatever its format, mesh and padding."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from slurmllm.core.config.recipe import ModelConfig
from slurmllm.core.errors import StorageError
from slurmllm.core.format import format_lines
from slurmllm.train.checkpoint.formats.dcp_read import DcpFiles
from slurmllm.train.checkpoint.formats.nxd_files import LAYOUT, NxdFiles, read_layout
from slurmllm.train.checkpoint.formats.pickles import METADATA
from slurmllm.train.checkpoint.formats.safetensors_files import (
    StoredTensor,
    TensorFiles,
    open_safetensors,
)
from slurmllm.train.checkpoint.shards import WeightReader
from slurmllm.train.checkpoint.state import INDEX, MODEL, TRAIN_STATE, Origin, require_model
from slurmllm.train.model.regions import Region, sizes_of, whole_region

# Parameters with one row per vocabulary entry, and possibly padding rows after them.
VOCABULARY = ("embed.weight", "head.weight")


class TrainingFiles(TensorFiles, Protocol):
    """Weights (`tensors` and `read`) and the optimizer's state."""

    @property
    def moments(self) -> Mapping[tuple[str, str], StoredTensor]:
        """By kind (such as `exp_avg`) and parameter; empty without optimizer state."""
        ...

    def read(self, name: str, region: Region | None = None, kind: str | None = None) -> Tensor:
        """Return a parameter or its moment `kind`; see `TensorFiles.read`."""
        ...

    def step(self, name: str) -> float:
        """Return the number of updates of a parameter."""
        ...


def open_weights(origin: Origin) -> TensorFiles:
    """Open a checkpoint's weights, under our names and in our layout; StorageError if damaged."""
    directory = origin.directory
    has_shards = any((directory / name).is_file() for name in (LAYOUT, METADATA))
    if origin.imported is None or has_shards:
        return backend_files(origin)
    path = directory / INDEX
    try:
        weight_map: dict[str, str] = json.loads(path.read_bytes())["weight_map"]
        names = sorted({Path(name).name for name in weight_map.values()})  # none outside
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise StorageError(f"cannot read {path}: {error}; import the model again") from error
    files, faults = open_safetensors(directory, names, weight_map)
    # Imported once without faults: the files were changed or damaged since.
    if faults:
        raise StorageError(f"{directory} is damaged:{format_lines(faults)}")
    return files


def backend_files(origin: Origin) -> TrainingFiles:
    layout = read_layout(origin.directory)
    if layout is not None:
        return NxdFiles(origin.directory, origin.model, layout)
    return DcpFiles(origin.directory)


def weight_reader(directory: Path, config: ModelConfig) -> WeightReader:
    """Return a reader of regions of a checkpoint's parameters, with zeros as padding rows."""
    weights = open_weights(require_model(directory, config))

    def read(name: str, region: Region) -> Tensor:
        if name not in weights.tensors:
            raise StorageError(f"{directory} holds no {name}; restore it, or import it again")
        return read_padded(name, region, weights.tensors[name], weights.read, config.vocab_size)

    return read


def open_training(directory: Path, config: ModelConfig) -> TrainingFiles:
    """Open weights and optimizer state for a run to resume from, padded as the run needs.

    Raises a RunError if the folder is of another model, a StorageError if it has no state.
    """
    # A folder with nothing but shards is assumed to be of the run's model.
    named = any((directory / name).is_file() for name in (TRAIN_STATE, MODEL))
    files = backend_files(
        require_model(directory, config) if named else Origin(directory, config, None)
    )
    if not files.moments:
        raise StorageError(
            f"{directory} holds weights and no optimizer state; a run starts from it by "
            "train.init_from"
        )
    return _PaddedFiles(files)


class _PaddedFiles:
    """Files of a checkpoint, with as many padding rows as the reader asks for."""

    def __init__(self, files: TrainingFiles) -> None:
        self._files = files
        self.tensors = files.tensors
        self.moments = files.moments
        self.step = files.step

    def read(self, name: str, region: Region | None = None, kind: str | None = None) -> Tensor:
        stored = self.tensors.get(name) if kind is None else self.moments.get((kind, name))
        if stored is None:
            title = name if kind is None else f"{kind} of {name}"
            raise StorageError(f"the checkpoint holds no {title}; restore it")
        region = region or whole_region(stored.shape)
        read = partial(self._files.read, kind=kind)
        return read_padded(name, region, stored, read, stored.shape[0])


def read_padded(
    name: str,
    region: Region,
    stored: StoredTensor,
    read: Callable[[str, Region | None], Tensor],
    vocabulary_rows: int,
) -> Tensor:
    """Read a region of a parameter or one of its moments, with the reader's padding, which is 0.

    Of one in VOCABULARY, `vocabulary_rows` are in the file. Raises a StorageError if the region
    exceeds what is stored.
    """
    size = sizes_of(region)
    rows = size[0]
    if name in VOCABULARY:
        rows = min(max(vocabulary_rows - region[0].start, 0), rows)
        region = (slice(region[0].start, region[0].start + rows), *region[1:])
    # The number of padding rows depends on the mesh that wrote the file, so that they differ.
    if rows == 0 or 0 in size:  # nothing but padding, or more workers than rows
        return torch.zeros(size, dtype=stored.dtype)
    shape = stored.shape
    if len(shape) != len(region) or any(r.stop > s for r, s in zip(region, shape, strict=True)):
        raise StorageError(
            f"{name} is {list(shape)} in the checkpoint, too small for "
            f"{[r.stop for r in region]}; restore the checkpoint, or import the model again"
        )
    values = read(name, None if region == whole_region(shape) else region)
    if rows == size[0]:
        return values
    return torch.cat([values, values.new_zeros(size[0] - rows, *size[1:])])
