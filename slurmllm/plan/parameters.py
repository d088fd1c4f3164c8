"""The parameters of a model, counted without building it; torch-free."""

from __future__ import annotations

import math
from functools import lru_cache

from slurmllm.config.families import FAMILIES
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
    """How many numbers a model learns."""
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
    """Numbers that one block learns."""
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
    width, ffn, heads = model.hidden_size, model.ffn_hidden_size, model.num_heads * model.head_dim
    qkv = heads + 2 * model.kv_heads * model.head_dim
    up = ("mlp.gate_up", 2 * ffn) if model.gated else ("mlp.up", ffn)
    return {
        **_norm("attention_norm", model),
        **_linear("attention.qkv", qkv, width, model.attention_bias),
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
