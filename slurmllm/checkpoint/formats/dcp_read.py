"""Reading the native backend's checkpoints: tensors or regions of them, whatever mesh wrote them.

Only the chunks that overlap a region are read, one at a time, and no process group is needed.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import IO, cast

import numpy as np
import torch
from torch import Tensor

from slurmllm.checkpoint.formats.pickles import (
    ChunkTable,
    FilePart,
    Rows,
    StoredChunks,
    read_metadata,
)
from slurmllm.checkpoint.formats.safetensors_files import StoredTensor
from slurmllm.checkpoint.shards import Region, intersection, shifted
from slurmllm.checkpoint.state import MOMENTS
from slurmllm.errors import StorageError
from slurmllm.run.safe_files import open_regular

# Prefixes in the backend's state: weights, and the optimizer's moments and step of each.
MODEL, OPTIMIZER = "model.", "optimizer."


class DcpFiles:
    """One checkpoint folder in DCP's format; see `weights.TrainingFiles`.

    The constructor and every read raise a StorageError if the folder is damaged. Workers get the
    `table` that rank 0 has read; None: read it.
    """

    def __init__(self, directory: Path, table: ChunkTable | None = None) -> None:
        self.directory = directory
        self._files, self._stored = table or read_metadata(directory)
        stored = {
            key: StoredTensor.of(chunks.shape, chunks.dtype)
            for key, chunks in self._stored.items()
            if chunks.dtype is not None and key.startswith((MODEL, OPTIMIZER))
        }
        self.tensors = {k.removeprefix(MODEL): t for k, t in stored.items() if k.startswith(MODEL)}
        if not self.tensors:
            raise StorageError(f"{directory} holds no weights: no tensor begins with {MODEL}")
        self.moments = {
            (kind, name): stored[key]
            for kind in MOMENTS
            for name in self.tensors
            if (key := _key(name, kind)) in stored
        }

    def read(self, name: str, region: Region | None = None) -> Tensor:
        return self.read_key(MODEL + name, region, name)

    def read_moment(self, kind: str, name: str, region: Region | None = None) -> Tensor:
        return self.read_key(_key(name, kind), region, f"{kind} of {name}")

    def step(self, name: str) -> float:
        return float(self.read_key(_key(name, "step"), None, f"step of {name}"))

    def read_key(self, key: str, region: Region | None = None, title: str | None = None) -> Tensor:
        """Read a tensor by its key in the state; `title` names it in errors."""
        name = title or key
        stored = self._stored.get(key)
        if stored is None or stored.dtype is None:
            raise StorageError(f"{self.directory} holds no {name}; restore it")
        region = region or tuple(slice(0, size) for size in stored.shape)
        size = [part.stop - part.start for part in region]
        overlaps = _overlaps(stored, region)
        # A gap between the chunks would leave uninitialized values.
        if overlaps.sum() < math.prod(size):
            raise StorageError(
                f"{self.directory} holds {overlaps.sum()} of {math.prod(size)} values of {name}; "
                "restore it"
            )
        try:
            out = torch.empty(size, dtype=stored.dtype)
        except RuntimeError as error:  # a damaged size
            raise StorageError(f"cannot read {name} from {self.directory}: {error}") from error
        dims = len(region)
        for *numbers, file, at, length in stored.rows[overlaps > 0].tolist():
            pairs = zip(numbers[:dims], numbers[dims:], strict=True)
            whole = tuple(slice(offset, offset + size) for offset, size in pairs)
            common = intersection(region, whole)
            chunk = self._read_chunk(self._files[file], at, length, title or "shards")
            if list(chunk.shape) != numbers[dims:]:
                raise StorageError(
                    f"cannot read {name} from {self.directory}: a chunk is {list(chunk.shape)} "
                    f"instead of {numbers[dims:]}"
                )
            out[shifted(common, region)] = chunk[shifted(common, whole)]
        return out

    def require_shape(self, key: str, shape: tuple[int, ...]) -> None:
        """Raise a StorageError if a tensor is stored in another shape."""
        stored = self._stored.get(key)
        if stored is not None and stored.shape != shape:
            raise StorageError(
                f"{key} is {list(stored.shape)} in {self.directory} instead of {list(shape)}; "
                "restore it"
            )

    def _read_chunk(self, name: str, at: int, length: int, title: str) -> Tensor:
        try:
            with open_regular(self.directory / name) as stream:
                part = cast(IO[bytes], FilePart(stream, at, length))
                chunk: Tensor = torch.load(part, map_location="cpu", weights_only=True)
        except Exception as error:  # damaged bytes may raise anything
            raise StorageError(f"cannot read {title} from {self.directory}: {error}") from error
        if not isinstance(chunk, Tensor):
            raise StorageError(f"cannot read {title} from {self.directory}: it is no tensor")
        return chunk


def _key(name: str, kind: str) -> str:
    return f"{OPTIMIZER}{name}.{kind}"


def _overlaps(stored: StoredChunks, region: Region) -> Rows:
    """Return how many values of each chunk are in a region. [chunks]"""
    start = np.array([part.start for part in region], dtype=np.int64)
    stop = np.array([part.stop for part in region], dtype=np.int64)
    offsets, sizes = np.split(stored.rows[:, :-3], 2, axis=1)
    common = np.minimum(stop, offsets + sizes) - np.maximum(start, offsets)
    overlaps: Rows = common.clip(min=0).prod(axis=1)
    return overlaps
