"""Reading the native backend's checkpoints: tensors or regions of them, whatever mesh wrote them.

Only the chunks that overlap a region are read, one at a time, and no process group is needed. A
load opens every file once: on a shared file system an open may take a millisecond.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from slurmllm.core.errors import StorageError
from slurmllm.core.run.safe_files import open_regular
from slurmllm.train.checkpoint.archive_checks import FilePart
from slurmllm.train.checkpoint.formats.pickles import (
    ChunkTable,
    StoredChunks,
    UnsafePickleError,
    check_torch_file,
    read_metadata,
)
from slurmllm.train.checkpoint.formats.safetensors_files import StoredTensor
from slurmllm.train.checkpoint.state import MOMENTS, MOMENTUM
from slurmllm.train.model.regions import Region, intersection, relative_to, sizes_of, whole_region

# Prefixes in the backend's state: weights, and the optimizer's moments and step of each.
MODEL = "model."
OPTIMIZER = "optimizer."


class DcpFiles:
    """One checkpoint folder in DCP's format; see `weights.TrainingFiles`.

    Raises StorageErrors if it is damaged. Workers get rank 0's `table`; None: read it.
    """

    def __init__(self, directory: Path, table: ChunkTable | None = None) -> None:
        self.directory = directory
        self._files, self._stored = table or read_metadata(directory)
        stored = {
            key: StoredTensor(chunks.shape, chunks.dtype)
            for key, chunks in self._stored.items()
            if chunks.dtype is not None and key.startswith((MODEL, OPTIMIZER))
        }
        self.tensors = {k.removeprefix(MODEL): t for k, t in stored.items() if k.startswith(MODEL)}
        if not self.tensors:
            raise StorageError(f"{directory} holds no weights: no tensor begins with {MODEL}")
        self.moments = {
            (kind, name): stored[key]
            for kind in (*MOMENTS, MOMENTUM)
            for name in self.tensors
            if (key := _key(name, kind)) in stored
        }

    def read(self, name: str, region: Region | None = None, kind: str | None = None) -> Tensor:
        return self.read_key(MODEL + name if kind is None else _key(name, kind), region)

    def step(self, name: str) -> float:
        return float(self.read_key(_key(name, "step")))

    def read_key(self, key: str, region: Region | None = None) -> Tensor:
        """Read a tensor by its key in the state."""
        stored = self._require(key)
        region = region or whole_region(stored.shape)
        rows = self._rows(key, region)
        try:
            out = torch.empty(sizes_of(region), dtype=stored.dtype)
        except RuntimeError as error:  # a damaged size
            raise StorageError(f"cannot read {key} from {self.directory}: {error}") from error
        self._copy([_Copy(row, out, region, key) for row in rows], key)
        return out

    def fill(self, tensors: Mapping[str, tuple[Tensor, Region]]) -> None:
        """Copy regions of tensors, by keys, into tensors of their size, opening each file once."""
        self._copy(
            [
                _Copy(row, out, region, key)
                for key, (out, region) in tensors.items()
                for row in self._rows(key, region)
            ],
            "shards",
        )

    def require_shape(self, key: str, shape: tuple[int, ...]) -> None:
        """Raise a StorageError if a tensor is stored in another shape."""
        stored = self._stored.get(key)
        if stored is not None and stored.shape != shape:
            raise StorageError(
                f"{key} is {list(stored.shape)} in {self.directory} instead of {list(shape)}; "
                "restore it"
            )

    def _require(self, key: str) -> StoredChunks:
        stored = self._stored.get(key)
        if stored is None or stored.dtype is None:
            raise StorageError(f"{self.directory} holds no {key}; restore it")
        return stored

    def _rows(self, key: str, region: Region) -> list[list[int]]:
        """Return the rows of the chunks that overlap a region, which must be the whole of it."""
        stored = self._require(key)
        start = np.array([bounds.start for bounds in region], dtype=np.int64)
        stop = np.array([bounds.stop for bounds in region], dtype=np.int64)
        offsets, sizes = np.split(stored.rows[:, :-3], 2, axis=1)
        common = np.minimum(stop, offsets + sizes) - np.maximum(start, offsets)
        overlaps = common.clip(min=0).prod(axis=1)  # values of each chunk in the region
        num_values = math.prod(sizes_of(region))
        # A gap between the chunks would leave uninitialized values.
        if overlaps.sum() < num_values:
            raise StorageError(
                f"{self.directory} holds {overlaps.sum()} of {num_values} values of {key}; "
                "restore it"
            )
        rows: list[list[int]] = stored.rows[overlaps > 0].tolist()
        return rows

    def _copy(self, copies: Sequence[_Copy], title: str) -> None:
        """Read the chunks in the order of files and offsets, one at a time."""
        in_order = sorted(copies, key=lambda copy: copy.row[-3:])
        try:
            for file, group in groupby(in_order, key=lambda copy: copy.row[-3]):
                with open_regular(self.directory / self._files[file]) as stream:
                    for copy in group:
                        self._copy_chunk(stream, copy)
        except OSError as error:
            raise StorageError(f"cannot read {title} from {self.directory}: {error}") from error

    def _copy_chunk(self, stream: BinaryIO, copy: _Copy) -> None:
        *numbers, file, start_byte, length = copy.row
        offsets = numbers[: len(copy.region)]
        sizes = numbers[len(copy.region) :]
        title = f"cannot read {copy.key} from {self.directory}"
        section = cast(BinaryIO, FilePart(stream, start_byte, length))
        try:
            check_torch_file(section)
            section.seek(0)
            chunk: Tensor = torch.load(section, map_location="cpu", weights_only=True)
        except (OSError, MemoryError):
            raise
        except UnsafePickleError as error:
            raise StorageError(f"{title}: {self._files[file]} is {error}") from error
        except Exception as error:  # damaged bytes may raise anything, with torch's advice for us
            raise StorageError(
                f"{title}: {self._files[file]} is truncated or damaged ({type(error).__name__}); "
                "restore it"
            ) from error
        shape = list(chunk.shape) if isinstance(chunk, Tensor) else "no tensor"
        if shape != sizes:
            raise StorageError(f"{title}: a chunk is {shape} instead of {sizes}")
        whole = tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
        common = intersection(copy.region, whole)
        copy.out[relative_to(common, copy.region)].copy_(chunk[relative_to(common, whole)])


class _Copy(NamedTuple):
    """A chunk that is read into a tensor, as far as it is in the tensor's region."""

    row: list[int]  # of `StoredChunks`
    out: Tensor
    region: Region
    key: str


def _key(name: str, kind: str) -> str:
    return f"{OPTIMIZER}{name}.{kind}"
