"""The learning rate of each step."""

from __future__ import annotations

import math

from slurmllm.config.recipe import OptimConfig


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
