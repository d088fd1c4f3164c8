"""The trainers: slurmllm's native backend, and a plain loop over transformers' models.

Each is a function task → step; a step takes tokens and labels, int64 [batch, seq], and returns its
loss, which may still be computing.

All have fp32 weights and optimizer state, products in bf16, fused AdamW, the gradient clipped at
1.0, and the vocabulary padded as ours is. A plain loop reads no number in the timed steps; ours
reads the loss and both norms of every step, one step late, as the training loop does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, SupportsFloat

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from _gpu.task import LR, Task
from slurmllm.backends.base import MicroBatch, Worker, load_backend
from slurmllm.backends.native.device import send
from slurmllm.config.recipe import ModelConfig, OptimConfig
from slurmllm.plan.mesh import make_mesh

Tokens = npt.NDArray[np.int64]
Step = Callable[[Tokens, Tokens], SupportsFloat]
Logits = Callable[[Tensor], Tensor]


def make_ours(task: Task) -> Step:
    """The native backend, called as the training loop calls it."""
    from slurmllm.model.decoder import build_model

    config = task.config()
    backend = load_backend("native")(config, make_mesh(config, 1), Worker(0, 1, 0, "node"))
    backend.start()
    backend.build(lambda: build_model(config.recipe.model))
    backend.build_optimizer()
    unread: list[Sequence[SupportsFloat]] = []

    def step(tokens: Tokens, labels: Tokens) -> SupportsFloat:
        loss = backend.forward_backward([MicroBatch(tokens, labels)], labels.size)
        unread.append((loss, backend.optimizer_step(LR), backend.param_norm()))
        if len(unread) > 1:
            for number in unread.pop(0):
                float(number)
        return loss

    return step


def make_loop(task: Task) -> Step:
    """transformers' model; tokens to loss are one compiled graph."""
    import transformers

    config = task.config().recipe.model
    # No sequence is padded, so no mask is needed; transformers would build one as a tensor when it
    # is compiled by torch before 2.14, and attention would be slower.
    transformers.AttentionMaskInterface.register("sdpa", lambda *_, **__: None)
    make: Any = {"gpt3": _gpt2, "llama": _llama}[config.family]
    with torch.device(task.device):
        model = make(transformers, config).train()

    def logits(tokens: Tensor) -> Tensor:
        found: Tensor = model(input_ids=tokens, use_cache=False).logits
        return found

    return _plain_step(task, model, _compile(_loss_of(logits), task))


TRAINERS: dict[str, Callable[[Task], Step]] = {"ours": make_ours, "loop": make_loop}


def _gpt2(transformers: Any, config: ModelConfig) -> nn.Module:
    found: nn.Module = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=config.padded_vocab_size,
            n_positions=config.seq_len,
            n_embd=config.hidden_size,
            n_layer=config.num_layers,
            n_head=config.num_heads,
            n_inner=config.ffn_hidden_size,
            activation_function="gelu_pytorch_tanh",
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            attn_implementation="sdpa",
        )
    )
    return found


def _llama(transformers: Any, config: ModelConfig) -> nn.Module:
    found: nn.Module = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.padded_vocab_size,
            max_position_embeddings=config.seq_len,
            hidden_size=config.hidden_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.kv_heads,
            intermediate_size=config.ffn_hidden_size,
            tie_word_embeddings=False,
            attn_implementation="sdpa",
        )
    )
    return found


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def _loss_of(logits: Logits) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda tokens, labels: _cross_entropy(logits(tokens), labels)


def _inductor(task: Task) -> str:
    return "inductor" if task.compiled else "eager"


def _compile(function: Any, task: Task) -> Any:
    return torch.compile(function, fullgraph=True, dynamic=False, backend=_inductor(task))


def _plain_step(task: Task, model: nn.Module, loss_of: Callable[[Tensor, Tensor], Tensor]) -> Step:
    optim: OptimConfig = task.config().recipe.optim
    device = torch.device(task.device)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": optim.weight_decay},
            {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
        ],
        lr=LR,
        betas=optim.betas,
        eps=optim.eps,
        fused=True,
    )

    def step(tokens: Tokens, labels: Tokens) -> SupportsFloat:
        inputs = send(torch.from_numpy(tokens), device), send(torch.from_numpy(labels), device)
        with torch.autocast(device.type, torch.bfloat16):
            loss = loss_of(*inputs)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(parameters, optim.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step
