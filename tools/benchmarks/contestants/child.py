"""The child process of one contestant: python -m contestants.child NAME.

Line by line on its standard input: the task, then for each turn its number of steps. For each turn
it answers one line of JSON. Between turns it waits for its input and computes nothing.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

from contestants.task import Task


class Turn:
    """Holds a training loop between its turns and takes the time of its steps.

    The first step of a turn is not counted: it finds the caches filled by others.
    """

    def __init__(self, task: Task, replies: TextIO) -> None:
        self.task = task
        self._replies = replies
        self.steps = self._left = 0
        self._began = 0.0

    def begin(self) -> None:
        """Wait for the next turn; ends the process when there is none."""
        line = sys.stdin.readline()
        if not line.strip():
            # Not sys.exit: libraries catch it, and threads of theirs may wait.
            os._exit(0)
        self.steps = int(line)
        self._left = self.steps + 1

    def step_done(self, loss: Callable[[], float]) -> None:
        """After every optimizer step; reads the loss in the turn's last step only."""
        self._left -= 1
        if self._left == self.steps:
            self._began = time.perf_counter()
        if self._left > 0:
            return
        value = loss()
        answer = {"seconds": time.perf_counter() - self._began, "loss": value}
        self.answer(answer)
        # Memory that is free goes back to the system: the others need it.
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
        self.begin()

    def answer(self, content: dict[str, Any]) -> None:
        print(json.dumps(content), file=self._replies, flush=True)


def main() -> None:
    # Libraries print to standard output what they like; answers go the descriptor's old way.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    turn = Turn(Task.from_json(sys.stdin.readline()), replies)
    try:
        import torch

        torch.set_num_threads(turn.task.threads)
        torch.manual_seed(0)
        train = importlib.import_module(f"contestants.{sys.argv[1]}").train
    except ImportError as error:
        turn.answer({"missing": str(error)})
        return
    turn.begin()
    train(turn.task, turn)


if __name__ == "__main__":
    main()
