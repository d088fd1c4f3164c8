"""A worker that hangs says where: its Python stacks on a signal, whatever it is doing."""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from contextlib import suppress
from types import FrameType

from slurmllm.config.recipe import leaving_s
from slurmllm.pulse import STACKS, STACKS_SIGNAL


def dump_on_signal() -> None:
    """From now on, dump the stacks of all threads into the launcher's file on its signal.

    In C, without the interpreter's lock: it works while a thread waits in a library. The file is
    opened now, for a handler cannot.
    """
    path = os.environ.get(STACKS)
    if not path:
        return
    with suppress(OSError):  # a full disk of the node must not end the training
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        faulthandler.register(STACKS_SIGNAL, file=file, all_threads=True)


# CAUTION: NCCL may catch SIGUSR1, so launchers send SIGUSR2 to workers; it is heard all the same.
STOP_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)


class StopRequest:
    """Set by a signal, asked for by the loop after each step."""

    def __init__(self) -> None:
        self.signal_name: str | None = None
        self._signalled_at: float | None = None

    def install(self) -> None:
        """Handle the signals from now on; before torch is imported, for that takes seconds."""
        for number in STOP_SIGNALS:
            signal.signal(number, self._handle)

    def ignore(self) -> None:
        """Ignore the signals from now on.

        The launcher repeats its signal until the worker is gone, and Python puts the default
        action (the process ends) back while it shuts down.
        """
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def left_s(self, lead_s: float) -> float | None:
        """Seconds until the supervisor ends this worker; None where nobody has said.

        Nobody has where no signal came, outside Slurm, and after SIGTERM, which leaves Slurm's
        KillWait.

        Args:
            lead_s: `slurm.signal_lead_s`, by which the signal came before the time limit.
        """
        told = self.signal_name not in (None, "SIGTERM") and "SLURM_JOB_ID" in os.environ
        if not told or self._signalled_at is None:
            return None
        return leaving_s(lead_s) - (time.monotonic() - self._signalled_at)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.signal_name = signal.Signals(number).name
        if self._signalled_at is None:  # it is repeated
            self._signalled_at = time.monotonic()
