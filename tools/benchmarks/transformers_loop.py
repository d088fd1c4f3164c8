"""A plain loop over transformers' models, the peer of ours in `gpu.py` and `train_speed.py`.

Tokens to loss are one compiled graph, under autocast for bf16. Weights and optimizer state are
fp32, AdamW is fused, and the gradient is clipped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from contestants.task import decay_groups
from torch import Tensor, nn
from torch.nn import functional as F

from slurmllm.core.config.recipe import ModelConfig
from slurmllm.core.config.resolve import RunConfig
from slurmllm.train.backends.native.device import send

Tokens = npt.NDArray[np.int64]


def make_model(config: ModelConfig) -> nn.Module:
    """Return transformers' model of a shape, with the vocabulary padded as ours is."""
    import transformers

    # With torch before 2.14, transformers 5 builds the causal mask as a tensor whenever it is
    # compiled, and sdpa then computes the upper triangle too. No sequence is padded here, so no
    # mask is needed: sdpa's is_causal is faster.
    transformers.AttentionMaskInterface.register("sdpa", lambda *_, **__: None)
    common: dict[str, Any] = {
        "vocab_size": config.padded_vocab_size,
        "use_cache": False,
        "attn_implementation": "sdpa",
    }
    model_config: Any
    if config.family == "gpt3":
        model_config = transformers.GPT2Config(
            **common,
            n_positions=config.seq_len,
            n_embd=config.hidden_size,
            n_layer=config.num_layers,
            n_head=config.num_heads,
            n_inner=config.ffn_hidden_size,
            activation_function="gelu_pytorch_tanh",
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    else:
        common |= {
            "hidden_size": config.hidden_size,
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": config.num_heads,
            "intermediate_size": config.ffn_hidden_size,
            "max_position_embeddings": config.seq_len,
            "tie_word_embeddings": False,
        }
        if config.family == "llama":
            model_config = transformers.LlamaConfig(**common, num_key_value_heads=config.kv_heads)
        else:
            common |= {"rotary_pct": 0.25, "use_parallel_residual": True}
            model_config = transformers.GPTNeoXConfig(**common)
    factory: Any = transformers.AutoModelForCausalLM
    model: nn.Module = factory.from_config(model_config)
    return model.train()


def make_step(config: RunConfig, device: str) -> Callable[[Tokens, Tokens], Tensor]:
    """Return `step_of` of transformers' model."""
    with torch.device(device):
        model = make_model(config.recipe.model)
    compiler = "inductor" if config.recipe.train.compile else "eager"

    @torch.compile(fullgraph=True, dynamic=False, backend=compiler)
    def loss_of(tokens: Tensor, labels: Tensor) -> Tensor:
        logits = model(input_ids=tokens).logits
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())

    return step_of(config, device, model, loss_of)


def step_of(
    config: RunConfig, device: str, model: nn.Module, loss_of: Callable[[Tensor, Tensor], Tensor]
) -> Callable[[Tokens, Tokens], Tensor]:
    """Return a function that makes an optimizer step; its loss may still be computing.

    Tokens and labels are int64, [batch, seq].
    """
    recipe = config.recipe
    optim = recipe.optim
    groups = decay_groups(model, optim.weight_decay)
    optimizer = torch.optim.AdamW(groups, optim.lr, optim.betas, optim.eps, fused=True)

    def step(tokens: Tokens, labels: Tokens) -> Tensor:
        inputs = (send(torch.from_numpy(part), torch.device(device)) for part in (tokens, labels))
        with torch.autocast(device, torch.bfloat16, enabled=recipe.train.precision != "fp32"):
            loss = loss_of(*inputs)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), optim.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step
