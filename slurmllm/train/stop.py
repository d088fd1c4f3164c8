"""The wish to stop: signals that ask a worker to save and leave."""

from __future__ import annotations

import signal
from types import FrameType

# CAUTION: NCCL may catch SIGUSR1, so launchers send SIGUSR2 to workers; it is heard all the same.
STOP_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)


class StopRequest:
    """Set by a signal, asked for by the loop after each step."""

    def __init__(self) -> None:
        self.signal_name: str | None = None

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

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.signal_name = signal.Signals(number).name
