"""Hooks: the work of a step other than training; a file for each kind.

A hook of one's own (docs/plugins.md) gets a `HookContext` when training begins.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from slurmllm.core.config.resolve import RunConfig
from slurmllm.core.run.records import MetricsRow
from slurmllm.core.run.safe_files import open_append
from slurmllm.core.run.worker_files import diagnostic
from slurmllm.plan.mesh import Mesh
from slurmllm.train.control.plane import ControlPlane

if TYPE_CHECKING:
    from torch import nn


Scalars = Mapping[str, float]


class StepEnd(NamedTuple):
    """The end of one step."""

    row: MetricsRow
    last: bool = False  # the stage is complete with this step
    saving: bool = False  # a checkpoint is saved after this step
    leaving: bool = False  # training ends with this step, complete or stopped
    evaluating: bool = False  # the texts of `eval` are evaluated after this step
    batch: int = 0  # number of the step's global batch in the stream, from 1


class Evaluation(NamedTuple):
    """The losses of one evaluation, by text, in nats."""

    step: int
    time: float  # Unix time at its end, s
    losses: Scalars


class Hook:
    """Base class of the hooks; `backends` names those that it works with, all by default."""

    backends: ClassVar[tuple[str, ...]] = ()

    def __str__(self) -> str:
        return type(self).__name__

    def reads_model(self, step: int) -> bool:
        """Return whether `after_step` reads the weights after a step; the same on all workers.

        On CUDA the next step is then enqueued only after the hooks of this one have returned.
        """
        return False

    def before_training(self) -> None:
        """Called once before the first step, on every worker that has the hook."""

    def after_evaluation(self, evaluation: Evaluation) -> None:
        """Called after each evaluation, on every worker that has the hook."""

    def before_step(self, step: int) -> None:
        """Called before each optimizer step with its number, on every worker that has the hook."""

    def after_step(self, end: StepEnd) -> None:
        """Called after each optimizer step, on every worker that has the hook."""

    def close(self) -> None:
        """Called when training ends, also by an error; raises nothing, which would hide it."""


@dataclass(frozen=True)
class HookContext:
    """What a hook of one's own gets: the first argument of its class.

    Attributes:
        name: The hook's name in the recipe.
        rank: This worker's; the hook is made on every worker.
        attempt: Number of the attempt, from 0.
        step: Steps trained before this attempt.
        last_step: The step at which training is complete.
        control: Exchanges small values; all workers make the same calls in the same order.
        model: Returns this worker's part of the model, DTensors with their names in the whole model
            to read and not to change; ConfigError on other backends than native.
        file: JSON lines of `write`: `hooks/<name>/attempt_NNN.jsonl` in the run directory.
        add_scalars: Adds (step, tag → value) to the run's TensorBoard curves; only on rank 0.
    """

    name: str
    config: RunConfig
    mesh: Mesh
    rank: int
    attempt: int
    step: int
    last_step: int
    control: ControlPlane
    model: Callable[[], nn.Module]
    file: Path
    add_scalars: Callable[[int, Scalars], None]

    def write(self, row: Mapping[str, object]) -> None:
        """Append a row to `file`; does nothing on other workers than rank 0."""
        if self.rank != 0:
            return
        line = json.dumps(row) + "\n"
        with (
            diagnostic(f"the rows of hook {self.name}"),
            os.fdopen(open_append(self.file), "a", encoding="utf-8") as stream,
        ):
            stream.write(line)
