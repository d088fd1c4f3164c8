"""A plain loop over transformers' model: one compiled graph from tokens to loss."""

from __future__ import annotations

from transformers_loop import make_step

from contestants.child import Turn
from contestants.ours import config_of
from contestants.task import Task


def train(task: Task, turn: Turn) -> None:
    step = make_step(config_of(task), "cpu")
    for tokens, labels in task.batches():
        turn.step_done(step(tokens, labels).item)
