"""After which steps a checkpoint is written."""

from __future__ import annotations

from slurmllm.config.recipe import CheckpointConfig

_FIRST_AUTO = 100


class SaveSchedule:
    """Every `checkpoint.every_steps` steps.

    Args:
        config: The recipe's section.
    """

    def __init__(self, config: CheckpointConfig) -> None:
        self._every = _FIRST_AUTO if config.every_steps == "auto" else config.every_steps

    def due(self, step: int) -> bool:
        """Whether a checkpoint is written after a step; the same on all workers."""
        return step % self._every == 0
