"""Details of one run for `slurmllm status RUN`: batch, graphs, nodes, workers, the first failure.

The worker that made an attempt fail is looked for in the order of `classify`: a hang without an
earlier failure, then failure records, then exit codes, then nodes without a report. Failures of
workers that only lost a peer are echoes, used if there is nothing else.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from slurmllm.analysis.status.logs import last_lines, node_of
from slurmllm.core.config.command import CommandConfig
from slurmllm.core.config.operation import WatchdogConfig
from slurmllm.core.config.resolve import RunConfig
from slurmllm.core.errors import StorageError
from slurmllm.core.format import Json, Texts
from slurmllm.core.metrics.row_reader import last_evaluation, perplexity
from slurmllm.core.run.artifact_records import (
    CheckpointEvaluation,
    GraphManifest,
    MicroBatchRecord,
)
from slurmllm.core.run.error_patterns import cause_line
from slurmllm.core.run.records import (
    AttemptRecord,
    Attempts,
    Event,
    ExcludedNode,
    Exclusions,
    FailureRecord,
    HangRecord,
    NodeRecord,
    NodeRecords,
    PassedOver,
    Phase,
    Ranks,
    SkippedBatches,
    SkipsRecord,
    SlowRank,
    Versions,
    WorkerPhases,
    WorkerRecord,
)
from slurmllm.core.run.rundir import RunDir, Stage, read_all
from slurmllm.launch.graphs.archive import faults
from slurmllm.launch.supervise.attempts import (
    failure_records,
    load_attempts,
    node_records,
    unequal_versions,
)
from slurmllm.launch.supervise.classify import (
    KILLED,
    FailedWorker,
    failed_workers,
    hang_text,
    how_ended,
    is_echo,
    unreported_nodes,
    workers_without_failure_record,
)
from slurmllm.launch.supervise.exclusion import excluded
from slurmllm.launch.supervise.slow_ranks import read_slow_ranks
from slurmllm.launch.supervise.stacks import outliers, read_locations
from slurmllm.launch.supervise.watchdog import (
    behind,
    limit_s,
    read_heartbeats,
    recent_step_times,
    slow_step_s,
)
from slurmllm.plan.mesh import Mesh, load_mesh
from slurmllm.train.backends.environment import load_environment
from slurmllm.train.checkpoint.foreign import list_trainer_checkpoints, unmatched_checkpoints
from slurmllm.train.checkpoint.holds import read_evaluations


@dataclass(frozen=True)
class WorkerProgress:
    """What the slowest workers are doing."""

    phase: Phase  # phase of the workers furthest behind
    step: int  # their last completed step
    # seconds since any worker last changed its phase or step, by the nodes' clocks
    unchanged_s: float
    limit_s: float | None  # seconds from which on this is a hang; None without a watchdog
    behind: Ranks  # ranks behind the others; empty if all are equally far


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
    incomplete: Texts  # half-written checkpoints
    completion_file: str | None  # which complete ones have
    unmatched: str  # that `checkpoints` matches nothing, and what is there
    passed_over: tuple[PassedOver, ...] = ()  # broken at the last attempt's start


@dataclass(frozen=True)
class Details:
    """Details of one run; also keys of `slurmllm status RUN --json`."""

    cold_first_step_s: float | None  # first step with an empty graph cache (precompile stage)
    first_steps: dict[str, FirstStep]  # by node of the last attempt
    mesh: Mesh | None  # the planned mesh; None without plan.json
    micro_batch: MicroBatchRecord | None  # measurement for `train.micro_batch: auto`
    graphs: GraphManifest | None
    uncompiled: Texts  # why the graph archive is incomplete
    unused_graphs: dict[str, str]  # node of the last attempt → why it ignored the archive
    # node of the last attempt → versions of driver, runtime, compiler, …
    versions: dict[str, Versions]
    unequal_versions: str  # nodes with other versions; empty if all are equal
    excluded: Exclusions
    not_excluded: Exclusions  # recorded too, but used as there was no spare node
    compiling_s: float | None  # seconds since the first step began to compile; None if none does
    workers: WorkerProgress | None  # what the workers are doing; None if none are running
    # Slow ranks of a running attempt; None if ranks cannot be compared
    slow_ranks: tuple[SlowRank, ...] | None
    evaluation: Event | None  # the newest one; None without one
    evaluations: tuple[CheckpointEvaluation, ...]  # of checkpoints, during training
    skips: tuple[SkippedBatches, ...]  # batches that the run skips after roll-backs
    core_files: dict[str, int]  # core file of a killed process in the run's directory → bytes
    trial: bool  # whether the run reads the built-in texts in place of its recipe's data
    trainer: TrainerDetails | None = None  # of another project

    def to_dict(self) -> Json:
        """Return the keys of `slurmllm status RUN --json`."""
        event = self.evaluation
        unequal = self.unequal_versions
        evaluation = event and {
            **event.model_dump(include={"step", "attempt", "seconds"}),
            "texts": {n: {"loss": v, "perplexity": perplexity(v)} for n, v in event.values.items()},
        }
        return vars(self) | {
            "mesh": self.mesh and (self.mesh.size_json() if self.trainer else self.mesh.to_json()),
            "trainer": self.trainer and vars(self.trainer),
            # The list of files would be longer than everything else together.
            "graphs": self.graphs and self.graphs.model_dump(exclude={"files"}),
            "evaluation": evaluation,
            "warnings": [unequal] if unequal else [],
        }


def read_details(run: RunDir, attempts: Attempts, state: str, config: RunConfig) -> Details:
    """Read the details of a run; `attempts` are those of the train stage, oldest first."""
    recipe = config.recipe
    # Manifest, micro batch and mesh are derived: `resume` makes damaged ones again.
    manifest = None
    uncompiled = Texts()
    mesh = None
    try:
        manifest = GraphManifest.find(run.graphs_manifest)
        uncompiled = faults(manifest, run) if manifest else ()
    except StorageError as error:
        reason = str(error).partition("; restore")[0]
        uncompiled = (f"{reason}; `slurmllm resume {run.name}` compiles the graphs again",)
    with suppress(StorageError):
        mesh = load_mesh(run.plan)
    # Versions and first steps are figures only: a damaged record must not hide the run's state.
    nodes: NodeRecords = {}
    with suppress(StorageError):
        for last in (attempts or load_attempts(run, "precompile"))[-1:]:
            nodes = node_records(run, last)
    versions = {name: node.versions for name, node in nodes.items()}
    unused_graphs = {name: node.cache_reason for name, node in nodes.items() if node.cache_reason}
    running = state == "training" and bool(attempts) and attempts[-1].ended_at is None
    progress = read_worker_progress(run, attempts[-1], recipe.watchdog) if running else None
    unused, used = excluded_nodes(run, attempts)
    command = recipe.command
    evaluates = not recipe.worker.has_model or recipe.eval.every_steps is not None
    reused = manifest is not None and manifest.graphs > 0 and not unused_graphs
    return Details(
        cold_first_step_s=manifest.cold_first_step_s if manifest else None,
        first_steps=_first_steps(run),
        mesh=mesh,
        micro_batch=MicroBatchRecord.find_readable(run.micro_batch),
        graphs=manifest,
        uncompiled=uncompiled,
        unused_graphs=unused_graphs,
        versions=versions,
        unequal_versions=unequal_versions(versions),
        excluded=unused,
        not_excluded=used,
        compiling_s=_compiling_s(run, state, config, None if reused else progress),
        workers=progress,
        slow_ranks=read_slow_ranks(run, attempts[-1]) if running else None,
        evaluation=last_evaluation(run) if evaluates else None,
        evaluations=tuple(read_evaluations(run)),
        skips=SkipsRecord.of(run).skips,
        core_files={p.name: p.stat().st_size for p in run.path.glob("core*") if p.is_file()},
        trial=config.is_trial,
        trainer=_trainer_details(run, attempts, command) if command else None,
    )


def excluded_nodes(run: RunDir, attempts: Attempts) -> tuple[Exclusions, Exclusions]:
    """Return the excluded nodes, and those that the newest attempt uses anyway."""
    recorded = excluded(run)
    used = list[ExcludedNode]()
    for last in attempts[-1:]:  # training there now, or begun after the exclusion
        since = math.inf if last.ended_at is None else last.started_at
        used = [node for node in recorded if node.node in last.nodes and node.since < since]
    return tuple(node for node in recorded if node not in used), tuple(used)


def _trainer_details(run: RunDir, attempts: Attempts, command: CommandConfig) -> TrainerDetails:
    missing = ""
    with suppress(StorageError):
        for last in attempts[-1:]:
            folder = run.attempt("train", last.attempt)
            nodes = [NodeRecord.find(folder.node(node)) for node in (last.nodes[0], last.nodes[-1])]
            missing = next(filter(None, (n.progress_missing for n in nodes if n)), "")
    incomplete = tuple(
        str(entry.path) for entry in list_trainer_checkpoints(run, command) if not entry.complete
    )
    return TrainerDetails(
        command.run,
        missing,
        incomplete,
        command.completion_file,
        unmatched_checkpoints(run, command),
        attempts[-1].passed_over if attempts else (),
    )


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
    if not progress or progress.phase != "first_step":
        return None
    return progress.unchanged_s


def read_worker_progress(
    run: RunDir, record: AttemptRecord, config: WatchdogConfig
) -> WorkerProgress | None:
    """Return the progress of an open attempt; None before its launchers write a heartbeat."""
    beats: WorkerPhases = {}
    for heartbeat in read_heartbeats(run, record):
        beats |= heartbeat.ranks
    if not beats:
        return None
    last = behind(beats)
    beat = beats[last[0]]
    return WorkerProgress(
        phase=beat.phase,
        step=beat.step,
        # The nodes' clocks may be ahead of this machine's.
        unchanged_s=max(time.time() - max(b.since for b in beats.values()), 0.0),
        limit_s=limit_s(beat.phase, config, slow_step_s(recent_step_times(run)))
        if config.enabled
        else None,
        behind=() if len(last) == len(beats) else last,
    )


_SEARCHED_LINES = 200  # of a log, for the line that names a cause


@dataclass(frozen=True)
class Culprit:
    """The worker that made an attempt fail, as far as known."""

    record: AttemptRecord
    rank: int | None  # None if unknown
    node: str  # empty if unknown
    how: Texts  # the facts, one line each
    failure: FailureRecord | None = None  # the worker's failure record
    stacks: bool = False  # whether the attempt hung and left stacks


def failed_attempts(run: RunDir, stages: Sequence[Stage]) -> list[AttemptRecord]:
    """Return the attempts that failed or are failing, by start time."""
    records = [record for stage in stages for record in load_attempts(run, stage)]
    failed = [record for record in records if _has_failed(run, record)]
    return sorted(failed, key=lambda record: record.started_at)


def _has_failed(run: RunDir, record: AttemptRecord) -> bool:
    if record.ending is not None:
        return record.ending not in ("done", "advance_signal", "cancelled", "superseded")
    if record.files(run).hang.is_file():
        return True
    return bool(failure_records(run, record) or failed_workers(node_records(run, record)))


def culprit(run: RunDir, record: AttemptRecord) -> Culprit:
    """Find the worker that made an attempt fail; StorageError if a record is damaged."""
    nodes = node_records(run, record)
    failures = failure_records(run, record)
    primary = [failure for failure in failures if not is_echo(failure)]
    first = min(primary, key=lambda failure: failure.time, default=None)
    folder = record.files(run)
    hang = HangRecord.find(folder.hang) if record.ending in (None, "hang") else None
    if hang and (not first or first.time >= hang.found_at):
        locations = read_locations(folder)
        rank = next(iter((*hang.missing, *outliers(locations), *hang.behind)), None)
        hang_facts = [*hang_text(hang)[: 1 + bool(hang.unresponsive_nodes)], *hang.collectives]
        if rank in locations:
            hang_facts.append(f"its stack: rank {rank}: {locations[rank].text}")
            rank = locations[rank].worker
        name = "" if rank is None else node_of(record, rank)
        return Culprit(record, rank, name, tuple(hang_facts), stacks=bool(locations))
    if record.launch_failure and not failures:  # before any worker
        return Culprit(record, None, "", ())
    silent = unreported_nodes(record.nodes, nodes)
    lost = [name for name in silent if name in record.blamed_nodes]
    if lost and record.ending is not None:
        return _lost(record, lost)
    if first:
        return Culprit(
            record,
            first.rank,
            first.node,
            (first.message,) if first.error == KILLED else _exit(nodes, first.rank),
            first,
        )
    if unrecorded := workers_without_failure_record(nodes, failures):
        likely = _most_likely(run, record, unrecorded)
        return Culprit(record, likely.rank, likely.node, _exit(nodes, likely.rank))
    if silent and record.ending is not None:
        return _lost(record, silent)
    echo = min(failures, key=lambda failure: failure.time, default=None)
    if echo:
        facts = ("it only lost a connection, and no other worker recorded a failure",)
        if record.ending == "node_failure" and len(record.evidence) > 1:
            facts = (record.evidence[0],)
        return Culprit(record, echo.rank, echo.node, facts, echo)
    return Culprit(record, None, "", ())


def _most_likely(
    run: RunDir, record: AttemptRecord, failed: Sequence[FailedWorker]
) -> FailedWorker:
    """Return the worker whose log names a cause; else the first ended by a signal, or the first."""
    for worker in failed:
        line = cause_line(last_lines(run, record, worker.rank, _SEARCHED_LINES))
        if line and line[1] not in ("lost_peer", "connection"):
            return worker
    return next((worker for worker in failed if worker.code < 0), failed[0])


def _exit(nodes: NodeRecords, rank: int) -> Texts:
    return tuple(how_ended(n.exit_codes[rank]) for n in nodes.values() if rank in n.exit_codes)


def _lost(record: AttemptRecord, nodes: Sequence[str]) -> Culprit:
    """A node that stopped responding, represented by its first worker."""
    per_node = record.world_size // max(len(record.nodes), 1)
    rank = record.nodes.index(nodes[0]) * per_node
    return Culprit(
        record,
        rank,
        nodes[0],
        (f"{', '.join(nodes)} stopped responding: its launcher left no report",),
    )
