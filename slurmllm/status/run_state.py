"""The word for where a run stands, from its records and from what Slurm says of its jobs."""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from slurmllm.config.load import load
from slurmllm.config.resolve import RunConfig
from slurmllm.errors import SlurmError
from slurmllm.records import AttemptRecord, JobsRecord, Submission
from slurmllm.rundir import RunDir
from slurmllm.slurm.client import QueuedJob, SlurmClient
from slurmllm.supervise.attempts import load_attempts

_RUNNING = ("RUNNING", "COMPLETING")
_WAITING = ("PENDING", "REQUEUED", "CONFIGURING", "REQUEUE_HOLD")


@dataclass(frozen=True)
class RunRecords:
    """What a run's directory says of where it stands.

    Attributes:
        sent: The last submission.
        attempts: Of the train stage, oldest first.
        precompiles: Of the precompile stage.
    """

    run: RunDir
    config: ConfigSummary
    sent: Submission | None
    attempts: list[AttemptRecord]
    precompiles: list[AttemptRecord]

    @property
    def last(self) -> AttemptRecord | None:
        """The last train attempt of the last submission."""
        last = self.attempts[-1] if self.attempts else None
        if last is not None and self.sent is not None and last.attempt < self.sent.first_attempt:
            return None
        return last

    @property
    def precompiled(self) -> AttemptRecord | None:
        """The last precompile attempt of the last submission, where it has ended."""
        tried, sent = next(reversed(self.precompiles), None), self.sent
        if tried is None or sent is None or tried.ending is None:
            return None
        if sent.local:
            return tried if tried.started_at >= sent.submitted_at else None
        return tried if tried.job_id == sent.precompile_job else None

    @property
    def settled(self) -> bool:
        """Whether the records alone tell that the last submission has come to its end."""
        last = self.last or self.precompiled
        if last is None or last.ending == "superseded":
            return False
        return last.action == "stop" or (last.action == "finish" and last.stage == "train")


def read_records(run: RunDir, config: ConfigSummary) -> RunRecords:
    """Read them.

    Raises:
        StorageError: one is damaged.
    """
    submissions = JobsRecord.load(run.jobs).submissions if run.jobs.is_file() else ()
    return RunRecords(
        run,
        config,
        submissions[-1] if submissions else None,
        load_attempts(run, "train"),
        load_attempts(run, "precompile"),
    )


def derive_state(records: RunRecords, jobs: Mapping[str, JobState]) -> tuple[str, str]:
    """The state (see `state.RunState`), and one line that explains it.

    Args:
        records: The run's; where they are settled, no job is looked at.
        jobs: Stage → what Slurm says.
    """
    run, sent, last = records.run, records.sent, records.last
    if last is not None and last.action == "finish":
        return "done", ""
    if sent is None:
        return "interrupted", "never submitted"
    if sent.local:
        return _local(records, sent)
    if records.settled:
        return _stopped(run, last) if last is not None else _not_precompiled(records, None)
    precompile, train = jobs.get("precompile"), jobs.get("train")
    if train is not None and train.state in _RUNNING:
        return "training", ""
    if precompile is not None and precompile.state in _RUNNING:
        return "precompiling", ""
    if train is not None and train.state in _WAITING:
        return "requeued" if last is not None else "queued", _waits_for(train)
    if train is not None and train.state == "CANCELLED" and records.attempts:
        return _cancelled(run)
    silent = train is not None and train.state == "UNKNOWN" and bool(train.reason)
    forgotten = train is not None and train.state == "UNKNOWN" and not silent
    if forgotten and sent.cancelled_at is not None:
        return _cancelled(run)
    if last is not None and last.ended_at is not None and not silent:
        return _stopped(run, last)
    if precompile is not None and precompile.state not in ("COMPLETED", "UNKNOWN"):
        return _not_precompiled(records, precompile)
    if train is not None and train.state == "CANCELLED":
        return "cancelled", ""
    if train is not None and train.state == "UNKNOWN":
        return "unknown", train.reason or "Slurm no longer knows the job and has no accounting"
    return "interrupted", f"train job {train.state if train else 'never submitted'}"


def _waits_for(job: JobState) -> str:
    why = f"waiting for {job.reason}" if job.reason else ""
    if job.state == "REQUEUE_HOLD" or "held" in job.reason.lower():
        why += f"; `scontrol release {job.job_id}` lets it start"
    return why


def _cancelled(run: RunDir) -> tuple[str, str]:
    return "cancelled", f"`slurmllm resume {run.name}` continues"


def _stopped(run: RunDir, last: AttemptRecord) -> tuple[str, str]:
    if last.ending == "cancelled":
        return _cancelled(run)
    return "stopped", f"{last.ending}: {'; '.join(last.evidence)}"


def _not_precompiled(records: RunRecords, job: JobState | None) -> tuple[str, str]:
    """How a precompile stage ended that lets no training follow."""
    tried, state = records.precompiled, job.state if job is not None else "UNKNOWN"
    cancelled = state == "CANCELLED" or (tried is not None and tried.ending == "cancelled")
    word = "cancelled" if cancelled else "stopped"
    if tried is not None:
        return word, f"precompile: {tried.ending}: {'; '.join(tried.evidence)}"
    return word, f"precompile job {state}; see {records.run.stage_log('precompile')}"


def _local(records: RunRecords, sent: Submission) -> tuple[str, str]:
    if is_process_alive(sent):
        state = "training" if records.last is not None else "precompiling"
        return state, f"process {sent.pid}"
    last = records.last or records.precompiled
    if last is not None and last.action == "stop":
        return _stopped(records.run, last)
    if sent.cancelled_at is not None:
        return _cancelled(records.run)
    return "interrupted", f"`slurmllm resume {records.run.name}` continues"


def is_process_alive(sent: Submission) -> bool:
    """Whether a local submission's process still runs, as far as this machine can tell."""
    if sent.pid is None or sent.host != socket.gethostname():
        return False
    try:
        command = Path(f"/proc/{sent.pid}/cmdline").read_bytes()
    except OSError:
        return False
    return b"slurmllm" in command and sent.pid != os.getpid()


@dataclass(frozen=True)
class JobState:
    """One of the two jobs of a submission."""

    job_id: str
    state: str
    reason: str = ""


@dataclass(frozen=True)
class QueueSnapshot:
    """Slurm's answer.

    Attributes:
        jobs: The jobs that it still holds, by id.
        silent: Why it did not answer; empty where it did.
    """

    jobs: Mapping[str, QueuedJob] = field(default_factory=dict)
    silent: str = ""


def job_ids(sent: Submission | None) -> dict[str, str]:
    """Stage → job id of a submission to Slurm."""
    if sent is None or sent.local:
        return {}
    ids = {"precompile": sent.precompile_job, "train": sent.train_job}
    return {stage: job for stage, job in ids.items() if job is not None}


def query_queue(submissions: Iterable[Submission | None], client: SlurmClient) -> QueueSnapshot:
    """Ask Slurm once for the jobs of many submissions."""
    wanted = [job for sent in submissions for job in job_ids(sent).values()]
    if not wanted:
        return QueueSnapshot()
    try:
        return QueueSnapshot(client.queue(wanted))
    except SlurmError as error:
        return QueueSnapshot(silent=str(error))


def read_job_states(
    sent: Submission | None, queue: QueueSnapshot, client: SlurmClient, brief: bool = False
) -> dict[str, JobState]:
    """Stage → state of the jobs of a submission.

    Args:
        sent: The submission.
        queue: What `ask` found.
        client: Slurm.
        brief: Whether to leave out jobs that it holds no more while it holds another, which tells
            where the run stands: accounting must be asked for each of them.
    """
    jobs, ids = {}, job_ids(sent)
    enough = brief and any(job in queue.jobs and queue.jobs[job].active for job in ids.values())
    for stage, job in ids.items():
        if queue.silent:
            jobs[stage] = JobState(job, "UNKNOWN", queue.silent)
        elif job in queue.jobs:
            reason = queue.jobs[job].reason
            jobs[stage] = JobState(job, queue.jobs[job].state, "" if reason == "None" else reason)
        elif not enough:
            rows = [row for row in client.accounting(job) if row.job_id == job]
            jobs[stage] = JobState(job, rows[-1].state if rows else "UNKNOWN")
    return jobs


# What comes of a tree that is not as `load` would have it.
_ODD = (LookupError, AttributeError, TypeError, ValueError)
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True)
class ConfigSummary:
    """What a run is.

    Attributes:
        recipe: Its recipe's name.
        steps: How many it is to train.
        usd_per_node_hour: By the cluster profile, on demand; None: it has no price.
    """

    recipe: str
    steps: int
    usd_per_node_hour: float | None


def summarize_config(config: RunConfig) -> ConfigSummary:
    """The outline of a configuration that is loaded already."""
    price = config.cluster.price
    usd = price.on_demand if price is not None else None
    return ConfigSummary(config.recipe.name, config.recipe.train.steps, usd)


def read_config_summary(run: RunDir) -> ConfigSummary:
    """The outline of a run.

    Raises:
        ConfigError: its configuration is unreadable or no longer valid.
    """
    try:
        # The sources of the values, which nobody asks for here, are the longer half.
        tree = yaml.load(run.config.read_bytes().partition(b"\norigin:")[0], _Loader)
        price = tree["cluster"].get("price")
        name, steps = tree["name"], tree["train"]["steps"]
        usd = None if price is None else float(price["on_demand"])
    except (OSError, yaml.YAMLError, RecursionError, *_ODD):
        return summarize_config(load(run.config))
    sound = type(name) is str and type(steps) is int and steps > 0
    if not sound or (usd is not None and not 0 < usd < math.inf):
        return summarize_config(load(run.config))
    return ConfigSummary(name, steps, usd)
