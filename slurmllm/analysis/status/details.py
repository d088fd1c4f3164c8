"""Details of one run for `slurmllm status RUN`: batch, graphs, nodes, progress of the workers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from slurmllm.core.config.command import CommandConfig
from slurmllm.core.config.operation import WatchdogConfig
from slurmllm.core.config.resolve import RunConfig
from slurmllm.core.errors import StorageError
from slurmllm.core.metrics.row_reader import last_evaluation, perplexity
from slurmllm.core.run.artifact_records import GraphManifest, MicroBatchRecord
from slurmllm.core.run.records import (
    AttemptRecord,
    Event,
    ExcludedNode,
    NodeRecord,
    Phase,
    SkippedBatches,
    SkipsRecord,
    WorkerPhase,
    WorkerRecord,
)
from slurmllm.core.run.rundir import RunDir, read_all
from slurmllm.launch.graphs.archive import faults
from slurmllm.launch.supervise.attempts import load_attempts, node_records, unequal_versions
from slurmllm.launch.supervise.exclusion import excluded
from slurmllm.launch.supervise.watchdog import (
    behind,
    limit_s,
    read_heartbeats,
    recent_step_times,
    slow_step_s,
)
from slurmllm.plan.mesh import Mesh, load_mesh
from slurmllm.train.backends.environment import load_environment
from slurmllm.train.checkpoint.foreign import list_trainer_checkpoints


@dataclass(frozen=True)
class WorkerProgress:
    """What the slowest workers are doing."""

    phase: Phase  # phase of the workers furthest behind
    step: int  # their last completed step
    # seconds since any worker last changed its phase or step, by the nodes' clocks
    unchanged_s: float
    limit_s: float | None  # seconds from which on this is a hang; None without a watchdog
    behind: tuple[int, ...]  # ranks behind the others; empty if all are equally far


@dataclass(frozen=True)
class FirstStep:
    """The first step of an attempt on one node, and its use of the graph cache."""

    first_step_s: float
    cache_hits: int
    cache_misses: int


@dataclass(frozen=True)
class TrainerDetails:
    """What is known of a trainer of another project."""

    command: str  # as the recipe has it
    missing: str  # why no steps are known, and what would show them; empty if they are
    incomplete: tuple[str, ...]  # half-written checkpoints


@dataclass(frozen=True)
class Details:
    """Details of one run; also keys of `slurmllm status RUN --json`."""

    cold_first_step_s: float | None  # first step with an empty graph cache (precompile stage)
    first_steps: dict[str, FirstStep]  # by node of the last attempt
    mesh: Mesh | None  # the planned mesh; None without plan.json
    micro_batch: MicroBatchRecord | None  # measurement for `train.micro_batch: auto`
    graphs: GraphManifest | None
    uncompiled: tuple[str, ...]  # why the graph archive is incomplete
    unused_graphs: dict[str, str]  # node of the last attempt → why it ignored the archive
    # node of the last attempt → versions of driver, runtime, compiler, …
    versions: dict[str, dict[str, str]]
    unequal_versions: str  # nodes with other versions; empty if all are equal
    excluded: tuple[ExcludedNode, ...]
    compiling_s: float | None  # seconds since the first step began to compile; None if none does
    workers: WorkerProgress | None  # what the workers are doing; None if none are running
    evaluation: Event | None  # the newest one; None without one
    skips: tuple[SkippedBatches, ...]  # batches that the run skips after roll-backs
    core_files: dict[str, int]  # core file of a killed process in the run's directory → bytes
    trial: bool  # whether the run reads the built-in texts in place of its recipe's data
    trainer: TrainerDetails | None = None  # of another project

    def to_dict(self) -> dict[str, Any]:
        """Return the keys of `slurmllm status RUN --json`."""
        event, unequal = self.evaluation, self.unequal_versions
        evaluation = None
        if event is not None:
            texts = {n: {"loss": v, "perplexity": perplexity(v)} for n, v in event.values.items()}
            evaluation = event.model_dump(include={"step", "attempt", "seconds"})
            evaluation["texts"] = texts
        return vars(self) | {
            "mesh": self.mesh and (self.mesh.size_json() if self.trainer else self.mesh.to_json()),
            "trainer": self.trainer and vars(self.trainer),
            # The list of files would be longer than everything else together.
            "graphs": self.graphs and self.graphs.model_dump(exclude={"files"}),
            "evaluation": evaluation,
            "warnings": [unequal] if unequal else [],
        }


def read_details(
    run: RunDir, attempts: Sequence[AttemptRecord], state: str, config: RunConfig
) -> Details:
    """Read the details of a run; `attempts` are those of the train stage, oldest first."""
    recipe = config.recipe
    # Manifest, micro batch and mesh are derived: `resume` makes damaged ones again.
    manifest, uncompiled, measured, mesh = None, tuple[str, ...](), None, None
    try:
        manifest = GraphManifest.find(run.graphs_manifest)
        uncompiled = faults(manifest, run) if manifest is not None else ()
    except StorageError as error:
        reason = str(error).partition("; restore")[0]
        uncompiled = (f"{reason}; `slurmllm resume {run.name}` compiles the graphs again",)
    with suppress(StorageError):
        measured = MicroBatchRecord.find(run.micro_batch)
    with suppress(StorageError):
        mesh = load_mesh(run.plan)
    # Versions and first steps are figures only: a damaged record must not hide the run's state.
    versions: dict[str, dict[str, str]] = {}
    unused_graphs: dict[str, str] = {}
    with suppress(StorageError):
        for last in (attempts or load_attempts(run, "precompile"))[-1:]:
            nodes = node_records(run, last)
            versions = {name: node.versions for name, node in nodes.items()}
            reasons = {name: node.cache_reason for name, node in nodes.items()}
            unused_graphs = {name: reason for name, reason in reasons.items() if reason}
    running = state == "training" and bool(attempts) and attempts[-1].ended_at is None
    progress = read_worker_progress(run, attempts[-1], recipe.watchdog) if running else None
    command = recipe.command
    evaluates = not recipe.worker.has_model or recipe.eval.every_steps is not None
    reused = manifest is not None and manifest.graphs > 0 and not unused_graphs
    return Details(
        cold_first_step_s=manifest.cold_first_step_s if manifest is not None else None,
        first_steps=_first_steps(run),
        mesh=mesh,
        micro_batch=measured,
        graphs=manifest,
        uncompiled=uncompiled,
        unused_graphs=unused_graphs,
        versions=versions,
        unequal_versions=unequal_versions(versions),
        excluded=tuple(excluded(run)),
        compiling_s=_compiling_s(run, state, config, None if reused else progress),
        workers=progress,
        evaluation=last_evaluation(run) if evaluates else None,
        skips=(SkipsRecord.find(run.skips) or SkipsRecord()).skips,
        core_files={p.name: p.stat().st_size for p in run.path.glob("core*") if p.is_file()},
        trial=config.is_trial,
        trainer=None if command is None else _trainer_details(run, attempts, command),
    )


def _trainer_details(
    run: RunDir, attempts: Sequence[AttemptRecord], command: CommandConfig
) -> TrainerDetails:
    missing = ""
    with suppress(StorageError):
        for last in attempts[-1:]:
            folder = run.attempt("train", last.attempt)
            nodes = [NodeRecord.find(folder.node(node)) for node in (last.nodes[0], last.nodes[-1])]
            missing = next(filter(None, (n.progress_missing for n in nodes if n)), "")
    entries = list_trainer_checkpoints(run, command)
    incomplete = tuple(str(entry.path) for entry in entries if not entry.complete)
    return TrainerDetails(command.run, missing, incomplete)


def _first_steps(run: RunDir) -> dict[str, FirstStep]:
    """Return the first step of the newest attempt by node, as far as records can be read."""
    for folder in run.attempts("train")[-1:]:
        with suppress(StorageError):
            paths = sorted(folder.worker(0).parent.glob("rank_*.json"))
            return {
                w.node: FirstStep(w.first_step_s, w.cache_hits, w.cache_misses)
                for w in read_all(WorkerRecord.load, paths)
            }
    return {}


def _compiling_s(
    run: RunDir, state: str, config: RunConfig, progress: WorkerProgress | None
) -> float | None:
    """Return the time of a first step that compiles; of precompile, that of its whole attempt."""
    if not load_environment(config.backend).expects_graphs(config):
        return None
    if state == "precompiling":
        open_attempts = [a for a in load_attempts(run, "precompile")[-1:] if a.ended_at is None]
        return max((time.time() - a.started_at for a in open_attempts), default=None)
    if progress is None or progress.phase != "first_step":
        return None
    return progress.unchanged_s


def read_worker_progress(
    run: RunDir, record: AttemptRecord, config: WatchdogConfig
) -> WorkerProgress | None:
    """Return the progress of an open attempt; None before its launchers write a heartbeat."""
    beats: dict[int, WorkerPhase] = {}
    for heartbeat in read_heartbeats(run, record):
        beats |= heartbeat.ranks
    if not beats:
        return None
    last = behind(beats)
    beat = beats[last[0]]
    slow_s = slow_step_s(recent_step_times(run))
    return WorkerProgress(
        phase=beat.phase,
        step=beat.step,
        # The nodes' clocks may be ahead of this machine's.
        unchanged_s=max(time.time() - max(b.since for b in beats.values()), 0.0),
        limit_s=limit_s(beat.phase, config, slow_s) if config.enabled else None,
        behind=() if len(last) == len(beats) else last,
    )
