"""Which values of a parameter lie where in neuronx-distributed's files; torch-free.

Tensor parallelism gives a worker the pieces that `plan.shares` says, one after the other. ZeRO-1
pads that tensor with rows of 0 to a multiple of the data-parallel workers, and gives each an equal
run of rows (torch_xla's zero_redundancy_optimizer.py, `_shard_tensor`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import NamedTuple

from slurmllm.config.recipe import ModelConfig
from slurmllm.plan.parameters import Shape, parameter_shapes
from slurmllm.plan.shares import share_of

Region = tuple[slice, ...]


class Part(NamedTuple):
    """Values of a parameter, in the whole of it and in a stored tensor."""

    whole: Region
    local: Region


class Local(NamedTuple):
    """A tensor as it is stored: its shape, and the parts of the parameter in it; the rest is 0."""

    shape: Shape
    parts: tuple[Part, ...]


def part_of_worker(
    name: str, shape: Shape, model: ModelConfig, tensor: int, tensor_rank: int
) -> Local:
    """What a tensor-parallel worker holds of a parameter."""
    share = share_of(name, shape, model, tensor, tensor_rank)
    whole = tuple(slice(0, size) for size in shape)
    if share.dim is None:
        return Local(shape, (Part(whole, whole),))
    before, after = whole[: share.dim], whole[share.dim + 1 :]
    parts, at = [], 0
    for piece in share.pieces:
        place = slice(at, at + piece.stop - piece.start)
        parts.append(Part((*before, piece, *after), (*before, place, *after)))
        at = place.stop
    return Local((*shape[: share.dim], at, *shape[share.dim + 1 :]), tuple(parts))


def shard_of_replica(held: Local, data: int, data_rank: int) -> Local:
    """What a data-parallel worker's optimizer has of a tensor under ZeRO-1."""
    each = -(-held.shape[0] // data)
    rows = slice(each * data_rank, each * (data_rank + 1))
    parts = []
    for whole, local in held.parts:
        start, stop = max(local[0].start, rows.start), min(local[0].stop, rows.stop)
        if start < stop:
            moved = whole[0].start - local[0].start
            parts.append(
                Part(
                    (slice(start + moved, stop + moved), *whole[1:]),
                    (slice(start - rows.start, stop - rows.start), *local[1:]),
                )
            )
    return Local((each, *held.shape[1:]), tuple(parts))


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
        stages[chunk % pipeline] += sorted(mine, key=_place)
    if model.tied_embeddings and pipeline > 1:
        stages[-1].append("embed.weight")  # the head of the last stage
    return tuple(tuple(sorted(names, key=lambda name: len(shapes[name]) <= 1)) for names in stages)


def _place(name: str) -> tuple[int, bool]:
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
