"""A plain loop over transformers' model: one compiled graph from tokens to loss.

torch.compile of model and loss as a whole, autocast to bf16 around them, fused AdamW,
torch.nn.utils.clip_grad_norm_.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from contestants import task as settings
from contestants import transformers_model
from contestants.child import Turn
from contestants.task import Task


def train(task: Task, turn: Turn) -> None:
    """Train without end."""
    model = transformers_model.make_model(task)
    optimizer = torch.optim.AdamW(
        settings.decay_groups(model),
        lr=settings.LR,
        betas=settings.BETAS,
        eps=settings.EPS,
        fused=True,
    )

    @torch.compile(fullgraph=True, dynamic=False)
    def loss_of(tokens: Tensor, labels: Tensor) -> Tensor:
        logits = model(input_ids=tokens).logits
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())

    for tokens, labels in task.batches():
        with torch.autocast("cpu", torch.bfloat16, enabled=task.precision == "bf16"):
            loss = loss_of(torch.from_numpy(tokens), torch.from_numpy(labels))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.GRAD_CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        turn.step_done(loss.item)
