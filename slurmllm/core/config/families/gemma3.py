"""Gemma 3, its text models: Gemma team 2025 (arXiv 2503.19786)."""

from __future__ import annotations

from dataclasses import replace

from slurmllm.core.config.families.family import LayerKeys, module_table
from slurmllm.core.config.families.llama import LATER_LLAMA

_THEIRS = LATER_LLAMA.hugging_face
_MODULES = """
    embed                         same     model.embed_tokens
    layers.{}.attention_norm      same     .input_layernorm
    layers.{}.attention.qkv       qkv      .self_attn.q_proj .self_attn.k_proj .self_attn.v_proj
    layers.{}.attention.q_norm    same     .self_attn.q_norm
    layers.{}.attention.k_norm    same     .self_attn.k_norm
    layers.{}.attention.out       same     .self_attn.o_proj
    layers.{}.attention_out_norm  same     .post_attention_layernorm
    layers.{}.mlp_norm            same     .pre_feedforward_layernorm
    layers.{}.mlp.gate_up         gate_up  .mlp.gate_proj .mlp.up_proj
    layers.{}.mlp.down            same     .mlp.down_proj
    layers.{}.mlp_out_norm        same     .post_feedforward_layernorm
    final_norm                    same     model.norm
    head                          same     lm_head
"""

GEMMA3 = replace(
    LATER_LLAMA,
    name="gemma3",
    defaults={
        **LATER_LLAMA.defaults,
        "activation": "gelu_tanh",
        "tied_embeddings": True,
    },
    choices={**LATER_LLAMA.choices, "activation": ("gelu_tanh", "gelu", "silu")},
    optional=LATER_LLAMA.optional
    | {"attention_pattern", "query_pre_attn_scalar", "logits_softcap"},
    norm_places="both",
    norm_weight="one_plus",
    scaled_embedding=True,
    # transformers/models/gemma3. The published files leave out what the class has.
    hugging_face=replace(
        _THEIRS,
        model_type="gemma3_text",
        causal="Gemma3ForCausalLM",
        base="Gemma3TextModel",
        keys={
            **_THEIRS.keys,
            "vocab_size": ("vocab_size", 262208),
            "hidden_size": ("hidden_size", 2304),
            "ffn_hidden_size": ("intermediate_size", 9216),
            "num_layers": ("num_hidden_layers", 26),
            "num_heads": ("num_attention_heads", 8),
            "num_kv_heads": ("num_key_value_heads", 4),
            "head_dim": ("head_dim", 256),
            "seq_len": ("max_position_embeddings", 131072),
            "activation": ("hidden_activation", "gelu_pytorch_tanh"),
            "tied_embeddings": ("tie_word_embeddings", True),
            "query_pre_attn_scalar": ("query_pre_attn_scalar", 256),
            "logits_softcap": ("final_logit_softcapping", None),
        },
        # Its attention reads no soft cap, whatever config.json says.
        fixed={"attn_logit_softcapping": None},
        modules=module_table("model.layers.{}", _MODULES),
        # The text model of Gemma3ForConditionalGeneration, as versions 4 and 5 name it.
        wrapper="gemma3",
        renamed=((r"^language_model\.(?=model|lm_head)|(?<=^model\.)language_model\.", ""),),
        buffers=r"rotary_emb\.inv_freq$|^(model\.)?(vision_tower|multi_modal_projector)\.",
        rope_bases={
            "full_attention": ("rope_theta", 1e6),
            "sliding_attention": ("rope_local_base_freq", 1e4),
        },
        layers=LayerKeys(window=4096, full_every=6),
    ),
)
