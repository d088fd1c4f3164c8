"""litgpt's GPT model in litgpt's own pretraining loop, without its data, logs and checkpoints.

As in `litgpt/pretrain.py` (0.5.13): torch.compile(model), then Lightning Fabric's setup with
precision bf16-mixed or 32-true, a cross entropy outside the graph, fabric.backward,
fabric.clip_gradients, AdamW. What is other than there: AdamW is fused also on the CPU, where
litgpt leaves it unfused, and the cross entropy is compiled and not cut into chunks of 128 tokens;
both are faster. The models are those of litgpt's Pythia and Llama configurations.
"""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from litgpt.config import Config
from litgpt.model import GPT
from torch.nn import functional as F

from contestants import task as settings
from contestants.child import Turn
from contestants.task import Task

_FAMILIES: dict[str, dict[str, Any]] = {
    "neox": {
        "rotary_percentage": 0.25,
        "parallel_residual": True,
        "bias": True,
        "norm_class_name": "LayerNorm",
        "mlp_class_name": "GptNeoxMLP",
        "gelu_approximate": "none",
    },
    "llama": {
        "rotary_percentage": 1.0,
        "parallel_residual": False,
        "bias": False,
        "norm_class_name": "RMSNorm",
        "mlp_class_name": "LLaMAMLP",
    },
}


def train(task: Task, turn: Turn) -> None:
    s = task.shape
    config = Config(
        name="benchmark",
        block_size=task.seq,
        n_layer=s.layers,
        n_embd=s.hidden,
        n_head=s.heads,
        n_query_groups=s.kv_heads,
        intermediate_size=s.ffn,
        vocab_size=s.vocab,
        padded_vocab_size=s.vocab,
        **_FAMILIES[s.family],
    )
    precision = "bf16-mixed" if task.precision == "bf16" else "32-true"
    fabric: Any = L.Fabric(accelerator="cpu", devices=1, precision=precision)
    fabric.launch()
    with fabric.init_module(empty_init=False):
        model: Any = GPT(config)
    model.apply(model._init_weights)
    groups = settings.decay_groups(model)
    model = fabric.setup(torch.compile(model))
    optimizer = fabric.setup_optimizers(
        torch.optim.AdamW(
            groups, lr=settings.LR, betas=settings.BETAS, eps=settings.EPS, fused=True
        )
    )

    @torch.compile(fullgraph=True, dynamic=False)
    def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    for tokens, labels in task.batches():
        loss = cross_entropy(model(torch.from_numpy(tokens)), torch.from_numpy(labels))
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=settings.GRAD_CLIP)
        optimizer.step()
        optimizer.zero_grad()
        turn.step_done(loss.item)
