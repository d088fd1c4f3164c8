"""Blame, exit code and record of exceptions."""

from __future__ import annotations

import errno

import pytest
import torch

from slurmllm.core.errors import CheckpointError, ConfigError, DivergenceError
from slurmllm.train.backends.base import Worker
from slurmllm.train.exits import classify_error, failure_record, format_failure

WORKER = Worker(3, 4, 1, "node-2")


@pytest.mark.parametrize(
    ("error", "name", "blame", "exit_code"),
    [
        (ConfigError("bad"), "ConfigError", "user", 2),
        (CheckpointError("full"), "CheckpointError", "infrastructure", 4),
        (DivergenceError("nan"), "DivergenceError", "code", 71),
        (KeyboardInterrupt(), "KeyboardInterrupt", "user", 130),
        (ValueError("oops"), "ValueError", "code", 70),
        (MemoryError(), "OutOfMemoryError", "code", 72),
        (torch.OutOfMemoryError("CUDA out of memory"), "OutOfMemoryError", "code", 72),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
            "OutOfMemoryError",
            "code",
            72,
        ),
        (
            RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.1]"),
            "RuntimeError",
            "infrastructure",
            3,
        ),
        (OSError(errno.ENOSPC, "No space left on device"), "OSError", "infrastructure", 4),
        (FileNotFoundError(errno.ENOENT, "gone"), "FileNotFoundError", "code", 70),
    ],
)
def test_classes(error: BaseException, name: str, blame: str, exit_code: int) -> None:
    meaning = classify_error(error)
    assert (meaning.error, meaning.blame, meaning.exit_code) == (name, blame, exit_code)
    assert meaning.message


def test_out_of_memory_has_a_fix() -> None:
    assert "smaller train.micro_batch" in classify_error(torch.OutOfMemoryError("CUDA")).message


def test_record_and_message() -> None:
    try:
        raise ValueError("oops")
    except ValueError as error:
        record = failure_record(error, WORKER, step=7)
    assert (record.rank, record.node, record.step) == (3, "node-2", 7)
    assert "test_record_and_message" in record.traceback
    assert format_failure(record).startswith("Traceback")
    assert format_failure(record).endswith("rank 3 on node-2: ValueError: oops")
    plain = failure_record(ConfigError("model.x: 3 is wrong"), WORKER, step=None)
    assert format_failure(plain) == "rank 3 on node-2: model.x: 3 is wrong"
