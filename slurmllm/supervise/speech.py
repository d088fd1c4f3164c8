"""What the supervisor says into the stage's log, which may lie on the disk that fails."""

from __future__ import annotations

from contextlib import suppress


def say(line: str) -> None:
    """Print a line at once; a log that cannot be written ends nothing."""
    with suppress(OSError):
        print(line, flush=True)
