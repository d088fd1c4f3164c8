"""What all workers decide together after each step: to stop, to fail, to finish a save.

Nothing of it waits inside a step:

1. After step k, each worker posts three flags: its stop signal, whether it found a divergence,
   whether its files of the save in progress are still being written. The control plane forms their
   maximum while step k + 1 runs.
2. After step k + 1 all workers read that result, which has arrived by then, and act alike: all of
   them stop after step k + 1, fail, or finish the save.

A worker never acts on its own flags, so that no two workers take different ways. What there is to
say about a flag (the reason of a divergence) is exchanged only once all have seen it. Before a save
the workers do wait for the flags of the step itself (`decide`).
"""

from __future__ import annotations

import signal
from typing import NamedTuple

from slurmllm.control.plane import ControlPlane, Pending


class Flags(NamedTuple):
    """One worker's flags, or the maximum over all workers."""

    stop_signal: int = 0  # number of a signal, 0 for none
    diverged: bool = False
    writing: bool = False  # files of the save in progress are being written

    @property
    def signal_name(self) -> str | None:
        return signal.Signals(self.stop_signal).name if self.stop_signal else None


class Agreement:
    """The flags under way."""

    def __init__(self, control: ControlPlane) -> None:
        self._control = control
        self._pending: Pending | None = None

    def post(self, flags: Flags) -> None:
        """Begin to exchange the flags of a step (collective); does not wait."""
        self._pending = self._control.reduce([int(flag) for flag in flags], "max")

    def read(self) -> Flags:
        """Return the maximum of the flags last posted, the same on all workers."""
        assert self._pending is not None
        stop_signal, diverged, writing = self._pending.result()
        return Flags(stop_signal, bool(diverged), bool(writing))
