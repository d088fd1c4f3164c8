"""What happened beside the steps of an attempt, as rank 0 wrote it down; without numpy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from pydantic import ValidationError

from slurmllm.errors import RunError
from slurmllm.records import Event
from slurmllm.rundir import RunDir


def read_events(run: RunDir, attempt: int) -> Iterator[Event]:
    """The events of a train attempt, oldest first; none where it wrote none.

    Lines that are no events (a last one that was cut) are left out.

    Raises:
        RunError: the file cannot be read.
    """
    path = run.events(attempt)
    try:
        lines = path.read_bytes().splitlines() if path.is_file() else []
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror or error}") from error
    for line in lines:
        with suppress(ValidationError):
            yield Event.model_validate_json(line)
