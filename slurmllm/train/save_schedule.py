"""After which steps a checkpoint is written."""

from __future__ import annotations

from slurmllm.config.recipe import CheckpointConfig


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
