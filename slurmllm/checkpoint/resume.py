"""Finding the checkpoint to go on from: the newest that verifies, else the one before."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from slurmllm.backends.base import Backend
from slurmllm.checkpoint.manifest import faults, read_manifest
from slurmllm.checkpoint.state import TRAIN_STATE, TrainState, differences
from slurmllm.errors import CheckpointError, RunError, StorageError
from slurmllm.records import CheckpointManifest
from slurmllm.rundir import RunDir


class Resumable(NamedTuple):
    """The checkpoint to go on from.

    Attributes:
        state: Of the newest checkpoint that verifies; None where there is none at all.
        skipped: Newer ones that do not verify, each with the reason.
    """

    state: TrainState | None
    skipped: tuple[str, ...]


def find_resumable(run: RunDir, backend: Backend, fingerprint: Mapping[str, Any]) -> Resumable:
    """Find the newest checkpoint that verifies; the workers share the checksums (collective).

    Raises:
        CheckpointError: there are checkpoints and none of them verifies.
        RunError: it is another model's or another data's.
    """
    # Rank 0's view for all: a listing may differ between nodes of a shared file system.
    steps: list[int] = backend.gather(run.checkpoint_steps())[0]
    skipped: list[str] = []
    for step in reversed(steps):
        directory = run.checkpoint(step)
        fault = first_fault(directory, backend)
        if fault is None:
            state = TrainState.load(directory / TRAIN_STATE)
            _check_fingerprint(directory, state, fingerprint)
            return Resumable(state, tuple(skipped))
        skipped.append(f"step {step}: {fault}")
    if skipped:
        raise CheckpointError(
            f"none of the checkpoints in {run.checkpoints} verifies:\n"
            + "\n".join(f"  {line}" for line in skipped)
            + "\nrestore one of them, or move the folder away to start again from step 0"
        )
    return Resumable(None, ())


def first_fault(directory: Path, backend: Backend) -> str | None:
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
    found = [line for part in backend.gather(faults(directory, share)) for line in part]
    return "; ".join(found) or None


def _check_fingerprint(directory: Path, state: TrainState, fingerprint: Mapping[str, Any]) -> None:
    saved = dict(state.fingerprint)
    if state.data.get("version") == 1:
        # Its corpus had a fingerprint of another kind, which the stream compares when it resumes.
        saved["data.corpus"] = fingerprint.get("data.corpus")
    lines = differences(saved, fingerprint)
    if lines:
        raise RunError(
            f"{directory} is of another model or other data and cannot be continued:\n"
            + "\n".join(f"  {line}" for line in lines)
            + "\nput the settings back, or start a new run with another --name"
        )
