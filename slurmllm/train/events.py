"""What happens beside the steps: saves, spikes, … a JSON line each, a file an attempt."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from slurmllm.records import Event


class EventLog:
    """Appends to `events/attempt_NNN.jsonl`.

    Args:
        path: Of the file; None: nothing is written (all ranks but 0).
        attempt: Of the train stage.
    """

    def __init__(self, path: Path | None, attempt: int) -> None:
        self._path, self._attempt = path, attempt

    def add(self, kind: str, step: int, **fields: Any) -> None:
        """Write an event (`records.Event`); events are few, so the file is opened for each.

        A refusal of the file system is passed over: what must not fail is the save it tells of.
        """
        if self._path is None:
            return
        event = Event.model_validate(
            {"kind": kind, "step": step, "attempt": self._attempt, "time": time.time(), **fields}
        )
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as stream:
                stream.write(event.model_dump_json(exclude_defaults=True) + "\n")
