"""Hooks: the work of a step other than training; a file for each kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from slurmllm.records import MetricsRow


class StepEnd(NamedTuple):
    """The end of one step."""

    row: MetricsRow
    last: bool  # the stage is complete with this step
    saving: bool  # a checkpoint is saved after this step
    leaving: bool  # training ends with this step, complete or stopped
    evaluating: bool = False  # the texts of `eval` are evaluated after this step
    batch: int = 0  # number of the step's global batch in the stream, from 1


class Evaluation(NamedTuple):
    """The losses of one evaluation, by text, in nats."""

    step: int
    time: float  # Unix time at its end, s
    losses: Mapping[str, float]


class Hook:
    """Base class of the hooks."""

    def before_steps(self) -> None:
        """Called once before the first step, on every worker that has the hook."""

    def after_evaluation(self, found: Evaluation) -> None:
        """Called after each evaluation, on every worker that has the hook."""

    def before_step(self, step: int) -> None:
        """Called before each optimizer step with its number, on every worker that has the hook."""

    def after_step(self, end: StepEnd) -> None:
        """Called after each optimizer step, on every worker that has the hook."""

    def close(self) -> None:
        """Called when training ends, also by an error; raises nothing, which would hide it."""
