"""Llama 2: Touvron et al. 2023 (arXiv 2307.09288); Llama 3 to 3.2: Grattafiori et al. 2024
(arXiv 2407.21783); Mistral 7B and Nemo: Jiang et al. 2023 (arXiv 2310.06825).
"""

from __future__ import annotations

from dataclasses import replace

from slurmllm.core.config.families.family import (
    LATER_KEYS,
    Family,
    HuggingFaceModel,
    LayerKeys,
    module_table,
)

_MODULES = """
    embed                     same     model.embed_tokens
    layers.{}.attention_norm  same     .input_layernorm
    layers.{}.attention.qkv   qkv      .self_attn.q_proj .self_attn.k_proj .self_attn.v_proj
    layers.{}.attention.out   same     .self_attn.o_proj
    layers.{}.mlp_norm        same     .post_attention_layernorm
    layers.{}.mlp.gate_up     gate_up  .mlp.gate_proj .mlp.up_proj
    layers.{}.mlp.down        same     .mlp.down_proj
    final_norm                same     model.norm
    head                      same     lm_head
"""

LLAMA = Family(
    name="llama",
    norm="rms",
    positions="rotary",
    gated=True,
    defaults={
        "rotary_pct": 1.0,
        "activation": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "parallel_residual": False,
        "qk_norm": False,
        "tied_embeddings": False,
    },
    choices={
        "rotary_pct": (1.0,),
        "activation": ("silu",),
        "parallel_residual": (False,),
        "qk_norm": (False,),
    },
    optional=frozenset({"num_kv_heads", "head_dim", "rope_scaling"}),
    # transformers/models/llama
    hugging_face=HuggingFaceModel(
        "llama",
        "LlamaForCausalLM",
        "LlamaModel",
        keys=LATER_KEYS
        | {
            "num_kv_heads": ("num_key_value_heads", None),
            "head_dim": ("head_dim", None),
            "activation": ("hidden_act", "silu"),
            "attention_bias": ("attention_bias", False),
            "mlp_bias": ("mlp_bias", False),
            "norm_eps": ("rms_norm_eps", 1e-6),
        },
        rotary_keys={"rotary_base": "rope_theta"},
        written={"attention_dropout": 0.0},
        modules=module_table("model.layers.{}", _MODULES),
        prefix="model.",
        buffers=r"rotary_emb\.inv_freq$",
    ),
)

_KEYS = LLAMA.hugging_face.keys

MISTRAL = replace(
    LLAMA,
    name="mistral",
    choices={**LLAMA.choices, "attention_bias": (False,), "mlp_bias": (False,)},
    optional=LLAMA.optional | {"attention_pattern"},
    # transformers/models/mistral: Llama's names.
    hugging_face=replace(
        LLAMA.hugging_face,
        model_type="mistral",
        causal="MistralForCausalLM",
        base="MistralModel",
        keys={
            **{name: key for name, key in _KEYS.items() if not name.endswith("_bias")},
            "seq_len": ("max_position_embeddings", 131072),
            "num_kv_heads": ("num_key_value_heads", 8),
        },
        layers=LayerKeys(window=4096),
    ),
)

# Later models: norms of queries and keys, and no biases in the feed-forward layer, of which their
# config.json says nothing.
LATER_LLAMA = replace(
    LLAMA,
    defaults={**LLAMA.defaults, "qk_norm": True},
    choices={**LLAMA.choices, "mlp_bias": (False,), "qk_norm": (True,)},
    hugging_face=replace(
        LLAMA.hugging_face,
        keys={name: key for name, key in _KEYS.items() if name != "mlp_bias"},
    ),
)
