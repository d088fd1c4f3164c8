"""GPT-3: Brown et al. 2020 (arXiv 2005.14165); in transformers, GPT-2."""

from __future__ import annotations

from slurmllm.core.config.families.family import (
    REQUIRED,
    SHARED_KEYS,
    Family,
    HuggingFaceModel,
    ModuleMapping,
)

_LAYER = "transformer.h.{}."

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
            "add_cross_attention": False,
        },
        # The configuration class has dropouts of 0.1.
        written={"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
        modules=(
            ModuleMapping("embed", ("transformer.wte",)),
            ModuleMapping("positions", ("transformer.wpe",)),
            ModuleMapping("layers.{}.attention_norm", (f"{_LAYER}ln_1",)),
            ModuleMapping("layers.{}.attention.qkv", (f"{_LAYER}attn.c_attn",), "conv1d_qkv"),
            ModuleMapping("layers.{}.attention.out", (f"{_LAYER}attn.c_proj",), "conv1d"),
            ModuleMapping("layers.{}.mlp_norm", (f"{_LAYER}ln_2",)),
            ModuleMapping("layers.{}.mlp.up", (f"{_LAYER}mlp.c_fc",), "conv1d"),
            ModuleMapping("layers.{}.mlp.down", (f"{_LAYER}mlp.c_proj",), "conv1d"),
            ModuleMapping("final_norm", ("transformer.ln_f",)),
            ModuleMapping("head", ("lm_head",)),
        ),
        prefix="transformer.",
        buffers=r"\.attn\.(bias|masked_bias)$",
        always_biased=("attention_bias", "mlp_bias"),
    ),
)
