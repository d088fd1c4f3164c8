"""Reading neuronx-distributed's checkpoints without it: whole parameters and moments, or regions.

A value is in one worker's file, or in several that agree; `nxd_layout.py` computes which. Weights
are the fp32 master weights if the checkpoint has them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from slurmllm.checkpoint.formats.nxd_layout import (
    NxdLayout,
    RegionPart,
    StoredPart,
    model_file,
    optimizer_file,
    part_of_worker,
    shard_of_replica,
)
from slurmllm.checkpoint.formats.safetensors_files import StoredTensor
from slurmllm.checkpoint.shards import Region
from slurmllm.checkpoint.state import MOMENTS
from slurmllm.config.recipe import ModelConfig
from slurmllm.errors import StorageError
from slurmllm.plan.parameters import parameter_shapes

MASTERS = "sharded_master_weights"
# Only the files' tables of tensors are cached: about 100 kB for a thousand tensors.
_CACHED_FILES = 1024

Key = tuple[Any, ...]  # keys through nested dicts: ("base_state", 3, "exp_avg")


class _Source(NamedTuple):
    """A tensor of a file, and the part of a parameter in it."""

    file: str
    key: Key
    part: StoredPart


class NxdFiles:
    """A checkpoint folder in NxD's format; see `weights.TrainingFiles`.

    Attributes:
        tensors: The weights.
        moments: The optimizer's, by kind and parameter; empty if only weights were saved.

    Raises:
        StorageError: A worker's file is missing or damaged; every read raises it too.
    """

    def __init__(self, directory: Path, model: ModelConfig, layout: NxdLayout) -> None:
        self.directory, self._model, self._layout = directory, model, layout
        self._shapes = parameter_shapes(model)
        self._open = lru_cache(_CACHED_FILES)(lambda name: TorchFile(directory / name))
        # Parameter → stage and number in the stage's optimizer. Tied embeddings have two stages.
        self._places: dict[str, tuple[int, int]] = {}
        for stage, names in enumerate(layout.names):
            for number, name in enumerate(names):
                self._places.setdefault(name, (stage, number))
        self._masters = bool(
            layout.trained
            and layout.zero
            and self._open(optimizer_file(0, 0, 0)).shape((MASTERS, 0)) is not None
        )
        weights = layout.optimizer_dtype if self._masters else layout.dtype
        state = layout.optimizer_dtype if layout.zero else layout.dtype
        shapes = {name: shape for name, shape in self._shapes.items() if name in self._places}
        self.tensors = {
            name: StoredTensor.of(shape, getattr(torch, weights)) for name, shape in shapes.items()
        }
        self.moments = {
            (kind, name): StoredTensor.of(shape, getattr(torch, state))
            for kind in (MOMENTS if layout.trained else ())
            for name, shape in shapes.items()
        }

    def read(self, name: str, region: Region | None = None) -> Tensor:
        stage, number = self._places[name]
        if self._masters:
            sources = self._optimizer_sources(name, (MASTERS, number))
        else:
            sources = (
                _Source(model_file(rank, stage), (name,), self._part(name, rank))
                for rank in range(self._layout.tensor)
            )
        return self._assemble(self.tensors[name], sources, region, name)

    def read_moment(self, kind: str, name: str, region: Region | None = None) -> Tensor:
        sources = self._optimizer_sources(name, (*self._state_key(name), kind))
        return self._assemble(self.moments[kind, name], sources, region, f"{kind} of {name}")

    def step(self, name: str) -> float:
        file = self._open(optimizer_file(0, 0, self._places[name][0]))
        return float(file.read((*self._state_key(name), "step")))

    def param_groups(self) -> list[dict[str, Any]]:
        """Returns the optimizer's hyperparameters from the first worker's file."""
        if not self._layout.trained:
            return []
        groups = self._open(optimizer_file(0, 0, 0)).content.get("param_groups", [])
        return [{key: group[key] for key in group if key != "params"} for group in groups]

    def _state_key(self, name: str) -> Key:
        return ("base_state" if self._layout.zero else "state", self._places[name][1])

    def _optimizer_sources(self, name: str, key: Key) -> Iterator[_Source]:
        stage, data = self._places[name][0], self._layout.data
        for rank in range(self._layout.tensor):
            part = self._part(name, rank)
            if not self._layout.zero:
                yield _Source(optimizer_file(0, rank, stage), key, part)
                continue
            for replica in range(data):
                shard = shard_of_replica(part, data, replica)
                yield _Source(optimizer_file(replica, rank, stage), key, shard)

    def _part(self, name: str, rank: int) -> StoredPart:
        return part_of_worker(name, self._shapes[name], self._model, self._layout.tensor, rank)

    def _assemble(
        self, stored: StoredTensor, sources: Iterator[_Source], region: Region | None, what: str
    ) -> Tensor:
        """Copies the region from the files that overlap it."""
        wanted = region or tuple(slice(0, size) for size in stored.shape)
        out = torch.empty([part.stop - part.start for part in wanted], dtype=stored.dtype)
        seen: set[tuple[tuple[int, int], ...]] = set()
        missing = out.numel()
        for source in sources:
            for part in source.part.parts:
                key = tuple((piece.start, piece.stop) for piece in part.whole)
                common = _intersection(part.whole, wanted)
                if common is None or key in seen:  # several workers hold the same values
                    continue
                seen.add(key)
                values = self._read(source, _local_region(common, part))
                out[_shifted(common, wanted)] = values
                missing -= values.numel()
        if missing:  # else `out` would have uninitialized values
            raise StorageError(f"{self.directory} lacks {missing} of the values of {what}")
        return out

    def _read(self, source: _Source, region: Region) -> Tensor:
        file = self._open(source.file)
        shape = file.shape(source.key)
        if shape is not None and shape != source.part.shape:
            raise StorageError(
                f"{file.path}: {'.'.join(map(str, source.key))} is {list(shape)}, but the mesh and "
                f"the model require {list(source.part.shape)}; restore it"
            )
        return file.read(source.key, region)


def _intersection(a: Region, b: Region) -> Region | None:
    both = tuple(
        slice(max(x.start, y.start), min(x.stop, y.stop)) for x, y in zip(a, b, strict=True)
    )
    return both if all(part.start < part.stop for part in both) else None


def _shifted(region: Region, origin: Region) -> Region:
    return tuple(
        slice(x.start - o.start, x.stop - o.start) for x, o in zip(region, origin, strict=True)
    )


def _local_region(common: Region, part: RegionPart) -> Region:
    """Converts a region of the whole parameter to one of the stored tensor."""
    return tuple(
        slice(x.start + at.start, x.stop + at.start)
        for x, at in zip(_shifted(common, part.whole), part.local, strict=True)
    )


class _TensorRecord(NamedTuple):
    """Place of a tensor in a file; `offset` in bytes."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    contiguous: bool


class TorchFile:
    """One file of torch.save, read tensor by tensor.

    Attributes:
        content: Everything in the file; its tensors have no values.

    Raises:
        StorageError: The file is missing or damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            # Fake tensors have shapes, types and file offsets, but no memory.
            with FakeTensorMode():
                self.content: dict[Any, Any] = torch.load(
                    path, map_location="cpu", weights_only=True
                )
        except OSError as error:
            raise StorageError(f"{path} cannot be read: {error.strerror or error}") from error
        except Exception as error:  # damaged bytes may raise anything
            raise StorageError(f"{path} is damaged: {error}; restore it") from error
        self._records = {}
        for key, tensor in _tensors(self.content):
            start: int = tensor.untyped_storage()._checkpoint_offset or 0
            offset = start + int(tensor.storage_offset()) * tensor.itemsize
            self._records[key] = _TensorRecord(
                tuple(tensor.shape), tensor.dtype, offset, tensor.is_contiguous()
            )

    def shape(self, key: Key) -> tuple[int, ...] | None:
        return self._records[key].shape if key in self._records else None

    def dtype(self, key: Key) -> torch.dtype | None:
        return self._records[key].dtype if key in self._records else None

    def read(self, key: Key, region: Region | None = None) -> Tensor:
        """Returns a tensor or a region of it.

        Raises:
            StorageError: The tensor is missing, or the file cannot be read.
        """
        record = self._records.get(key)
        if record is None or not record.contiguous:
            raise StorageError(f"{self.path} holds no {'.'.join(map(str, key))}; restore it")
        # Whole rows are read, the other dimensions are cut afterwards.
        shape, first = list(record.shape), 0
        if region:
            first, shape[0] = region[0].start, region[0].stop - region[0].start
        out = torch.empty(shape, dtype=record.dtype)
        if out.numel():
            row_bytes = out.nbytes // shape[0] if shape else 0
            self._read_into(out, record.offset + first * row_bytes)
        return out[(slice(None), *region[1:])] if region else out

    def _read_into(self, out: Tensor, offset: int) -> None:
        target = out.reshape(-1).view(torch.uint8).numpy().data
        try:
            with self.path.open("rb") as stream:
                stream.seek(offset)
                num_bytes = stream.readinto(target)
        except OSError as error:
            raise StorageError(f"{self.path} cannot be read: {error.strerror or error}") from error
        if num_bytes != len(target):
            raise StorageError(f"{self.path} is cut short; restore it")


def _tensors(content: Mapping[Any, Any], keys: Key = ()) -> Iterator[tuple[Key, Tensor]]:
    for key, value in content.items():
        if isinstance(value, Tensor):
            yield (*keys, key), value
        elif isinstance(value, Mapping):
            yield from _tensors(value, (*keys, key))
