"""Files between a worker and its launcher: its phase and the events of its attempt.

The launcher polls the phase, one line in a file on the node's own disk; neither side ever waits.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Self

from slurmllm.core.run.records import Event, Phase, WorkerPhase
from slurmllm.core.run.rundir import RunDir
from slurmllm.core.run.safe_files import open_append, os_error_text, read_limited

PHASE_FILE = "SLURMLLM_PHASE_FILE"
STACKS_FILE = "SLURMLLM_STACKS_FILE"  # a worker dumps its Python stacks into this file …
STACKS_SIGNAL = signal.SIGQUIT  # … on this signal, from any state
RUN_COPY = "SLURMLLM_RUN_COPY"  # the launcher's copies of the run's small files, for its workers
INSTALLED_FILE = "SLURMLLM_INSTALLED_FILE"  # written when the compiled graphs are in place
REUSED = "reused"  # its content if the graphs are of an archive and may not suit this node
log = logging.getLogger(__name__)

_POLL_S = 0.05
_LINE_BYTES = 96  # constant: a shorter line would leave the end of the previous one


def run_copy(run: RunDir) -> RunDir:
    """Return where a worker reads configuration and measured micro batch of its run.

    The launcher has read and checked both and gives its workers copies in the node's memory, so
    that one process of a node reads the shared file system. Without a launcher it is the run.
    """
    folder = os.environ.get(RUN_COPY)
    return RunDir(Path(folder)) if folder else run


class PhaseWriter:
    """Writes this worker's phase to a file; without a path, nothing.

    The line also has the mean time of a step without waits for other ranks, over a window of time.
    Windows begin at fixed wall-clock times, so that all ranks average the same steps.
    """

    def __init__(self, path: Path | None) -> None:
        self._window = 0  # number of the current window
        self._own_s: list[float] = []  # of the steps in it
        self._measured = ""  # number and mean of the last window
        self._file: int | None = None
        if path is not None:
            with suppress(OSError):  # a full disk of the node must not end the training
                self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)

    @classmethod
    def from_environment(cls) -> Self:
        path = os.environ.get(PHASE_FILE)
        return cls(Path(path) if path else None)

    def begin(self, phase: Phase, step: int) -> None:
        """Record that a phase begins; `step` is the last step finished."""
        if self._file is None:
            return
        line = f"{phase} {step} {time.time():.3f} {self._measured}".ljust(_LINE_BYTES - 1) + "\n"
        with suppress(OSError):
            os.pwrite(self._file, line.encode(), 0)

    def add_step(self, own_s: float, window_s: float) -> None:
        """Add a step; a window that has ended is written with the next phase."""
        window = int(time.time() / window_s)
        if window != self._window:
            if self._own_s:
                self._measured = f"{self._window} {fmean(self._own_s):.4e}"
            self._window = window
            self._own_s = []
        self._own_s.append(own_s)


def read_phase(path: Path) -> WorkerPhase | None:
    """Read a worker's phase; None if it has written none yet."""
    try:
        return WorkerPhase.model_validate(
            # The window's fields are absent at first.
            dict(zip(WorkerPhase.model_fields, read_limited(path, 4096).decode().split()))  # noqa: B905
        )
    except (OSError, ValueError):
        return None


_failed_diagnostics: set[str] = set()


@contextmanager
def diagnostic(action: str, cleanup: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Log and suppress errors of the body, the first of each `what`.

    For curves, events and reports; never for checkpoints, metrics, or a call that others wait for.
    """
    try:
        yield
    except Exception as error:
        if action not in _failed_diagnostics:
            _failed_diagnostics.add(action)
            log.warning(
                "%s failed: %s; its records may be incomplete, and training continues",
                action,
                os_error_text(error) if isinstance(error, OSError) else repr(error),
            )
        cleanup()


def wait_for_graphs() -> bool:
    """Wait until the launcher has installed the compiled graphs; without a launcher, return.

    Returns whether graphs of an archive are used. If the launcher fails, it ends its workers.
    """
    path = os.environ.get(INSTALLED_FILE)
    while path is not None and not Path(path).exists():
        time.sleep(_POLL_S)
    return path is not None and Path(path).read_text("ascii") == REUSED


@dataclass
class EventLog:
    """Appends to `events/attempt_NNN.jsonl`; writes nothing without `path` (all ranks but 0)."""

    path: Path | None
    attempt: int

    def add(self, kind: str, step: int, **fields: Any) -> None:
        if self.path is None:
            return
        line = (
            Event.model_validate(
                {
                    "kind": kind,
                    "step": step,
                    "attempt": self.attempt,
                    "time": time.time(),
                    **fields,
                }
            ).model_dump_json(exclude_defaults=True)
            + "\n"
        )
        with (
            diagnostic("events"),  # the save that the event describes must not fail
            os.fdopen(open_append(self.path), "a", encoding="utf-8") as stream,
        ):
            stream.write(line)
