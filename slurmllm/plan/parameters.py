"""The parameters of a decoder and the work of computing with them, counted; torch-free.

Work is that of one worker, for the tokens of one micro batch, forward. The backward pass is twice
the forward pass: each product's two gradients are products of the same size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from slurmllm.core.config.families import (
    BLOCK_NORMS,
    FAMILIES,
    Sharding,
    ShardingPlan,
    sharding_plan,
)
from slurmllm.core.config.recipe import ModelConfig

Shape = tuple[int, ...]
Shapes = dict[str, Shape]  # by the name of a parameter
# Modules before the blocks, in the order of their parameters.
_BEFORE_BLOCKS = ("embed", "positions", "embedding_norm")


def parameter_shapes(model: ModelConfig) -> Shapes:
    """Return name → shape of every parameter of the model, the padded vocabulary included."""
    outside = rest_shapes(model)
    shapes = {name: outside.pop(name) for name in list(outside) if _is_before_blocks(name)}
    for layer in range(model.num_layers):
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in block_shapes(model).items()}
    return shapes | outside


def parameters(model: ModelConfig) -> int:
    return parameter_counts(model, 1, 1, 0, 1).total


def rest_shapes(model: ModelConfig) -> Shapes:
    """Return name → shape of each parameter outside the blocks."""
    vocabulary = model.padded_vocab_size, model.hidden_size
    positions = model.seq_len, model.hidden_size
    tables: Shapes = {"embed": vocabulary, "positions": positions, "head": vocabulary}
    return _parameters_of(_plan(model).outside, tables, model)


def pipeline_stages_of(name: str, model: ModelConfig, pipeline: int) -> set[int]:
    """Return the pipeline stages that have a parameter outside the blocks."""
    first, last = 0, pipeline - 1
    if name == "embed.weight":
        return {first, last} if model.tied_embeddings else {first}
    return {first} if _is_before_blocks(name) else {last}


def _is_before_blocks(name: str) -> bool:
    return name.partition(".")[0] in _BEFORE_BLOCKS


def block_parameters(model: ModelConfig) -> int:
    return parameter_counts(model, 1, 1, 0, 1).block


def rest_parameters(model: ModelConfig, pipeline: int) -> int:
    """Return numbers outside the blocks, of the pipeline stage that has the most of them."""
    ends = (parameter_counts(model, 1, pipeline, stage, 1) for stage in (0, pipeline - 1))
    return max(counts.outside for counts in ends)


def block_shapes(model: ModelConfig) -> Shapes:
    """Return name inside a block → shape of each of its parameters."""
    width, ffn, head = model.hidden_size, model.ffn_hidden_size, model.head_width
    queries, keys = model.num_heads * head, model.kv_heads * head
    vector = FAMILIES[model.family].qk_norm_over == "vector"
    shapes: Shapes = {
        "attention.qkv": (queries + 2 * keys, width),
        "attention.q_norm": (queries if vector else head,),
        "attention.k_norm": (keys if vector else head,),
        "attention.out": (width, queries),
        "mlp.up": (ffn, width),
        "mlp.gate_up": (2 * ffn, width),
        "mlp.down": (width, ffn),
    }
    return _parameters_of(_plan(model).block, shapes, model)


def _parameters_of(modules: Iterable[str], shapes: Shapes, model: ModelConfig) -> Shapes:
    """Return name → shape of the modules' parameters; those without a shape are norms."""
    family = FAMILIES[model.family]
    biases = {"attention": model.attention_bias, "mlp": model.mlp_bias}
    parameters: Shapes = {}
    for module in modules:
        shape: Shape = (model.hidden_size,)
        bias = family.norm == "layer"
        if module in shapes:
            shape = shapes[module]
            bias = len(shape) > 1 and biases.get(module.partition(".")[0], False)
        if len(shape) > 1 or family.norm_weight != "none":
            parameters[f"{module}.weight"] = shape
            if bias:
                parameters[f"{module}.bias"] = shape[:1]
    return parameters


def _plan(model: ModelConfig) -> ShardingPlan:
    return sharding_plan(model.family, model.tied_embeddings, model.qk_norm)


@lru_cache(maxsize=256)
def muon_shapes(model: ModelConfig) -> tuple[tuple[int, int], ...]:
    """Return the shapes of a block's matrices that Muon orthogonalizes, each on its own."""
    width, keys = model.hidden_size, model.kv_heads * model.head_width
    heads, ffn = model.num_heads * model.head_width, model.ffn_hidden_size
    attention = (heads, width), (keys, width), (keys, width), (width, heads)
    gate = [(ffn, width)] if model.gated else []
    return (*attention, *gate, (ffn, width), (width, ffn))


class Share(NamedTuple):
    """A worker's part of a parameter."""

    dim: int | None  # the sharded dimension; None if every worker has the whole tensor
    pieces: tuple[slice, ...]  # of that dimension, in their order on the worker

    @property
    def size(self) -> int:
        """Length of the part along `dim`."""
        return sum(piece.stop - piece.start for piece in self.pieces)

    def regions(self, shape: tuple[int, ...]) -> list[tuple[slice, ...]]:
        """Return the pieces as regions of the whole parameter, in their order on the worker."""
        whole = tuple(slice(0, size) for size in shape)
        if self.dim is None:
            return [whole]
        return [(*whole[: self.dim], piece, *whole[self.dim + 1 :]) for piece in self.pieces]


WHOLE = Share(None, ())


def kv_copies(model: ModelConfig, tensor: int) -> int:
    """Return how many tensor-parallel workers hold each key and value head."""
    return max(1, tensor // model.kv_heads)


def sharding(name: str, model: ModelConfig) -> Sharding:
    """Return how the plan shares the module of a parameter, such as `layers.3.mlp.down.weight`."""
    plan = _plan(model)
    module = name.rpartition(".")[0]
    if module.startswith("layers."):
        return plan.block[module.split(".", 2)[2]]
    return plan.outside[module]


def share_of(
    name: str, shape: tuple[int, ...], model: ModelConfig, tensor: int, rank: int
) -> Share:
    """Return a tensor-parallel worker's part of a parameter, by name and whole shape."""
    how = sharding(name, model)
    bias = name.endswith(".bias")
    if how in ("sequence", "head") or (how == "row" and bias):
        return WHOLE
    dim = 1 if how == "row" else 0
    if kv_copies(model, tensor) > 1 and ".attention." in name:
        if ".k_norm." in name:  # of one head
            head = rank % model.kv_heads * model.head_width
            return Share(dim, (slice(head, head + model.head_width),))
        return Share(dim, _replicated(model, tensor, rank, "attention.qkv" in name))
    size = shape[dim] // tensor
    return Share(dim, (slice(rank * size, (rank + 1) * size),))


def _replicated(model: ModelConfig, tensor: int, rank: int, coalesced: bool) -> tuple[slice, ...]:
    """Return a worker's heads if several have the same key-value head, as ranges of dimensions.

    They are its queries and, in the coalesced matrix, its key and its value.
    """
    group, width = model.num_heads // model.kv_heads, model.head_width
    number, head = divmod(rank, model.kv_heads)
    num_queries = group // kv_copies(model, tensor)
    first = head * (group + 2 if coalesced else group)
    start, key = (first + number * num_queries) * width, (first + group) * width
    queries = slice(start, start + num_queries * width)
    return (queries, slice(key, key + 2 * width)) if coalesced else (queries,)


@lru_cache(maxsize=256)
def worker_shapes(model: ModelConfig, tensor: int) -> tuple[tuple[Shape, ...], Mapping[str, Shape]]:
    """Return shapes of a worker's parts: in a block, and by name outside the blocks."""

    def shard(name: str, shape: Shape) -> Shape:
        share = share_of(name, shape, model, tensor, 0)
        return tuple(share.size if dim == share.dim else n for dim, n in enumerate(shape))

    block = [shard(f"layers.0.{name}", shape) for name, shape in block_shapes(model).items()]
    return tuple(block), {name: shard(name, shape) for name, shape in rest_shapes(model).items()}


class ParameterCounts(NamedTuple):
    """How many numbers of its parameters a worker has."""

    block: int  # of one block
    outside: int
    blocks: int
    largest: int  # of the largest parameter
    matrices: int  # of the blocks' matrices

    @property
    def total(self) -> int:
        return self.blocks * self.block + self.outside


@lru_cache(maxsize=4096)
def parameter_counts(
    model: ModelConfig, tensor: int, pipeline: int, stage: int, workers: int, worker: int = 0
) -> ParameterCounts:
    """Return what a worker of a stage has if `workers` share its part by rows.

    FSDP's pieces are equal, the last ones shorter or empty; ZeRO-1 of NxD pads them to the first.
    """

    def count(shape: Shape) -> int:
        piece = math.ceil(shape[0] / workers)
        return max(0, min(piece, shape[0] - worker * piece)) * math.prod(shape[1:])

    blocks, outside = worker_shapes(model, tensor)
    block = [count(shape) for shape in blocks]
    of_stage = (name for name in outside if stage in pipeline_stages_of(name, model, pipeline))
    outer = [count(outside[name]) for name in of_stage]
    layers = model.num_layers // pipeline
    matrices = layers * sum(count(shape) for shape in blocks if len(shape) > 1)
    return ParameterCounts(sum(block), sum(outer), layers, max(block + outer), matrices)


@dataclass(frozen=True)
class Product:
    """A matrix product [m, k] × [k, n]."""

    m: int
    n: int
    k: int

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k

    @property
    def numbers(self) -> int:
        return self.m * self.k + self.k * self.n + self.m * self.n

    @property
    def smallest(self) -> int:
        """The dimension that limits how well a device's matrix units are filled."""
        return min(self.m, self.n, self.k)


def newton_schulz_product(shape: Sequence[int]) -> Product:
    """Return a product as large as the three of one Newton-Schulz iteration on a matrix."""
    small, large = sorted(shape)
    return Product(small, small, 2 * large + small)


@lru_cache(maxsize=4096)
def block_products(model: ModelConfig, tokens: int, tensor: int) -> tuple[Product, ...]:
    """Return the products of a block's four matrices on one of `tensor` workers."""
    shapes, _ = worker_shapes(model, tensor)
    return tuple(Product(tokens, *shape) for shape in shapes if len(shape) == 2)


def head_product(model: ModelConfig, tokens: int, tensor: int) -> Product:
    """Return the product whose result is the logits of one of `tensor` workers."""
    return Product(tokens, model.padded_vocab_size // tensor, model.hidden_size)


@lru_cache(maxsize=256)
def layer_windows(model: ModelConfig) -> tuple[int, ...]:
    """Return for each layer how many tokens a token attends to at most: a window, or all."""
    length = model.seq_len
    return tuple(min(kind.window or length, length) for kind in model.layer_kinds)


def attention_pairs(length: int, window: int) -> int:
    """Return the pairs of tokens in a sequence of which one attends to the other.

    Half of the diagonal counts, so that causal attention without a window has half of all pairs.
    """
    return window * (2 * length - window) // 2


def attention_flops(
    model: ModelConfig, tokens: int, tensor: int, pairs: float | None = None
) -> int:
    """Return the FLOPs of a block's scores and weighted values.

    `pairs` are those of a sequence, by default of causal attention without a window.
    """
    queries, _ = head_widths(model, tensor)
    length = model.seq_len
    each = attention_pairs(length, length) if pairs is None else pairs
    return int(2 * 2 * queries * tokens * each / length)


@lru_cache(maxsize=4096)
def block_elements(model: ModelConfig, tokens: int, tensor: int, sequence: bool) -> int:
    """Return numbers that a block's elementwise work reads and writes.

    The norms (in, out) and both residual sums (two in, one out) work on the whole stream, or on
    a worker's share of the sequence under sequence parallelism; rotary positions, norms of
    queries and keys and the activation on the worker's heads and features.
    """
    stream = tokens * model.hidden_size // (tensor if sequence else 1)
    queries, keys = head_widths(model, tensor)
    turned = 2 * (queries + keys) if model.rotary_pct > 0 else 0
    if model.qk_norm:
        turned += 2 * (queries + keys)
    activated = (up_width(model) + model.ffn_hidden_size) // tensor
    return (2 * num_norms(model) + 6) * stream + tokens * (turned + activated)


def num_norms(model: ModelConfig) -> int:
    """Return the norms of the stream in a block."""
    return len(BLOCK_NORMS[FAMILIES[model.family].norm_places])


def up_width(model: ModelConfig) -> int:
    """Return features of the feed-forward layer's first matrix, gate included."""
    return model.ffn_hidden_size * (2 if model.gated else 1)


def head_widths(model: ModelConfig, tensor: int) -> tuple[int, int]:
    """Return the width of a worker's queries and keys; a head is copied if there are too few."""
    keys = model.kv_heads * kv_copies(model, tensor) // tensor
    return model.num_heads * model.head_width // tensor, keys * model.head_width


def model_flops(model: ModelConfig, sequences: int) -> float:
    """Return the FLOPs to train on `sequences` sequences, as MFU defines them.

    6 for each weight of a matrix and token, and 12 · layers · hidden · length² a sequence for
    attention, whose masked half counts too (Chowdhery et al. 2022, arXiv 2204.02311, appendix B).
    A layer with a window has length · window in place of length², as in OLMo-core (fa6c501,
    nn/attention, `num_flops_per_token`) and nanochat (92d63d4, gpt.py, `estimate_flops`).
    """
    tokens = sequences * model.seq_len
    block = sum(product.flops for product in block_products(model, 1, 1))
    vocabulary = 2 * model.vocab_size * model.hidden_size  # padding is no work of the model
    attention = 4 * sum(layer_windows(model)) * model.num_heads * model.head_width
    return 3.0 * tokens * (model.num_layers * block + attention + vocabulary)
