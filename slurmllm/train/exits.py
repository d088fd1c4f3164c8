"""Why a worker ends: stop requests by signals, and the meaning of an exception."""

from __future__ import annotations

import errno
import faulthandler
import os
import signal
import time
import traceback
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from slurmllm.core.config.operation import leaving_s
from slurmllm.core.errors import (
    EXIT_INTERRUPTED,
    EXIT_OUT_OF_MEMORY,
    Blame,
    CodeError,
    NodeError,
    SlurmllmError,
    StorageError,
)
from slurmllm.core.run.error_patterns import meaning_of
from slurmllm.core.run.records import FailureRecord
from slurmllm.core.run.safe_files import open_append
from slurmllm.core.run.worker_files import STACKS_FILE, STACKS_SIGNAL
from slurmllm.train.backends.base import Worker

_DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ESTALE, errno.EFBIG}
# CAUTION: NCCL may catch SIGUSR1, so launchers send SIGUSR2 to workers; both are handled.
STOP_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)


def dump_on_signal() -> None:
    """Dump the stacks of all threads into the launcher's file on STACKS_SIGNAL.

    In C, without the interpreter's lock: it works while a thread waits in a library.
    """
    path = os.environ.get(STACKS_FILE)
    if not path:
        return
    with suppress(OSError):  # a full disk of the node must not end the training
        faulthandler.register(STACKS_SIGNAL, file=open_append(Path(path)), all_threads=True)


class StopRequest:
    """A stop requested by a signal, which the loop checks after each step."""

    signal_name: str | None = None
    agreed: str | None = None  # name of the stop signal that all workers have agreed on
    _signalled_at: float | None = None

    def install(self) -> None:  # before torch is imported, which takes seconds
        for number in STOP_SIGNALS:
            signal.signal(number, self._handle)

    def ignore(self) -> None:
        """Ignore the signals from now on: the launcher repeats them until the worker has ended."""
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def left_s(self, lead_s: float) -> float | None:
        """Return the time until the supervisor kills this worker, s; None if it is unknown.

        It is unknown without a signal, outside Slurm, and after SIGTERM, which leaves Slurm's
        KillWait.
        """
        limited = self.signal_name not in (None, "SIGTERM") and "SLURM_JOB_ID" in os.environ
        if not limited or self._signalled_at is None:
            return None
        return leaving_s(lead_s) - (time.monotonic() - self._signalled_at)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.signal_name = signal.Signals(number).name
        if self._signalled_at is None:  # the launcher repeats it; the time counts from the first
            self._signalled_at = time.monotonic()


class ErrorClass(NamedTuple):
    """The meaning of an exception."""

    error: str
    message: str
    blame: Blame
    exit_code: int


def classify_error(error: BaseException) -> ErrorClass:
    name = type(error).__name__
    message = str(error) or type(error).__name__
    if isinstance(error, SlurmllmError):
        return ErrorClass(name, message, error.blame, error.exit_code)
    if isinstance(error, KeyboardInterrupt):
        return ErrorClass(name, "interrupted", "user", EXIT_INTERRUPTED)
    meaning = meaning_of(f"{name} {message}")
    if isinstance(error, MemoryError) or meaning == "memory":
        name = "OutOfMemoryError"  # torch's name for it on a GPU
    if name == "OutOfMemoryError":
        message += "; choose a smaller train.micro_batch or train.activation_checkpointing=full"
        return ErrorClass(name, message, CodeError.blame, EXIT_OUT_OF_MEMORY)
    kind: type[SlurmllmError] = CodeError
    disk_error = isinstance(error, OSError) and error.errno in _DISK_ERRORS
    if meaning in ("lost_peer", "device", "node", "port"):
        kind = NodeError
    elif disk_error or meaning in ("storage", "storage_lasting"):
        kind = StorageError
    return ErrorClass(name, message, kind.blame, kind.exit_code)


def is_of_compiler(error: BaseException) -> bool:
    """Return whether torch.compile raised it, such as for a compiler that was killed."""
    return type(error).__module__.startswith(("torch._dynamo", "torch._inductor"))


def failure_record(error: BaseException, worker: Worker, step: int | None) -> FailureRecord:
    return FailureRecord(
        rank=worker.rank,
        node=worker.node,
        step=step,
        traceback="".join(traceback.format_exception(error)),
        time=time.time(),
        **classify_error(error)._asdict(),
    )


def format_failure(record: FailureRecord) -> str:
    head = f"rank {record.rank} on {record.node}: "
    expected = ("DivergenceError", "StaleGraphsError", "OutOfMemoryError")
    if record.blame == "code" and record.error not in expected:
        head = f"{record.traceback.rstrip()}\n{head}{record.error}: "
    return f"{head}{record.message}"
