"""The records of a stage's attempts: opened, closed, counted."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from slurmllm.analysis.rows import last_row
from slurmllm.config.resolve import RunConfig, load
from slurmllm.records import (
    Action,
    AttemptRecord,
    FailureRecord,
    JobsRecord,
    NodeRecord,
    WorkerRecord,
)
from slurmllm.rundir import AttemptDir, RunDir, Stage
from slurmllm.supervise.allocation import Allocation, free_port
from slurmllm.supervise.classify import ACTIONS, Ending, device_fault, reported_all
from slurmllm.supervise.refill import added_by


def load_attempts(run: RunDir, stage: Stage) -> list[AttemptRecord]:
    """The records of a stage's attempts, oldest first."""
    return [AttemptRecord.load(a.record) for a in run.attempts(stage) if a.record.is_file()]


def open_attempt(
    run: RunDir, stage: Stage, config: RunConfig, allocation: Allocation
) -> AttemptRecord:
    """Begin the next attempt on the nodes at hand and write its record."""
    numbers = [attempt.number for attempt in run.attempts(stage)]
    steps = run.checkpoint_steps()
    record = AttemptRecord(
        attempt=max(numbers, default=-1) + 1,
        stage=stage,
        job_id=allocation.job_id,
        restart_count=allocation.restart_count,
        nodes=allocation.nodes,
        world_size=len(allocation.nodes) * config.cluster.devices_per_node,
        master_addr=allocation.master_addr,
        master_port=config.cluster.master_port or free_port(),
        started_at=time.time(),
        checkpoint_before=max(steps, default=None),
    )
    record.save(run.attempt(stage, record.attempt).record)
    return record


def close_attempt(
    run: RunDir,
    record: AttemptRecord,
    ending: Ending,
    phases_s: Mapping[str, float] | None = None,
    ended_at: float | None = None,
) -> AttemptRecord:
    """Write down how an attempt ended and what follows.

    Returns:
        The closed record; its class is `no_progress` where this attempt was one too many.
    """
    paths = run.attempt(record.stage, record.attempt)
    row = last_row(run) if record.stage == "train" else None
    if row is not None and row.get("attempt") != record.attempt:
        row = None  # this attempt made no step
    worker = _first_worker(paths)
    phases = dict(phases_s or {})
    if worker is not None:
        phases |= {"start_up": worker.start_up_s, "first_step": worker.first_step_s}
    before = record.checkpoint_before
    closed = record.model_copy(
        update={
            "ended_at": ended_at or time.time(),
            "ending": ending.ending,
            "action": ACTIONS[ending.ending],
            "evidence": ending.evidence,
            "blamed_nodes": ending.blamed_nodes,
            "first_step": None if row is None else (worker.resumed_from or 0) + 1 if worker else 1,
            "last_step": None if row is None else int(row["step"]),
            "checkpoint_after": max(run.checkpoint_steps(), default=before),
            "phases_s": {name: round(seconds, 3) for name, seconds in phases.items()},
            "graphs_added": added_by([n.graphs_added for n in node_records(run, record).values()]),
        }
    )
    if closed.action == "requeue" and record.stage == "precompile" and ending.started:
        closed = closed.model_copy(update={"action": "stop"})  # train waits for its success
    elif closed.ending == "compile_failure" and record.stage == "precompile":
        closed = _in_spite_of(closed, load(run.config))
    elif closed.action == "requeue":
        closed = _within_budget(run, closed)
    closed.save(paths.record)
    return closed


def _in_spite_of(closed: AttemptRecord, config: RunConfig) -> AttemptRecord:
    """Let the train stage start on incomplete graphs, where the recipe says so."""
    if config.recipe.train.incomplete_graphs != "compile":
        return closed
    words = "train.incomplete_graphs: compile: the train stage starts all the same"
    return closed.model_copy(update={"action": "finish", "evidence": (*closed.evidence, words)})


def _within_budget(run: RunDir, closed: AttemptRecord) -> AttemptRecord:
    """Stop instead of requeueing where the limits of `slurm` in the recipe are reached."""
    limits = load(run.config).recipe.slurm
    begin = JobsRecord.load(run.jobs).submissions[-1].first_attempt if run.jobs.is_file() else 0
    recent = [a for a in load_attempts(run, closed.stage) if begin <= a.attempt < closed.attempt]
    recent.append(closed)
    idle = 0
    for attempt in reversed(recent):
        if attempt.checkpoint_after != attempt.checkpoint_before:
            break
        idle += 1
    if idle >= limits.no_progress_limit:
        words = f"{idle} attempts in a row without a new checkpoint (slurm.no_progress_limit)"
        return _stopped(closed, (words, f"the last one: {closed.ending}"))
    failures = sum(attempt.ending == "node_failure" for attempt in recent)
    if failures > limits.failure_budget:
        words = f"{failures} node failures, slurm.failure_budget is {limits.failure_budget}"
        return closed.model_copy(update={"action": "stop", "evidence": (*closed.evidence, words)})
    return closed


def _stopped(closed: AttemptRecord, evidence: tuple[str, ...]) -> AttemptRecord:
    action: Action = "stop"
    return closed.model_copy(
        update={
            "ending": "no_progress",
            "action": action,
            "evidence": (*evidence, *closed.evidence),
        }
    )


def node_records(run: RunDir, record: AttemptRecord) -> dict[str, NodeRecord]:
    """What the launchers reported, by node."""
    paths = run.attempt(record.stage, record.attempt)
    found = ((name, paths.node(name)) for name in record.nodes)
    return {name: NodeRecord.load(path) for name, path in found if path.is_file()}


def lost_nodes(run: RunDir, record: AttemptRecord) -> list[str]:
    """The nodes that an attempt blames and that did not live to report, or whose device broke."""
    reported = node_records(run, record)
    broken = {f.node for f in failure_records(run, record) if device_fault(f)}
    return [
        name
        for name in record.blamed_nodes
        if name in broken or not reported_all(reported.get(name))
    ]


def unequal_versions(by_node: Mapping[str, Mapping[str, str]]) -> str:
    """The versions that nodes do not share, by node; empty where they share all."""
    reported = {name: versions for name, versions in by_node.items() if versions}
    lines = []
    for what in sorted({what for versions in reported.values() for what in versions}):
        by_version: dict[str, list[str]] = {}
        for name, versions in reported.items():
            by_version.setdefault(versions.get(what, "none"), []).append(name)
        if len(by_version) > 1:
            said = (f"{version} on {' '.join(names)}" for version, names in by_version.items())
            lines.append(f"{what} {', '.join(said)}")
    return f"the nodes have unequal versions: {'; '.join(lines)}" if lines else ""


def failure_records(run: RunDir, record: AttemptRecord) -> Sequence[FailureRecord]:
    """What the workers that failed wrote down."""
    folder = run.attempt(record.stage, record.attempt).failure(0).parent
    paths = sorted(folder.glob("rank_*.json")) if folder.is_dir() else []
    return [FailureRecord.load(path) for path in paths]


def _first_worker(paths: AttemptDir) -> WorkerRecord | None:
    path = paths.worker(0)
    return WorkerRecord.load(path) if path.is_file() else None
