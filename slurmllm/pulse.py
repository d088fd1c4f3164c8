"""What a worker is doing, for its launcher: a line in a file on the node's own disk.

The launcher names the file ($SLURMLLM_PULSE) and reads it now and then; nothing waits for anybody.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Self, get_args

from slurmllm.records import Phase, RankBeat

PULSE = "SLURMLLM_PULSE"
STACKS = "SLURMLLM_STACKS"  # the file into which a worker dumps its Python stacks …
STACKS_SIGNAL = signal.SIGQUIT  # … on this signal, whatever it is doing
_LENGTH = 64  # every line is as long, so that a shorter one leaves nothing of the one before


class Pulse:
    """Says what this worker is doing.

    Args:
        path: Of the file; None: nobody wants to know.
    """

    def __init__(self, path: Path | None) -> None:
        self._file: int | None = None
        if path is not None:
            with suppress(OSError):  # a full disk of the node must not end the training
                self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)

    @classmethod
    def from_environment(cls) -> Self:
        """Into the file that the launcher has named, if it has."""
        path = os.environ.get(PULSE)
        return cls(Path(path) if path else None)

    def beat(self, phase: Phase, step: int) -> None:
        """Write down that a phase begins.

        Args:
            phase: What this worker is about to do.
            step: The last one finished.
        """
        if self._file is None:
            return
        line = f"{phase} {step} {time.time():.3f}".ljust(_LENGTH - 1) + "\n"
        with suppress(OSError):
            os.pwrite(self._file, line.encode(), 0)


def read_pulse(path: Path) -> RankBeat | None:
    """What a worker has written last; None where it has written nothing yet."""
    try:
        phase, step, since = path.read_text().split()
        if phase not in get_args(Phase):
            return None
        return RankBeat.model_validate({"phase": phase, "step": int(step), "since": float(since)})
    except (OSError, ValueError):
        return None
