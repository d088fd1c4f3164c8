"""Finding the checkpoint to resume from: the newest that verifies, else the one before."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from slurmllm.core.errors import CheckpointError, RunError, StorageError
from slurmllm.core.run.artifact_records import CheckpointManifest
from slurmllm.core.run.records import JobsRecord
from slurmllm.core.run.rundir import RunDir
from slurmllm.train.checkpoint.catalogue import (
    first_attempt_used,
    invalidated_checkpoints,
    invalidation_reason,
    lost_attempts,
    missing_checkpoint_messages,
    read_rollbacks,
    recorded_saves,
    refuse_unknown,
)
from slurmllm.train.checkpoint.folder import file_faults, read_manifest
from slurmllm.train.checkpoint.replicas import Replica, open_replica
from slurmllm.train.checkpoint.shards import WorkerContext
from slurmllm.train.checkpoint.state import TRAIN_STATE, TrainState, fingerprint_differences

log = logging.getLogger(__name__)


class Resumable(NamedTuple):
    """The checkpoint to resume from."""

    state: TrainState | None  # the checkpoint's training state; None if the run has no checkpoint
    skipped: tuple[str, ...]  # one line for each newer checkpoint that does not verify
    invalidated: tuple[str, ...] = ()  # one line for each newer one that a roll-back invalidated


def find_resumable(
    run: RunDir, backend: WorkerContext, fingerprint: Mapping[str, Any]
) -> Resumable:
    """Return the newest checkpoint that verifies, replicas included (collective).

    Raises a CheckpointError if the run has saved and nothing verifies, a RunError if the checkpoint
    is of another model or of other data.
    """
    # All workers take rank 0's listing: on a shared file system, nodes may see different ones.
    replica: Replica | None = None
    listing = None
    if backend.worker.rank == 0:
        replica_steps: list[int] = []
        try:
            replica = open_replica(backend.config.recipe.checkpoint, run.name)
            if replica is not None:
                replica.make_folder(backend.config.cluster.trusted_group)
                replica_steps = usable_steps(run, replica)
        except StorageError as error:  # the run's own checkpoints do not depend on it
            log.warning("%s", error)
            replica = None
        invalid, saves = invalidated_checkpoints(run), recorded_saves(run)
        listing = (run.checkpoint_steps(), invalid, replica_steps, saves, lost_attempts(run))
    steps, invalidated, replica_steps, saves, lost = backend.control.broadcast(listing)
    skipped: list[str] = []
    for step in sorted({*steps, *replica_steps} - set(invalidated), reverse=True):
        directory = run.checkpoint(step)
        fault = first_fault(directory, backend) if step in steps else None
        if step in replica_steps and (fault is not None or step not in steps):
            skipped += [f"step {step}: {fault}"] if fault else []
            fault = backend.control.broadcast(_fetch(replica, step, run) if replica else None)
        if fault is None:
            state = _load_state(directory, step, backend)
            if lines := fingerprint_differences(state.fingerprint, fingerprint):
                raise RunError(
                    f"{directory} is of another model or other data and cannot be continued:\n"
                    + "\n".join(f"  {line}" for line in lines)
                    + "\nrestore the settings, or start a new run with another --name"
                )
            skipped += missing_checkpoint_messages(saves, step, {*steps, *replica_steps})
            return Resumable(state, tuple(skipped), _newer_than(step, invalidated))
        skipped.append(f"step {step}: {fault}")
    if skipped:
        raise CheckpointError(
            f"none of the checkpoints in {run.checkpoints} verifies:\n"
            + "\n".join(f"  {line}" for line in skipped)
            + "\nrestore one of them, or move the folder away and start again from step 0 by "
            f"`slurmllm resume {run.name} --from-scratch`"
        )
    refuse_unknown(run, saves, lost)
    return Resumable(None, (), _newer_than(0, invalidated))


def _fetch(replica: Replica, step: int, run: RunDir) -> str | None:
    """Restore a checkpoint from its replica; return the fault if that fails."""
    try:
        replica.fetch(step, run)
    except StorageError as error:
        return str(error)
    log.info("restored step %d from %s", step, replica.location)
    return None


def usable_steps(run: RunDir, replica: Replica) -> list[int]:
    """Return the steps of the replicas that a run may resume from, oldest first."""
    rollbacks, begin = read_rollbacks(run), first_attempt_used(run)
    # An older run of the same name, whose folder was removed, may have left replicas.
    submissions = JobsRecord.of(run).submissions
    created_at = min((submission.submitted_at for submission in submissions), default=0.0)
    usable = []
    for step in replica.steps():
        try:
            manifest = replica.manifest(step)
        except StorageError as error:  # of a copy that was cut off; the others are whole
            log.warning("%s", error)
            continue
        earlier = manifest.saved_at < created_at or manifest.attempt < begin
        if not earlier and not invalidation_reason(step, manifest.attempt, rollbacks):
            usable.append(step)
    return usable


def _newer_than(step: int, invalidated: Mapping[int, str]) -> tuple[str, ...]:
    newer = sorted((other for other in invalidated if other > step), reverse=True)
    return tuple(f"step {other}: {invalidated[other]}" for other in newer)


def first_fault(directory: Path, backend: WorkerContext) -> str | None:
    """Verify a checkpoint's files, which the workers share out (collective).

    Pickles are checked by who loads them, directly before.
    """
    manifest: CheckpointManifest | None = None
    fault: str | None = None
    if backend.worker.rank == 0:
        try:
            manifest = read_manifest(directory)
        except StorageError as error:
            fault = str(error)
    control = backend.control
    # Every worker reads a part of the files: one alone takes minutes for a large checkpoint. The
    # manifest is read by rank 0 alone: another node may not see it yet on a shared file system.
    workers = range(control.world_size)
    shares = [manifest.files[rank :: len(workers)] if manifest else None for rank in workers]
    share = control.scatter(shares)
    if share is None:
        return control.broadcast(fault)
    parts = control.gather(file_faults(directory, share))
    lines = None if parts is None else [line for report in parts for line in report]
    return "; ".join(control.broadcast(lines)) or None


def _load_state(directory: Path, step: int, backend: WorkerContext) -> TrainState:
    """Load the training state on rank 0 for all workers (collective)."""
    state: TrainState | None = None
    fault: StorageError | None = None
    if backend.worker.rank == 0:
        try:
            state = TrainState.load(directory / TRAIN_STATE)
            if state.step != step:  # its shards would be read from another folder
                raise StorageError(f"{directory} holds step {state.step}; restore it")
        except StorageError as error:
            fault = error
    if first := backend.control.first(fault):
        raise first
    return backend.control.broadcast(state)
