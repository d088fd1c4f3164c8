"""GPT-NeoX and Pythia: Black et al. 2022 (arXiv 2204.06745), Biderman et al. 2023 (2304.01373)."""

from __future__ import annotations

from slurmllm.core.config.families.family import LATER_KEYS, Family, HuggingFaceModel, module_table

_MODULES = """
    embed                     same      gpt_neox.embed_in
    layers.{}.attention_norm  same      .input_layernorm
    layers.{}.attention.qkv   neox_qkv  .attention.query_key_value
    layers.{}.attention.out   same      .attention.dense
    layers.{}.mlp_norm        same      .post_attention_layernorm
    layers.{}.mlp.up          same      .mlp.dense_h_to_4h
    layers.{}.mlp.down        same      .mlp.dense_4h_to_h
    final_norm                same      gpt_neox.final_layer_norm
    head                      same      embed_out
"""

NEOX = Family(
    name="neox",
    norm="layer",
    positions="rotary",
    gated=False,
    defaults={
        "rotary_pct": 0.25,
        # By erf, as in Pythia's config.json (NeoX 20B's has "gelu_fast":
        # model.activation=gelu_tanh).
        "activation": "gelu",
        "attention_bias": True,
        "mlp_bias": True,
        "parallel_residual": True,
        "qk_norm": False,
        "tied_embeddings": False,
    },
    choices={"activation": ("gelu", "gelu_tanh"), "qk_norm": (False,)},
    # transformers/models/gpt_neox. Its head was renamed lm_head in version 5, which reads the
    # older name too; version 4 reads no other.
    hugging_face=HuggingFaceModel(
        "gpt_neox",
        "GPTNeoXForCausalLM",
        "GPTNeoXModel",
        keys=LATER_KEYS
        | {
            "activation": ("hidden_act", "gelu"),
            "attention_bias": ("attention_bias", True),
            "parallel_residual": ("use_parallel_residual", True),
            "norm_eps": ("layer_norm_eps", 1e-5),
        },
        rotary_keys={"rotary_pct": "rotary_pct", "rotary_base": "rotary_emb_base"},
        # The configuration class has dropouts of its own.
        written={"attention_dropout": 0.0, "hidden_dropout": 0.0},
        modules=module_table("gpt_neox.layers.{}", _MODULES),
        prefix="gpt_neox.",
        renamed=((r"^lm_head\.", "embed_out."),),
        buffers=r"\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)$|rotary_emb\.inv_freq$",
        always_biased=("mlp_bias",),
    ),
)
