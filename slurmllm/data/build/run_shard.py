"""What a process does with one shard, wherever it runs: in-process, local worker or Slurm job."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from slurmllm import errors
from slurmllm.data.build.shard import write_shard
from slurmllm.data.build.shards import Shard
from slurmllm.data.build.work import WorkFolder


class Outcome(NamedTuple):
    """How a shard ended; plain values, for it crosses to another process.

    Attributes:
        shard: Its name.
        error: Class and message of the error that stopped it, None where it is written.
        process: Its id.
        peak_bytes: The most memory that the process has had so far (resident set).
    """

    shard: str
    error: tuple[str, str] | None
    process: int
    peak_bytes: int

    def raise_error(self) -> None:
        """Raise the error, if there was one."""
        if self.error is not None:
            name, message = self.error
            raise getattr(errors, name)(message)


def run_shard(
    shard: Shard, work: Path, on_progress: Callable[[int], None] | None = None
) -> Outcome:
    """Write a shard.

    Args:
        shard: The shard.
        work: The work folder.
        on_progress: Called with the bytes read; where left out, a file says how many.
    """
    error = None
    try:
        write_shard(shard, WorkFolder(work), on_progress)
    except errors.SlurmllmError as fault:
        error = (type(fault).__name__, str(fault))
    return Outcome(shard.name, error, os.getpid(), peak_bytes())


def peak_bytes() -> int:
    """The most memory that this process has had (resident set)."""
    # Not getrusage: its figure is at least what the process was forked from had.
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:  # another system than Linux
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    found = re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0
