"""Commands with a time limit, whose output goes to a file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

_POLL_S = 0.5
_PROGRESS_S = 30.0  # between two lines of progress
_CANCEL_S = 60.0  # for a run to end after SIGTERM


class StageError(Exception):
    """A stage of a trainer failed; the message is for the table."""


def say(message: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {message}", file=sys.stderr, flush=True)


def run_limited(
    label: str,
    command: Sequence[str],
    log: Path,
    environment: Mapping[str, str],
    limit_s: float,
    *,
    folder: Path | None = None,
    status: Callable[[], str] = lambda: "",
    meanwhile: Callable[[], bool] = lambda: True,  # called until it returns True
) -> int:
    """Run a command and return its exit code; its standard error is in `log` with suffix .err.

    Raises:
        StageError: It took longer than `limit_s`; it was ended, with what it had started.
    """
    begin = reported = time.monotonic()
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output, log.with_suffix(".err").open("wb") as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            env=environment,
            cwd=folder,
            start_new_session=True,
        )
        try:
            is_over = False
            while process.poll() is None:
                is_over = is_over or meanwhile()
                now = time.monotonic()
                if now - begin > limit_s:
                    raise StageError(f"{label}: not over after {limit_s:.0f} s ({log})")
                if now - reported > _PROGRESS_S:
                    reported = now
                    say(f"{label}: {now - begin:.0f} s {status()}".rstrip())
                time.sleep(_POLL_S)
        finally:
            _end(process)
    return process.returncode


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process that still runs: SIGTERM, which lets a run cancel itself, then SIGKILL."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_CANCEL_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def last_line(*files: Path) -> str:
    """Return the last line with a word of the first file that has one; empty without."""
    for file in files:
        with suppress(OSError), file.open(errors="replace") as stream:
            for line in reversed(deque(stream, 40)):
                if any(character.isalnum() for character in line):
                    return line.strip()[:300]
    return ""
