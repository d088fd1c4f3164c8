"""The phases of an attempt and what it gained, from the files that it left.

    started ─ preflight ─ cache ─ start_up ─ first_step ─ training and saving ─ stopping ─ ended

`queue` is the wait in Slurm's queue before. `stopping` begins with the first sign of the end, in a
hang when the last worker stopped advancing.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime

from slurmllm.errors import RunError, StorageError
from slurmllm.metrics.row_reader import last_row_of, read_events, read_rows
from slurmllm.records import AttemptRecord, CheckpointManifest
from slurmllm.rundir import RunDir
from slurmllm.slurm.client import AccountingRow


@dataclass(frozen=True)
class Timeline:
    """A train attempt by its metrics, events and checkpoints.

    Attributes:
        phases_s: start_up, first_step, training, saving, stopping, s; empty without a step.
    """

    phases_s: dict[str, float] = field(default_factory=dict)
    first_step: int | None = None
    last_step: int | None = None
    steps_gained: int | None = None  # steps after its start that a checkpoint of this attempt holds
    steps_lost: int | None = None  # steps that no checkpoint holds


def timeline(
    run: RunDir, record: AttemptRecord, ended_at: float, sign_at: float | None
) -> Timeline:
    """Reconstruct the timeline of a train attempt.

    `record` has the phases before the launchers' start; `ended_at` and `sign_at`, the first sign of
    the end that the supervisor saw, are Unix times.
    """
    steps = saved_by(run, record.attempt)
    first, last = None, None
    with suppress(RunError, OSError):
        path = run.metrics(record.attempt)
        first, last = next((row for _, row in read_rows(path)), None), last_row_of(path)
    needed = {"step", "time", "step_time_s"}
    if first is None or last is None or not needed <= first.keys() & last.keys():
        before = record.checkpoint_before or 0
        gained = max(steps, default=before) - before
        return Timeline(steps_gained=max(gained, 0), steps_lost=0)
    first_step, last_step = int(first["step"]), int(last["step"])
    before = first_step - 1
    saved = max(steps, default=before)
    first_began = first["time"] - first["step_time_s"]
    # Unix time of the end of each save, and the seconds for which training waited.
    saves: list[tuple[float, float]] = []
    with suppress(RunError):
        events = read_events(run, record.attempt)
        saves = [(event.time, event.waited_s or 0.0) for event in events if event.kind == "save"]
    worked_until = max(last["time"], *(time for time, _ in saves), 0.0)
    # A step in progress at the first sign counts as training.
    work_end = min(max(worked_until, sign_at or 0.0), ended_at)
    launched = record.started_at + sum(
        record.phases_s.get(name, 0.0) for name in ("preflight", "cache")
    )
    saving = sum(waited for _, waited in saves)
    late = sum(waited for time, waited in saves if time > work_end)
    phases = {
        "start_up": first_began - launched,
        "first_step": first["step_time_s"],
        "training": work_end - first["time"] - (saving - late),
        "saving": saving,
        "stopping": ended_at - work_end - late,
    }
    return Timeline(
        phases_s={name: max(seconds, 0.0) for name, seconds in phases.items()},
        first_step=first_step,
        last_step=last_step,
        steps_gained=max(saved - before, 0),
        steps_lost=max(last_step - max(saved, before), 0),
    )


def saved_by(run: RunDir, attempt: int) -> list[int]:
    """The steps of the existing checkpoints that an attempt wrote."""
    found = []
    for step in run.checkpoint_steps():
        with suppress(StorageError):
            manifest = CheckpointManifest.load(run.checkpoint(step) / "manifest.json")
            if manifest.attempt == attempt:
                found.append(step)
    return found


def queue_s(
    record: AttemptRecord, earlier: Sequence[AttemptRecord], row: AccountingRow | None
) -> float | None:
    """Seconds in the queue; None if unknown.

    A requeued attempt waits from the end of the one before it, the first one from the time at which
    it was eligible to start.
    """
    of_job = [a for a in earlier if a.attempt < record.attempt and a.job_id == record.job_id]
    if of_job and of_job[-1].ended_at is not None:
        return max(record.started_at - of_job[-1].ended_at, 0.0)
    if row is None:
        return None
    with suppress(ValueError):  # "Unknown", "None"
        eligible = datetime.fromisoformat(row.eligible or row.submit).timestamp()
        return max(datetime.fromisoformat(row.start).timestamp() - eligible, 0.0)
    return None
