"""Where a run stands now, from its directory and from Slurm: what `slurmllm status` shows."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slurmllm.analysis.reading.rows import last_row
from slurmllm.config.recipe import WatchdogConfig
from slurmllm.config.resolve import load
from slurmllm.errors import SlurmError, SlurmllmError, StorageError
from slurmllm.plan.mesh import Mesh, load_mesh
from slurmllm.records import (
    AttemptRecord,
    ExcludedNode,
    GraphManifest,
    JobsRecord,
    MicroBatchRecord,
    SkippedBatches,
    SkipsRecord,
    Submission,
    WorkerRecord,
)
from slurmllm.rundir import RunDir, is_run
from slurmllm.slurm.client import SlurmClient
from slurmllm.supervise.attempts import load_attempts, node_records, unequal_versions
from slurmllm.supervise.exclusion import excluded
from slurmllm.supervise.gate import faults
from slurmllm.supervise.standing import Standing, standing


@dataclass(frozen=True)
class JobState:
    """One of the two jobs of a submission."""

    job_id: str
    state: str
    reason: str = ""


@dataclass(frozen=True)
class RunState:
    """A run as of now.

    Attributes:
        state: queued, precompiling, training, requeued, done, stopped, cancelled, interrupted,
            unknown (Slurm does not answer) or damaged (a record cannot be read).
        why: One line that explains the state, where there is something to explain.
        step: Last step trained, of `steps`.
        eta_s: Seconds to the last step at the present rate.
        cold_first_step_s: First step with an empty graph cache (precompile).
        first_steps: The last attempt's node → (first step in s, cache hits, cache misses).
        mesh: As planned, None where plan.json is absent.
        micro_batch: What was measured for `train.micro_batch: auto`, None where nothing was.
        graphs: What the archive of compiled graphs holds, None where there is none.
        uncompiled: Why that archive is not complete.
        versions: The last attempt's node → versions of driver, runtime, compiler, …
        unequal_versions: Which nodes differ in them, empty where none do.
        excluded: The nodes that the run keeps off.
        standing: What the workers are doing, None where none run.
        skips: Windows of the data that the run passes over after roll-backs.
    """

    name: str
    run_dir: str
    recipe: str
    state: str
    why: str
    nodes: int
    step: int
    steps: int
    metrics: dict[str, Any]
    eta_s: float | None
    jobs: dict[str, JobState]
    attempts: list[AttemptRecord] = field(default_factory=list)
    checkpoints: list[int] = field(default_factory=list)
    cold_first_step_s: float | None = None
    first_steps: dict[str, tuple[float, int, int]] = field(default_factory=dict)
    mesh: Mesh | None = None
    micro_batch: MicroBatchRecord | None = None
    graphs: GraphManifest | None = None
    uncompiled: tuple[str, ...] = ()
    versions: dict[str, dict[str, str]] = field(default_factory=dict)
    unequal_versions: str = ""
    excluded: tuple[ExcludedNode, ...] = ()
    standing: Standing | None = None
    skips: tuple[SkippedBatches, ...] = ()


def all_runs(root: Path) -> list[RunDir]:
    """The runs under a folder, the newest last."""
    if not root.is_dir():
        return []
    found = [RunDir(entry) for entry in root.iterdir() if is_run(entry)]
    return sorted(found, key=lambda run: run.config.stat().st_mtime)


def run_state(run: RunDir, client: SlurmClient) -> RunState:
    """Put together where a run stands."""
    recipe = load(run.config).recipe
    submissions = JobsRecord.load(run.jobs).submissions if run.jobs.is_file() else ()
    sent = submissions[-1] if submissions else None
    attempts = load_attempts(run, "train")
    jobs = _jobs(sent, client)
    state, why = _state(run, sent, jobs, attempts)
    row = last_row(run) or {}
    step = int(row.get("step", 0))
    left_s = (recipe.train.steps - step) * float(row.get("step_time_s", 0.0))
    versions = _versions(run, attempts)
    manifest = GraphManifest.load(run.graphs_manifest) if run.graphs_manifest.is_file() else None
    return RunState(
        name=run.name,
        run_dir=str(run.path),
        recipe=recipe.name,
        state=state,
        why=why,
        nodes=sent.nodes if sent else 0,
        step=step,
        steps=recipe.train.steps,
        metrics=row,
        eta_s=left_s if row and state == "training" else None,
        jobs=jobs,
        attempts=attempts,
        checkpoints=run.checkpoint_steps(),
        cold_first_step_s=manifest.cold_first_step_s if manifest is not None else None,
        first_steps=_first_steps(run),
        mesh=load_mesh(run.plan) if run.plan.is_file() else None,
        micro_batch=(MicroBatchRecord.load(run.micro_batch) if run.micro_batch.is_file() else None),
        graphs=manifest,
        uncompiled=faults(manifest, run) if manifest is not None else (),
        versions=versions,
        unequal_versions=unequal_versions(versions),
        excluded=tuple(excluded(run)),
        standing=_standing(run, attempts, state, recipe.watchdog),
        skips=SkipsRecord.load(run.skips).skips if run.skips.is_file() else (),
    )


def any_state(run: RunDir, client: SlurmClient) -> RunState:
    """Where a run stands, `damaged` where its records do not tell."""
    try:
        return run_state(run, client)
    except SlurmllmError as error:
        why = str(error).splitlines()[0]
        return RunState(run.name, str(run.path), "", "damaged", why, 0, 0, 0, {}, None, {})


def is_active(run: RunDir, client: SlurmClient) -> bool:
    """Whether jobs of a run wait or run.

    Raises:
        SlurmError: Slurm does not answer, and the run was submitted to it.
    """
    sent = JobsRecord.load(run.jobs).submissions[-1:] if run.jobs.is_file() else ()
    if not sent:
        return False
    if sent[0].local:
        return _alive(sent[0])
    ids = [job for job in (sent[0].precompile_job, sent[0].train_job) if job is not None]
    return any(job.active for job in client.queue(ids).values())


def _jobs(sent: Submission | None, client: SlurmClient) -> dict[str, JobState]:
    if sent is None or sent.local:
        return {}
    ids = {"precompile": sent.precompile_job, "train": sent.train_job}
    known = {stage: job for stage, job in ids.items() if job is not None}
    try:
        queued = client.queue(list(known.values()))
    except SlurmError as error:
        return {stage: JobState(job, "UNKNOWN", str(error)) for stage, job in known.items()}
    jobs = {}
    for stage, job in known.items():
        if job in queued:
            reason = queued[job].reason if queued[job].reason != "None" else ""
            jobs[stage] = JobState(job, queued[job].state, reason)
            continue
        rows = [row for row in client.accounting(job) if row.job_id == job]
        jobs[stage] = JobState(job, rows[-1].state if rows else "UNKNOWN")
    return jobs


_WAITING = ("PENDING", "REQUEUED", "CONFIGURING", "REQUEUE_HOLD")


def _state(
    run: RunDir, sent: Submission | None, jobs: dict[str, JobState], attempts: list[AttemptRecord]
) -> tuple[str, str]:
    last = attempts[-1] if attempts else None
    if last is not None and sent is not None and last.attempt < sent.first_attempt:
        last = None  # of an earlier submission
    if last is not None and last.action == "finish":
        return "done", ""
    if sent is None:
        return "interrupted", "never submitted"
    if sent.local:
        return _local_state(run, sent, last)
    precompile, train = jobs.get("precompile"), jobs.get("train")
    if train is not None and train.state in ("RUNNING", "COMPLETING"):
        return "training", ""
    if precompile is not None and precompile.state in ("RUNNING", "COMPLETING"):
        return "precompiling", ""
    if train is not None and train.state in _WAITING:
        state = "requeued" if last is not None else "queued"
        why = f"waiting for {train.reason}" if train.reason else ""
        if train.state == "REQUEUE_HOLD" or "held" in train.reason.lower():
            why += f"; `scontrol release {train.job_id}` lets it start"
        return state, why
    if train is not None and train.state == "CANCELLED" and attempts:
        return "cancelled", f"`slurmllm resume {run.name}` continues"
    if last is not None and last.ended_at is not None:
        return "stopped", f"{last.ending}: {'; '.join(last.evidence)}"
    if precompile is not None and precompile.state not in ("COMPLETED", "UNKNOWN"):
        word = "cancelled" if precompile.state == "CANCELLED" else "stopped"
        tried = next(reversed(load_attempts(run, "precompile")), None)
        if tried is not None and tried.job_id == precompile.job_id and tried.ending is not None:
            return word, f"precompile: {tried.ending}: {'; '.join(tried.evidence)}"
        return word, f"precompile job {precompile.state}; see {run.stage_log('precompile')}"
    if train is not None and train.state == "CANCELLED":
        return "cancelled", ""
    if train is not None and train.state == "UNKNOWN":
        return "unknown", train.reason or "Slurm no longer knows the job and has no accounting"
    return "interrupted", f"train job {train.state if train else 'never submitted'}"


def _local_state(run: RunDir, sent: Submission, last: AttemptRecord | None) -> tuple[str, str]:
    if _alive(sent):
        return ("training" if last is not None else "precompiling"), f"process {sent.pid}"
    last = last or next(reversed(load_attempts(run, "precompile")), None)
    if last is not None and last.action == "stop":
        return "stopped", f"{last.ending}: {'; '.join(last.evidence)}"
    return "interrupted", f"`slurmllm resume {run.name}` continues"


def _alive(sent: Submission) -> bool:
    """Whether a local submission's process still runs, as far as this machine can tell."""
    if sent.pid is None or sent.host != socket.gethostname():
        return False
    try:
        command = Path(f"/proc/{sent.pid}/cmdline").read_bytes()
    except OSError:
        return False
    return b"slurmllm" in command and sent.pid != os.getpid()


def _standing(
    run: RunDir, attempts: list[AttemptRecord], state: str, config: WatchdogConfig
) -> Standing | None:
    running = state == "training" and bool(attempts) and attempts[-1].ended_at is None
    return standing(run, attempts[-1], config) if running else None


def _versions(run: RunDir, attempts: list[AttemptRecord]) -> dict[str, dict[str, str]]:
    """Of the last train attempt's nodes; of the last precompile attempt's before there is one."""
    tries = attempts or load_attempts(run, "precompile")
    if not tries:
        return {}
    try:
        return {name: node.versions for name, node in node_records(run, tries[-1]).items()}
    except StorageError:
        return {}  # as with the first steps


def _first_steps(run: RunDir) -> dict[str, tuple[float, int, int]]:
    attempts = run.attempts("train")
    folder = attempts[-1].worker(0).parent if attempts else None
    if folder is None or not folder.is_dir():
        return {}
    try:
        workers = [WorkerRecord.load(path) for path in sorted(folder.glob("rank_*.json"))]
    except StorageError:
        return {}  # figures only: a damaged one must not hide the run's state
    return {w.node: (w.first_step_s, w.cache_hits, w.cache_misses) for w in workers}
