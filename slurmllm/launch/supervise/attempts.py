"""Attempt records, opened and closed, with the records of their nodes and workers.

The phases of an attempt, and what it gained, follow from the files that it left:

    started ─ preflight ─ cache ─ start_up ─ first_step ─ training and saving ─ stopping ─ ended

`queue` is the wait in Slurm's queue before. `stopping` begins with the first sign of the end, in a
hang when the last worker stopped advancing.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

from slurmllm.core.config.load import load
from slurmllm.core.config.resolve import RunConfig
from slurmllm.core.errors import RunError, StorageError
from slurmllm.core.format import Json, by_key
from slurmllm.core.metrics.row_reader import Row, last_row_of, read_events, read_rows
from slurmllm.core.run.artifact_records import CheckpointManifest
from slurmllm.core.run.records import (
    WAITS,
    AttemptRecord,
    Attempts,
    FailureRecord,
    NodeRecord,
    NodeRecords,
    PassedOver,
    Restart,
    SkipsRecord,
    Submission,
    SweepRecord,
    Versions,
    WorkerRecord,
    last_submission,
)
from slurmllm.core.run.rundir import RunDir, Stage, read_all, storage_errors
from slurmllm.core.slurm.client import AccountingRow, to_unix
from slurmllm.launch.supervise.allocation import Allocation, SlurmAllocation, start_of_job
from slurmllm.launch.supervise.classify import Ending, unreported_nodes
from slurmllm.launch.supervise.policy import decide
from slurmllm.train.checkpoint.foreign import list_trainer_checkpoints, saved_steps
from slurmllm.train.checkpoint.selection import select_checkpoint
from slurmllm.train.control.rendezvous import free_ports

# All that the process logs about attempts has one component, whatever module it comes from.
_log = logging.getLogger("slurmllm.launch.supervise.supervisor")


def process_identity(pid: int | None) -> str | None:
    """Boot and start time of a process, as process ids are reused; None if it does not run."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        # proc(5): the name, in parentheses, may hold anything; state and start time come after it.
        content = Path(f"/proc/{pid}/stat").read_text("ascii", "replace")
    except OSError:
        return None
    state, *fields = content.rpartition(")")[2].split()
    # Not by psutil's `create_time`: it moves with the clock.
    return None if state in "ZX" else f"{boot} {fields[18]}"


def this_process() -> Json:
    """Return the fields by which a record names the process that writes it."""
    pid = os.getpid()
    return {"pid": pid, "process": process_identity(pid), "host": socket.gethostname()}


ProcessRecord = AttemptRecord | Submission | SweepRecord


def is_running(record: ProcessRecord, content: bytes) -> bool:
    """Whether a recorded process, if any, still runs with `content` in its command line.

    A run that Python submitted has a process of any name.
    """
    try:
        command = Path(f"/proc/{record.pid}/cmdline").read_bytes()
    except OSError:
        return False
    identity = record.process
    return content in command and identity is not None and identity == process_identity(record.pid)


def another_runs(record: ProcessRecord, content: bytes) -> bool:
    """Whether a recorded process still runs, as `is_running`, and is not this one."""
    return record.pid != os.getpid() and is_running(record, content)


def incarnation(record: AttemptRecord, allocation: Allocation) -> AccountingRow | None:
    """Return the accounting of the start of its job in which an attempt ran."""
    if record.job_id is None or not isinstance(allocation, SlurmAllocation):
        return None
    return start_of_job(allocation.client, record.job_id, record.restart_count)


def ending_of_orphaned(
    record: AttemptRecord,
    reported: NodeRecords,
    row: AccountingRow | None,
    failed: Collection[str] | None = None,
) -> Ending:
    """Return how an attempt ended whose supervisor died, by Slurm's accounting.

    `failed`: the nodes that Slurm counts as failed now; None if the run does not use Slurm.
    """
    state = row.state if row is not None else "UNKNOWN"
    if row is not None and row.exit_code == f"{StorageError.exit_code}:0":
        return Ending(
            "storage_failure",
            (
                f"Slurm: {state}, exit code {row.exit_code}: the supervisor on {record.nodes[0]} "
                "could not write why it ended",
            ),
        )
    evidence = (
        f"Slurm: {state}; the supervisor on {record.nodes[0]} ended without a record"
        if record.job_id is not None
        else "the supervisor ended without a record",
    )
    if state == "CANCELLED":
        return Ending("cancelled", evidence)
    if state == "OUT_OF_MEMORY":
        return Ending("out_of_memory", evidence)
    if state in ("TIMEOUT", "PREEMPTED"):
        return Ending("advance_signal", evidence)
    silent = unreported_nodes(record.nodes, reported)
    # Of several nodes without a report, the one that failed is unknown. In a job that was requeued
    # by command, or failed, the supervisor's process ended, and with it the reports.
    accused = len(silent) == 1 and state in ("NODE_FAIL", "UNKNOWN")
    # If any node of a job fails, even a spare one, Slurm kills the job's processes on all others.
    if failed is not None and len(record.nodes) + record.spare_nodes > 1:
        accused = accused and silent[0] in failed
    return Ending("node_failure", evidence, tuple(silent) if accused else ())


def load_attempts(run: RunDir, stage: Stage) -> list[AttemptRecord]:
    records = read_all(AttemptRecord.find, (attempt.record for attempt in run.attempts(stage)))
    return [record for record in records if record is not None]


def open_attempt(
    run: RunDir, stage: Stage, config: RunConfig, allocation: Allocation
) -> AttemptRecord:
    """Begin the next attempt and write its record; raises StorageError if that is impossible."""
    newest, passed_over = None, tuple[PassedOver, ...]()
    if (command := config.recipe.command) is None:
        steps = saved_steps(run, config)
    else:
        newest, passed_over = select_checkpoint(run, command)
        steps = [newest.step] if newest is not None else []
    while True:
        number = run.next_attempt_number(stage)
        folder = run.attempt(stage, number).path
        # FileExistsError: another supervisor was faster.
        with storage_errors(f"cannot make {folder}"), suppress(FileExistsError):
            folder.parent.mkdir(parents=True, exist_ok=True)
            folder.mkdir()  # atomic: two supervisors get different numbers
            break
    first_port = config.cluster.master_port
    master_port, control_port = (first_port, first_port + 1) if first_port else free_ports(2)
    record = AttemptRecord(
        attempt=number,
        stage=stage,
        job_id=allocation.job_id,
        restart_count=allocation.restart_count,
        **this_process(),
        nodes=allocation.nodes,
        spare_nodes=len(allocation.all_nodes or allocation.nodes) - len(allocation.nodes),
        world_size=len(allocation.nodes) * config.workers_per_node,
        master_addr=allocation.master_addr,
        master_port=master_port,
        control_port=control_port,
        started_at=time.time(),
        checkpoint_before=max(steps, default=None),
        # Once, for all nodes: a shared file system may show them different ones.
        checkpoint_path=None if newest is None else str(newest.path),
        passed_over=passed_over,
    )
    record.save(record.files(run).record)
    return record


def log_attempt(record: AttemptRecord, message: str) -> None:
    """Log a line about an attempt; `logs` finds the attempts in a stage's log by its form."""
    _log.info("%s: %s", name_of(record), message)


def name_of(record: AttemptRecord) -> str:
    """Return `train attempt 2 of job 7`."""
    job = f" of job {record.job_id}" if record.job_id else ""
    return f"{record.stage} attempt {record.attempt}{job}"


def close_attempt(
    run: RunDir,
    record: AttemptRecord,
    ending: Ending,
    phases_s: Mapping[str, float] | None = None,
    ended_at: float | None = None,
    first_symptom_at: float | None = None,
    row: AccountingRow | None = None,
    restart_mode: Restart = "requeue",
    in_allocation: bool = False,
    excluded_nodes: Iterable[str] = (),
) -> AttemptRecord:
    """Record how an attempt ended and the action that follows; returns the closed record.

    `phases_s` are the supervisor's measurements; the others follow from the workers' files.
    `ended_at` (None: now) and `first_symptom_at`, of the end, are Unix times, s. `restart_mode`
    and `in_allocation` are as in `policy.decide`. Raises a StorageError if the run directory cannot
    be read or written.
    """
    config = load(run.config)
    earlier = load_attempts(run, record.stage)
    waited_s = queue_s(record, earlier, row)
    phases = {} if waited_s is None else {"queue": waited_s}
    phases |= {**record.phases_s, **(phases_s or {})}
    if worker := WorkerRecord.find(record.files(run).worker(0)):
        phases |= {"start_up": worker.start_up_s, "first_step": worker.first_step_s}
    closed = record.model_copy(
        update={
            "ended_at": ended_at or time.time(),
            "phases_s": phases,
            "ending": ending.ending,
            "evidence": ending.evidence,
            "blamed_nodes": ending.blamed_nodes,
            "excluded_nodes": tuple(excluded_nodes),
            "launch_failure": ending.launch,
            "done_early": ending.done_early,
        }
    )
    if closed.stage == "train":
        closed = timeline(run, closed, first_symptom_at, config)
    saved = max(saved_steps(run, config, closed), default=closed.checkpoint_before)
    graphs = {name for node in node_records(run, closed).values() for name in node.new_graphs}
    phases = {name: round(seconds, 3) for name, seconds in closed.phases_s.items()}
    fields = {"checkpoint_after": saved, "phases_s": phases, "new_graphs": tuple(sorted(graphs))}
    closed = closed.model_copy(update=fields)
    begin = first_attempt(run)
    invalidations = SkipsRecord.of(run).invalidations if closed.ending == "divergence" else ()
    closed = decide(
        closed,
        [a for a in earlier if begin <= a.attempt < closed.attempt and a.ending],
        config.recipe,
        rolled_back=any(entry.attempt == closed.attempt for entry in invalidations),
        started=ending.started,
        restart_mode=restart_mode,
        in_allocation=in_allocation,
    )
    # Written last: until then the attempt counts as open, and the next supervisor closes it.
    closed.save(record.files(run).record)
    return closed


def timeline(
    run: RunDir, record: AttemptRecord, first_symptom_at: float | None, config: RunConfig
) -> AttemptRecord:
    """Return the record of an ended train attempt with the steps and phases that its files show.

    It has the phases before the launchers' start; `first_symptom_at`, Unix time, s: when the
    supervisor saw the first sign of the end.
    """
    assert record.ended_at is not None
    ended_at, steps = record.ended_at, saved_by(run, record, config)
    rows, last = list[Row](), None
    with suppress(RunError, OSError):
        path = run.metrics(record.attempt)
        rows, last = [row for _, row in islice(read_rows(path), 2)], last_row_of(path)
    begun = record.checkpoint_before or 0
    if last is None or not all("time" in row for row in (*rows, last)):
        return record.model_copy(
            update={"steps_gained": max(max(steps, default=begun) - begun, 0), "steps_lost": 0}
        )
    first, second = rows[0], rows[-1]
    logged, last_step = int(first["step"]), int(last["step"])
    # Other trainers log every tenth step, say, and the first row may have no time of its steps.
    before = max(logged - max(int(second["step"]) - logged, 1), 0)
    before = begun if before < begun < logged else before
    saved = max(steps, default=before)
    first_step_s = (first.get("step_time_s") or second.get("step_time_s", 0.0)) * (logged - before)
    first_began = first["time"] - first_step_s
    waits = []
    with suppress(RunError):
        waits = [event for event in read_events(run, record.attempt) if event.kind in WAITS]
    # Unix time of the end of each save, and the seconds for which training waited.
    saves = [(event.time, event.waited_s or 0.0) for event in waits if event.kind == "save"]
    evaluated_s = sum(event.waited_s or 0.0 for event in waits if event.kind == "evaluation")
    # A step in progress at the first sign counts as training.
    worked_until = max(last["time"], first_symptom_at or 0.0, *(event.time for event in waits))
    work_end = min(worked_until, ended_at)
    before_s = (record.phases_s.get(name, 0.0) for name in ("preflight", "cache"))
    launched = record.started_at + sum(before_s)
    saving = sum(waited for _, waited in saves)
    late = sum(waited for time, waited in saves if time > work_end)
    seconds = {
        "start_up": first_began - launched,
        "first_step": first_step_s,
        "training": work_end - first["time"] - (saving - late) - evaluated_s,
        "saving": saving,
        "stopping": ended_at - work_end - late,
    }
    if evaluated_s:
        seconds["evaluation"] = evaluated_s
    return record.model_copy(
        update={
            "phases_s": record.phases_s | {name: max(s, 0.0) for name, s in seconds.items()},
            "first_step": before + 1,
            "last_step": last_step,
            "steps_gained": max(saved - before, 0),
            "steps_lost": max(last_step - max(saved, before), 0),
        }
    )


def saved_by(run: RunDir, record: AttemptRecord, config: RunConfig) -> list[int]:
    """Return the steps of the existing checkpoints that an ended attempt wrote.

    Of a trainer whose checkpoints are not watched, all steps count as saved that come after those
    of the attempts before it.
    """
    attempt = record.attempt
    command = config.recipe.command
    if command is not None and command.checkpoints is None:
        with suppress(RunError, OSError):
            earlier = (a.last_step or 0 for a in load_attempts(run, "train") if a.attempt < attempt)
            last = last_row_of(run.metrics(attempt))
            step = 0 if last is None else int(last["step"])
            return [step] if step > max(earlier, default=0) else []
    if command is not None:
        end = record.ended_at or math.inf
        return [
            e.step
            for e in list_trainer_checkpoints(run, command, closing=record)
            if e.complete and record.started_at <= e.changed_at <= end
        ]
    steps = []
    for step in run.checkpoint_steps():
        manifest = CheckpointManifest.find_readable(run.checkpoint(step) / "manifest.json")
        if manifest and manifest.attempt == attempt:
            steps.append(step)
    return steps


def queue_s(record: AttemptRecord, earlier: Attempts, row: AccountingRow | None) -> float | None:
    """Return the seconds in the queue; None if unknown.

    A requeued attempt waits from the end of the one before it, the first one from the time at which
    it was eligible to start.
    """
    of_job = [a for a in earlier if a.attempt < record.attempt and a.job_id == record.job_id]
    if of_job and of_job[-1].ended_at is not None:
        return max(record.started_at - of_job[-1].ended_at, 0.0)
    if row is None:
        return None
    start = to_unix(row.start)
    eligible = to_unix(row.eligible or row.submit)
    return None if start is None or eligible is None else max(start - eligible, 0.0)


def first_attempt(run: RunDir) -> int:
    """Return the first train attempt of the last submission: budgets count from there."""
    last = last_submission(run)
    return 0 if last is None else last.first_attempt


def newer_attempt(run: RunDir, stage: Stage, number: int) -> int | None:
    """Return the number of an attempt that another supervisor has begun since, if any."""
    try:
        newest = run.next_attempt_number(stage) - 1
    except OSError:
        return None
    return newest if newest > number else None


def node_records(
    run: RunDir, record: AttemptRecord, names: Iterable[str] | None = None
) -> dict[str, NodeRecord]:
    """Return the records of an attempt's nodes, or of those in `names`, as far as they exist."""
    paths = record.files(run)
    names = list(record.nodes if names is None else names)
    records = zip(names, read_all(NodeRecord.find, map(paths.node, names)), strict=True)
    return {name: node for name, node in records if node is not None}


def failure_records(run: RunDir, record: AttemptRecord) -> Sequence[FailureRecord]:
    return read_all(
        FailureRecord.load, sorted(record.files(run).failure(0).parent.glob("rank_*.json"))
    )


def unequal_versions(by_node: Mapping[str, Versions]) -> str:
    """Return which versions differ between nodes, with the nodes; empty if none do."""
    reported = {name: versions for name, versions in by_node.items() if versions}
    lines = []
    for component in sorted({key for versions in reported.values() for key in versions}):
        by_version = by_key((of.get(component, "none"), name) for name, of in reported.items())
        if len(by_version) > 1:
            items = (f"{version} on {' '.join(names)}" for version, names in by_version.items())
            lines.append(f"{component} {', '.join(items)}")
    return f"the nodes have unequal versions: {'; '.join(lines)}" if lines else ""
