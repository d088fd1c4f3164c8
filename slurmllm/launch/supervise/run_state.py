"""The state of a run, derived from its records and from Slurm's view of its jobs."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from slurmllm.core.config.command import STEPS_NOT_PASSED
from slurmllm.core.config.load import ConfigSummary, load
from slurmllm.core.errors import SlurmError, StorageError
from slurmllm.core.format import format_duration
from slurmllm.core.run.records import (
    AttemptRecord,
    Submission,
    SweepRecord,
    UnrecordedEnding,
    last_submission,
    runs_of,
)
from slurmllm.core.run.rundir import STAGES, RunDir, Stage, SweepDir
from slurmllm.core.run.safe_files import read_tail
from slurmllm.core.slurm.client import ENDED_STATES, WAITING_STATES, QueuedJob, SlurmClient
from slurmllm.core.slurm.error_texts import explain_waiting
from slurmllm.launch.supervise.allocation import accounted_state
from slurmllm.launch.supervise.attempts import another_runs, is_running, load_attempts
from slurmllm.plan.mesh import load_mesh

# What Slurm's states mean for a run, other than RUNNING and PENDING.
_MEANINGS = {
    "COMPLETING": "its last processes are ending",
    "SUSPENDED": "suspended; it continues by itself (gang scheduling), or by an administrator's "
    "`scontrol resume {job}`",
    "STOPPED": "stopped by SIGSTOP; `scancel --signal=CONT {job}` continues it",
    "SIGNALING": "Slurm is sending it a signal",
    "RESIZING": "its number of nodes is changing",
    "STAGE_OUT": "its files are being staged out",
    "REVOKED": "another cluster of the federation has started it: `squeue --federation`",
    **dict.fromkeys(("CONFIGURING", "POWER_UP_NODE"), "its nodes are starting"),
    "SPECIAL_EXIT": "held after a special exit",
    "RESV_DEL_HOLD": "held: its reservation was deleted",
    "LAUNCH_FAILED": "held: Slurm could not launch it",
    "RECONFIG_FAIL": "held: its nodes could not be configured",
}
_HELD = ("REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD", "LAUNCH_FAILED", "RECONFIG_FAIL")
# What a batch script says before it ends with 2, in its last lines
_OF_SCRIPT = re.compile(
    r"\S{1,255}: cluster\.setup: line |error: \S{1,255} (?:has no interpreter|limits)"
)
_TAIL_BYTES = 4096
SILENT_S = 300.0  # from the last written file on, a run of another machine may be dead


@dataclass(frozen=True)
class RunRecords:
    """The records of a run that determine its state."""

    run: RunDir
    config: ConfigSummary
    submission: Submission | None
    attempts: list[AttemptRecord]  # attempts of the train stage, oldest first
    precompiles: list[AttemptRecord]  # attempts of the precompile stage, oldest first

    @property
    def last(self) -> AttemptRecord | None:
        """The last train attempt of the last submission."""
        first = 0 if self.submission is None else self.submission.first_attempt
        return next((a for a in self.attempts[-1:] if a.attempt >= first), None)

    @property
    def precompiled(self) -> AttemptRecord | None:
        """The last precompile attempt of the last submission, if it has ended."""
        last = next(reversed(self.precompiles), None)
        submission = self.submission
        if last is None or submission is None or last.ending is None:
            return None
        # A local attempt has no job id: its time decides.
        present = last.job_id == submission.precompile_job
        if submission.local:
            present = last.started_at >= submission.submitted_at
        return last if present else None

    @property
    def done(self) -> bool:
        """Whether the last submission has trained all steps."""
        return self.last is not None and self.last.action == "finish"

    @property
    def cancelled(self) -> bool:
        """Whether `slurmllm cancel` cancelled the last submission."""
        return self.submission is not None and self.submission.cancelled_at is not None

    @property
    def ended(self) -> bool:
        """Whether the records alone show that the last submission has ended."""
        last = self.last or self.precompiled
        if last is None or last.ending == "superseded":
            return False
        return last.action == "stop" or (last.action == "finish" and last.stage == "train")


def read_records(run: RunDir, config: ConfigSummary) -> RunRecords:
    """Read the records of a run; raises StorageError if one is damaged."""
    return RunRecords(
        run,
        config,
        last_submission(run),
        load_attempts(run, "train"),
        load_attempts(run, "precompile"),
    )


@dataclass(frozen=True)
class JobState:
    """The state of one of the jobs of a submission."""

    job_id: str
    state: str
    reason: str = ""
    meaning: str = ""  # of the reason why it is pending; empty for a job that is not
    remedy: str = ""  # what to do about it; empty if the wait ends by itself
    unrecorded: UnrecordedEnding | None = None  # of its last attempt: the run directory was full

    @property
    def waits(self) -> bool:
        return self.state in WAITING_STATES

    @property
    def has_nodes(self) -> bool:
        return self.state not in (*ENDED_STATES, *WAITING_STATES, "UNKNOWN")

    @property
    def state_meaning(self) -> str:
        """What its state means; empty if that is plain."""
        return _MEANINGS.get(self.state, "").format(job=self.job_id)

    @property
    def waiting(self) -> str:
        """Why it is pending and what to do, on one line."""
        why = f"waiting for {self.reason}"
        if self.meaning:
            why += f": {self.meaning}"
        texts = [self.state_meaning or why, self.remedy] if self.reason else [self.state_meaning]
        # A user's or an administrator's hold never ends by itself.
        if self.state in _HELD and "scontrol release" not in self.remedy:
            texts.append(f"`scontrol release {self.job_id}` lets it start")
        return "; ".join(filter(None, texts))


State = tuple[str, str]  # see `runs.RunState`: state and reason
Jobs = Mapping[str, JobState]


def derive_state(records: RunRecords, jobs: Jobs) -> State:
    """Return the state of a run and its reason: the first matching row of the tables wins.

    Records come before Slurm, which forgets jobs after minutes, and a job that runs comes before
    the record of an attempt that it may be about to supersede. `jobs`, by stage, are not read if
    the records show that the run has ended.
    """
    return (
        _by_records(records, jobs)
        or _by_active_jobs(records, jobs)
        or _by_ended_jobs(records, jobs)
    )


def _by_records(records: RunRecords, jobs: Jobs) -> State | None:
    run = records.run
    submission = records.submission
    last = records.last
    if last is not None and records.done:
        return "done", STEPS_NOT_PASSED if last.done_early else ""
    if submission is None and (process := sweep_process(run)):
        return "waiting", f"for the runs before it in its sweep, {process}"
    if submission is None:
        return "interrupted", f"never submitted; `{start_command(run)}` starts it"
    active = "training" if last is not None else "precompiling"
    if submission.local and is_process_alive(submission):
        return active, f"process {submission.pid}"
    if submission.local:
        last = last or records.precompiled
        if last is not None and last.action == "stop":
            return _stopped(run, last)
        if records.cancelled:
            return _cancelled(run)
        if (host := host_elsewhere(submission, jobs)) is not None:
            silent_s = time.time() - last_written(run)
            process = f"on {host}, process {submission.pid}"
            if silent_s < SILENT_S:
                return active, process
            return "unknown", (
                f"{process}, which has written nothing for {format_duration(silent_s)}; if it "
                f"is gone, `slurmllm resume {run.name} --force`"
            )
        return _by_script(records) or ("interrupted", f"`slurmllm resume {run.name}` continues")
    if records.ended:
        return _stopped(run, last) if last is not None else _not_precompiled(records, "UNKNOWN")
    return None


def _by_active_jobs(records: RunRecords, jobs: Jobs) -> State | None:
    train = _train_job(jobs)
    precompile = jobs.get("precompile")
    # The precompile job of a sweep continues for the other runs.
    shared = records.submission is not None and records.submission.graphs_of is not None
    first = jobs.get("train")  # whatever its successor does
    if shared and records.cancelled and (first is None or first.state == "CANCELLED"):
        return _cancelled(records.run)
    # A record cannot show that a requeued job runs again before its attempt is opened.
    if train is not None and train.has_nodes:
        return "training", train.state_meaning
    if precompile is not None and precompile.has_nodes:
        return "precompiling", precompile.state_meaning
    if train is not None and train.waits:
        if precompile is not None and precompile.waits and precompile.reason:
            return "queued", f"precompile job {precompile.waiting}"
        return "requeued" if records.last is not None else "queued", train.waiting
    return None


def _by_ended_jobs(records: RunRecords, jobs: Jobs) -> State:
    run = records.run
    last = records.last
    train = _train_job(jobs)
    precompile = jobs.get("precompile")
    state, reason = ("", "") if train is None else (train.state, train.reason)
    # UNKNOWN has a reason if the query failed, none if Slurm has forgotten the job.
    forgotten = state == "UNKNOWN" and not reason
    if (state == "CANCELLED" and records.attempts) or (forgotten and records.cancelled):
        return _cancelled(run)
    if last is not None and last.ended_at is not None and (state != "UNKNOWN" or forgotten):
        return _stopped(run, last)
    if precompile is not None and precompile.state not in ("COMPLETED", "UNKNOWN"):
        return _not_precompiled(records, precompile.state)
    if state == "CANCELLED":
        return "cancelled", ""
    if state == "UNKNOWN":
        return "unknown", reason or "squeue does not list the job, and sacct gave nothing"
    if train is not None and (ending := train.unrecorded) is not None:
        return "stopped", f"{ending.ending}: {'; '.join(ending.evidence)}"
    if state != "FAILED":
        return "interrupted", f"train job {state or 'never submitted'}"
    return _by_script(records) or ("interrupted", _failed_job(run, "train"))


def _train_job(jobs: Jobs) -> JobState | None:
    """Return the train job; once it has ended, its successor if that is active."""
    train = jobs.get("train")
    successor = jobs.get("successor")
    if train is None or successor is None or train.waits or train.has_nodes:
        return train
    return successor if successor.waits or successor.has_nodes else train


def _by_script(records: RunRecords) -> State | None:
    """Return the state of a run whose batch script ended before its supervisor began."""
    submission = records.submission
    for path in map(records.run.stage_log, STAGES if submission and records.last is None else ()):
        with suppress(OSError):
            line = next(filter(_OF_SCRIPT.match, reversed(read_tail(path, _TAIL_BYTES)[-4:])), None)
            # Not that of an earlier submission; the clocks may differ.
            if line and submission and path.stat().st_mtime > submission.submitted_at - 1.0:
                return "stopped", f"bad_configuration: {line.removeprefix('error: ')}"
    return None


def _cancelled(run: RunDir) -> State:
    return "cancelled", f"`slurmllm resume {run.name}` continues"


def _stopped(run: RunDir, last: AttemptRecord) -> State:
    if last.ending == "cancelled":
        return _cancelled(run)
    return "stopped", f"{last.ending}: {'; '.join(last.evidence)}"


def _not_precompiled(records: RunRecords, job_state: str) -> State:
    """Return the state after a precompile stage that no training follows."""
    last = records.precompiled
    cancelled = job_state == "CANCELLED" or (last is not None and last.ending == "cancelled")
    state = "cancelled" if cancelled else "stopped"
    if last is not None:
        return state, f"precompile: {last.ending}: {'; '.join(last.evidence)}"
    if not cancelled and (stopped := _by_script(records)):
        return stopped
    run = records.run
    name = records.submission.graphs_of if records.submission else None
    compiling = run if name is None else SweepDir(run.path.parent).graph_run(name)
    if job_state == "FAILED":
        return state, _failed_job(compiling, "precompile")
    return state, f"precompile job {job_state}; see {compiling.stage_log('precompile')}"


def _failed_job(run: RunDir, stage: Stage) -> str:
    """Return that a job failed, and where to look for the reason."""
    path = run.stage_log(stage)
    with suppress(OSError):
        if path.stat().st_size == 0:
            return (
                f"{stage} job FAILED before its script printed a line; this happens if the time "
                "limit is not above slurm.signal_lead_s: Slurm then signals as the job starts"
            )
    return f"{stage} job FAILED; see {path}"


def is_process_alive(submission: Submission) -> bool:
    """Return whether the process of a local submission is seen to run on this machine."""
    # Its identity names the boot of a machine: a shared file system shows runs of others, too.
    return another_runs(submission, b"")


def host_elsewhere(submission: Submission, jobs: Jobs) -> str | None:
    """Return the machine that may run a local submission, if its processes are not seen here.

    None if the submission has ended, or Slurm shows that the allocation that it used has.
    """
    allocation = jobs.get("allocation")
    # UNKNOWN has a reason if the query failed, none if Slurm has forgotten the job.
    gone = allocation is not None and not (
        allocation.has_nodes or (allocation.state == "UNKNOWN" and allocation.reason)
    )
    if (
        not submission.local
        or submission.ended_at is not None
        or gone
        or submission.host == socket.gethostname()
    ):
        return None
    return submission.host


def last_written(run: RunDir) -> float:
    """Return the Unix time of the last line of a run's logs, or of a heartbeat."""
    paths = [run.stage_log(stage) for stage in STAGES]
    for attempt in run.attempts("train")[-1:]:
        paths += attempt.heartbeat("any").parent.glob("*.json")
    newest = 0.0
    for path in (run.jobs, *paths):
        with suppress(OSError):
            newest = max(newest, path.stat().st_mtime)
    return newest


def start_command(run: RunDir) -> str:
    """Return the command that starts a run that was never submitted, as its sweep would have."""
    command = f"slurmllm resume {run.name}"
    with suppress(StorageError):
        nodes = load_mesh(run.plan).nodes
        command += f" --nodes {nodes}" if nodes > 1 else ""
    with suppress(StorageError):
        sweep = SweepDir(run.path.parent)
        for sibling in (*sweep.graph_runs(), *runs_of(sweep)):
            with suppress(StorageError):  # damaged: another run's record says it too
                if (last := last_submission(sibling)) is not None:
                    return f"{command} --local" if last.local else command
    return command


def sweep_process(run: RunDir) -> str | None:
    """Return the process of the local sweep that a run is in, if it runs or may run elsewhere."""
    sweep = SweepRecord.find_readable(SweepDir(run.path.parent).record)
    if sweep is None or sweep.pid in (None, os.getpid()):
        return None
    if is_running(sweep, b"slurmllm"):
        return f"process {sweep.pid}"
    runs = (RunDir(run.path.parent / case.run) for case in sweep.cases)
    writes = (time.time() - last_written(case) < SILENT_S for case in runs)
    if sweep.host != socket.gethostname() and any(writes):
        return f"process {sweep.pid} on {sweep.host}"
    return None


@dataclass(frozen=True)
class QueueSnapshot:
    """The result of one squeue call."""

    jobs: Mapping[str, QueuedJob] = field(default_factory=dict)  # jobs in the queue, by id
    error: str = ""  # why Slurm did not answer; empty if it did


def job_ids(submission: Submission | None) -> dict[str, str]:
    """Return stage, `successor`, or `allocation` of a local run → job id of a submission."""
    if submission is not None and submission.local and submission.allocation is not None:
        return {"allocation": submission.allocation}
    return {} if submission is None or submission.local else submission.jobs


def query_queue(submissions: Iterable[Submission | None], client: SlurmClient) -> QueueSnapshot:
    """Query Slurm once for the jobs of many submissions."""
    jobs = [job for submission in submissions for job in job_ids(submission).values()]
    if not jobs:
        return QueueSnapshot()
    try:
        return QueueSnapshot(client.queue(jobs))
    except SlurmError as error:
        return QueueSnapshot(error=str(error))


def read_job_states(
    run: RunDir,
    submission: Submission | None,
    queue: QueueSnapshot,
    client: SlurmClient,
    brief: bool = False,
) -> Jobs:
    """Return stage → state of the jobs of a submission.

    `brief`: one active job is enough, as sacct is called once for every job that has left the
    queue, which takes long for a list of runs.
    """
    jobs = {}
    ids = job_ids(submission)
    enough = brief and any(job in queue.jobs and queue.jobs[job].active for job in ids.values())
    for stage, job in ids.items():
        if queue.error:
            jobs[stage] = JobState(job, "UNKNOWN", queue.error)
        elif queued := queue.jobs.get(job):
            ending = UnrecordedEnding.of_comment(queued.comment)
            reason = "" if queued.reason == "None" else queued.reason
            meaning = remedy = ""
            if reason and queued.state in WAITING_STATES:
                meaning, remedy = explain_waiting(reason, job, run.name, stage)
                if "TimeLimit=MINUTES" in remedy and stage != "precompile":
                    lead_s = load(run.config).recipe.slurm.signal_lead_s
                    remedy += f" (above {lead_s / 60:g}: slurm.signal_lead_s {lead_s})"
            jobs[stage] = JobState(job, queued.state, reason, meaning, remedy, ending)
        elif not enough:
            jobs[stage] = JobState(job, accounted_state(client, job))
    return jobs


def is_active(run: RunDir, client: SlurmClient) -> bool:
    """Return whether jobs of a run are pending or running; SlurmError if Slurm does not say."""
    submission = last_submission(run)
    if submission is None:
        return False
    if submission.local:
        writes = time.time() - last_written(run) < SILENT_S
        return is_process_alive(submission) or (
            writes and process_elsewhere(run, client) is not None
        )
    return any(job.active for job in client.queue(submission.own_jobs).values())


def process_elsewhere(run: RunDir, client: SlurmClient) -> str | None:
    """Return `process 7 on h1` if it may run a run, and cannot be seen from this machine."""
    submission = last_submission(run)
    if submission is None or not submission.local or is_process_alive(submission):
        return None
    host = host_elsewhere(
        submission, read_job_states(run, submission, query_queue([submission], client), client)
    )
    return None if host is None else f"process {submission.pid} on {host}"
