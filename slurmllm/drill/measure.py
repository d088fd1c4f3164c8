"""How long a broken run took to its next step, and what the time went into."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from slurmllm.analysis.reading.rows import MetricsFile
from slurmllm.drill.agent import Injection
from slurmllm.drill.results import Recovery
from slurmllm.errors import RunError
from slurmllm.records import AttemptRecord, WorkerRecord
from slurmllm.rundir import RunDir


def recovery(run: RunDir, done: Injection, attempts: Sequence[AttemptRecord]) -> Recovery | None:
    """Seconds from the blow to the first step that a later attempt completed.

    Where an attempt in between came to no step, its time is in `launch_s`.

    Returns:
        None where no later attempt has made a step.
    """
    broken = next((a for a in attempts if a.attempt == done.attempt), None)
    after = [a for a in attempts if a.attempt > done.attempt]
    for index, attempt in enumerate(after):
        completed = _first_step_at(run, attempt.attempt)
        if completed is not None and broken is not None and broken.ended_at is not None:
            return _parts(run, done.time, completed, [broken, *after[: index + 1]])
    return None


def _parts(
    run: RunDir, struck: float, completed: float, chain: Sequence[AttemptRecord]
) -> Recovery:
    """The seconds in between, by attempts' records and the first worker's."""
    pairs = itertools.pairwise(chain)
    detection = max(0.0, (chain[0].ended_at or struck) - struck)
    requeue = sum(max(0.0, b.started_at - max(a.ended_at or 0.0, struck)) for a, b in pairs)
    last = chain[-1]
    worker = _first_worker(run, last.attempt)
    parts = {
        "detection_s": detection,
        "requeue_s": requeue,
        "preflight_s": last.phases_s.get("preflight", 0.0),
        "cache_s": last.phases_s.get("cache", 0.0),
        "start_up_s": worker.start_up_s if worker is not None else 0.0,
        "first_step_s": worker.first_step_s if worker is not None else 0.0,
    }
    total = completed - struck
    rounded = {name: round(seconds, 3) for name, seconds in parts.items()}
    left = max(0.0, total - sum(parts.values()))
    return Recovery(total_s=round(total, 3), launch_s=round(left, 3), **rounded)


def _first_worker(run: RunDir, attempt: int) -> WorkerRecord | None:
    path = run.attempt("train", attempt).worker(0)
    return WorkerRecord.load(path) if path.is_file() else None


def _first_step_at(run: RunDir, attempt: int) -> float | None:
    """Unix time at which an attempt completed its first step."""
    path = run.metrics(attempt)
    try:
        row = next(MetricsFile(path).rows(), None) if path.is_file() else None
    except RunError:
        return None
    return float(row["time"]) if row is not None and "time" in row else None
