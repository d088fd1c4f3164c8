"""The trainers: slurmllm's native backend, and a plain loop over transformers' models.

Each is a function task → step; a step takes tokens and labels, int64 [batch, seq], and returns its
loss, which may still be computing.

All have fp32 weights and optimizer state, products in bf16, fused AdamW, the gradient clipped at
1.0, and the vocabulary padded as ours is. A plain loop reads no number in the timed steps; ours
reads the loss and both norms of every step, one step late, as the training loop does.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
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
Step = Callable[..., SupportsFloat]
Logits = Callable[[Tensor], Tensor]


class Ours:
    """The native backend, called as the training loop calls it."""

    def __init__(self, task: Task) -> None:
        from slurmllm.model.decoder import build_model

        config = task.config()
        worker = Worker(0, 1, 0, "node")
        self.backend = load_backend("native")(config, make_mesh(config, 1), worker)
        self.backend.start()
        self.backend.build(lambda: build_model(config.recipe.model))
        self.backend.build_optimizer()
        self.unread: list[Sequence[SupportsFloat]] = []

    def __call__(
        self, tokens: Tokens, labels: Tokens, positions: Tokens | None = None
    ) -> SupportsFloat:
        parts = [MicroBatch(tokens, labels, positions)]
        loss = self.backend.forward_backward(parts, labels.size)
        self.unread.append((loss, self.backend.optimizer_step(LR), self.backend.param_norm()))
        if len(self.unread) > 1:
            for number in self.unread.pop(0):
                float(number)
        return loss

    def save(self, step: Callable[[], SupportsFloat]) -> dict[str, float]:
        """Save twice, training meanwhile: the first save allocates the host memory of the copies.

        Returns:
            Of the second: `begin_s`, until training goes on; `waited_s`, which the next step waited
            for the copies; `written_s`, until all is on disk; `bytes`.
        """
        figures: dict[str, float] = {}
        for _ in range(2):
            float(step())
            with tempfile.TemporaryDirectory() as folder:
                began = time.perf_counter()
                saving = self.backend.save_shards(Path(folder))
                begin_s = time.perf_counter() - began
                float(step())
                saving.wait()
                saving.finish()
                figures = {
                    "begin_s": begin_s,
                    "waited_s": saving.waited_s,
                    "written_s": time.perf_counter() - began,
                    "bytes": sum(path.stat().st_size for path in Path(folder).iterdir()),
                }
        return figures


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


TRAINERS: dict[str, Callable[[Task], Step]] = {"ours": Ours, "loop": make_loop}


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
