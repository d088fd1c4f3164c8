"""What a hook is."""

from __future__ import annotations

from typing import NamedTuple

from slurmllm.records import MetricsRow


class StepEnd(NamedTuple):
    """The end of one step.

    Attributes:
        row: What was measured.
        last: Whether the stage is complete with this step.
        saving: Whether a checkpoint is written after this step.
        leaving: Whether training ends with this step, here or for now.
        batch: The global batch that the step was made with, as the stream counts them from 1.
    """

    row: MetricsRow
    last: bool
    saving: bool
    leaving: bool
    batch: int = 0


class Hook:
    """Something that happens beside training."""

    def after_step(self, moment: StepEnd) -> None:
        """After each optimizer step, on every worker that has the hook."""

    def close(self) -> None:
        """At the end of training, however it ends; raises nothing, which would hide the end."""
