"""Where runs stand now, from their directories and from Slurm: what `slurmllm status` shows."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from slurmllm.checkpoint.catalogue import invalidation_reason, read_rollbacks
from slurmllm.config.load import load
from slurmllm.errors import SlurmllmError, StorageError
from slurmllm.metrics.row_reader import last_row, last_row_of
from slurmllm.metrics.step_time import Pace, finite_number, read_pace
from slurmllm.records import AttemptRecord, CheckpointManifest, Heartbeat, JobsRecord
from slurmllm.rundir import RunDir, is_run
from slurmllm.slurm.client import SlurmClient
from slurmllm.status.details import Details, read_details
from slurmllm.status.run_state import (
    JobState,
    RunRecords,
    derive_state,
    is_process_alive,
    job_ids,
    query_queue,
    read_config_summary,
    read_job_states,
    read_records,
    summarize_config,
)

ACTIVE = ("queued", "precompiling", "training", "requeued")


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint that is whole.

    Attributes:
        step: After which it was saved.
        saved_at: Unix time, s.
        age_s: Seconds since then.
    """

    step: int
    saved_at: float
    age_s: float


@dataclass(frozen=True)
class RunState:
    """A run as of now.

    Attributes:
        state: queued, precompiling, training, requeued, done, stopped, cancelled, interrupted,
            unknown (Slurm does not answer) or damaged (a record cannot be read).
        why: One line that explains the state, where there is something to explain.
        step: Last step trained, of `steps`.
        metrics: The last row of metrics, as written.
        loss: Of it; None where it is no finite number.
        tokens: Trained on so far.
        seq_per_s: Median of the recent steps.
        eta_s: Seconds to the last step at the pace of the recent steps, saves included and
            further restarts not; None where nothing trains.
        finish_at: Unix time of that.
        last_checkpoint: The newest that is whole and that no roll-back has set aside.
        checkpoints: Steps of all checkpoint folders.
        restarts: Attempts of the train stage after the first.
        node_hours: Of all attempts so far, precompile's included.
        usd: What they cost by the profile's price on demand; None without one.
        jobs: Stage → its Slurm job; of a list, those alone that Slurm had to be asked about.
        attempts: Of the train stage.
        details: Of a run looked at by itself.
    """

    name: str
    run_dir: str
    recipe: str = ""
    state: str = "damaged"
    why: str = ""
    nodes: int = 0
    step: int = 0
    steps: int = 0
    metrics: dict[str, Any] = field(default_factory=dict)
    loss: float | None = None
    tokens: int | None = None
    seq_per_s: float | None = None
    eta_s: float | None = None
    finish_at: float | None = None
    last_checkpoint: SavedCheckpoint | None = None
    checkpoints: list[int] = field(default_factory=list)
    restarts: int = 0
    node_hours: float = 0.0
    usd: float | None = None
    jobs: dict[str, JobState] = field(default_factory=dict)
    attempts: list[AttemptRecord] = field(default_factory=list)
    details: Details | None = None

    @property
    def active(self) -> bool:
        """Whether the run waits or runs."""
        return self.state in ACTIVE

    @property
    def not_told(self) -> bool:
        """Whether Slurm, which alone knows it, did not answer."""
        return self.state == "unknown" and any(job.reason for job in self.jobs.values())


def list_runs(root: Path) -> list[RunDir]:
    """The runs under a folder, the newest last."""
    found = []
    for entry in root.iterdir() if root.is_dir() else ():
        with suppress(OSError):  # removed meanwhile
            if is_run(entry):
                found.append(((entry / "config.yaml").stat().st_mtime, RunDir(entry)))
    return [run for _, run in sorted(found, key=lambda one: (one[0], one[1].name))]


def run_state(run: RunDir, client: SlurmClient) -> RunState:
    """Where a run stands, with its details.

    Raises:
        ConfigError: its configuration is no longer valid.
        StorageError: a record is damaged or cannot be read.
    """
    try:
        config = load(run.config)
        records = read_records(run, summarize_config(config))
        queue = query_queue([records.sent], client)
        found = _run_state(records, read_job_states(records.sent, queue, client))
        training = found.state == "training"
        watchdog = config.recipe.watchdog
        return replace(found, details=read_details(run, found.attempts, training, watchdog))
    except OSError as error:
        raise StorageError(_unreadable(run, error)) from error


def run_states(runs: Sequence[RunDir], client: SlurmClient) -> list[RunState]:
    """Where many runs stand, `damaged` where their records do not tell.

    Slurm is asked once, for the jobs of all runs whose records do not show that they have ended.
    """
    read: list[RunRecords | RunState] = []
    for run in runs:
        try:
            read.append(read_records(run, read_config_summary(run)))
        except (SlurmllmError, OSError) as error:
            read.append(_damaged(run, error))
    wanted = [one.sent for one in read if isinstance(one, RunRecords) and not one.settled]
    queue = query_queue(wanted, client)
    found = []
    for one in read:
        if isinstance(one, RunRecords):
            try:
                jobs = {} if one.settled else read_job_states(one.sent, queue, client, brief=True)
                found.append(_run_state(one, jobs))
            except (SlurmllmError, OSError) as error:
                found.append(_damaged(one.run, error))
        else:
            found.append(one)
    return found


def is_active(run: RunDir, client: SlurmClient) -> bool:
    """Whether jobs of a run wait or run.

    Raises:
        SlurmError: Slurm does not answer, and the run was submitted to it.
    """
    sent = JobsRecord.load(run.jobs).submissions[-1:] if run.jobs.is_file() else ()
    if not sent:
        return False
    if sent[0].local:
        return is_process_alive(sent[0])
    return any(job.active for job in client.queue(list(job_ids(sent[0]).values())).values())


def _run_state(records: RunRecords, jobs: dict[str, JobState]) -> RunState:
    run, attempts, now = records.run, records.attempts, time.time()
    state, why = derive_state(records, jobs)
    row = last_row(run) or {}
    measured = read_pace(run, attempts)
    left_s = _left_s(records, row, measured) if state == "training" else None
    tokens = finite_number(row, "tokens")
    tries = [*records.precompiles, *attempts]
    hours = node_hours(run, tries, state in ("precompiling", "training"), now)
    usd = records.config.usd_per_node_hour
    return RunState(
        name=run.name,
        run_dir=str(run.path),
        recipe=records.config.recipe,
        state=state,
        why=why,
        nodes=records.sent.nodes if records.sent else 0,
        step=int(row.get("step", 0)),
        steps=records.config.steps,
        metrics=row,
        loss=finite_number(row, "loss"),
        tokens=None if tokens is None else int(tokens),
        seq_per_s=measured.seq_per_s if measured else finite_number(row, "seq_per_s"),
        eta_s=left_s,
        finish_at=None if left_s is None else now + left_s,
        last_checkpoint=_last_checkpoint(run, now),
        checkpoints=run.checkpoint_steps(),
        restarts=max(len(attempts) - 1, 0),
        node_hours=hours,
        usd=None if usd is None else hours * usd,
        jobs=jobs,
        attempts=attempts,
    )


def _damaged(run: RunDir, error: SlurmllmError | OSError) -> RunState:
    words = _unreadable(run, error) if isinstance(error, OSError) else str(error)
    return RunState(
        run.name, str(run.path), why="; ".join(line.strip() for line in words.splitlines()[:2])
    )


def _unreadable(run: RunDir, error: OSError) -> str:
    return (
        f"cannot read {error.filename or run.path}: {error.strerror or error}; check its "
        "permissions and the file system"
    )


def _left_s(records: RunRecords, row: dict[str, Any], measured: Pace | None) -> float | None:
    """Seconds to the last step; an attempt without a step makes those again that were lost."""
    if measured is None:
        return None
    step, last = int(row.get("step", 0)), records.last
    if last is not None and last.ended_at is None and row.get("attempt", -1) != last.attempt:
        step = last.checkpoint_before or 0
    return measured.seconds(max(records.config.steps - step, 0))


def _last_checkpoint(run: RunDir, now: float) -> SavedCheckpoint | None:
    skips = read_rollbacks(run)
    for step in reversed(run.checkpoint_steps()):
        with suppress(StorageError):  # a save that runs, or was cut
            found = CheckpointManifest.load(run.checkpoint(step) / "manifest.json")
            if invalidation_reason(step, found.attempt, skips) is None:
                return SavedCheckpoint(step, found.saved_at, max(now - found.saved_at, 0.0))
    return None


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
            signs.append(finite_number(row, "time") or 0.0)
    return max(signs)
