"""What a run has cost so far: nodes times time of its attempts, of both stages.

By the attempts' own records, so that `status` asks nobody; `report` has Slurm's own count, which
begins some seconds before a supervisor does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress

from slurmllm.analysis.reading.rows import last_row_of
from slurmllm.errors import StorageError
from slurmllm.records import AttemptRecord, Heartbeat
from slurmllm.rundir import RunDir
from slurmllm.supervise.pace import number_of

HOUR_S = 3600.0


def node_hours(run: RunDir, attempts: Sequence[AttemptRecord], running: bool, now: float) -> float:
    """Node hours of attempts.

    Args:
        run: The run.
        attempts: Of both stages.
        running: Whether the newest of them runs, so that its time goes on.
        now: Unix time, s.
    """
    newest = max(attempts, key=lambda attempt: attempt.started_at, default=None)
    return math.fsum(
        len(attempt.nodes)
        * max(_end(run, attempt, now if running and attempt is newest else None), 0.0)
        for attempt in attempts
    ) / HOUR_S  # fmt: skip


def _end(run: RunDir, attempt: AttemptRecord, now: float | None) -> float:
    """Seconds from an attempt's start to its end, or as far as it is known to have come."""
    end = attempt.ended_at or now or _last_sign(run, attempt)
    return end - attempt.started_at


def _last_sign(run: RunDir, attempt: AttemptRecord) -> float:
    """Unix time of the last that is heard of an attempt whose supervisor wrote no end."""
    signs = [attempt.started_at]
    for name in attempt.nodes:
        with suppress(StorageError):
            beat = Heartbeat.load(run.attempt(attempt.stage, attempt.attempt).heartbeat(name))
            signs.append(beat.written_at)
    if attempt.stage == "train":
        with suppress(OSError):
            row = last_row_of(run.metrics(attempt.attempt)) or {}
            signs.append(number_of(row, "time") or 0.0)
    return max(signs)
