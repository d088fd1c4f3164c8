"""Qwen3, the dense models: Yang et al. 2025 (arXiv 2505.09388)."""

from __future__ import annotations

from dataclasses import replace

from slurmllm.core.config.families.family import ModuleMapping
from slurmllm.core.config.families.llama import LATER_LLAMA

_THEIRS = LATER_LLAMA.hugging_face

QWEN3 = replace(
    LATER_LLAMA,
    name="qwen3",
    # transformers/models/qwen3: Llama's names and two norms more.
    hugging_face=replace(
        _THEIRS,
        model_type="qwen3",
        causal="Qwen3ForCausalLM",
        base="Qwen3Model",
        keys={
            **_THEIRS.keys,
            "seq_len": ("max_position_embeddings", 32768),
            "num_kv_heads": ("num_key_value_heads", 32),
            "head_dim": ("head_dim", 128),
        },
        fixed={"use_sliding_window": False},
        modules=(
            *_THEIRS.modules,
            ModuleMapping("layers.{}.attention.q_norm", ("model.layers.{}.self_attn.q_norm",)),
            ModuleMapping("layers.{}.attention.k_norm", ("model.layers.{}.self_attn.k_norm",)),
        ),
    ),
)
