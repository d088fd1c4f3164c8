"""SmolLM3: Hugging Face 2025 (huggingface.co/blog/smollm3); layers without positions: Yang et al.
2025 (arXiv 2501.18795).
"""

from __future__ import annotations

from dataclasses import replace

from slurmllm.core.config.families.family import LayerKeys
from slurmllm.core.config.families.llama import LLAMA

_THEIRS = LLAMA.hugging_face

SMOLLM3 = replace(
    LLAMA,
    name="smollm3",
    defaults={**LLAMA.defaults, "tied_embeddings": True},
    optional=LLAMA.optional | {"attention_pattern"},
    # transformers/models/smollm3: Llama's names.
    hugging_face=replace(
        _THEIRS,
        model_type="smollm3",
        causal="SmolLM3ForCausalLM",
        base="SmolLM3Model",
        keys={
            **_THEIRS.keys,
            "seq_len": ("max_position_embeddings", 32768),
            "num_kv_heads": ("num_key_value_heads", 4),
            "tied_embeddings": ("tie_word_embeddings", True),
        },
        rope_bases={"": ("rope_theta", 2e6)},
        layers=LayerKeys(window=None, unrotated_every=4),
    ),
)
