"""Small random Hugging Face models, saved as their users save them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")
transformers.utils.logging.disable_progress_bar()

IDS = {"bos_token_id": 0, "eos_token_id": 0}


def small(family: str, **settings: Any) -> nn.Module:
    """A model with random weights, biases and norms too."""
    sizes = {"vocab_size": 67, **IDS}
    if family == "neox":
        config = transformers.GPTNeoXConfig(
            **{
                "hidden_size": 32,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "intermediate_size": 48,
                "max_position_embeddings": 24,
                **sizes,
                **settings,
            }
        )
        model = transformers.GPTNeoXForCausalLM(config)
    elif family in ("llama", "qwen3"):
        values = {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 40,
            "max_position_embeddings": 24,
            **sizes,
        }
        if family == "llama":
            model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**values | settings))
        else:  # heads wider than hidden_size / heads
            values |= {"head_dim": 12, **settings}
            model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**values))
    else:
        config = transformers.GPT2Config(
            **{
                "n_embd": 32,
                "n_layer": 2,
                "n_head": 4,
                "n_inner": 48,
                "n_positions": 24,
                **sizes,
                **settings,
            }
        )
        model = transformers.GPT2LMHeadModel(config)
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape).to(parameter.dtype)
            parameter.add_(noise, alpha=0.1)
    return model.eval()


@st.composite
def models(draw: st.DrawFn, family: str) -> nn.Module:
    """Shapes, biases, activations, rotary shares and ties, drawn at random."""
    heads = draw(st.sampled_from([1, 2, 4]))
    head_dim = draw(st.sampled_from([4, 8, 12]))
    settings: dict[str, Any] = {
        "vocab_size": draw(st.integers(11, 97)),
        "tie_word_embeddings": draw(st.booleans()),
    }
    layers, ffn = draw(st.integers(1, 3)), draw(st.sampled_from([8, 33, 64]))
    length, eps = draw(st.integers(2, 30)), draw(st.sampled_from([1e-5, 1e-6]))
    if family == "gpt3":
        return small(
            family,
            n_embd=heads * head_dim,
            n_head=heads,
            n_layer=layers,
            n_positions=length,
            n_inner=draw(st.sampled_from([ffn, None])),
            layer_norm_epsilon=eps,
            activation_function=draw(st.sampled_from(["gelu_new", "gelu"])),
            **settings,
        )
    settings |= {
        "hidden_size": heads * head_dim,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "intermediate_size": ffn,
        "max_position_embeddings": length,
        "attention_bias": draw(st.booleans()),
    }
    base = draw(st.sampled_from([100.0, 10000.0]))
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": base}
    if family == "neox":
        rope["partial_rotary_factor"] = draw(st.integers(0, head_dim // 2)) * 2 / head_dim
        return small(
            family,
            rope_parameters=rope,
            layer_norm_eps=eps,
            use_parallel_residual=draw(st.booleans()),
            hidden_act=draw(st.sampled_from(["gelu", "gelu_fast", "gelu_pytorch_tanh"])),
            **settings,
        )
    if draw(st.booleans(), label="scaled"):
        rope |= {
            "rope_type": "llama3",
            "factor": draw(st.sampled_from([2.0, 8.0])),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": draw(st.sampled_from([8, 16])),
        }
    if family == "llama":
        settings["mlp_bias"] = draw(st.booleans())
    settings["head_dim"] = draw(st.sampled_from([head_dim, 10]))
    return small(
        family,
        rope_parameters=rope,
        rms_norm_eps=eps,
        num_key_value_heads=draw(st.sampled_from([h for h in (1, 2, 4) if heads % h == 0])),
        **settings,
    )


def save(model: nn.Module, folder: Path, *, shard: str = "5GB") -> Path:
    """What save_pretrained leaves, in one file or in several."""
    model.save_pretrained(folder, max_shard_size=shard)
    return folder


def tokens(model: nn.Module) -> Tensor:
    """[2, the longest sequence], random."""
    config: Any = model.config
    generator = torch.Generator().manual_seed(1)
    shape = (2, config.max_position_embeddings)
    return torch.randint(0, config.vocab_size, shape, generator=generator)
