"""The decoder against transformers' GPT-NeoX: logits, loss and every gradient."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from slurmllm.config.recipe import ModelConfig
from slurmllm.model.decoder import build_model
from slurmllm.model.init import initialize
from slurmllm.model.rotary import slice_order

transformers = pytest.importorskip("transformers")


@st.composite
def configs(draw: st.DrawFn) -> ModelConfig:
    heads = draw(st.sampled_from([1, 2, 3, 4]))
    head_dim = draw(st.sampled_from([4, 8, 12, 16]))
    turned = draw(st.integers(0, head_dim // 2)) * 2
    return ModelConfig(
        family="neox",
        num_layers=draw(st.integers(1, 3)),
        hidden_size=heads * head_dim,
        num_heads=heads,
        ffn_hidden_size=draw(st.sampled_from([8, 33, 64])),
        vocab_size=draw(st.integers(11, 97)),
        seq_len=draw(st.integers(2, 40)),
        rotary_pct=turned / head_dim,
        rotary_base=draw(st.sampled_from([100.0, 10000.0])),
        init_std=0.1,
    )


def reference(config: ModelConfig) -> nn.Module:
    model: nn.Module = transformers.GPTNeoXForCausalLM(
        transformers.GPTNeoXConfig(
            vocab_size=config.padded_vocab_size,
            hidden_size=config.hidden_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            intermediate_size=config.ffn_hidden_size,
            max_position_embeddings=config.seq_len,
            layer_norm_eps=config.norm_eps,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": config.rotary_base,
                "partial_rotary_factor": config.rotary_pct,
            },
            attn_implementation="eager",
        )
    )
    return model


def reference_name(name: str) -> str:
    for ours, theirs in (
        ("embed.", "gpt_neox.embed_in."),
        ("layers.", "gpt_neox.layers."),
        ("final_norm", "gpt_neox.final_layer_norm"),
        ("head.weight", "lm_head.weight"),
        ("attention_norm", "input_layernorm"),
        ("mlp_norm", "post_attention_layernorm"),
        ("attention.qkv", "attention.query_key_value"),
        ("attention.out", "attention.dense"),
        ("mlp.up", "mlp.dense_h_to_4h"),
        ("mlp.down", "mlp.dense_4h_to_h"),
    ):
        name = name.replace(ours, theirs)
    return name


def reference_layout(name: str, values: Tensor, config: ModelConfig) -> Tensor:
    """Our tensor in transformers' order of dimensions (it is its own kind of inverse for grads)."""
    if "attention.qkv" not in name:
        return values
    order = torch.tensor(slice_order(config.head_dim, config.rotary_pct))
    grouped = values.clone().unflatten(0, (config.num_heads, 3, config.head_dim))
    out = grouped.clone()
    out[:, :2].index_copy_(2, order, grouped[:, :2])
    return out.flatten(0, 2)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(configs())
def test_logits_loss_and_gradients(config: ModelConfig) -> None:
    ours, theirs = build_model(config), reference(config)
    initialize(ours, config, seed=3)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            if parameter.ndim == 1:  # biases and norms too must matter
                generator = torch.Generator().manual_seed(len(name))
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
            target = theirs.get_parameter(reference_name(name))
            target.copy_(reference_layout(name, parameter, config))
    tokens = torch.randint(0, config.vocab_size, (2, config.seq_len + 1))
    logits = ours(tokens[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    their_logits = theirs(tokens[:, :-1]).logits
    their_loss = F.cross_entropy(their_logits.flatten(0, 1), tokens[:, 1:].flatten())
    torch.testing.assert_close(logits, their_logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(loss, their_loss, rtol=1e-5, atol=1e-5)
    loss.backward()
    their_loss.backward()
    names = dict(ours.named_parameters())
    assert len(names) == len(dict(theirs.named_parameters()))
    for name, parameter in names.items():
        assert parameter.grad is not None
        grad = reference_layout(name, parameter.grad, config)
        their_grad = theirs.get_parameter(reference_name(name)).grad
        torch.testing.assert_close(grad, their_grad, rtol=1e-5, atol=1e-5, msg=name)
