"""Finding the checkpoint to go on from: the newest that verifies, else the one before."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from slurmllm.checkpoint.catalogue import (
    invalidated_checkpoints,
    invalidation_reason,
    read_rollbacks,
)
from slurmllm.checkpoint.manifest import file_faults, read_manifest
from slurmllm.checkpoint.replicas import Replica, open_replica
from slurmllm.checkpoint.shards import ShardBackend
from slurmllm.checkpoint.state import TRAIN_STATE, TrainState, fingerprint_differences
from slurmllm.errors import CheckpointError, RunError, StorageError
from slurmllm.records import CheckpointManifest, JobsRecord
from slurmllm.rundir import RunDir


class Resumable(NamedTuple):
    """The checkpoint to go on from.

    Attributes:
        state: Of the newest checkpoint that verifies; None where there is none at all.
        skipped: Newer ones that do not verify, each with the reason.
        set_aside: Newer ones that a roll-back has set aside, likewise.
    """

    state: TrainState | None
    skipped: tuple[str, ...]
    invalidated: tuple[str, ...] = ()


def find_resumable(run: RunDir, backend: ShardBackend, fingerprint: Mapping[str, Any]) -> Resumable:
    """Find the newest checkpoint that verifies; the workers share the checksums (collective).

    Raises:
        CheckpointError: there are checkpoints and none of them verifies.
        RunError: it is another model's or another data's.
    """
    # Rank 0's view for all: a listing may differ between nodes of a shared file system.
    tier = _SecondPlace(run, backend) if backend.worker.rank == 0 else None
    looked = None
    if tier is not None:
        looked = (run.checkpoint_steps(), invalidated_checkpoints(run), tier.steps)
    steps, aside, elsewhere = backend.gather(looked)[0]
    skipped: list[str] = []
    for step in sorted({*steps, *elsewhere} - set(aside), reverse=True):
        directory = run.checkpoint(step)
        fault = first_fault(directory, backend) if step in steps else None
        if step in elsewhere and (fault is not None or step not in steps):
            skipped += [f"step {step}: {fault}"] if fault else []
            fault = backend.gather(tier.fetch(step) if tier is not None else None)[0]
        if fault is None:
            state = TrainState.load(directory / TRAIN_STATE)
            _check_fingerprint(directory, state, fingerprint)
            return Resumable(state, tuple(skipped), _newer(aside, step))
        skipped.append(f"step {step}: {fault}")
    if skipped:
        raise CheckpointError(
            f"none of the checkpoints in {run.checkpoints} verifies:\n"
            + "\n".join(f"  {line}" for line in skipped)
            + "\nrestore one of them, or move the folder away to start again from step 0"
        )
    return Resumable(None, (), _newer(aside, 0))


class _SecondPlace:
    """What there is in the second place for checkpoints; a refusal is told and no more."""

    def __init__(self, run: RunDir, backend: ShardBackend) -> None:
        self._run = run
        self._tier: Replica | None = None
        self.steps: list[int] = []
        try:
            self._tier = open_replica(backend.config.recipe.checkpoint, run.name)
            if self._tier is not None:
                self.steps = usable_steps(run, self._tier)
        except StorageError as error:
            print(f"warning: {error}", flush=True)

    def fetch(self, step: int) -> str | None:
        """Bring a checkpoint into the run; what is wrong where that fails."""
        assert self._tier is not None
        try:
            self._tier.fetch(step, self._run)
        except StorageError as error:
            return str(error)
        print(f"brought step {step} back from {self._tier.location}", flush=True)
        return None


def usable_steps(run: RunDir, tier: Replica) -> list[int]:
    """The checkpoints in the second place that a run may go on from, oldest first.

    Not those that a roll-back has set aside, nor those of an older run of the same name.

    Raises:
        StorageError: the place cannot be reached, or the run's records are damaged.
    """
    skips = read_rollbacks(run)
    submissions = JobsRecord.load(run.jobs).submissions if run.jobs.exists() else ()
    born = min((one.submitted_at for one in submissions), default=0.0)
    manifests = [tier.manifest(step) for step in tier.steps()]
    return [
        m.step
        for m in manifests
        if m.saved_at >= born and not invalidation_reason(m.step, m.attempt, skips)
    ]


def _newer(aside: Mapping[int, str], step: int) -> tuple[str, ...]:
    return tuple(f"step {at}: {aside[at]}" for at in sorted(aside, reverse=True) if at > step)


def first_fault(directory: Path, backend: ShardBackend) -> str | None:
    """What is wrong with a checkpoint; the workers share the checksums (collective)."""
    manifest: CheckpointManifest | None = None
    fault: str | None = None
    if backend.worker.rank == 0:
        try:
            manifest = read_manifest(directory)
        except StorageError as error:
            fault = str(error)
    manifest, fault = backend.gather((manifest, fault))[0]
    if manifest is None:
        return fault
    share = manifest.files[backend.worker.rank :: backend.worker.world_size]
    found = [line for part in backend.gather(file_faults(directory, share)) for line in part]
    return "; ".join(found) or None


def _check_fingerprint(directory: Path, state: TrainState, fingerprint: Mapping[str, Any]) -> None:
    saved = dict(state.fingerprint)
    if state.data.get("version") == 1:
        # Its corpus had a fingerprint of another kind, which the stream compares when it resumes.
        saved["data.corpus"] = fingerprint.get("data.corpus")
    lines = fingerprint_differences(saved, fingerprint)
    if lines:
        raise RunError(
            f"{directory} is of another model or other data and cannot be continued:\n"
            + "\n".join(f"  {line}" for line in lines)
            + "\nput the settings back, or start a new run with another --name"
        )
