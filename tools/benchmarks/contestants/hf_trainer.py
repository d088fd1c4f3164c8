"""transformers' Trainer: bf16=True (autocast by accelerate), torch_compile=True, fused AdamW.

Neither logs nor saves nor evaluates; one process loads the batches, which are in memory.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers_loop import make_model

from contestants import task as settings
from contestants.child import Turn
from contestants.ours import config_of
from contestants.task import Task


class _Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __init__(self, task: Task) -> None:
        # The model moves the labels itself. The last token has none, one of `seq`.
        self.rows = torch.from_numpy(task.rows()[:, :-1].copy())

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


class _Turns(TrainerCallback):
    def __init__(self, turn: Turn) -> None:
        self.turn = turn
        self.loss = torch.zeros(())

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.turn.step_done(lambda: self.loss.item())


class _Watched(Trainer):
    """Keeps the last loss for the report."""

    turns: _Turns

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.turns.loss = super().training_step(*args, **kwargs)
        return self.turns.loss


def train(task: Task, turn: Turn) -> None:
    turns = _Turns(turn)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=10**6,
            per_device_train_batch_size=task.batch,
            use_cpu=True,
            bf16=task.precision == "bf16",
            torch_compile=True,
            optim="adamw_torch_fused",
            learning_rate=settings.LR,
            lr_scheduler_type="constant",
            adam_beta1=settings.BETAS[0],
            adam_beta2=settings.BETAS[1],
            adam_epsilon=settings.EPS,
            weight_decay=settings.WEIGHT_DECAY,
            max_grad_norm=settings.GRAD_CLIP,
            train_sampling_strategy="sequential",
            dataloader_drop_last=True,
            dataloader_num_workers=0,
            dataloader_pin_memory=False,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = _Watched(
            model=make_model(config_of(task).recipe.model),
            args=arguments,
            train_dataset=_Rows(task),
            callbacks=[turns],
        )
        trainer.turns = turns
        trainer.train()
