"""OLMo 3: Olmo team 2025 (arXiv 2512.13961)."""

from __future__ import annotations

from dataclasses import replace

from slurmllm.core.config.families.family import LayerKeys, module_table
from slurmllm.core.config.families.llama import LATER_LLAMA

_THEIRS = LATER_LLAMA.hugging_face
_MODULES = """
    embed                         same     model.embed_tokens
    layers.{}.attention.qkv       qkv      .self_attn.q_proj .self_attn.k_proj .self_attn.v_proj
    layers.{}.attention.q_norm    same     .self_attn.q_norm
    layers.{}.attention.k_norm    same     .self_attn.k_norm
    layers.{}.attention.out       same     .self_attn.o_proj
    layers.{}.attention_out_norm  same     .post_attention_layernorm
    layers.{}.mlp.gate_up         gate_up  .mlp.gate_proj .mlp.up_proj
    layers.{}.mlp.down            same     .mlp.down_proj
    layers.{}.mlp_out_norm        same     .post_feedforward_layernorm
    final_norm                    same     model.norm
    head                          same     lm_head
"""

OLMO3 = replace(
    LATER_LLAMA,
    name="olmo3",
    optional=LATER_LLAMA.optional | {"attention_pattern"},
    norm_places="after",
    qk_norm_over="vector",
    # transformers/models/olmo3
    hugging_face=replace(
        _THEIRS,
        model_type="olmo3",
        causal="Olmo3ForCausalLM",
        base="Olmo3Model",
        keys={
            **_THEIRS.keys,
            "norm_eps": ("rms_norm_eps", 1e-5),
        },
        modules=module_table("model.layers.{}", _MODULES),
        # Version 4 has one base; version 5 takes it for full attention only.
        rope_bases={"full_attention": ("rope_theta", 5e5), "sliding_attention": ("", 5e5)},
        layers=LayerKeys(window=4096, full_every=4),
    ),
)
