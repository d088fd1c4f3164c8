"""neuronx-distributed's checkpoints: their layout, and reading them without it.

    nxd_layout.json                                 NxdLayout; NxD's own files lack it
    nxd/model/dp_rank_00_tp_rank_TT_pp_rank_PP.pt   name → the worker's part of a parameter
    nxd/optim/dp_rank_DD_tp_rank_TT_pp_rank_PP.pt   the optimizer's state, by number
    nxd/checkpoint, nxd/done                        NxD's completion marks

The numbers count the optimizer's parameters, in the order of `names`. A value is in one worker's
file, or in several that agree. Weights are the fp32 master weights if the checkpoint has them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from slurmllm.core.config.recipe import ModelConfig
from slurmllm.core.errors import StorageError
from slurmllm.core.run.records import Record
from slurmllm.core.run.rundir import storage_errors
from slurmllm.core.run.safe_files import open_regular
from slurmllm.plan.parameters import Shape, parameter_shapes, share_of
from slurmllm.train.checkpoint.formats.pickles import check_torch_file
from slurmllm.train.checkpoint.formats.safetensors_files import StoredTensor
from slurmllm.train.checkpoint.shards import leaves
from slurmllm.train.checkpoint.state import MOMENTS
from slurmllm.train.model.regions import (
    Region,
    absolute,
    intersection,
    relative_to,
    sizes_of,
    whole_region,
)

LAYOUT = "nxd_layout.json"
TAG = "nxd"  # NxD's term for the folder of one checkpoint
MASTERS = "sharded_master_weights"

Key = tuple[Any, ...]  # keys through nested dicts: ("base_state", 3, "exp_avg")


class NxdLayout(Record):
    """`nxd_layout.json` of a checkpoint that NxD wrote,"""

    tensor: int  # tensor-parallel workers
    pipeline: int  # stages
    data: int  # data-parallel workers; each has a file of its own under zero
    virtual_pipeline: int = 1  # chunks of layers per stage
    zero: bool  # ZeRO-1: the optimizer's state is sharded over `data`
    optimizer_dtype: str  # of the moments, and of master weights: float32
    dtype: str  # of the weights: bfloat16
    trained: bool = True  # whether the optimizer's state is stored with the weights
    # Each stage's parameters in the optimizer's order, named as in the whole model.
    names: tuple[tuple[str, ...], ...]


def model_file(tensor_rank: int, pipeline_rank: int) -> str:
    """Return the path of a worker's weights in the folder; data-parallel replicas share it."""
    return f"{TAG}/model/{_file_name(0, tensor_rank, pipeline_rank)}"


def optimizer_file(data_rank: int, tensor_rank: int, pipeline_rank: int) -> str:
    """Return the path of a worker's optimizer state; `data_rank` is 0 without zero."""
    return f"{TAG}/optim/{_file_name(data_rank, tensor_rank, pipeline_rank)}"


def _file_name(data: int, tensor: int, pipeline: int) -> str:
    return f"dp_rank_{data:02d}_tp_rank_{tensor:02d}_pp_rank_{pipeline:02d}.pt"


def read_layout(directory: Path) -> NxdLayout | None:
    """Return the layout of a checkpoint folder, None if it is not in NxD's format."""
    path = directory / LAYOUT
    return NxdLayout.load(path) if path.is_file() else None


class RegionPart(NamedTuple):
    """A region of a parameter (`whole`), and its place in a stored tensor (`local`)."""

    whole: Region
    local: Region


class StoredPart(NamedTuple):
    """A tensor in a file: its shape, and the regions of the parameter in it; the rest is 0."""

    shape: Shape
    parts: tuple[RegionPart, ...]


def shard_of_replica(stored_part: StoredPart, data: int, data_rank: int) -> StoredPart:
    """Return the rows of a tensor that a data-parallel worker's optimizer holds under ZeRO-1."""
    each = -(-stored_part.shape[0] // data)  # NxD pads the last shards to equal size
    rows = slice(each * data_rank, each * (data_rank + 1))
    parts = []
    for whole, local in stored_part.parts:
        common = intersection(local[:1], (rows,))
        if common[0].start < common[0].stop:
            whole_rows = absolute(relative_to(common, local[:1]), whole[:1])
            local_rows = relative_to(common, (rows,))
            parts.append(RegionPart((*whole_rows, *whole[1:]), (*local_rows, *local[1:])))
    return StoredPart((each, *stored_part.shape[1:]), tuple(parts))


# A file, the key of a tensor in it, and the part of a parameter that the tensor is.
_Source = tuple[str, Key, StoredPart]


class NxdFiles:
    """A checkpoint folder in NxD's format; see `weights.TrainingFiles`. Raises StorageErrors."""

    def __init__(self, directory: Path, model: ModelConfig, layout: NxdLayout) -> None:
        self.directory = directory
        self._model = model
        self._layout = layout
        self._shapes = parameter_shapes(model)
        self._open = lru_cache(1024)(lambda name: TorchFile(directory / name))
        # Parameter → stage and number in the stage's optimizer. Tied embeddings have two stages.
        self._places: dict[str, tuple[int, int]] = {}
        for stage, names in enumerate(layout.names):
            for number, name in enumerate(names):
                self._places.setdefault(name, (stage, number))
        # NxD writes master weights only if the weights are of a smaller type than the state.
        first = self._open(optimizer_file(0, 0, 0)) if layout.trained and layout.zero else None
        self._masters = first is not None and first.shape((MASTERS, 0)) is not None
        weights = layout.optimizer_dtype if self._masters else layout.dtype
        state = layout.optimizer_dtype if layout.zero else layout.dtype
        shapes = {name: shape for name, shape in self._shapes.items() if name in self._places}
        self.tensors = {
            name: StoredTensor(shape, getattr(torch, weights)) for name, shape in shapes.items()
        }
        self.moments = {
            (kind, name): StoredTensor(shape, getattr(torch, state))
            for kind in (MOMENTS if layout.trained else ())
            for name, shape in shapes.items()
        }

    def read(self, name: str, region: Region | None = None, kind: str | None = None) -> Tensor:
        stage, number = self._places[name]
        if kind is not None:
            sources = self._optimizer_sources(name, (*self._state_key(name), kind))
            return self._assemble(self.moments[kind, name], sources, region, f"{kind} of {name}")
        if self._masters:
            sources = self._optimizer_sources(name, (MASTERS, number))
        else:
            sources = (
                (model_file(rank, stage), (name,), self._part(name, rank))
                for rank in range(self._layout.tensor)
            )
        return self._assemble(self.tensors[name], sources, region, name)

    def step(self, name: str) -> float:
        file = self._open(optimizer_file(0, 0, self._places[name][0]))
        return float(file.read((*self._state_key(name), "step")))

    def _state_key(self, name: str) -> Key:
        return ("base_state" if self._layout.zero else "state", self._places[name][1])

    def _optimizer_sources(self, name: str, key: Key) -> Iterator[_Source]:
        stage = self._places[name][0]
        shards = self._layout.data if self._layout.zero else 1
        for rank in range(self._layout.tensor):
            whole = self._part(name, rank)
            for replica in range(shards):
                shard = shard_of_replica(whole, shards, replica)
                yield optimizer_file(replica, rank, stage), key, shard

    def _part(self, name: str, rank: int) -> StoredPart:
        """Return the part of a parameter that a tensor-parallel worker holds."""
        shape = self._shapes[name]
        share = share_of(name, shape, self._model, self._layout.tensor, rank)
        dim = share.dim or 0
        parts = []
        end = 0
        for region in share.regions(shape):
            local = slice(end, end + region[dim].stop - region[dim].start)
            parts.append(RegionPart(region, (*region[:dim], local, *region[dim + 1 :])))
            end = local.stop
        return StoredPart((*shape[:dim], end, *shape[dim + 1 :]), tuple(parts))

    def _assemble(
        self, stored: StoredTensor, sources: Iterator[_Source], region: Region | None, title: str
    ) -> Tensor:
        """Copy the region from the files that overlap it."""
        region = region or whole_region(stored.shape)
        out = torch.empty(sizes_of(region), dtype=stored.dtype)
        seen: set[tuple[tuple[int, int], ...]] = set()
        missing = out.numel()
        for name, stored_key, stored_part in sources:
            for held in stored_part.parts:
                key = tuple((piece.start, piece.stop) for piece in held.whole)
                common = intersection(held.whole, region)
                # Several workers hold the same values.
                if key in seen or any(piece.start >= piece.stop for piece in common):
                    continue
                seen.add(key)
                local = absolute(relative_to(common, held.whole), held.local)
                file = self._open(name)
                shape = file.shape(stored_key)
                if shape is not None and shape != stored_part.shape:
                    raise StorageError(
                        f"{file.path}: {'.'.join(map(str, stored_key))} is {list(shape)}, but the "
                        f"mesh and the model require {list(stored_part.shape)}; restore it"
                    )
                values = file.read(stored_key, local)
                out[relative_to(common, region)] = values
                missing -= values.numel()
        if missing:  # else `out` would have uninitialized values
            raise StorageError(f"{self.directory} lacks {missing} of the values of {title}")
        return out


class TorchFile:
    """One file of torch.save, read tensor by tensor.

    Raises a StorageError if the file is missing or damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open_regular(path) as stream:
                check_torch_file(stream)
                stream.seek(0)
                # Fake tensors have shapes, types and file offsets, but no memory. In a mapping of
                # the file, a fault of the file system would end the process with SIGBUS.
                with FakeTensorMode():
                    content = torch.load(stream, map_location="cpu", weights_only=True)
            self._tensors = {
                keys: value for keys, value in leaves(content) if isinstance(value, Tensor)
            }
        except OSError as error:
            raise StorageError(f"{path} cannot be read: {error.strerror or error}") from error
        except Exception as error:  # damaged bytes may raise anything
            raise StorageError(f"{path} is damaged: {error}; restore it") from error

    def shape(self, key: Key) -> tuple[int, ...] | None:
        return tuple(self._tensors[key].shape) if key in self._tensors else None

    def read(self, key: Key, region: Region | None = None) -> Tensor:
        stored = self._tensors.get(key)
        if stored is None or not stored.is_contiguous():
            raise StorageError(f"{self.path} holds no {'.'.join(map(str, key))}; restore it")
        # Whole rows are read, the other dimensions are cut afterwards.
        shape = list(stored.shape)
        first = int(stored.storage_offset())
        if region:
            first += region[0].start * stored.stride(0)
            shape[0] = region[0].stop - region[0].start
        out = torch.empty(shape, dtype=stored.dtype)
        # numpy has no bf16: the bytes are read into a view of the tensor's memory.
        target = out.reshape(-1).view(torch.uint8).numpy().data
        start: int = stored.untyped_storage()._checkpoint_offset or 0
        with storage_errors(f"{self.path} cannot be read"), open_regular(self.path) as stream:
            stream.seek(start + first * stored.itemsize)
            num_bytes = stream.readinto(target)
        if num_bytes != len(target):
            raise StorageError(f"{self.path} is cut short; restore it")
        return out[(slice(None), *region[1:])] if region else out
