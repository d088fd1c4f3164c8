"""The layout of neuronx-distributed's checkpoints: mesh, types, parameter names; no torch.

    nxd_layout.json                                       NxdLayout; NxD's own files lack it
    nxd/model/dp_rank_00_tp_rank_TT_pp_rank_PP.pt         name → the worker's part of a parameter
    nxd/optim/dp_rank_DD_tp_rank_TT_pp_rank_PP.pt         the optimizer's state, by number
    nxd/checkpoint, nxd/done                              NxD's completion marks

The numbers count the optimizer's parameters, in the order of `names`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

from pydantic import Field

from slurmllm.checkpoint.shards import Region
from slurmllm.config.recipe import ModelConfig
from slurmllm.plan.parameters import Shape, parameter_shapes, share_of
from slurmllm.records import Record

LAYOUT = "nxd_layout.json"
TAG = "nxd"  # NxD's term for the folder of one checkpoint


class NxdLayout(Record):
    """`nxd_layout.json` of a checkpoint that NxD wrote, or that was converted for it."""

    tensor: int = Field(description="tensor-parallel workers")
    pipeline: int = Field(description="stages")
    data: int = Field(description="data-parallel workers; each has a file of its own under zero")
    virtual_pipeline: int = Field(default=1, description="chunks of layers per stage")
    zero: bool = Field(description="ZeRO-1: the optimizer's state is sharded over `data`")
    optimizer_dtype: str = Field(description="of the moments, and of master weights: float32")
    dtype: str = Field(description="of the weights: bfloat16")
    trained: bool = Field(
        default=True, description="whether the optimizer's state is stored with the weights"
    )
    names: tuple[tuple[str, ...], ...] = Field(
        description="each stage's parameters in the optimizer's order, named as in the whole model"
    )


def model_file(tensor_rank: int, pipeline_rank: int) -> str:
    """Path of a worker's weights in the checkpoint folder; data-parallel replicas share it."""
    return f"{TAG}/model/{_file_name(0, tensor_rank, pipeline_rank)}"


def optimizer_file(data_rank: int, tensor_rank: int, pipeline_rank: int) -> str:
    """Path of a worker's shard of the optimizer's state; `data_rank` is 0 without zero."""
    return f"{TAG}/optim/{_file_name(data_rank, tensor_rank, pipeline_rank)}"


def _file_name(data: int, tensor: int, pipeline: int) -> str:
    return f"dp_rank_{data:02d}_tp_rank_{tensor:02d}_pp_rank_{pipeline:02d}.pt"


def read_layout(directory: Path) -> NxdLayout | None:
    """Returns the layout of a checkpoint folder, None if it is not in NxD's format.

    Raises:
        StorageError: The file is damaged.
    """
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


def part_of_worker(
    name: str, shape: Shape, model: ModelConfig, tensor: int, tensor_rank: int
) -> StoredPart:
    """Returns the part of a parameter that a tensor-parallel worker holds."""
    share = share_of(name, shape, model, tensor, tensor_rank)
    whole = tuple(slice(0, size) for size in shape)
    if share.dim is None:
        return StoredPart(shape, (RegionPart(whole, whole),))
    before, after = whole[: share.dim], whole[share.dim + 1 :]
    parts, end = [], 0
    for piece in share.pieces:
        local = slice(end, end + piece.stop - piece.start)
        parts.append(RegionPart((*before, piece, *after), (*before, local, *after)))
        end = local.stop
    return StoredPart((*shape[: share.dim], end, *shape[share.dim + 1 :]), tuple(parts))


def shard_of_replica(part: StoredPart, data: int, data_rank: int) -> StoredPart:
    """Returns the rows of a tensor that a data-parallel worker's optimizer holds under ZeRO-1."""
    each = -(-part.shape[0] // data)  # NxD pads the last shards to equal size
    rows = slice(each * data_rank, each * (data_rank + 1))
    parts = []
    for whole, local in part.parts:
        start, stop = max(local[0].start, rows.start), min(local[0].stop, rows.stop)
        if start < stop:
            offset = whole[0].start - local[0].start
            parts.append(
                RegionPart(
                    (slice(start + offset, stop + offset), *whole[1:]),
                    (slice(start - rows.start, stop - rows.start), *local[1:]),
                )
            )
    return StoredPart((each, *part.shape[1:]), tuple(parts))


def names_of_stages(
    model: ModelConfig, pipeline: int, virtual_pipeline: int
) -> tuple[tuple[str, ...], ...]:
    """Returns each pipeline stage's parameters in the order of the NxD backend's optimizer.

    That is matrices first (they decay), otherwise the order of NxD's modules.
    """
    shapes = parameter_shapes(model)
    chunks = pipeline * virtual_pipeline
    each = model.num_layers // chunks
    stages: list[list[str]] = [[] for _ in range(pipeline)]
    for name in sorted(shapes, key=_module_order):
        layer = _module_order(name)[0]
        chunk = 0 if layer < 0 else min(layer // each, chunks - 1)
        stages[chunk % pipeline].append(name)
    if model.tied_embeddings and pipeline > 1:
        stages[-1].append("embed.weight")  # the head of the last stage
    return tuple(tuple(sorted(names, key=lambda name: len(shapes[name]) <= 1)) for names in stages)


def _module_order(name: str) -> tuple[int, bool]:
    """Sort key of NxD's module order: in a layer, norms before matrices (`ParallelBlock`)."""
    module, _, rest = name.partition(".")
    if module == "layers":
        layer, _, leaf = rest.partition(".")
        return int(layer), "norm." not in leaf
    return (-1 if module in ("embed", "positions") else sys.maxsize), False
