"""GPT-3: Brown et al. 2020 (arXiv 2005.14165); in transformers, GPT-2."""

from __future__ import annotations

from slurmllm.core.config.families.family import (
    REQUIRED,
    SHARED_KEYS,
    Family,
    HuggingFaceModel,
    module_table,
)

_MODULES = """
    embed                     same        transformer.wte
    positions                 same        transformer.wpe
    layers.{}.attention_norm  same        .ln_1
    layers.{}.attention.qkv   conv1d_qkv  .attn.c_attn
    layers.{}.attention.out   conv1d      .attn.c_proj
    layers.{}.mlp_norm        same        .ln_2
    layers.{}.mlp.up          conv1d      .mlp.c_fc
    layers.{}.mlp.down        conv1d      .mlp.c_proj
    final_norm                same        transformer.ln_f
    head                      same        lm_head
"""

GPT3 = Family(
    name="gpt3",
    norm="layer",
    positions="learned",
    gated=False,
    defaults={
        "rotary_pct": 0.0,
        "activation": "gelu_tanh",  # as in GPT-2's code
        "attention_bias": True,
        "mlp_bias": True,
        "parallel_residual": False,
        "qk_norm": False,
        "tied_embeddings": True,
    },
    choices={
        "rotary_pct": (0.0,),
        "activation": ("gelu", "gelu_tanh"),
        "parallel_residual": (False,),
        "qk_norm": (False,),
    },
    # transformers/models/gpt2
    hugging_face=HuggingFaceModel(
        "gpt2",
        "GPT2LMHeadModel",
        "GPT2Model",
        keys=SHARED_KEYS
        | {
            "num_layers": ("n_layer", REQUIRED),
            "hidden_size": ("n_embd", REQUIRED),
            "num_heads": ("n_head", REQUIRED),
            "ffn_hidden_size": ("n_inner", None),  # None: four times the hidden size
            "seq_len": ("n_positions", 1024),
            "activation": ("activation_function", "gelu_new"),
            "tied_embeddings": ("tie_word_embeddings", True),
            "norm_eps": ("layer_norm_epsilon", 1e-5),
        },
        fixed={
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
        },
        # The configuration class has dropouts of 0.1.
        written={"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
        modules=module_table("transformer.h.{}", _MODULES),
        prefix="transformer.",
        buffers=r"\.attn\.(bias|masked_bias)$",
        always_biased=("attention_bias", "mlp_bias"),
    ),
)
