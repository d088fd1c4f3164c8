"""The progress of a run by its files; cheap enough for fifty calls a second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from _chaos.bench import read_json


class RunFiles:
    """A run's directory.

    Args:
        path: The run's.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._sizes: dict[Path, tuple[int, int]] = {}

    def attempt(self) -> int:
        """The newest attempt; -1 before the first."""
        try:
            names = [entry.name for entry in (self.path / "attempts").iterdir()]
        except OSError:
            return -1
        return max((int(name) for name in names if name.isdigit()), default=-1)

    def record(self, attempt: int) -> dict[str, Any]:
        """The record of an attempt; empty before it is written."""
        return read_json(self.path / "attempts" / f"{attempt:03d}" / "attempt.json") or {}

    def last_step(self, attempt: int) -> int:
        """The newest step of an attempt; 0 before the first."""
        path = self.path / "metrics" / f"attempt_{attempt:03d}.jsonl"
        try:
            size = path.stat().st_size
        except OSError:
            return 0
        known, step = self._sizes.get(path, (-1, 0))
        if size != known:
            text = path.read_bytes()
            whole = text[: text.rfind(b"\n") + 1].splitlines()
            step = int(whole[-1].split(b'"step":')[1].split(b",")[0]) if whole else 0
            self._sizes[path] = (size, step)
        return step

    def saving(self) -> bool:
        """Whether a save is in progress."""
        try:
            return any(
                entry.name.endswith(".tmp") for entry in (self.path / "checkpoints").iterdir()
            )
        except OSError:
            return False

    def workers_started(self, attempt: int) -> bool:
        """Whether a launcher has started its workers."""
        folder = self.path / "attempts" / f"{attempt:03d}" / "nodes"
        try:
            return any(
                b'"pids":{"' in file.read_bytes().replace(b" ", b"").replace(b"\n", b"")
                for file in folder.iterdir()
            )
        except OSError:
            return False
