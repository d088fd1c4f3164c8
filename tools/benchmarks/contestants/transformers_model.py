"""transformers' model in a task's shape, for the contestants that train it."""

from __future__ import annotations

from typing import Any

from contestants.task import Task


def make_model(task: Task) -> Any:
    """fp32 weights, sdpa attention without a mask tensor, no cache."""
    from transformers import (
        AttentionMaskInterface,
        AutoModelForCausalLM,
        GPTNeoXConfig,
        LlamaConfig,
    )

    # With torch before 2.14, transformers 5 builds the causal mask as a tensor whenever it is
    # compiled, and sdpa then computes the upper triangle too. No sequence is padded here, so no
    # mask is needed: sdpa's is_causal is faster, and the contestant gets it.
    AttentionMaskInterface.register("sdpa", lambda *_, **__: None)
    s = task.shape
    common: dict[str, Any] = {
        "vocab_size": s.vocab,
        "hidden_size": s.hidden,
        "num_hidden_layers": s.layers,
        "num_attention_heads": s.heads,
        "intermediate_size": s.ffn,
        "max_position_embeddings": task.seq,
        "tie_word_embeddings": False,
        "use_cache": False,
        "attn_implementation": "sdpa",
    }
    config: Any
    if s.family == "llama":
        config = LlamaConfig(**common, num_key_value_heads=s.kv_heads)
    else:
        config = GPTNeoXConfig(**common, rotary_pct=0.25, use_parallel_residual=True)
    return AutoModelForCausalLM.from_config(config).train()
