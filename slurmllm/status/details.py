"""What `slurmllm status RUN` shows of one run beyond where it stands: batch, graphs, nodes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from slurmllm.config.recipe import WatchdogConfig
from slurmllm.errors import StorageError
from slurmllm.graphs.completeness import faults
from slurmllm.plan.mesh import Mesh, load_mesh
from slurmllm.records import (
    AttemptRecord,
    ExcludedNode,
    GraphManifest,
    Heartbeat,
    MicroBatchRecord,
    Phase,
    SkippedBatches,
    SkipsRecord,
    WorkerPhase,
    WorkerRecord,
)
from slurmllm.rundir import RunDir
from slurmllm.supervise.attempts import load_attempts, node_records, unequal_versions
from slurmllm.supervise.exclusion import excluded
from slurmllm.supervise.watchdog import behind, limit_s, recent_step_times, slow_step_s


@dataclass(frozen=True)
class Details:
    """One run more closely.

    Attributes:
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

    cold_first_step_s: float | None
    first_steps: dict[str, tuple[float, int, int]]
    mesh: Mesh | None
    micro_batch: MicroBatchRecord | None
    graphs: GraphManifest | None
    uncompiled: tuple[str, ...]
    versions: dict[str, dict[str, str]]
    unequal_versions: str
    excluded: tuple[ExcludedNode, ...]
    standing: WorkerProgress | None
    skips: tuple[SkippedBatches, ...]


def read_details(
    run: RunDir, attempts: Sequence[AttemptRecord], training: bool, config: WatchdogConfig
) -> Details:
    """Read them.

    Args:
        run: The run.
        attempts: Of the train stage, oldest first.
        training: Whether its train job runs.
        config: Of its watchdog.

    Raises:
        StorageError: a record is damaged.
    """
    versions = _versions(run, attempts)
    manifest = GraphManifest.load(run.graphs_manifest) if run.graphs_manifest.is_file() else None
    open_one = training and bool(attempts) and attempts[-1].ended_at is None
    return Details(
        cold_first_step_s=manifest.cold_first_step_s if manifest is not None else None,
        first_steps=_first_steps(run),
        mesh=load_mesh(run.plan) if run.plan.is_file() else None,
        micro_batch=(MicroBatchRecord.load(run.micro_batch) if run.micro_batch.is_file() else None),
        graphs=manifest,
        uncompiled=faults(manifest, run) if manifest is not None else (),
        versions=versions,
        unequal_versions=unequal_versions(versions),
        excluded=tuple(excluded(run)),
        standing=worker_progress(run, attempts[-1], config) if open_one else None,
        skips=SkipsRecord.load(run.skips).skips if run.skips.is_file() else (),
    )


def _versions(run: RunDir, attempts: Sequence[AttemptRecord]) -> dict[str, dict[str, str]]:
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


@dataclass(frozen=True)
class WorkerProgress:
    """What the slowest workers are doing.

    Attributes:
        phase: Of the workers furthest behind.
        step: Last one that they finished.
        unchanged_s: Seconds since any worker began anything new, by the nodes' clocks.
        limit_s: From which on it counts as a hang; None: nobody watches.
        behind: Ranks behind the others; none where all stand alike.
    """

    phase: Phase
    step: int
    unchanged_s: float
    limit_s: float | None
    behind: tuple[int, ...]


def worker_progress(
    run: RunDir, record: AttemptRecord, config: WatchdogConfig
) -> WorkerProgress | None:
    """Where an open attempt stands; None where its launchers have said nothing."""
    beats: dict[int, WorkerPhase] = {}
    for name in record.nodes:
        with suppress(StorageError):
            beats |= Heartbeat.load(run.attempt(record.stage, record.attempt).heartbeat(name)).ranks
    if not beats:
        return None
    last = behind(beats)
    beat = beats[last[0]]
    slow_s = slow_step_s(recent_step_times(run))
    return WorkerProgress(
        phase=beat.phase,
        step=beat.step,
        unchanged_s=max(time.time() - max(b.since for b in beats.values()), 0.0),
        limit_s=limit_s(beat.phase, config, slow_s) if config.enabled else None,
        behind=() if len(last) == len(beats) else last,
    )
