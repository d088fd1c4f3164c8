"""A child process of the supervisor, of the lowest priority, for what must not touch the training.

It reads the run directory; nothing waits for it, and nothing is lost with it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from slurmllm.core.run.safe_files import open_append
from slurmllm.core.run.worker_files import diagnostic
from slurmllm.core.slurm.client import wait_for
from slurmllm.train.control.rendezvous import die_with_parent

_POLL_S = 0.05


@dataclass
class SideProcess:
    """A verb of slurmllm that runs beside the attempts of one job."""

    purpose: str  # for messages
    arguments: Sequence[str]
    log: Path
    orphaned_by: int = signal.SIGKILL  # signal that it gets when the supervisor ends
    _child: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, unless that of an earlier attempt in this job still runs."""
        if self._child is not None and self._child.poll() is None:
            return
        command = ["nice", "-n", "19", sys.executable, "-P", "-m", "slurmllm", *self.arguments]
        with diagnostic(self.purpose), os.fdopen(open_append(self.log), "wb", buffering=0) as log:
            self._child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=partial(die_with_parent, self.orphaned_by),
            )

    def stop(self, patience_s: float, cancelled: Callable[[], object] = lambda: False) -> bool:
        """End it, by force after `patience_s`; returns whether it ended by itself without error."""
        child = self._child
        if child is None:
            return True
        if patience_s > 0:
            child.terminate()
            wait_for(lambda: child.poll() is not None or cancelled(), patience_s, _POLL_S)
            if child.returncode is not None:
                return child.returncode == 0
        child.kill()
        child.wait()
        return False
