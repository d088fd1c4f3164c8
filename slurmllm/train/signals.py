"""Signals of a worker: stop requests, and stack dumps of a worker that hangs."""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from contextlib import suppress
from types import FrameType

from slurmllm.config.recipe import leaving_s
from slurmllm.worker_phase import STACKS_FILE, STACKS_SIGNAL

# CAUTION: NCCL may catch SIGUSR1, so launchers send SIGUSR2 to workers; both are handled.
STOP_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)


def dump_on_signal() -> None:
    """Dump the stacks of all threads into the launcher's file on STACKS_SIGNAL.

    faulthandler runs in C without the interpreter's lock: it works while a thread waits in a
    library. The file is opened now, because a signal handler cannot.
    """
    path = os.environ.get(STACKS_FILE)
    if not path:
        return
    with suppress(OSError):  # a full disk of the node must not end the training
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        faulthandler.register(STACKS_SIGNAL, file=file, all_threads=True)


class StopRequest:
    """A stop requested by a signal, which the loop checks after each step."""

    def __init__(self) -> None:
        self.signal_name: str | None = None
        self._signalled_at: float | None = None

    def install(self) -> None:
        """Install the handlers; before torch is imported, which takes seconds."""
        for number in STOP_SIGNALS:
            signal.signal(number, self._handle)

    def ignore(self) -> None:
        """Ignore the signals from now on.

        The launcher repeats its signal until the worker has ended, and Python restores the default
        action (terminate) during its shutdown.
        """
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def left_s(self, lead_s: float) -> float | None:
        """Return the time until the supervisor kills this worker, s; None if it is unknown.

        It is unknown without a signal, outside Slurm, and after SIGTERM, which leaves Slurm's
        KillWait.

        Args:
            lead_s: `slurm.signal_lead_s`, the time from the signal to the time limit.
        """
        limited = self.signal_name not in (None, "SIGTERM") and "SLURM_JOB_ID" in os.environ
        if not limited or self._signalled_at is None:
            return None
        return leaving_s(lead_s) - (time.monotonic() - self._signalled_at)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.signal_name = signal.Signals(number).name
        if self._signalled_at is None:  # the launcher repeats it; the time counts from the first
            self._signalled_at = time.monotonic()
