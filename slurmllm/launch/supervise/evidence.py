"""The evidence of an attempt after its launchers have ended: records, logs, Slurm's state."""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

from slurmllm.core.config.command import STEPS_NOT_PASSED, CommandConfig
from slurmllm.core.config.resolve import RunConfig
from slurmllm.core.errors import SlurmError, StorageError
from slurmllm.core.log import message_of
from slurmllm.core.metrics.row_reader import last_rows
from slurmllm.core.run.artifact_records import GraphManifest
from slurmllm.core.run.records import AttemptRecord, HangRecord, Lines, NodeRecords
from slurmllm.core.run.rundir import RunDir, read_all
from slurmllm.core.run.safe_files import read_tail, write_error
from slurmllm.core.slurm.client import to_unix
from slurmllm.core.slurm.error_texts import Processes, launch_failure
from slurmllm.launch.graphs.archive import faults
from slurmllm.launch.supervise import attempts, collectives, stacks
from slurmllm.launch.supervise.allocation import Allocation, SlurmAllocation
from slurmllm.launch.supervise.attempt_monitor import Observations
from slurmllm.launch.supervise.classify import (
    Evidence,
    TrainerExit,
    unreported_nodes,
    workers_without_failure_record,
)
from slurmllm.launch.supervise.exclusion import slurm_failed
from slurmllm.train.checkpoint.foreign import list_trainer_checkpoints, newest_complete

_TAIL_BYTES = 32 * 1024
_INTERVAL_ROWS = 1000  # of a trainer's log, whose largest interval is that of its logging


def gather_evidence(
    run: RunDir,
    record: AttemptRecord,
    allocation: Allocation,
    observed: Observations,
    stop_signal: str | None,
    launchers: Processes,
    config: RunConfig,
) -> Evidence:
    """Collect what an ending is classified by; StorageError if a record cannot be read."""
    nodes = attempts.node_records(run, record)
    failures = attempts.failure_records(run, record)
    # The state first: accounting, from which the next lines read, lags behind SIGTERM by seconds.
    deadline = time.monotonic() + (3.0 if stop_signal == "SIGTERM" else 0.0)
    while (slurm_state := allocation.state()) in ("RUNNING", "COMPLETING"):
        if time.monotonic() >= deadline:
            break
        time.sleep(0.2)
    slurm_state, out_of_memory, down_nodes = _by_slurm(record, allocation, slurm_state)
    hang, lines = observed.hang, Lines()
    files = record.files(run)
    blocked = collectives.read_blocked(files, record.world_size)
    if hang is not None:
        hang, lines = _with_stacks(run, record, hang, nodes, blocked)
        with suppress(StorageError):
            hang.save(files.hang)
    ranks = [worker.rank for worker in workers_without_failure_record(nodes, failures)]
    tails = read_all(lambda rank: _log_tail(run, record, rank), ranks)
    command = config.recipe.command
    return Evidence(
        expected_nodes=record.nodes,
        nodes=nodes,
        failures=failures,
        slurm_state=slurm_state,
        step_out_of_memory=out_of_memory,
        down_nodes=down_nodes,
        stop_signal=stop_signal,
        overran_s=observed.overran_s,
        uncompiled=_uncompiled(run) if record.stage == "precompile" else (),
        hang=hang,
        stacks=lines,
        collectives=blocked.lines,
        log_tails=dict(zip(ranks, tails, strict=True)),
        superseded_by=observed.superseded_by,
        unwritable=observed.unwritable or write_error(files.path),
        # srun's own lines are in the stage's log, which rank 0 shares.
        launch=launch_failure(
            launchers, observed.launchers_s, _log_tail(run, record, 0), record.nodes
        ),
        peers=_peers(record) if failures else (),
        trainer=(
            _worker_exit(run, record)
            if command is None
            else _trainer_exit(run, record, command, nodes)
        ),
        no_gpu=_no_gpu(config),
    )


def _by_slurm(
    record: AttemptRecord, allocation: Allocation, state: str
) -> tuple[str, bool, dict[str, str]]:
    """Return the job's state, whether it ran out of memory, and the nodes that are down."""
    out_of_memory, down_nodes = False, dict[str, str]()
    if isinstance(allocation, SlurmAllocation):
        out_of_memory = any(
            row.state == "OUT_OF_MEMORY"
            for row in allocation.client.accounting(allocation.job_id)[-3:]
        )
        with suppress(SlurmError):
            preempted_at = to_unix(allocation.client.batch_job(allocation.job_id).preempt_time)
            # Not before: a job keeps its number, and may keep this time, when it is requeued.
            if preempted_at is not None and preempted_at >= int(record.started_at):
                state = "PREEMPTED"
        with suppress(SlurmError):
            failed = slurm_failed(allocation, allocation.client.node_states())
            down_nodes = {name: "" for name in record.nodes if name in failed}
            for node in allocation.client.partition_nodes() if down_nodes else ():
                down_nodes |= {node.name: node.reason} if node.name in down_nodes else {}
    return state, out_of_memory, down_nodes


def _peers(record: AttemptRecord) -> set[str]:
    """Return the names by which the workers of an attempt reach each other; empty for one."""
    names = {str(record.master_port), record.master_addr, *record.nodes} - {"127.0.0.1"}
    for name in record.nodes:
        with suppress(OSError):
            names.add(socket.gethostbyname(name))
    return names if record.world_size > 1 else set()


def _no_gpu(config: RunConfig) -> str:
    """Return why a job has no GPUs: it requested none, and its profile has none."""
    cluster = config.cluster
    train = config.recipe.slurm.directives.train
    if cluster.device == "cuda" or "gpu" in f"{cluster.directives} {train}":
        return ""
    return (
        f"no GPU was requested: profile {cluster.name} has device {cluster.device}, and no option "
        "asks for GPUs; add `-- --gres=gpu:N`, or choose a --cluster with GPUs"
    )


def _uncompiled(run: RunDir) -> Lines:
    manifest = GraphManifest.find_readable(run.graphs_manifest)
    return faults(manifest, run) if manifest else ("no archive of compiled graphs was written",)


def _worker_exit(run: RunDir, record: AttemptRecord) -> TrainerExit:
    """Return how slurmllm's workers exit at a stop: mostly with a checkpoint of their last step."""
    steps, saved = _logged_steps(run.metrics(record.attempt)), run.checkpoint_steps()
    if steps and steps[-1:] == saved[-1:]:
        return TrainerExit()
    after = f"after step {steps[-1]}" if steps else "before the first step was done"
    newest = f"newest checkpoint: step {saved[-1]}" if saved else "no checkpoint"
    return TrainerExit(f"left {after}; {newest}")


def _trainer_exit(
    run: RunDir, record: AttemptRecord, command: CommandConfig, nodes: NodeRecords
) -> TrainerExit:
    newest = newest_complete(
        list_trainer_checkpoints(
            run,
            command,
            closing=record.model_copy(update={"ended_at": time.time(), "ending": "advance_signal"}),
        )
    )
    checkpoint = "no complete checkpoint is known"
    if newest is not None:
        checkpoint = f"newest checkpoint: step {newest.step}"
    ended = "asked to save, and left"
    if command.stop_signal is None:
        ended = "ended without saving, as command.save_signal is none"
    progress = ""
    steps = _logged_steps(run.metrics(record.attempt))
    readable = not any(node.progress_missing for node in nodes.values())
    if steps:
        end = steps[-1]
        progress = f"at step {end + 1} " if end - 1 in steps[-2:] else f"after step {end} "
    elif newest is not None and newest.step == record.checkpoint_before:
        # After an attempt that had finished there was nothing left to do.
        readable = any(
            attempt.ending == "done" for attempt in attempts.load_attempts(run, "train")[-2:-1]
        )
        for path in run.metrics_files()[-1:] if readable else ():
            steps = _logged_steps(path)
    total = command.steps
    if total is None or not steps or steps[-1] >= total:
        return TrainerExit(f"{ended}; {checkpoint}", step=progress)
    # Its last steps may be unlogged, and counted from 0; a count that begins again is of epochs.
    interval = max((b - a for a, b in pairwise(steps)), default=total)
    last = max(steps[-1], 0 if newest is None else newest.step)
    unfinished = f"the last step that was read is {steps[-1]} of {total} (command.steps)"
    early = None
    if readable and steps == sorted(steps) and last + interval < total:
        early = last, total
        unfinished = f"done early, {last} of {total}: {STEPS_NOT_PASSED}"
    return TrainerExit(f"{ended}; {checkpoint}", unfinished, early, progress)


def _logged_steps(path: Path) -> list[int]:
    with suppress(OSError):
        return [int(row["step"]) for row in last_rows(path, _INTERVAL_ROWS)]
    return []


def _with_stacks(
    run: RunDir,
    record: AttemptRecord,
    hang: HangRecord,
    nodes: NodeRecords,
    blocked: collectives.Blocked,
) -> tuple[HangRecord, Lines]:
    """Add what ranks wait for, and suspects: nodes behind by phase, else by collective or stack."""
    locations = stacks.read_locations(record.files(run))
    # A launcher that could not even end its workers was frozen itself.
    frozen = tuple(unreported_nodes(record.nodes, nodes))
    unresponsive, suspects = hang.unresponsive_nodes, hang.suspects
    if not unresponsive and 0 < len(frozen) < len(record.nodes):
        unresponsive = suspects = frozen
    if not suspects:
        node_of = {rank: name for name, node in nodes.items() for rank in node.pids}
        ranks = blocked.missing_ranks or stacks.outliers(locations)
        workers = (locations[rank].worker if rank in locations else rank for rank in ranks)
        suspects = tuple(dict.fromkeys(node_of[rank] for rank in workers if rank in node_of))
    hang = hang.model_copy(
        update={
            "collectives": blocked.lines,
            "missing": blocked.missing_ranks,
            "unresponsive_nodes": unresponsive,
            "suspects": suspects,
        }
    )
    return hang, stacks.stack_lines(locations, blocked.missing_ranks)


def _log_tail(run: RunDir, record: AttemptRecord, rank: int) -> list[str]:
    """Return the end of a worker's log; rank 0 shares the stage's log with earlier attempts."""
    try:
        lines = read_tail(run.worker_log(record.stage, record.attempt, rank), _TAIL_BYTES)
    except OSError:
        return []
    begin = f"{record.stage} attempt {record.attempt}"
    starts = [index for index, line in enumerate(lines) if message_of(line).startswith(begin)]
    return lines[starts[0] :] if rank == 0 and starts else lines
