"""The weights of a checkpoint, imported or a run's: opening them, and filling a model with them.

A worker reads no more than its own share of a parameter.
"""

from __future__ import annotations

import json
from pathlib import Path

from torch import Tensor

from slurmllm.backends.base import WeightReader
from slurmllm.checkpoint.origin import INDEX, Origin, check_fit
from slurmllm.checkpoint.padding import read_padded
from slurmllm.checkpoint.safetensors_files import Region, TensorFiles, open_files
from slurmllm.checkpoint.training_files import backend_files, of_backend
from slurmllm.config.recipe import ModelConfig
from slurmllm.errors import StorageError


def open_weights(origin: Origin) -> TensorFiles:
    """The tensors of a checkpoint folder, under our names and in our layout.

    Raises:
        StorageError: files are missing or damaged.
    """
    directory = origin.directory
    if origin.imported is None or of_backend(directory):
        return backend_files(origin)
    path = directory / INDEX
    try:
        weight_map: dict[str, str] = json.loads(path.read_bytes())["weight_map"]
        names = sorted(set(weight_map.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise StorageError(f"cannot read {path}: {error}; import the model again") from error
    files, faults = open_files(directory, names, weight_map)
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
    weights = open_weights(check_fit(directory, config))

    def read(name: str, region: Region) -> Tensor:
        if name not in weights.tensors:
            raise StorageError(f"{directory} holds no {name}; restore it, or import it again")
        stored = weights.tensors[name]
        return read_padded(name, region, stored, weights.read, config.vocab_size)

    return read
