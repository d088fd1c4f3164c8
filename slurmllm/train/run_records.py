"""Files that a run writes about its training: `data.json` and `events/attempt_NNN.jsonl`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from slurmllm.errors import DataError
from slurmllm.records import DataRecord, Event
from slurmllm.rundir import RunDir


def check_data(run: RunDir, identity: Mapping[str, Any]) -> None:
    """Write `PackedStream.identity` to `data.json` in the first attempt, compare in later ones.

    Checkpoints record the data too; this file covers the time before the first one, and lets
    `compare` check whether two runs read the same data.

    Raises:
        DataError: The data are not those that the run began with.
    """
    current = DataRecord.model_validate(identity)
    if not run.data.is_file():
        current.save(run.data)
        return
    changed = DataRecord.load(run.data).differences(current)
    if changed:
        raise DataError(
            f"the data changed after {run.name} began: {'; '.join(changed)}; restore the old data "
            "or start a new run"
        )


class EventLog:
    """Appends to `events/attempt_NNN.jsonl`; writes nothing without `path` (all ranks but 0)."""

    def __init__(self, path: Path | None, attempt: int) -> None:
        self._path, self._attempt = path, attempt

    def add(self, kind: str, step: int, **fields: Any) -> None:
        if self._path is None:
            return
        event = Event.model_validate(
            {"kind": kind, "step": step, "attempt": self._attempt, "time": time.time(), **fields}
        )
        with suppress(OSError):  # the save that the event describes must not fail
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as stream:
                stream.write(event.model_dump_json(exclude_defaults=True) + "\n")
