"""What neuronx-distributed's files do not say of themselves: mesh, types, names; torch-free.

    nxd_layout.json                                       this record
    nxd/model/dp_rank_00_tp_rank_TT_pp_rank_PP.pt         name → the worker's part of a parameter
    nxd/optim/dp_rank_DD_tp_rank_TT_pp_rank_PP.pt         the optimizer's state, by number
    nxd/checkpoint, nxd/done                              NxD's own marks

The numbers count through the optimizer's parameters, which `names` lists in that order.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from pydantic import Field

from slurmllm.config.recipe import ModelConfig
from slurmllm.plan.parameters import Shape, parameter_shapes, share_of
from slurmllm.records import Record

LAYOUT = "nxd_layout.json"
TAG = "nxd"  # NxD's word for the folder of one checkpoint


class NxdLayout(Record):
    """`nxd_layout.json` of a checkpoint that NxD wrote, or that was converted for it."""

    tensor: int = Field(description="tensor-parallel workers")
    pipeline: int = Field(description="stages")
    data: int = Field(description="data-parallel workers; each has a file of its own under zero")
    virtual_pipeline: int = Field(default=1, description="chunks of layers a stage")
    zero: bool = Field(description="ZeRO-1: the optimizer's state is shared out over `data`")
    optimizer_dtype: str = Field(description="of the moments, and of master weights: float32")
    dtype: str = Field(description="of the weights: bfloat16")
    trained: bool = Field(
        default=True, description="the optimizer's state is there; else the weights alone"
    )
    names: tuple[tuple[str, ...], ...] = Field(
        description="each stage's parameters in the optimizer's order, named as in the whole model"
    )


def model_file(tensor_rank: int, pipeline_rank: int) -> str:
    """Where a worker's weights lie in the checkpoint folder; replicas have one file."""
    return f"{TAG}/model/{_place(0, tensor_rank, pipeline_rank)}"


def optimizer_file(data_rank: int, tensor_rank: int, pipeline_rank: int) -> str:
    """Where a worker's share of the optimizer's state lies; without zero, `data_rank` is 0."""
    return f"{TAG}/optim/{_place(data_rank, tensor_rank, pipeline_rank)}"


def _place(data: int, tensor: int, pipeline: int) -> str:
    return f"dp_rank_{data:02d}_tp_rank_{tensor:02d}_pp_rank_{pipeline:02d}.pt"


def read_layout(directory: Path) -> NxdLayout | None:
    """The layout of a checkpoint folder; None where it is none of NxD's.

    Raises:
        StorageError: the file is damaged.
    """
    path = directory / LAYOUT
    return NxdLayout.load(path) if path.is_file() else None


Region = tuple[slice, ...]


class RegionPart(NamedTuple):
    """Values of a parameter, in the whole of it and in a stored tensor."""

    whole: Region
    local: Region


class StoredPart(NamedTuple):
    """A tensor as it is stored: its shape, and the parts of the parameter in it; the rest is 0."""

    shape: Shape
    parts: tuple[RegionPart, ...]


def part_of_worker(
    name: str, shape: Shape, model: ModelConfig, tensor: int, tensor_rank: int
) -> StoredPart:
    """What a tensor-parallel worker holds of a parameter."""
    share = share_of(name, shape, model, tensor, tensor_rank)
    whole = tuple(slice(0, size) for size in shape)
    if share.dim is None:
        return StoredPart(shape, (RegionPart(whole, whole),))
    before, after = whole[: share.dim], whole[share.dim + 1 :]
    parts, at = [], 0
    for piece in share.pieces:
        place = slice(at, at + piece.stop - piece.start)
        parts.append(RegionPart((*before, piece, *after), (*before, place, *after)))
        at = place.stop
    return StoredPart((*shape[: share.dim], at, *shape[share.dim + 1 :]), tuple(parts))


def shard_of_replica(held: StoredPart, data: int, data_rank: int) -> StoredPart:
    """What a data-parallel worker's optimizer has of a tensor under ZeRO-1."""
    each = -(-held.shape[0] // data)
    rows = slice(each * data_rank, each * (data_rank + 1))
    parts = []
    for whole, local in held.parts:
        start, stop = max(local[0].start, rows.start), min(local[0].stop, rows.stop)
        if start < stop:
            moved = whole[0].start - local[0].start
            parts.append(
                RegionPart(
                    (slice(start + moved, stop + moved), *whole[1:]),
                    (slice(start - rows.start, stop - rows.start), *local[1:]),
                )
            )
    return StoredPart((each, *held.shape[1:]), tuple(parts))


def names_of_stages(
    model: ModelConfig, pipeline: int, virtual_pipeline: int
) -> tuple[tuple[str, ...], ...]:
    """Each pipeline stage's parameters in the order of the NxD backend's optimizer: matrices first.

    Args:
        model: The whole model's configuration.
        pipeline: Stages.
        virtual_pipeline: Chunks of layers a stage.
    """
    shapes = parameter_shapes(model)
    chunks = pipeline * virtual_pipeline
    each = model.num_layers // chunks
    stages: list[list[str]] = [[] for _ in range(pipeline)]
    for chunk in range(chunks):
        layers = range(chunk * each, (chunk + 1) * each)
        first, last = chunk == 0, chunk == chunks - 1
        mine = [name for name in shapes if _in_chunk(name, layers, first, last)]
        stages[chunk % pipeline] += sorted(mine, key=_nxd_shards_place)
    if model.tied_embeddings and pipeline > 1:
        stages[-1].append("embed.weight")  # the head of the last stage
    return tuple(tuple(sorted(names, key=lambda name: len(shapes[name]) <= 1)) for names in stages)


def _nxd_shards_place(name: str) -> tuple[int, bool]:
    """Where NxD's modules have a parameter: in a layer, norms before matrices (`ParallelBlock`)."""
    module, _, rest = name.partition(".")
    if module == "layers":
        layer, _, leaf = rest.partition(".")
        return int(layer), "norm." not in leaf
    return (-1 if module in ("embed", "positions") else sys.maxsize), False


def _in_chunk(name: str, layers: Iterable[int], first: bool, last: bool) -> bool:
    module, _, rest = name.partition(".")
    if module == "layers":
        return int(rest.partition(".")[0]) in layers
    return first if module in ("embed", "positions") else last
