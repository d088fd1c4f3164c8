"""Mistral 7B and Nemo: Jiang et al. 2023 (arXiv 2310.06825)."""

from __future__ import annotations

from dataclasses import replace

from slurmllm.core.config.families.family import LayerKeys
from slurmllm.core.config.families.llama import LLAMA

_THEIRS = LLAMA.hugging_face

MISTRAL = replace(
    LLAMA,
    name="mistral",
    choices={**LLAMA.choices, "attention_bias": (False,), "mlp_bias": (False,)},
    optional=LLAMA.optional | {"attention_pattern"},
    # transformers/models/mistral: Llama's names.
    hugging_face=replace(
        _THEIRS,
        model_type="mistral",
        causal="MistralForCausalLM",
        base="MistralModel",
        keys={
            **{name: key for name, key in _THEIRS.keys.items() if not name.endswith("_bias")},
            "seq_len": ("max_position_embeddings", 131072),
            "num_kv_heads": ("num_key_value_heads", 8),
        },
        layers=LayerKeys(window=4096),
    ),
)
