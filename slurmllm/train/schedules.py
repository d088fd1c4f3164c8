"""The learning rate of each step."""

from __future__ import annotations

import math

from slurmllm.config.recipe import CheckpointConfig, OptimConfig


def learning_rate(optim: OptimConfig, total_steps: int, step: int) -> float:
    """The learning rate of a step: linear warm-up, then the decay, then the minimum.

    Args:
        optim: lr, min_lr, warmup_steps, decay and decay_steps.
        total_steps: The run's, where decay_steps is left out.
        step: From 1. The first step of a warm-up over n steps has lr / n, the n-th lr.
    """
    if step <= optim.warmup_steps:
        return optim.lr * step / optim.warmup_steps
    end = optim.decay_steps or total_steps
    if optim.decay == "constant":
        return optim.lr
    progress = min(1.0, (step - optim.warmup_steps) / (end - optim.warmup_steps))
    left = 1.0 - progress if optim.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return optim.min_lr + (optim.lr - optim.min_lr) * left


class SaveSchedule:
    """Every `checkpoint.every_steps` steps; under `auto` when it has been said.

    Args:
        config: The recipe's section.

    Attributes:
        auto: Whether the steps are chosen while training.
    """

    def __init__(self, config: CheckpointConfig) -> None:
        self._every = None if config.every_steps == "auto" else config.every_steps
        self._next: int | None = None
        self.auto = self._every is None

    def due(self, step: int) -> bool:
        """Whether a checkpoint is written after a step; the same on all workers."""
        if self._every is not None:
            return step % self._every == 0
        return self._next is not None and step >= self._next

    def choose(self, step: int | None) -> None:
        """Under `auto`: the next step to save after; None where it is chosen later."""
        self._next = step
