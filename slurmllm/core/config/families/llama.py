"""Llama 2: Touvron et al. 2023 (arXiv 2307.09288); Llama 3 to 3.2: Grattafiori et al. 2024
(arXiv 2407.21783).
"""

from __future__ import annotations

from slurmllm.core.config.families.family import LATER_KEYS, Family, HuggingFaceModel, ModuleMapping

_LAYER = "model.layers.{}."

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
        modules=(
            ModuleMapping("embed", ("model.embed_tokens",)),
            ModuleMapping("layers.{}.attention_norm", (f"{_LAYER}input_layernorm",)),
            ModuleMapping(
                "layers.{}.attention.qkv",
                tuple(f"{_LAYER}self_attn.{projection}_proj" for projection in "qkv"),
                "qkv",
            ),
            ModuleMapping("layers.{}.attention.out", (f"{_LAYER}self_attn.o_proj",)),
            ModuleMapping("layers.{}.mlp_norm", (f"{_LAYER}post_attention_layernorm",)),
            ModuleMapping(
                "layers.{}.mlp.gate_up",
                (f"{_LAYER}mlp.gate_proj", f"{_LAYER}mlp.up_proj"),
                "gate_up",
            ),
            ModuleMapping("layers.{}.mlp.down", (f"{_LAYER}mlp.down_proj",)),
            ModuleMapping("final_norm", ("model.norm",)),
            ModuleMapping("head", ("lm_head",)),
        ),
        prefix="model.",
        buffers=r"rotary_emb\.inv_freq$",
    ),
)
