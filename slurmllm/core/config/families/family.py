"""What a model family consists of: its choices, its sharding, its form in transformers; torch-free.

One file of this package holds each family. `docs/developing/add_a_model.md` says how to add one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from slurmllm.core.format import Texts, Values

Activation = Literal["gelu", "gelu_tanh", "silu", "relu2"]
# How tensor parallelism shares a module's weight, [out, in] or [entries, width]:
#   vocabulary  by rows, a row being an entry of an embedding or of the head
#   column      by rows, so by output features (the columns of the transposed matrix)
#   row         by columns, so by input features; partial sums are added up afterwards
#   sequence    not shared; works on a share of the sequence under sequence parallelism
#   head        not shared; works on each of the worker's heads, so that a worker's gradient is a
#               partial sum
#   heads       by heads; works on all heads together, of which each worker has some
Sharding = Literal["vocabulary", "column", "row", "sequence", "head", "heads"]
# How several tensors of transformers are laid out in one of ours; the functions are in
# `checkpoint/formats/huggingface.py`:
#   same         equal
#   qkv          queries, keys and values, each a matrix
#   swapped_qkv  the same, rotated in the other direction: halves of each query and key swapped
#   neox_qkv     one matrix grouped by head, with GPT-NeoX's order of rotary dimensions
#   gate_up      gate and up, each a matrix
#   conv1d       GPT-2's [in, out]
#   conv1d_qkv   GPT-2's [in, out] with queries, keys and values one after the other
Layout = Literal["same", "qkv", "swapped_qkv", "neox_qkv", "gate_up", "conv1d", "conv1d_qkv"]

# Key of config.json, and its default in transformers' configuration class
ForeignKey = tuple[str, Any]
# Default of a key that every config.json must have.
REQUIRED = object()


class ModuleMapping(NamedTuple):
    """One of our modules and those of transformers; `{}` is the layer's number."""

    ours: str
    theirs: Texts
    layout: Layout = "same"


def module_table(layer: str, table: str) -> tuple[ModuleMapping, ...]:
    """Return a mapping for each line: our module, the layout, and transformers' modules.

    Those that begin with a dot are inside of `layer`.
    """
    rows: Any = map(str.split, table.strip().replace(" .", f" {layer}.").splitlines())
    return tuple(ModuleMapping(ours, tuple(theirs), layout) for ours, layout, *theirs in rows)


@dataclass(frozen=True)
class LayerKeys:
    """How a config.json describes the attention of each layer.

    Attributes:
        window: Default of `sliding_window`.
        full_every: Default of `layer_types`: every so many layers one has full attention, the
            others the window. 0: there is no such key.
        unrotated_every: Default of `no_rope_layer_interval`: every so many layers one has no
            rotary positions, unless `no_rope_layers` says otherwise, and `use_sliding_window`
            gives these the window. 0: there are no such keys.
    """

    window: int | None
    full_every: int = 0
    unrotated_every: int = 0

    def fault(self, pattern: Sequence[Values]) -> str:
        """Return why no config.json has these layers (fields of `LayerAttention`), or nothing."""
        ropes: dict[Any, set[Any]] = {}  # window → rope
        for kind in pattern:
            ropes.setdefault(kind.get("window"), set()).add(kind.get("rope"))
        every = set().union(*ropes.values())
        if len(ropes.keys() - {None}) > 1:
            return "has windows of several lengths; choose one"
        if not self.full_every and not self.unrotated_every and len(ropes) > 1:
            return "has layers with and without a window; give all the same"
        if not self.unrotated_every and "none" in every:
            return "has layers without rotary positions; leave rope out"
        if not self.full_every and every - {None, "none"}:
            return "has layers with another base; set model.rotary_base for all"
        if not self.unrotated_every and any(len(kinds) > 1 for kinds in ropes.values()):
            return "has several rotary bases for layers with the same window; choose one"
        return ""


@dataclass(frozen=True)
class HuggingFaceModel:
    """A family's configuration and tensors in transformers.

    Attributes:
        keys: Our field → (key of config.json, default of transformers' configuration class).
        fixed: Key → its only supported value.
        rotary_keys: Our field → key at the top level, as version 4 of transformers has it.
        written: Keys that an export sets, with their values.
        prefix: Prefix of names that files of the model without its head omit.
        renamed: Pattern of an older version's name → replacement.
        buffers: Pattern of computed tensors that older versions saved.
        rope_bases: Layer type → key of the base of its rotary angles, and its default; version 5
            has `rope_parameters` by type. "": all layers have the same.
        layers: How the layers' attention is described, if they may differ.
        wrapper: Type of a model of several kinds of input whose `text_config` is such a model.
        always_biased: Fields of `ModelConfig` whose biases transformers' model always has;
            zeros are exported if ours has none.
    """

    model_type: str
    causal: str  # the class with a head
    base: str  # the class without a head; its weights are complete if the head is tied
    keys: Mapping[str, ForeignKey]
    modules: tuple[ModuleMapping, ...]  # one row per module of ours
    prefix: str
    fixed: Values = field(default_factory=dict)
    rotary_keys: Mapping[str, str] = field(default_factory=dict)
    written: Values = field(default_factory=dict)
    renamed: tuple[tuple[str, str], ...] = ()
    buffers: str = r"(?!)"  # matches nothing
    rope_bases: Mapping[str, ForeignKey] = field(default_factory=lambda: {"": ("rope_theta", 1e4)})
    layers: LayerKeys | None = None
    wrapper: str = ""
    always_biased: Texts = ()

    def current_name(self, name: str) -> str | None:
        """Return the name that `modules` has, None for a buffer."""
        for pattern, replacement in self.renamed:
            name = re.sub(pattern, replacement, name)
        return None if re.search(self.buffers, name) else name


@dataclass(frozen=True)
class Family:
    """The choices that make a decoder a GPT-NeoX rather than something else."""

    name: str  # value of `model.family`
    norm: Literal["layer", "rms"]  # LayerNorm or RMSNorm
    # Rotary positions in every attention, or one learned table added to the embedding.
    positions: Literal["rotary", "learned"]
    gated: bool  # the feed-forward layer multiplies an activated gate with its up-projection
    # Fields of `ModelConfig` that a recipe of this family may leave out (all of `CHOSEN`).
    defaults: Values
    # Those of them that not all values are possible for, with the values: what transformers' model
    # of the family can be, so that every model can be exported.
    choices: Mapping[str, tuple[Any, ...]]
    hugging_face: HuggingFaceModel
    # Fields that only some families have; others must leave them out: num_kv_heads (several
    # attention heads may share a key and value head), head_dim, rope_scaling, and `EXTRAS`.
    optional: frozenset[str] = frozenset()
    # Norms of what attention and the feed-forward layer read (before), of their output before it is
    # added to the residual stream (after), or of both.
    norm_places: Literal["before", "after", "both"] = "before"
    # Norms multiply by their weight, by 1 + weight, or have none.
    norm_weight: Literal["plain", "one_plus", "none"] = "plain"
    embedding_norm: bool = False  # a norm between embedding and first block
    scaled_embedding: bool = False  # the embedding is multiplied by sqrt(hidden_size)
    # Queries' norm, and keys', is of each head or of all heads together.
    qk_norm_over: Literal["head", "vector"] = "head"
    qk_norm_after_rotation: bool = False


# Fields of `ModelConfig` that change attention or the logits, and that most families do not have.
EXTRAS = ("attention_pattern", "query_pre_attn_scalar", "attention_softcap", "logits_softcap")


# Fields of `ModelConfig` that the family has a default for.
CHOSEN = (
    "rotary_pct",
    "activation",
    "attention_bias",
    "mlp_bias",
    "parallel_residual",
    "qk_norm",
    "tied_embeddings",
)

# Keys of config.json: GPT-2 has names of its own, later models agree on these.
SHARED_KEYS: dict[str, ForeignKey] = {
    "vocab_size": ("vocab_size", REQUIRED),
    "init_std": ("initializer_range", 0.02),
}
LATER_KEYS: dict[str, ForeignKey] = {
    **SHARED_KEYS,
    "num_layers": ("num_hidden_layers", REQUIRED),
    "hidden_size": ("hidden_size", REQUIRED),
    "num_heads": ("num_attention_heads", REQUIRED),
    "ffn_hidden_size": ("intermediate_size", REQUIRED),
    "seq_len": ("max_position_embeddings", 2048),
    "tied_embeddings": ("tie_word_embeddings", False),
}


def gate_block(ffn_hidden_size: int) -> int:
    """Return the rows of gate and of up that alternate in the coalesced matrix.

    Blocks, so that a contiguous share of the rows holds matching gates and ups; 16 is what one
    vector register holds of fp32.
    """
    return math.gcd(ffn_hidden_size, 16)
