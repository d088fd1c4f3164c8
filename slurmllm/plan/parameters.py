"""The parameters of a model, counted without building it; torch-free."""

from __future__ import annotations

import math

from slurmllm.config.families import FAMILIES
from slurmllm.config.recipe import ModelConfig

Shape = tuple[int, ...]


def parameter_shapes(model: ModelConfig) -> dict[str, Shape]:
    """Name → shape of every parameter of the whole model, padding of the vocabulary included."""
    width, vocabulary = model.hidden_size, model.padded_vocab_size
    shapes: dict[str, Shape] = {"embed.weight": (vocabulary, width)}
    if FAMILIES[model.family].positions == "learned":
        shapes["positions.weight"] = (model.seq_len, width)
    for layer in range(model.num_layers):
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in _block(model).items()}
    shapes |= _norm("final_norm", model)
    if not model.tied_embeddings:
        shapes["head.weight"] = (vocabulary, width)
    return shapes


def parameters(model: ModelConfig) -> int:
    """How many numbers a model learns."""
    return sum(math.prod(shape) for shape in parameter_shapes(model).values())


def _block(model: ModelConfig) -> dict[str, Shape]:
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
