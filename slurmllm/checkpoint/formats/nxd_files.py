"""What neuronx-distributed wrote, read without it: whole parameters and moments, by name and part.

A value lies in one worker's file, or in several that agree; `nxd_shards.py` says where. Weights are
the fp32 master weights where they were saved.
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
from slurmllm.checkpoint.formats.safetensors_files import DTYPES, Region, StoredTensor
from slurmllm.checkpoint.state import MOMENTS
from slurmllm.config.recipe import ModelConfig
from slurmllm.errors import StorageError
from slurmllm.plan.parameters import parameter_shapes

MASTERS = "sharded_master_weights"
# Their indices alone are kept, some 100 kB a file of a thousand tensors.
_FILES_KEPT = 1024
_CODES = {dtype: code for code, dtype in DTYPES.items()}


class _Held(NamedTuple):
    """A tensor of a file, and what of a parameter is in it."""

    file: str
    key: Key
    local: StoredPart


class NxdFiles:
    """A checkpoint folder in NxD's format.

    Args:
        directory: The folder.
        model: The whole model's configuration.
        layout: The folder's.

    Attributes:
        tensors: The weights.
        moments: The optimizer's, by kind and parameter; empty where weights alone were saved.

    Raises:
        StorageError: its first files are missing or damaged.
    """

    def __init__(self, directory: Path, model: ModelConfig, layout: NxdLayout) -> None:
        self.directory, self._model, self._layout = directory, model, layout
        self._shapes = parameter_shapes(model)
        self._open = lru_cache(_FILES_KEPT)(lambda name: TorchFile(directory / name))
        self._places: dict[str, tuple[int, int]] = {}  # stage, and the optimizer's number there
        for stage, names in enumerate(layout.names):
            for number, name in enumerate(names):
                self._places.setdefault(name, (stage, number))
        known = [name for name in self._shapes if name in self._places]
        self._masters = bool(
            layout.trained
            and layout.zero
            and self._open(optimizer_file(0, 0, 0)).shape((MASTERS, 0)) is not None
        )
        weights = layout.optimizer_dtype if self._masters else layout.dtype
        self.tensors = {name: self._stored(name, weights) for name in known}
        self.moments: dict[tuple[str, str], StoredTensor] = {}
        if layout.trained:
            state = layout.optimizer_dtype if layout.zero else layout.dtype
            self.moments = {(k, name): self._stored(name, state) for k in MOMENTS for name in known}

    def _stored(self, name: str, dtype: str) -> StoredTensor:
        found: torch.dtype = getattr(torch, dtype)
        return StoredTensor(self._shapes[name], found, _CODES[found])

    def read(self, name: str, region: Region | None = None) -> Tensor:
        """A parameter or a part of it.

        Raises:
            StorageError: a worker's file is missing or damaged.
        """
        if self._masters:
            pieces = self._in_optimizer(name, (MASTERS, self._places[name][1]))
        else:
            pieces = self._in_model(name)
        return self._join(self.tensors[name], pieces, region, name)

    def read_moment(self, kind: str, name: str, region: Region | None = None) -> Tensor:
        """One of a parameter's moments or a part of it.

        Raises:
            StorageError: a worker's file is missing or damaged.
        """
        key = (*self._state(name), kind)
        return self._join(
            self.moments[kind, name], self._in_optimizer(name, key), region, f"{kind} of {name}"
        )

    def step(self, name: str) -> float:
        """How often a parameter was updated.

        Raises:
            StorageError: a worker's file is missing or damaged.
        """
        file = self._open(optimizer_file(0, 0, self._places[name][0]))
        return float(file.read((*self._state(name), "step")))

    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's hyperparameters, as a worker's file has them.

        Raises:
            StorageError: the file is missing or damaged.
        """
        if not self._layout.trained:
            return []
        groups = self._open(optimizer_file(0, 0, 0)).held.get("param_groups", [])
        return [{key: group[key] for key in group if key != "params"} for group in groups]

    def _state(self, name: str) -> Key:
        return ("base_state" if self._layout.zero else "state", self._places[name][1])

    def _in_model(self, name: str) -> Iterator[_Held]:
        stage = self._places[name][0]
        for rank in range(self._layout.tensor):
            yield _Held(model_file(rank, stage), (name,), self._part(name, rank))

    def _in_optimizer(self, name: str, key: Key) -> Iterator[_Held]:
        stage, data = self._places[name][0], self._layout.data
        for rank in range(self._layout.tensor):
            part = self._part(name, rank)
            if not self._layout.zero:
                yield _Held(optimizer_file(0, rank, stage), key, part)
                continue
            for replica in range(data):
                shard = shard_of_replica(part, data, replica)
                yield _Held(optimizer_file(replica, rank, stage), key, shard)

    def _part(self, name: str, tensor_rank: int) -> StoredPart:
        return part_of_worker(
            name, self._shapes[name], self._model, self._layout.tensor, tensor_rank
        )

    def _join(
        self, stored: StoredTensor, pieces: Iterator[_Held], region: Region | None, what: str
    ) -> Tensor:
        wanted = region or tuple(slice(0, size) for size in stored.shape)
        out = torch.empty([part.stop - part.start for part in wanted], dtype=stored.dtype)
        seen: set[tuple[tuple[int, int], ...]] = set()
        missing = out.numel()
        for held in pieces:
            for part in held.local.parts:
                key = tuple((piece.start, piece.stop) for piece in part.whole)
                common = _common(part.whole, wanted)
                if common is None or key in seen:  # several workers hold it
                    continue
                seen.add(key)
                values = self._read(held, _inside(common, part))
                out[_moved(common, wanted)] = values
                missing -= values.numel()
        if missing:
            raise StorageError(f"{self.directory} lacks {missing} of the values of {what}")
        return out

    def _read(self, held: _Held, region: Region) -> Tensor:
        file = self._open(held.file)
        found = file.shape(held.key)
        if found is not None and found != held.local.shape:
            raise StorageError(
                f"{file.path}: {'.'.join(map(str, held.key))} is {list(found)} where the mesh and "
                f"the model ask for {list(held.local.shape)}; restore it"
            )
        return file.read(held.key, region)


def _common(a: Region, b: Region) -> Region | None:
    both = tuple(
        slice(max(x.start, y.start), min(x.stop, y.stop)) for x, y in zip(a, b, strict=True)
    )
    return both if all(part.start < part.stop for part in both) else None


def _moved(region: Region, origin: Region) -> Region:
    return tuple(
        slice(x.start - o.start, x.stop - o.start) for x, o in zip(region, origin, strict=True)
    )


def _inside(common: Region, part: RegionPart) -> Region:
    """Where a region of the whole parameter lies in the stored tensor."""
    shifted = _moved(common, part.whole)
    return tuple(
        slice(x.start + at.start, x.stop + at.start)
        for x, at in zip(shifted, part.local, strict=True)
    )


Key = tuple[Any, ...]  # the way through nested dicts: ("base_state", 3, "exp_avg")


class _Stored(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int  # in the file, bytes
    in_rows: bool


class TorchFile:
    """One file.

    Attributes:
        held: Everything in it; tensors without values.

    Raises:
        StorageError: it is missing or damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with FakeTensorMode():
                self.held: dict[Any, Any] = torch.load(path, map_location="cpu", weights_only=True)
        except OSError as error:
            raise StorageError(f"{path} cannot be read: {error.strerror or error}") from error
        except Exception as error:  # torch raises what it likes on damaged bytes
            raise StorageError(f"{path} is damaged: {error}; restore it") from error
        self._tensors = {key: _stored(tensor) for key, tensor in _tensors(self.held)}

    def shape(self, key: Key) -> tuple[int, ...] | None:
        """A tensor's dimensions; None where it is not there."""
        return self._tensors[key].shape if key in self._tensors else None

    def dtype(self, key: Key) -> torch.dtype | None:
        """A tensor's type; None where it is not there."""
        return self._tensors[key].dtype if key in self._tensors else None

    def read(self, key: Key, region: Region | None = None) -> Tensor:
        """A tensor or a part of it.

        Raises:
            StorageError: it is not there, or the file cannot be read.
        """
        stored = self._tensors.get(key)
        if stored is None or not stored.in_rows:
            raise StorageError(f"{self.path} holds no {'.'.join(map(str, key))}; restore it")
        shape, first = list(stored.shape), 0
        if region:
            first, shape[0] = region[0].start, region[0].stop - region[0].start
        out = torch.empty(shape, dtype=stored.dtype)
        if out.numel():
            row_bytes = out.nbytes // shape[0] if shape else 0
            self._fill(out, stored.offset + first * row_bytes)
        return out[(slice(None), *region[1:])] if region else out

    def _fill(self, out: Tensor, offset: int) -> None:
        target = out.reshape(-1).view(torch.uint8).numpy().data
        try:
            with self.path.open("rb") as stream:
                stream.seek(offset)
                found = stream.readinto(target)
        except OSError as error:
            raise StorageError(f"{self.path} cannot be read: {error.strerror or error}") from error
        if found != len(target):
            raise StorageError(f"{self.path} is cut short; restore it")


def _tensors(held: Mapping[Any, Any], way: Key = ()) -> Iterator[tuple[Key, Tensor]]:
    for key, value in held.items():
        if isinstance(value, Tensor):
            yield (*way, key), value
        elif isinstance(value, Mapping):
            yield from _tensors(value, (*way, key))


def _stored(tensor: Tensor) -> _Stored:
    start: int = tensor.untyped_storage()._checkpoint_offset or 0
    offset = start + int(tensor.storage_offset()) * tensor.itemsize
    return _Stored(tuple(tensor.shape), tensor.dtype, offset, tensor.is_contiguous())
