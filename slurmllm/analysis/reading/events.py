"""What happened beside the steps of an attempt, as rank 0 wrote it down; without numpy."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import ValidationError

from slurmllm.errors import RunError
from slurmllm.records import Event
from slurmllm.rundir import RunDir


def read_events(run: RunDir, attempt: int, left_out: list[int] | None = None) -> Iterator[Event]:
    """The events of a train attempt, oldest first; none where it wrote none.

    Lines that are no events (a last one that was cut, a newer version's kind) are left out.

    Args:
        run: The run.
        attempt: Number of the train attempt.
        left_out: The numbers of these lines, from 1, are put here.

    Raises:
        RunError: the file cannot be read.
    """
    path = run.events(attempt)
    try:
        lines = path.read_bytes().splitlines() if path.is_file() else []
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror or error}") from error
    for number, line in enumerate(lines, start=1):
        try:
            yield Event.model_validate_json(line)
        except ValidationError:
            if left_out is not None:
                left_out.append(number)
