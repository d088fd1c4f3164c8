"""nanochat: Karpathy 2025 (github.com/karpathy/nanochat), as transformers has it."""

from __future__ import annotations

from dataclasses import replace

from slurmllm.core.config.families.family import module_table
from slurmllm.core.config.families.llama import LATER_LLAMA

_THEIRS = LATER_LLAMA.hugging_face
_MODULES = """
    embed                    same         model.embed_tokens
    layers.{}.attention.qkv  swapped_qkv  .self_attn.q_proj .self_attn.k_proj .self_attn.v_proj
    layers.{}.attention.out  same         .self_attn.o_proj
    layers.{}.mlp.up         same         .mlp.fc1
    layers.{}.mlp.down       same         .mlp.fc2
    head                     same         lm_head
"""

NANOCHAT = replace(
    LATER_LLAMA,
    name="nanochat",
    gated=False,
    defaults={**LATER_LLAMA.defaults, "activation": "relu2"},
    choices={**LATER_LLAMA.choices, "activation": ("relu2", "gelu", "gelu_tanh", "silu")},
    optional=LATER_LLAMA.optional | {"logits_softcap"},
    norm_weight="none",
    embedding_norm=True,
    qk_norm_after_rotation=True,
    # transformers/models/nanochat
    hugging_face=replace(
        _THEIRS,
        model_type="nanochat",
        causal="NanoChatForCausalLM",
        base="NanoChatModel",
        keys={
            **_THEIRS.keys,
            "activation": ("hidden_act", "relu2"),
            "logits_softcap": ("final_logit_softcapping", 15.0),
        },
        modules=module_table("model.layers.{}", _MODULES),
    ),
)
