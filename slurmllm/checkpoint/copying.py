"""Copies checkpoints to the second place beside training; rank 0 alone."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from slurmllm.checkpoint.second_tier import SecondTier
from slurmllm.errors import SlurmllmError
from slurmllm.rundir import RunDir

_BACKGROUND_NICENESS = 15

# step, seconds, bytes, what went wrong
OnCopied = Callable[[int, float, int, str | None], None]


class Copier:
    """One copy at a time, of the newest checkpoint there is when the one before is done.

    A refusal is told and costs nothing else; the next checkpoint is tried again. A copy under way
    does not hold up the end of the process.

    Args:
        tier: The second place.
        run: The run.
        keep: Newest checkpoints kept there.
        still_ours: Raises where a newer attempt has taken the run over.
        on_copied: Told of every copy, from another thread.
    """

    def __init__(
        self,
        tier: SecondTier,
        run: RunDir,
        keep: int,
        still_ours: Callable[[], None],
        on_copied: OnCopied,
    ) -> None:
        self._tier, self._run, self._keep = tier, run, keep
        self._still_ours, self._on_copied = still_ours, on_copied
        self._changed = threading.Condition()
        self._wanted: int | None = None
        self._copying: int | None = None
        self._thread: threading.Thread | None = None

    @property
    def in_use(self) -> tuple[int, ...]:
        """The checkpoints of the run that it reads or is about to."""
        with self._changed:
            return tuple(s for s in (self._copying, self._wanted) if s is not None)

    def copy(self, step: int) -> None:
        """Copy a checkpoint of the run as soon as the one under way is done."""
        with self._changed:
            self._wanted = step
            self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="second-tier", daemon=True)
            self._thread.start()

    def finish(self, limit_s: float) -> bool:
        """Wait until everything is copied, so long at most; whether it is."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._wanted is None and self._copying is None, max(0.0, limit_s)
            )

    def _work(self) -> None:
        # On Linux of this thread alone.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _BACKGROUND_NICENESS)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._wanted is not None)
                step, self._copying, self._wanted = self._wanted, self._wanted, None
            assert step is not None
            began, num_bytes, fault = time.monotonic(), 0, None
            try:
                self._still_ours()
                num_bytes = self._tier.put(self._run.checkpoint(step))
                self._tier.retain(self._keep)
            except SlurmllmError as error:
                fault = str(error)
            self._on_copied(step, time.monotonic() - began, num_bytes, fault)
            with self._changed:
                self._copying = None
                self._changed.notify_all()
