"""The differences between the model families; torch-free.

`FAMILIES` holds what a family is and what a recipe may leave to it; `sharding_plan` maps its
matrices to their tensor-parallel sharding. The decoder, the backends, the planner and the
conversion of checkpoints read both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

FamilyName = Literal["neox", "llama", "gpt3"]
Activation = Literal["gelu", "gelu_tanh", "silu"]
# How tensor parallelism shares a module's weight, [out, in] or [entries, width]:
#   vocabulary  by rows, a row being an entry of an embedding or of the head
#   column      by rows, so by output features (the columns of the transposed matrix)
#   row         by columns, so by input features; partial sums are added up afterwards
#   sequence    not shared; works on a share of the sequence under sequence parallelism
Sharding = Literal["vocabulary", "column", "row", "sequence"]


@dataclass(frozen=True)
class Family:
    """The choices that make a decoder a GPT-NeoX rather than something else."""

    norm: Literal["layer", "rms"]  # LayerNorm or RMSNorm before attention, feed-forward and head
    # Rotary positions in every attention, or one learned table added to the embedding.
    positions: Literal["rotary", "learned"]
    gated: bool  # the feed-forward layer multiplies an activated gate with its up-projection
    kv_groups: bool  # several attention heads may share a key and value head
    # Fields of `ModelConfig` that a recipe of this family may leave out.
    defaults: Mapping[str, Any]
    # Those of them that not all values are possible for, with the values: what transformers' model
    # of the family can be, so that every model can be exported.
    choices: Mapping[str, tuple[Any, ...]]


FAMILIES: dict[str, Family] = {
    # Black et al. 2022 (arXiv 2204.06745), Biderman et al. 2023 (arXiv 2304.01373). GELU by erf,
    # as in Pythia's config.json (NeoX 20B's has "gelu_fast": model.activation=gelu_tanh).
    "neox": Family(
        norm="layer",
        positions="rotary",
        gated=False,
        kv_groups=False,
        defaults={
            "rotary_pct": 0.25,
            "activation": "gelu",
            "attention_bias": True,
            "mlp_bias": True,
            "parallel_residual": True,
            "tied_embeddings": False,
        },
        choices={"activation": ("gelu", "gelu_tanh")},
    ),
    # Touvron et al. 2023 (arXiv 2307.09288).
    "llama": Family(
        norm="rms",
        positions="rotary",
        gated=True,
        kv_groups=True,
        defaults={
            "rotary_pct": 1.0,
            "activation": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "parallel_residual": False,
            "tied_embeddings": False,
        },
        choices={"rotary_pct": (1.0,), "activation": ("silu",), "parallel_residual": (False,)},
    ),
    # Brown et al. 2020 (arXiv 2005.14165); GELU by tanh as in GPT-2's code.
    "gpt3": Family(
        norm="layer",
        positions="learned",
        gated=False,
        kv_groups=False,
        defaults={
            "rotary_pct": 0.0,
            "activation": "gelu_tanh",
            "attention_bias": True,
            "mlp_bias": True,
            "parallel_residual": False,
            "tied_embeddings": True,
        },
        choices={
            "rotary_pct": (0.0,),
            "activation": ("gelu", "gelu_tanh"),
            "parallel_residual": (False,),
        },
    ),
}


def gate_block(ffn_hidden_size: int) -> int:
    """Rows of gate and of up that alternate in the coalesced matrix of a gated family.

    Blocks, so that a contiguous share of the rows holds matching gates and ups; 16 is what one
    vector register holds of fp32.
    """
    return math.gcd(ffn_hidden_size, 16)


_BLOCK: dict[str, Sharding] = {
    "attention_norm": "sequence",
    "attention.qkv": "column",
    "attention.out": "row",
    "mlp_norm": "sequence",
    "mlp.up": "column",
    "mlp.gate_up": "column",
    "mlp.down": "row",
}


@dataclass(frozen=True)
class ShardingPlan:
    """Module name → how tensor parallelism shares its parameters."""

    block: Mapping[str, Sharding]  # names inside a decoder layer, whatever its number
    rest: Mapping[str, Sharding]  # names outside the layers


def sharding_plan(family: str, tied_embeddings: bool) -> ShardingPlan:
    """The one sharding plan of a family, for every backend.

    Biases of column-parallel modules are shared with their rows; those of row-parallel ones are
    whole on every worker and are added once, after the sum.
    """
    kind = FAMILIES[family]
    absent = "mlp.up" if kind.gated else "mlp.gate_up"
    rest: dict[str, Sharding] = {"embed": "vocabulary", "final_norm": "sequence"}
    if kind.positions == "learned":
        rest["positions"] = "vocabulary"
    if not tied_embeddings:
        rest["head"] = "vocabulary"
    return ShardingPlan({name: how for name, how in _BLOCK.items() if name != absent}, rest)
