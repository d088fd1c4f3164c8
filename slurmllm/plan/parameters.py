"""The parameters of a model, counted without building it; torch-free."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from slurmllm.config.families import FAMILIES, Sharding, sharding_plan
from slurmllm.config.recipe import ModelConfig

Shape = tuple[int, ...]

_BEFORE_THE_BLOCKS = ("embed.weight", "positions.weight")


def parameter_shapes(model: ModelConfig) -> dict[str, Shape]:
    """Name → shape of every parameter of the whole model, padding of the vocabulary included."""
    rest = rest_shapes(model)
    shapes = {name: rest.pop(name) for name in list(rest) if name in _BEFORE_THE_BLOCKS}
    for layer in range(model.num_layers):
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in block_shapes(model).items()}
    return shapes | rest


def parameters(model: ModelConfig) -> int:
    rest = sum(math.prod(shape) for shape in rest_shapes(model).values())
    return model.num_layers * block_parameters(model) + rest


def rest_shapes(model: ModelConfig) -> dict[str, Shape]:
    """Name → shape of every parameter outside the blocks."""
    width, vocabulary = model.hidden_size, model.padded_vocab_size
    shapes: dict[str, Shape] = {"embed.weight": (vocabulary, width)}
    if FAMILIES[model.family].positions == "learned":
        shapes["positions.weight"] = (model.seq_len, width)
    shapes |= _norm("final_norm", model)
    if not model.tied_embeddings:
        shapes["head.weight"] = (vocabulary, width)
    return shapes


def ends(name: str, model: ModelConfig, pipeline: int) -> set[int]:
    """The pipeline stages that have a parameter outside the blocks."""
    first, last = 0, pipeline - 1
    if name == "embed.weight":
        return {first, last} if model.tied_embeddings else {first}
    return {first} if name == "positions.weight" else {last}


@lru_cache(maxsize=256)
def block_parameters(model: ModelConfig) -> int:
    return sum(math.prod(shape) for shape in block_shapes(model).values())


@lru_cache(maxsize=256)
def rest_parameters(model: ModelConfig, pipeline: int) -> int:
    """Numbers outside the blocks, of the pipeline stage that has the most of them."""
    width, vocabulary = model.hidden_size, model.padded_vocab_size * model.hidden_size
    first = vocabulary
    if FAMILIES[model.family].positions == "learned":
        first += model.seq_len * width
    norm = sum(math.prod(shape) for shape in _norm("final_norm", model).values())
    last = norm + vocabulary  # tied, the last stage has a copy of the embedding
    if pipeline > 1:
        return max(first, last)
    return first + (norm if model.tied_embeddings else last)


def block_shapes(model: ModelConfig) -> dict[str, Shape]:
    """Name inside a block → shape of each of its parameters."""
    width, ffn, heads = model.hidden_size, model.ffn_hidden_size, model.num_heads * model.head_width
    qkv = heads + 2 * model.kv_heads * model.head_width
    qk_norms: dict[str, Shape] = {}
    if model.qk_norm:
        qk_norms = {f"attention.{one}_norm.weight": (model.head_width,) for one in "qk"}
    up = ("mlp.gate_up", 2 * ffn) if model.gated else ("mlp.up", ffn)
    return {
        **_norm("attention_norm", model),
        **_linear("attention.qkv", qkv, width, model.attention_bias),
        **qk_norms,
        **_linear("attention.out", width, heads, model.attention_bias),
        **_norm("mlp_norm", model),
        **_linear(*up, width, model.mlp_bias),
        **_linear("mlp.down", width, ffn, model.mlp_bias),
    }


def _norm(name: str, model: ModelConfig) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {f"{name}.weight": (model.hidden_size,)}
    if FAMILIES[model.family].norm == "layer":
        shapes[f"{name}.bias"] = (model.hidden_size,)
    return shapes


def _linear(name: str, out: int, into: int, bias: bool) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {f"{name}.weight": (out, into)}
    if bias:
        shapes[f"{name}.bias"] = (out,)
    return shapes


_QKV = "attention.qkv"


class Share(NamedTuple):
    """A worker's part of a parameter."""

    dim: int | None  # the sharded dimension; None if every worker has the whole tensor
    pieces: tuple[slice, ...]  # of that dimension, in their order on the worker

    @property
    def size(self) -> int:
        """Length of the part along `dim`."""
        return sum(piece.stop - piece.start for piece in self.pieces)


WHOLE = Share(None, ())


def kv_copies(model: ModelConfig, tensor: int) -> int:
    """Number of tensor-parallel workers that hold each key and value head."""
    return max(1, tensor // model.kv_heads)


def sharding(name: str, model: ModelConfig) -> Sharding:
    """How the plan shares the module of a parameter, such as `layers.3.mlp.down.weight`."""
    plan = sharding_plan(model.family, model.tied_embeddings, model.qk_norm)
    module = name.rpartition(".")[0]
    if module.startswith("layers."):
        return plan.block[module.split(".", 2)[2]]
    return plan.rest[module]


def share_of(
    name: str, shape: tuple[int, ...], model: ModelConfig, tensor: int, rank: int
) -> Share:
    """A tensor-parallel worker's part of a parameter, by name and shape in the whole model."""
    how = sharding(name, model)
    bias = name.endswith(".bias")
    if how in ("sequence", "head") or (how == "row" and bias):
        return WHOLE
    dim = 1 if how == "row" else 0
    if kv_copies(model, tensor) > 1 and ".attention." in name:
        queries, key_and_value = _replicated(model, tensor, rank)
        pieces = (queries, key_and_value) if _QKV in name else (_heads(model, tensor, rank),)
        return Share(dim, pieces)
    size = shape[dim] // tensor
    return Share(dim, (slice(rank * size, (rank + 1) * size),))


def _place(model: ModelConfig, tensor: int, rank: int) -> tuple[int, int, int]:
    """The worker's key-value head, its number among those that hold it, and its queries' count."""
    copies = kv_copies(model, tensor)
    queries = model.num_heads // model.kv_heads // copies
    return rank % model.kv_heads, rank // model.kv_heads, queries


def _replicated(model: ModelConfig, tensor: int, rank: int) -> tuple[slice, slice]:
    """Rows of the coalesced matrix: the worker's queries, then its key and its value."""
    head, number, queries = _place(model, tensor, rank)
    group, width = model.num_heads // model.kv_heads, model.head_width
    first = head * (group + 2)
    start = (first + number * queries) * width
    key = (first + group) * width
    return slice(start, start + queries * width), slice(key, key + 2 * width)


def _heads(model: ModelConfig, tensor: int, rank: int) -> slice:
    """The attention heads that the worker computes, as a range of the heads' dimensions."""
    head, number, queries = _place(model, tensor, rank)
    group, width = model.num_heads // model.kv_heads, model.head_width
    start = (head * group + number * queries) * width
    return slice(start, start + queries * width)


@lru_cache(maxsize=256)
def worker_shapes(model: ModelConfig, tensor: int) -> tuple[tuple[Shape, ...], Mapping[str, Shape]]:
    """Shapes of a worker's parts: in a block, and by name outside the blocks."""

    def part(name: str, shape: Shape) -> Shape:
        share = share_of(name, shape, model, tensor, 0)
        return tuple(share.size if dim == share.dim else n for dim, n in enumerate(shape))

    block = [part(f"layers.0.{name}", shape) for name, shape in block_shapes(model).items()]
    return tuple(block), {name: part(name, shape) for name, shape in rest_shapes(model).items()}


class ParameterCounts(NamedTuple):
    """How many numbers of its parameters a worker has."""

    block: int  # of one block
    rest: int
    blocks: int
    largest: int  # of the largest parameter

    @property
    def total(self) -> int:
        return self.blocks * self.block + self.rest


@lru_cache(maxsize=4096)
def parameter_counts(
    model: ModelConfig, tensor: int, pipeline: int, stage: int, workers: int, worker: int = 0
) -> ParameterCounts:
    """What a worker of a stage has if `workers` share its part, each parameter by rows.

    FSDP's pieces are equal, the last ones shorter or empty; ZeRO-1 of NxD pads them to the first.
    """

    def count(shape: Shape) -> int:
        piece = math.ceil(shape[0] / workers)
        return max(0, min(piece, shape[0] - worker * piece)) * math.prod(shape[1:])

    blocks, outside = worker_shapes(model, tensor)
    block = [count(shape) for shape in blocks]
    rest = [count(shape) for name, shape in outside.items() if stage in ends(name, model, pipeline)]
    return ParameterCounts(sum(block), sum(rest), model.num_layers // pipeline, max(block + rest))
