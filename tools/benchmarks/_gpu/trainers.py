"""The trainers: slurmllm's native backend, and a plain loop over transformers' models.

Each is a function task → step; a step takes tokens and labels, int64 [batch, seq], and returns its
loss, which may still be computing.

A plain loop reads no number in the timed steps; ours reads the loss and both norms of every step,
one step late, as the training loop does.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import SupportsFloat

from contestants.ours import start_backend
from transformers_loop import Tokens, make_step

from _gpu.task import LR, Task
from slurmllm.train.backends.base import MicroBatch

Step = Callable[..., SupportsFloat]


class Ours:
    """The native backend, called as the training loop calls it."""

    def __init__(self, task: Task) -> None:
        self.backend = start_backend(task.config())
        self.unread: list[Sequence[SupportsFloat]] = []

    def __call__(
        self, tokens: Tokens, labels: Tokens, positions: Tokens | None = None
    ) -> SupportsFloat:
        parts = [MicroBatch(tokens, labels, positions)]
        loss = self.backend.forward_backward(parts, labels.size)
        self.unread.append((loss, self.backend.optimizer_step(LR), self.backend.param_norm()))
        if len(self.unread) > 1:
            for number in self.unread.pop(0):
                float(number)
        return loss

    def save(self, step: Callable[[], SupportsFloat]) -> dict[str, float]:
        """Save twice while training: the first save allocates the host memory of the copies.

        Returns, of the second, `begin_s`, until training goes on; `waited_s`, which the next step
        waited for the copies; `written_s`, until all is on disk; `bytes`.
        """
        figures: dict[str, float] = {}
        for _ in range(2):
            float(step())
            with tempfile.TemporaryDirectory() as folder:
                began = time.perf_counter()
                saving = self.backend.save_shards(Path(folder))
                begin_s = time.perf_counter() - began
                float(step())
                saving.wait()
                saving.finish()
                figures = {
                    "begin_s": begin_s,
                    "waited_s": saving.waited_s,
                    "written_s": time.perf_counter() - began,
                    "bytes": sum(path.stat().st_size for path in Path(folder).iterdir()),
                }
        return figures


def make_loop(task: Task) -> Step:
    return make_step(task.config(), task.device)


TRAINERS: dict[str, Callable[[Task], Step]] = {"ours": Ours, "loop": make_loop}
