"""Names and layouts of Hugging Face's models, one table per family, read in both directions.

A row maps one of our modules to theirs. `join` combines their tensors into ours, `split` divides
ours into theirs. Both serve weights, biases and meta tensors, which give the expected shapes.
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

# Files of weights: a single one, or several with an index.
WHOLE = "model.safetensors"
SHARDS = "model.safetensors.index.json"
_LAYER = re.compile(r"^layers\.(\d+)\.")


@dataclass(frozen=True)
class TensorLayout:
    """How several of their tensors are laid out in one of ours."""

    join: Callable[[ModelConfig, Sequence[Tensor]], Tensor]  # (config, theirs) → ours
    split: Callable[[ModelConfig, Tensor], Sequence[Tensor]]  # (config, ours) → theirs


def _unflatten_rows(tensor: Tensor, *sizes: int) -> Tensor:
    return tensor.reshape(*sizes, *tensor.shape[1:])


def _reorder_heads(config: ModelConfig, qkv: Tensor, *, inverse: bool) -> Tensor:
    """Permutes the query and key dimensions of every head to our rotary order, or back."""
    order = torch.tensor(slice_order(config.head_dim, config.rotary_pct), device=qkv.device)
    if inverse:
        order = order.argsort()
    heads = _unflatten_rows(qkv, config.num_heads, 3, config.head_dim)
    reordered = heads[:, :2].index_select(2, order)
    return torch.cat([reordered, heads[:, 2:]], dim=1).flatten(0, 2)


def _group_qkv(config: ModelConfig, qkv: Sequence[Tensor]) -> Tensor:
    """Queries, keys and values → rows grouped by key-value head."""
    parts = [_unflatten_rows(part, config.kv_heads, -1) for part in qkv]
    return torch.cat(parts, dim=1).flatten(0, 1)


def _ungroup_qkv(config: ModelConfig, ours: Tensor) -> Sequence[Tensor]:
    queries = config.num_heads // config.kv_heads * config.head_dim
    groups = _unflatten_rows(ours, config.kv_heads, -1)
    parts = groups.tensor_split((queries, queries + config.head_dim), dim=1)
    return [part.flatten(0, 1) for part in parts]


def _interleave(config: ModelConfig, gate_up: Sequence[Tensor]) -> Tensor:
    """Gate and up → alternating blocks of `gate_block` rows."""
    blocks = [_unflatten_rows(part, -1, config.gate_block) for part in gate_up]
    return torch.stack(blocks, dim=1).flatten(0, 2)


def _deinterleave(config: ModelConfig, ours: Tensor) -> Sequence[Tensor]:
    blocks = _unflatten_rows(ours, -1, 2, config.gate_block)
    return [blocks[:, half].flatten(0, 1) for half in (0, 1)]


def _transposed(tensor: Tensor) -> Tensor:
    """GPT-2's Conv1D stores its weight as [in, out]; biases stay."""
    return tensor.t() if tensor.ndim == 2 else tensor


_SAME = TensorLayout(lambda _, theirs: theirs[0], lambda _, ours: [ours])
_QKV = TensorLayout(_group_qkv, _ungroup_qkv)
_GATE_UP = TensorLayout(_interleave, _deinterleave)
# GPT-NeoX groups queries, keys and values by head, as we do; the order within a head differs.
_NEOX_QKV = TensorLayout(
    lambda config, theirs: _reorder_heads(config, theirs[0], inverse=False),
    lambda config, ours: [_reorder_heads(config, ours, inverse=True)],
)
_CONV1D = TensorLayout(
    lambda _, theirs: _transposed(theirs[0]), lambda _, ours: [_transposed(ours)]
)
_CONV1D_QKV = TensorLayout(
    lambda config, theirs: _group_qkv(config, _transposed(theirs[0]).chunk(3)),
    lambda config, ours: [_transposed(torch.cat(list(_ungroup_qkv(config, ours))))],
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
        buffers: Pattern of computed tensors that older versions saved.
        always_biased: Fields of `ModelConfig` whose biases transformers' model always has;
            zeros are exported if ours has none.
    """

    modules: tuple[ModuleMapping, ...]  # one row per module of ours
    prefix: str  # prefix that files of the model without its head omit
    renamed: tuple[tuple[str, str], ...] = ()  # pattern of an older version's name → replacement
    buffers: str = r"(?!)"  # matches nothing
    always_biased: tuple[str, ...] = ()

    def current_name(self, name: str) -> str | None:
        """Returns the name that the table knows, None for a buffer."""
        for pattern, replacement in self.renamed:
            name = re.sub(pattern, replacement, name)
        return None if re.search(self.buffers, name) else name


FAMILY_MAPPINGS: dict[str, FamilyMapping] = {
    # transformers/models/gpt_neox. Its head was renamed lm_head in version 5, which reads the
    # older name too; version 4 reads no other.
    "neox": FamilyMapping(
        modules=(
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
        renamed=((r"^lm_head\.", "embed_out."),),
        buffers=r"\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)$|rotary_emb\.inv_freq$",
        always_biased=("mlp_bias",),
    ),
    # transformers/models/llama
    "llama": FamilyMapping(
        modules=(
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
        modules=(
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


@dataclass(frozen=True)
class TensorMapping:
    """One of our tensors and those of theirs that it is converted from or to."""

    ours: str
    shape: tuple[int, ...]  # of ours, without padding rows of the vocabulary
    theirs: dict[str, tuple[int, ...]]  # names → shapes, in the order of the layout
    layout: TensorLayout


def tensor_mappings(config: ModelConfig) -> list[TensorMapping]:
    modules = {module.ours: module for module in FAMILY_MAPPINGS[config.family].modules}
    with torch.device("meta"):
        model = build_model(unpadded(config))  # no file holds padding rows
    found = []
    for name, parameter in model.named_parameters():
        leaf = name.rpartition(".")[2]
        layer = _LAYER.match(name)
        number = layer.group(1) if layer else ""
        module = modules[_LAYER.sub("layers.{}.", name).removesuffix(f".{leaf}")]
        names = [f"{theirs.format(number)}.{leaf}" for theirs in module.theirs]
        shapes = [tuple(part.shape) for part in module.layout.split(config, parameter.detach())]
        theirs = dict(zip(names, shapes, strict=True))
        found.append(TensorMapping(name, tuple(parameter.shape), theirs, module.layout))
    return found


def unpadded(config: ModelConfig) -> ModelConfig:
    return config.model_copy(update={"vocab_pad_multiple": 1})


def with_their_biases(config: ModelConfig) -> ModelConfig:
    """Returns the model with the biases that transformers' model of the family always has."""
    biased = dict.fromkeys(FAMILY_MAPPINGS[config.family].always_biased, True)
    return config.model_copy(update=biased)
