"""Names and layouts of Hugging Face's models against ours, one table a family, read both ways.

A row says which of their modules make one of ours. `join` puts their tensors together as ours,
`split` takes ours apart as theirs; both serve weights and biases, and tensors on the meta device,
from which the shapes to expect are taken.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from slurmllm.config.recipe import ModelConfig
from slurmllm.model.attention import slice_order
from slurmllm.model.decoder import build_model


@dataclass(frozen=True)
class TensorLayout:
    """How their tensors lie in one of ours.

    Attributes:
        join: (config, theirs) → ours.
        split: (config, ours) → theirs.
    """

    join: Callable[[ModelConfig, Sequence[Tensor]], Tensor]
    split: Callable[[ModelConfig, Tensor], Sequence[Tensor]]


def _rows(tensor: Tensor, *sizes: int) -> Tensor:
    """The first dimension as several."""
    return tensor.reshape(*sizes, *tensor.shape[1:])


def _turn_heads(config: ModelConfig, qkv: Tensor, *, back: bool) -> Tensor:
    """The query and key dimensions of every head in our order, or back in theirs."""
    order = torch.tensor(slice_order(config.head_dim, config.rotary_pct), device=qkv.device)
    if back:
        order = order.argsort()
    heads = _rows(qkv, config.num_heads, 3, config.head_dim)
    turned = heads[:, :2].index_select(2, order)
    return torch.cat([turned, heads[:, 2:]], dim=1).flatten(0, 2)


def _group(config: ModelConfig, qkv: Sequence[Tensor]) -> Tensor:
    """Queries, keys, values → rows grouped by key-value head."""
    parts = [_rows(part, config.kv_heads, -1) for part in qkv]
    return torch.cat(parts, dim=1).flatten(0, 1)


def _ungroup(config: ModelConfig, ours: Tensor) -> Sequence[Tensor]:
    queries = config.num_heads // config.kv_heads * config.head_dim
    groups = _rows(ours, config.kv_heads, -1)
    parts = groups.tensor_split((queries, queries + config.head_dim), dim=1)
    return [part.flatten(0, 1) for part in parts]


def _interleave(config: ModelConfig, gate_up: Sequence[Tensor]) -> Tensor:
    """Gate and up → alternating blocks of `gate_block` rows."""
    blocks = [_rows(part, -1, config.gate_block) for part in gate_up]
    return torch.stack(blocks, dim=1).flatten(0, 2)


def _deinterleave(config: ModelConfig, ours: Tensor) -> Sequence[Tensor]:
    blocks = _rows(ours, -1, 2, config.gate_block)
    return [blocks[:, half].flatten(0, 1) for half in (0, 1)]


def _turned(tensor: Tensor) -> Tensor:
    """GPT-2's Conv1D keeps its weight as [in, out]; biases are biases."""
    return tensor.t() if tensor.ndim == 2 else tensor


_SAME = TensorLayout(lambda _, theirs: theirs[0], lambda _, ours: [ours])
_QKV = TensorLayout(_group, _ungroup)
_GATE_UP = TensorLayout(_interleave, _deinterleave)
# GPT-NeoX groups queries, keys and values by head, as we do; the order inside a head differs.
_NEOX_QKV = TensorLayout(
    lambda config, theirs: _turn_heads(config, theirs[0], back=False),
    lambda config, ours: [_turn_heads(config, ours, back=True)],
)
_CONV1D = TensorLayout(lambda _, theirs: _turned(theirs[0]), lambda _, ours: [_turned(ours)])
_CONV1D_QKV = TensorLayout(
    lambda config, theirs: _group(config, _turned(theirs[0]).chunk(3)),
    lambda config, ours: [_turned(torch.cat(list(_ungroup(config, ours))))],
)


class ModuleMapping(NamedTuple):
    """One of our modules and theirs; `{}` is the layer's number."""

    ours: str
    theirs: tuple[str, ...]
    layout: TensorLayout = _SAME


@dataclass(frozen=True)
class FamilyMapping:
    """A family's names and layouts in transformers.

    Attributes:
        rows: One of our modules each.
        prefix: What a file of the model without its head leaves out.
        older: Names of older versions → today's.
        buffers: Names of what older versions saved though it is computed, not trained.
        always_biased: Fields of `ModelConfig` whose biases transformers' model always has; where
            ours has none, zeros are exported.
    """

    rows: tuple[ModuleMapping, ...]
    prefix: str
    older: tuple[tuple[str, str], ...] = ()
    buffers: str = r"(?!)"
    always_biased: tuple[str, ...] = ()

    def todays_name(self, name: str) -> str | None:
        """The name that the table knows; None for a buffer."""
        for old, new in self.older:
            name = re.sub(old, new, name)
        return None if re.search(self.buffers, name) else name


FAMILY_MAPPINGS: dict[str, FamilyMapping] = {
    # transformers/models/gpt_neox. Its head was renamed lm_head in version 5, which reads the
    # older name too; version 4 reads no other.
    "neox": FamilyMapping(
        rows=(
            ModuleMapping("embed", ("gpt_neox.embed_in",)),
            ModuleMapping("layers.{}.attention_norm", ("gpt_neox.layers.{}.input_layernorm",)),
            ModuleMapping(
                "layers.{}.attention.qkv",
                ("gpt_neox.layers.{}.attention.query_key_value",),
                _NEOX_QKV,
            ),
            ModuleMapping("layers.{}.attention.out", ("gpt_neox.layers.{}.attention.dense",)),
            ModuleMapping("layers.{}.mlp_norm", ("gpt_neox.layers.{}.post_attention_layernorm",)),
            ModuleMapping("layers.{}.mlp.up", ("gpt_neox.layers.{}.mlp.dense_h_to_4h",)),
            ModuleMapping("layers.{}.mlp.down", ("gpt_neox.layers.{}.mlp.dense_4h_to_h",)),
            ModuleMapping("final_norm", ("gpt_neox.final_layer_norm",)),
            ModuleMapping("head", ("embed_out",)),
        ),
        prefix="gpt_neox.",
        older=((r"^lm_head\.", "embed_out."),),
        buffers=r"\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)$|rotary_emb\.inv_freq$",
        always_biased=("mlp_bias",),
    ),
    # transformers/models/llama
    "llama": FamilyMapping(
        rows=(
            ModuleMapping("embed", ("model.embed_tokens",)),
            ModuleMapping("layers.{}.attention_norm", ("model.layers.{}.input_layernorm",)),
            ModuleMapping(
                "layers.{}.attention.qkv",
                (
                    "model.layers.{}.self_attn.q_proj",
                    "model.layers.{}.self_attn.k_proj",
                    "model.layers.{}.self_attn.v_proj",
                ),
                _QKV,
            ),
            ModuleMapping("layers.{}.attention.out", ("model.layers.{}.self_attn.o_proj",)),
            ModuleMapping("layers.{}.mlp_norm", ("model.layers.{}.post_attention_layernorm",)),
            ModuleMapping(
                "layers.{}.mlp.gate_up",
                ("model.layers.{}.mlp.gate_proj", "model.layers.{}.mlp.up_proj"),
                _GATE_UP,
            ),
            ModuleMapping("layers.{}.mlp.down", ("model.layers.{}.mlp.down_proj",)),
            ModuleMapping("final_norm", ("model.norm",)),
            ModuleMapping("head", ("lm_head",)),
        ),
        prefix="model.",
        buffers=r"rotary_emb\.inv_freq$",
    ),
    # transformers/models/gpt2
    "gpt3": FamilyMapping(
        rows=(
            ModuleMapping("embed", ("transformer.wte",)),
            ModuleMapping("positions", ("transformer.wpe",)),
            ModuleMapping("layers.{}.attention_norm", ("transformer.h.{}.ln_1",)),
            ModuleMapping(
                "layers.{}.attention.qkv", ("transformer.h.{}.attn.c_attn",), _CONV1D_QKV
            ),
            ModuleMapping("layers.{}.attention.out", ("transformer.h.{}.attn.c_proj",), _CONV1D),
            ModuleMapping("layers.{}.mlp_norm", ("transformer.h.{}.ln_2",)),
            ModuleMapping("layers.{}.mlp.up", ("transformer.h.{}.mlp.c_fc",), _CONV1D),
            ModuleMapping("layers.{}.mlp.down", ("transformer.h.{}.mlp.c_proj",), _CONV1D),
            ModuleMapping("final_norm", ("transformer.ln_f",)),
            ModuleMapping("head", ("lm_head",)),
        ),
        prefix="transformer.",
        buffers=r"\.attn\.(bias|masked_bias)$",
        always_biased=("attention_bias", "mlp_bias"),
    ),
}
# Files of weights: all in one, or several with an index.
WHOLE = "model.safetensors"
SHARDS = "model.safetensors.index.json"
_LAYER = re.compile(r"^layers\.(\d+)\.")


@dataclass(frozen=True)
class TensorMapping:
    """One of our tensors and those of theirs that make it.

    Attributes:
        ours: Its name.
        shape: Its shape, the vocabulary not padded.
        theirs: Their names → shapes, in the order that the layout takes them.
        layout: From the one to the others.
    """

    ours: str
    shape: tuple[int, ...]
    theirs: dict[str, tuple[int, ...]]
    layout: TensorLayout


def tensor_mappings(config: ModelConfig) -> list[TensorMapping]:
    """Every tensor of a model, in the model's order.

    Args:
        config: The model; its vocabulary counts without padding rows, which no file holds.
    """
    rows = {row.ours: row for row in FAMILY_MAPPINGS[config.family].rows}
    with torch.device("meta"):
        model = build_model(unpadded(config))
    found = []
    for name, parameter in model.named_parameters():
        leaf = name.rpartition(".")[2]
        layer = _LAYER.match(name)
        number = layer.group(1) if layer else ""
        row = rows[_LAYER.sub("layers.{}.", name).removesuffix(f".{leaf}")]
        parts = row.layout.split(config, parameter.detach())
        theirs = [f"{module.format(number)}.{leaf}" for module in row.theirs]
        shapes = [tuple(part.shape) for part in parts]
        found.append(
            TensorMapping(
                name, tuple(parameter.shape), dict(zip(theirs, shapes, strict=True)), row.layout
            )
        )
    return found


def unpadded(config: ModelConfig) -> ModelConfig:
    """The same model without padding rows in its vocabulary."""
    return config.model_copy(update={"vocab_pad_multiple": 1})


def with_their_biases(config: ModelConfig) -> ModelConfig:
    """The model with the biases that transformers' model of the family always has."""
    biased = dict.fromkeys(FAMILY_MAPPINGS[config.family].always_biased, True)
    return config.model_copy(update=biased)
