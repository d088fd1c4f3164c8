"""Small random Hugging Face models, saved as their users save them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")
transformers.utils.logging.disable_progress_bar()

IDS: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}


_SIZES = {
    **{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"max_position_embeddings": 24, "intermediate_size": 40},
}
_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 48, "n_positions": 24}
_GROUPED = {**_SIZES, "num_key_value_heads": 2}
FAMILIES: dict[str, tuple[str, str, dict[str, int]]] = {
    "neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", {**_SIZES, "intermediate_size": 48}),
    "llama": ("LlamaConfig", "LlamaForCausalLM", _GROUPED),
    # heads wider than hidden_size / heads
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {**_GROUPED, "head_dim": 12}),
    "mistral": ("MistralConfig", "MistralForCausalLM", _GROUPED),
    "smollm3": ("SmolLM3Config", "SmolLM3ForCausalLM", {**_GROUPED, "num_hidden_layers": 5}),
    "olmo3": ("Olmo3Config", "Olmo3ForCausalLM", {**_GROUPED, "num_hidden_layers": 5}),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", {**_GROUPED, "head_dim": 12}),
    "nanochat": ("NanoChatConfig", "NanoChatForCausalLM", _GROUPED),
    "gpt3": ("GPT2Config", "GPT2LMHeadModel", _GPT2),
}


def small(family: str, **settings: Any) -> nn.Module:
    """A model with random weights, biases and norms too."""
    config, kind, sizes = FAMILIES[family]
    values = {"vocab_size": 67, **IDS, **sizes, **settings}
    model = getattr(transformers, kind)(getattr(transformers, config)(**values))
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape).to(parameter.dtype)
            parameter.add_(noise, alpha=0.1)
    evaluated: nn.Module = model.eval()
    return evaluated


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
