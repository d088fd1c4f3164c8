"""The progress of a run by its files; cheap enough for fifty calls a second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from _chaos.bench import read_json
from slurmllm.core.metrics.row_reader import last_row_of
from slurmllm.core.run.rundir import RunDir


class RunFiles:
    """A run's directory."""

    def __init__(self, path: Path) -> None:
        self.run = RunDir(path)

    def attempt(self) -> int:
        """The newest attempt; -1 before the first."""
        return max((attempt.number for attempt in self.run.attempts("train")), default=-1)

    def record(self, attempt: int) -> dict[str, Any]:
        """The record of an attempt; empty before it is written."""
        return read_json(self.run.attempt("train", attempt).record) or {}

    def last_step(self, attempt: int) -> int:
        """The newest step of an attempt; 0 before the first."""
        try:
            row = last_row_of(self.run.metrics(attempt))
        except OSError:
            return 0
        return 0 if row is None else int(row["step"])

    def saving(self) -> bool:
        return any(self.run.checkpoints.glob("*.tmp"))

    def workers_started(self, attempt: int) -> bool:
        nodes = (self.run.attempt("train", attempt).path / "nodes").glob("*.json")
        return any((read_json(node) or {}).get("pids") for node in nodes)
