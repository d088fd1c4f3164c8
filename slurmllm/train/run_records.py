"""What a run reads, written down once: a later attempt that would read something else is refused.

A checkpoint says the same of itself; this also covers the time before the first one, and lets
`compare` tell whether two runs saw the same data.
"""

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
    """Write `data.json` at the first attempt, compare with it at the others.

    Args:
        run: The run.
        identity: Of the stream that is about to be read (`PackedStream.identity`).

    Raises:
        DataError: the data are not those that the run began with.
    """
    reads = DataRecord.model_validate(identity)
    if not run.data.is_file():
        reads.save(run.data)
        return
    changed = DataRecord.load(run.data).differences(reads)
    if changed:
        raise DataError(
            f"the data changed after {run.name} began: {'; '.join(changed)}; put the old ones "
            "back or start a new run"
        )


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
