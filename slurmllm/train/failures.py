"""The meaning of a worker's exception: whose fault it is, the exit code, and its record."""

from __future__ import annotations

import errno
import time
import traceback
from typing import NamedTuple

from slurmllm.backends.base import Worker
from slurmllm.error_patterns import meaning_of
from slurmllm.errors import (
    EXIT_INTERRUPTED,
    Blame,
    CodeError,
    NodeError,
    SlurmllmError,
    StorageError,
)
from slurmllm.records import FailureRecord

_DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ESTALE, errno.EFBIG}


class ErrorClass(NamedTuple):
    """The meaning of an exception."""

    error: str
    message: str
    blame: Blame
    exit_code: int


def classify_error(error: BaseException) -> ErrorClass:
    name, message = type(error).__name__, str(error) or type(error).__name__
    if isinstance(error, SlurmllmError):
        return ErrorClass(name, message, error.blame, error.exit_code)
    if isinstance(error, KeyboardInterrupt):
        return ErrorClass(name, "interrupted", "user", EXIT_INTERRUPTED)
    meaning = meaning_of(f"{name} {message}")
    if isinstance(error, MemoryError) or meaning == "memory":
        name = "OutOfMemoryError"  # torch's name for it on a GPU
    if name == "OutOfMemoryError":
        fix = "choose a smaller train.micro_batch or train.activation_checkpointing=full"
        return ErrorClass(name, f"{message}; {fix}", CodeError.blame, CodeError.exit_code)
    if meaning in ("lost_peer", "device", "node", "port"):
        return ErrorClass(name, message, NodeError.blame, NodeError.exit_code)
    disk_error = isinstance(error, OSError) and error.errno in _DISK_ERRORS
    if disk_error or meaning in ("storage", "storage_lasting"):
        return ErrorClass(name, message, StorageError.blame, StorageError.exit_code)
    return ErrorClass(name, message, CodeError.blame, CodeError.exit_code)


def failure_record(error: BaseException, worker: Worker, step: int | None) -> FailureRecord:
    classified = classify_error(error)
    return FailureRecord(
        rank=worker.rank, node=worker.node, step=step, time=time.time(), **classified._asdict(),
        traceback="".join(traceback.format_exception(error)),
    )  # fmt: skip


def format_failure(record: FailureRecord) -> str:
    """Format a failure for the log: the message if the user can act on it, else the traceback."""
    head = f"rank {record.rank} on {record.node}: "
    if record.blame == "code" and record.error not in ("DivergenceError", "OutOfMemoryError"):
        head = f"{record.traceback.rstrip()}\n{head}{record.error}: "
    return f"{head}{record.message}"
