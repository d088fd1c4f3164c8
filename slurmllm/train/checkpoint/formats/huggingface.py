"""Tensors of Hugging Face's models, converted in both directions.

Names and layouts are in the family's file (`config/families/`). `join` combines their tensors into
ours, `split` divides ours into theirs. Both serve weights, biases and meta tensors, which give the
expected shapes.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from slurmllm.core.config.families import FAMILIES
from slurmllm.core.config.families.family import Layout
from slurmllm.core.config.recipe import ModelConfig
from slurmllm.train.checkpoint.formats.model_folders import TokenizerFiles
from slurmllm.train.model.attention import slice_order
from slurmllm.train.model.decoder import build_model

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
    """Permute the query and key dimensions of every head to our rotary order, or back."""
    order = torch.tensor(slice_order(config.head_width, config.rotary_pct), device=qkv.device)
    if inverse:
        order = order.argsort()
    heads = _unflatten_rows(qkv, config.num_heads, 3, config.head_width)
    reordered = heads[:, :2].index_select(2, order)
    return torch.cat([reordered, heads[:, 2:]], dim=1).flatten(0, 2)


def _group_qkv(config: ModelConfig, qkv: Sequence[Tensor]) -> Tensor:
    """Return the rows of queries, keys and values, grouped by key-value head."""
    parts = [_unflatten_rows(block, config.kv_heads, -1) for block in qkv]
    return torch.cat(parts, dim=1).flatten(0, 1)


def _ungroup_qkv(config: ModelConfig, ours: Tensor) -> Sequence[Tensor]:
    queries = config.num_heads // config.kv_heads * config.head_width
    groups = _unflatten_rows(ours, config.kv_heads, -1)
    parts = groups.tensor_split((queries, queries + config.head_width), dim=1)
    return [block.flatten(0, 1) for block in parts]


def _swap_halves(config: ModelConfig, qkv: Sequence[Tensor]) -> Sequence[Tensor]:
    """Swap the halves of every query and key, which turns their rotation around."""
    queries, keys, values = qkv
    swapped = [
        _unflatten_rows(block, -1, 2, config.head_width // 2).flip(1).flatten(0, 2)
        for block in (queries, keys)
    ]
    return [*swapped, values]


def _interleave(config: ModelConfig, gate_up: Sequence[Tensor]) -> Tensor:
    blocks = [_unflatten_rows(block, -1, config.gate_block) for block in gate_up]
    return torch.stack(blocks, dim=1).flatten(0, 2)


def _deinterleave(config: ModelConfig, ours: Tensor) -> Sequence[Tensor]:
    blocks = _unflatten_rows(ours, -1, 2, config.gate_block)
    return [blocks[:, half].flatten(0, 1) for half in (0, 1)]


def _transposed(tensor: Tensor) -> Tensor:
    """GPT-2's Conv1D stores its weight as [in, out]; biases stay."""
    return tensor.t() if tensor.ndim == 2 else tensor


# GPT-NeoX groups queries, keys and values by head, as we do; the order within a head differs.
LAYOUTS: dict[Layout, TensorLayout] = {
    "same": TensorLayout(lambda _, theirs: theirs[0], lambda _, ours: [ours]),
    "qkv": TensorLayout(_group_qkv, _ungroup_qkv),
    "swapped_qkv": TensorLayout(
        lambda config, theirs: _group_qkv(config, _swap_halves(config, theirs)),
        lambda config, ours: _swap_halves(config, _ungroup_qkv(config, ours)),
    ),
    "gate_up": TensorLayout(_interleave, _deinterleave),
    "neox_qkv": TensorLayout(
        lambda config, theirs: _reorder_heads(config, theirs[0], inverse=False),
        lambda config, ours: [_reorder_heads(config, ours, inverse=True)],
    ),
    "conv1d": TensorLayout(
        lambda _, theirs: _transposed(theirs[0]), lambda _, ours: [_transposed(ours)]
    ),
    "conv1d_qkv": TensorLayout(
        lambda config, theirs: _group_qkv(config, _transposed(theirs[0]).chunk(3)),
        lambda config, ours: [_transposed(torch.cat(list(_ungroup_qkv(config, ours))))],
    ),
}


@dataclass(frozen=True)
class TensorMapping:
    """One of our tensors and those of theirs that it is converted from or to."""

    ours: str
    shape: tuple[int, ...]  # of ours, without padding rows of the vocabulary
    theirs: dict[str, tuple[int, ...]]  # names → shapes, in the order of the layout
    layout: TensorLayout


@dataclass(frozen=True)
class TensorPlan(ABC):
    """An import or export whose inputs have been checked."""

    mappings: list[TensorMapping]
    dtype: torch.dtype | None  # type of the weights to write; None keeps each tensor's own
    tokenizer: TokenizerFiles  # files to write with the weights
    # A line for each tensor with NaN or infinite weights, of those that were converted.
    not_finite: list[str] = field(default_factory=list, kw_only=True)

    @abstractmethod
    def dtype_of(self, mapping: TensorMapping) -> torch.dtype: ...

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(mapping.shape) for mapping in self.mappings)

    @property
    def sizes_bytes(self) -> list[int]:
        return [math.prod(m.shape) * self.dtype_of(m).itemsize for m in self.mappings]


def tensor_mappings(config: ModelConfig) -> list[TensorMapping]:
    modules = {module.ours: module for module in FAMILIES[config.family].hugging_face.modules}
    with torch.device("meta"):
        model = build_model(unpadded(config))  # no file holds padding rows
    mappings = []
    for name, parameter in model.named_parameters():
        leaf = name.rpartition(".")[2]
        layer = _LAYER.match(name)
        number = layer.group(1) if layer else ""
        module = modules[_LAYER.sub("layers.{}.", name).removesuffix(f".{leaf}")]
        names = [f"{theirs.format(number)}.{leaf}" for theirs in module.theirs]
        layout = LAYOUTS[module.layout]
        shapes = [tuple(block.shape) for block in layout.split(config, parameter.detach())]
        theirs = dict(zip(names, shapes, strict=True))
        mappings.append(TensorMapping(name, tuple(parameter.shape), theirs, layout))
    return mappings


def not_finite_text(tensor: Tensor) -> str:
    """Return `3 of 64 weights are NaN or infinite`, empty if all are finite."""
    bad = tensor.numel() - int(tensor.isfinite().count_nonzero())
    verb = "is" if bad == 1 else "are"
    return f"{bad:,} of {tensor.numel():,} weights {verb} NaN or infinite" if bad else ""


def unpadded(config: ModelConfig) -> ModelConfig:
    return config.model_copy(update={"vocab_pad_multiple": 1})


def with_their_biases(config: ModelConfig) -> ModelConfig:
    """Return the model with the biases that transformers' model of the family always has."""
    biased = FAMILIES[config.family].hugging_face.always_biased
    return config.model_copy(update=dict.fromkeys(biased, True))
