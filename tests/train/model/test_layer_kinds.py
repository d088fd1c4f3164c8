"""Layers of several kinds, norms and soft caps against transformers' models, in fp32."""

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from slurmllm.core.config.families import EXTRAS, FAMILIES, Family
from slurmllm.core.config.families.llama import LLAMA
from slurmllm.core.config.recipe import ModelConfig
from slurmllm.train.model.decoder import Decoder, build_model
from slurmllm.train.model.init import initialize

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.numerics

_ANY = replace(LLAMA, choices={}, optional=LLAMA.optional | {*EXTRAS})
_GEMMA: dict[str, Any] = {
    "norm_places": "both",
    "norm_weight": "one_plus",
    "scaled_embedding": True,
}
KINDS: dict[str, Family] = {
    "like_olmo3": replace(_ANY, norm_places="after", qk_norm_over="vector"),
    "like_gemma3": replace(_ANY, **_GEMMA),
    "like_gemma2": replace(_ANY, **_GEMMA),
    "like_smollm3": _ANY,
    "like_nanochat": replace(
        _ANY, gated=False, norm_weight="none", embedding_norm=True, qk_norm_after_rotation=True
    ),
}
SIZES: dict[str, Any] = {
    "num_layers": 5,
    "hidden_size": 48,
    "num_heads": 4,
    "num_kv_heads": 2,
    "ffn_hidden_size": 40,
    "vocab_size": 61,
    "vocab_pad_multiple": 8,
    "seq_len": 24,
    "norm_eps": 1e-6,
    "init_std": 0.1,
}
GEMMA = {"activation": "gelu_tanh", "tied_embeddings": True, "query_pre_attn_scalar": 20.0}
LOCAL = {"window": 5, "rope": 100.0}
SETTINGS: dict[str, dict[str, Any]] = {
    "like_olmo3": {"qk_norm": True, "attention_pattern": [{"window": 7}, {"window": 7}, {}]},
    "like_gemma3": GEMMA | {"qk_norm": True, "attention_pattern": [LOCAL, LOCAL, {}]},
    "like_gemma2": GEMMA
    | {"attention_softcap": 2.0, "logits_softcap": 3.0, "attention_pattern": [{"window": 5}, {}]},
    "like_smollm3": {"attention_pattern": [{}, {}, {"rope": "none"}]},
    "like_nanochat": {"activation": "relu2", "qk_norm": True, "logits_softcap": 1.5},
}


@pytest.fixture(autouse=True)
def families(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, family in KINDS.items():
        monkeypatch.setitem(FAMILIES, name, replace(family, name=name))


def model_config(kind: str, **values: Any) -> ModelConfig:
    return ModelConfig.model_validate({"family": kind, **SIZES, **SETTINGS[kind], **values})


def reference(kind: str, c: ModelConfig) -> nn.Module:
    common = {
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_width,
        "intermediate_size": c.ffn_hidden_size,
        "max_position_embeddings": c.seq_len,
        "rms_norm_eps": c.norm_eps,
        "tie_word_embeddings": c.tied_embeddings,
        "pad_token_id": None,
        "attn_implementation": "eager",
    }
    rope = {"rope_type": "default", "rope_theta": c.rotary_base}
    windows = [a.window for a in c.attention_kinds if a.window]
    types = [
        "sliding_attention" if c.layer_attention(i).window else "full_attention"
        for i in range(c.num_layers)
    ]
    layers = {"sliding_window": max(windows, default=None), "layer_types": types}
    gemma = {"query_pre_attn_scalar": int(c.query_pre_attn_scalar or c.head_width), **layers}
    made: Any
    if kind == "like_olmo3":
        ropes = {"full_attention": rope, "sliding_attention": rope}
        config = transformers.Olmo3Config(**common, **layers, rope_parameters=ropes)
        made = transformers.Olmo3ForCausalLM(config)
    elif kind == "like_gemma3":
        ropes = {"full_attention": rope, "sliding_attention": rope | {"rope_theta": 100.0}}
        config = transformers.Gemma3TextConfig(**common, **gemma, rope_parameters=ropes)
        made = transformers.Gemma3ForCausalLM(config)
    elif kind == "like_gemma2":
        caps = {
            "attn_logit_softcapping": c.attention_softcap,
            "final_logit_softcapping": c.logits_softcap,
        }
        config = transformers.Gemma2Config(**common, **gemma, **caps, rope_parameters=rope)
        made = transformers.Gemma2ForCausalLM(config)
    elif kind == "like_smollm3":
        turned = [int(c.layer_attention(i).rope != "none") for i in range(c.num_layers)]
        config = transformers.SmolLM3Config(**common, no_rope_layers=turned, rope_parameters=rope)
        made = transformers.SmolLM3ForCausalLM(config)
    else:
        config = transformers.NanoChatConfig(
            **common, final_logit_softcapping=c.logits_softcap, rope_parameters=rope
        )
        made = transformers.NanoChatForCausalLM(config)
    return cast(nn.Module, made)


_LATER = {
    "attention_norm": "input_layernorm",
    "attention.out": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
    "mlp.up": "mlp.fc1",
    "mlp.down": "mlp.down_proj",
    "embed": "model.embed_tokens",
    "final_norm": "model.norm",
    "head": "lm_head",
}
_OUT = {
    "attention_out_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_out_norm": "post_feedforward_layernorm",
}
NAMES = {
    "like_olmo3": _LATER | _OUT,
    "like_gemma3": _LATER | _OUT,
    "like_gemma2": _LATER | _OUT,
    "like_smollm3": _LATER,
    "like_nanochat": _LATER | {"mlp.down": "mlp.fc2"},
}


def theirs(name: str, values: Tensor, c: ModelConfig) -> dict[str, Tensor]:
    """One of our tensors, a parameter or its gradient, as transformers names and orders it."""
    module, _, leaf = name.rpartition(".")
    prefix = ""
    if module.startswith("layers."):
        _, layer, module = module.split(".", 2)
        prefix = f"model.layers.{layer}."
    if module in ("embed", "head"):
        values = values[: c.vocab_size]
    if module == "attention.qkv":
        group = c.num_heads // c.kv_heads
        grouped = values.unflatten(0, (c.kv_heads, group + 2, c.head_width))
        q, k, v = (part.flatten(0, 1) for part in grouped.split([group, 1, 1], dim=1))
        if c.family == "like_nanochat":  # turns the other way: halves change places
            q, k = (part.roll(c.head_width // 2, 1) for part in (q, k))
        parts = {"q_proj": q, "k_proj": k, "v_proj": v}
        return {f"{prefix}self_attn.{n}.{leaf}": p.flatten(0, 1) for n, p in parts.items()}
    if module == "mlp.gate_up":
        gate, up = values.unflatten(0, (-1, 2, c.gate_block)).unbind(1)
        parts = {"gate_proj": gate, "up_proj": up}
        return {f"{prefix}mlp.{n}.{leaf}": p.flatten(0, 1) for n, p in parts.items()}
    return {f"{prefix}{NAMES[c.family][module]}.{leaf}": values}


def pair(kind: str, **values: Any) -> tuple[Decoder, nn.Module, ModelConfig]:
    """Our model and transformers' with the same weights, none of which is without effect."""
    config = model_config(kind, **values)
    ours, other = build_model(config), reference(kind, config)
    initialize(ours, config, seed=3)
    generator = torch.Generator().manual_seed(5)
    expected = dict(other.named_parameters())
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.3)
            for their_name, part in theirs(name, parameter, config).items():
                expected[their_name].copy_(part)
    return ours, other, config


@pytest.mark.parametrize("kind", KINDS)
def test_logits_loss_and_gradients(kind: str) -> None:
    ours, other, config = pair(kind)
    generator = torch.Generator().manual_seed(7)
    text = torch.randint(0, config.vocab_size, (2, config.seq_len + 1), generator=generator)
    tokens, labels = text[:, :-1], text[:, 1:]
    logits, their_logits = ours(tokens)[..., : config.vocab_size], other(tokens).logits
    torch.testing.assert_close(logits, their_logits, rtol=1e-6, atol=3e-6)
    loss = ours(tokens, labels)
    their_loss = F.cross_entropy(their_logits.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(loss, their_loss, rtol=1e-6, atol=0)
    loss.backward()
    their_loss.backward()
    expected = {name: p.grad for name, p in other.named_parameters()}
    compared = set()
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None
        for their_name, part in theirs(name, parameter.grad, config).items():
            compared.add(their_name)
            torch.testing.assert_close(part, expected[their_name], rtol=1e-5, atol=1e-6, msg=name)
    assert compared == set(expected)
