"""Finding the checkpoint to resume from: the newest that verifies, else the one before."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from slurmllm.core.config.resolve import RunConfig
from slurmllm.core.errors import CheckpointError, RunError, StorageError
from slurmllm.core.format import format_lines
from slurmllm.core.run.artifact_records import CheckpointFile
from slurmllm.core.run.records import JobsRecord
from slurmllm.core.run.rundir import RunDir
from slurmllm.train.checkpoint.catalogue import (
    invalidated_checkpoints,
    lost_attempts,
    missing_checkpoint_messages,
    recorded_saves,
    refuse_unknown,
)
from slurmllm.train.checkpoint.folder import file_faults, read_manifest
from slurmllm.train.checkpoint.replicas import Replica, open_replica
from slurmllm.train.checkpoint.state import TRAIN_STATE, TrainState, fingerprint_differences
from slurmllm.train.control.plane import ControlPlane

log = logging.getLogger(__name__)

T = TypeVar("T")


class Resumable(NamedTuple):
    """The checkpoint to resume from."""

    state: TrainState | None  # the checkpoint's training state; None if the run has no checkpoint
    skipped: tuple[str, ...]  # one line for each newer checkpoint that does not verify
    invalidated: tuple[str, ...] = ()  # one line for each newer one that a roll-back invalidated


def _list_checkpoints(run: RunDir, config: RunConfig) -> tuple[Replica | None, tuple[Any, ...]]:
    """Return the replica, if it can be used, and what is recorded of the run's checkpoints."""
    replica: Replica | None = None
    replica_steps: list[int] = []
    try:
        replica = open_replica(config.recipe.checkpoint, run.name)
        if replica is not None:
            replica.make_folder(config.cluster.trusted_group)
            replica_steps = usable_steps(run, replica)
    except StorageError as error:  # the run's own checkpoints do not depend on it
        log.warning("%s", error)
        replica = None
    return replica, (
        run.checkpoint_steps(),
        invalidated_checkpoints(run),
        replica_steps,
        recorded_saves(run),
        lost_attempts(run),
    )


def _load_state(run: RunDir, step: int) -> TrainState:
    state = TrainState.load(run.checkpoint(step) / TRAIN_STATE)
    if state.step != step:  # its shards would be read from another folder
        raise StorageError(f"{run.checkpoint(step)} holds step {state.step}; restore it")
    return state


def find_resumable(
    run: RunDir, config: RunConfig, control: ControlPlane, fingerprint: Mapping[str, Any]
) -> Resumable:
    """Return the newest checkpoint that verifies, replicas included (collective).

    Raises a CheckpointError if the run has saved and nothing verifies, a RunError if the checkpoint
    is of another model or of other data.
    """
    # All workers take rank 0's listing: on a shared file system, nodes may see different ones.
    replica, listing = _list_checkpoints(run, config) if control.rank == 0 else (None, None)
    steps, invalidated, replica_steps, saves, lost = control.broadcast(listing)

    def fetch(step: int) -> None:
        assert replica is not None
        replica.fetch(step, run)
        log.info("restored step %d from %s", step, replica.location)

    def resumable(state: TrainState | None, step: int, skipped: Sequence[str]) -> Resumable:
        newer = sorted((number for number in invalidated if number > step), reverse=True)
        return Resumable(
            state,
            tuple(skipped),
            tuple(f"step {number}: {invalidated[number]}" for number in newer),
        )

    skipped: list[str] = []
    for step in sorted({*steps, *replica_steps} - set(invalidated), reverse=True):
        directory = run.checkpoint(step)
        fault = first_fault(directory, control) if step in steps else None
        if step in replica_steps and (fault is not None or step not in steps):
            skipped += [f"step {step}: {fault}"] if fault else []
            fault = None
            try:
                control.from_first(partial(fetch, step))
            except StorageError as error:
                fault = str(error)
        if fault is None:
            state = control.from_first(partial(_load_state, run, step))
            if lines := fingerprint_differences(state.fingerprint, fingerprint):
                raise RunError(
                    f"{directory} is of another model or other data and cannot be continued:"
                    f"{format_lines(lines)}\n"
                    "restore the settings, or start a new run with another --name"
                )
            if control.rank == 0 and (warning := state.changed_settings(config.recipe)):
                log.warning("%s", warning)
            skipped += missing_checkpoint_messages(saves, step, {*steps, *replica_steps})
            return resumable(state, step, skipped)
        skipped.append(f"step {step}: {fault}")
    if skipped:
        raise CheckpointError(
            f"none of the checkpoints in {run.checkpoints} verifies:{format_lines(skipped)}\n"
            "restore one of them, or move the folder away and start again from step 0 by "
            f"`slurmllm resume {run.name} --from-scratch`"
        )
    refuse_unknown(run, saves, lost)
    return resumable(None, 0, ())


def usable_steps(run: RunDir, replica: Replica) -> list[int]:
    """Return the steps of the replicas that a run may resume from, oldest first."""
    # An older run of the same name, whose folder was removed, may have left replicas.
    created_at = JobsRecord.of(run).created_at
    manifests = {}
    for step in replica.steps():
        try:
            manifest = replica.manifest(step)
        except StorageError as error:  # of a copy that was cut off; the others are whole
            log.warning("%s", error)
            continue
        if manifest.saved_at >= created_at:
            manifests[step] = manifest
    invalidated = invalidated_checkpoints(run, manifests)
    return [step for step in manifests if step not in invalidated]


def first_fault(directory: Path, control: ControlPlane) -> str | None:
    """Verify a checkpoint's files, which the workers share out (collective).

    Pickles are checked by who loads them, directly before.
    """
    try:
        # By rank 0 alone: another node may not see it yet on a shared file system. As plain values,
        # which every worker unpickles over ten times as fast as records.
        files = control.from_first(lambda: read_manifest(directory).model_dump()["files"])
    except StorageError as error:
        return str(error)
    # Every worker reads a part of the files: one alone takes minutes for a large checkpoint.
    share = [CheckpointFile(**file) for file in files[control.rank :: control.world_size]]
    parts = control.gather(file_faults(directory, share))
    lines = None if parts is None else [line for report in parts for line in report]
    return "; ".join(control.broadcast(lines)) or None
