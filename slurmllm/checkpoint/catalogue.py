"""The checkpoints of a run: which exist, which verify, which are invalidated.

A roll-back invalidates the checkpoints saved after training began to diverge. Their files verify,
so a resume must know them by the run's records. They stay on disk for inspection until training
reaches their step again.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from slurmllm.checkpoint.manifest import file_faults, read_manifest
from slurmllm.errors import CheckpointError, StorageError
from slurmllm.records import CheckpointManifest, SkippedBatches, SkipsRecord
from slurmllm.rundir import RunDir

if TYPE_CHECKING:
    from slurmllm.progress import OnProgress


def read_rollbacks(run: RunDir) -> tuple[SkippedBatches, ...]:
    """Returns the roll-backs of a run, oldest first; StorageError if their file is damaged."""
    return SkipsRecord.load(run.skips).skips if run.skips.exists() else ()


def invalidation_reason(step: int, attempt: int, rollbacks: Sequence[SkippedBatches]) -> str | None:
    """Returns why the checkpoint that `attempt` saved at `step` is invalidated, None if valid.

    A checkpoint of the same step saved by a later attempt is valid: that one trained past the
    divergence again, without the skipped batches.
    """
    for rollback in rollbacks:
        if step >= rollback.onset and attempt <= rollback.attempt:
            return (
                f"attempt {attempt} saved it after the divergence from step {rollback.onset} on, "
                f"which attempt {rollback.attempt} rolled back"
            )
    return None


def invalidated_checkpoints(run: RunDir) -> dict[int, str]:
    """Returns step → reason; StorageError if the file of the run's roll-backs is damaged."""
    rollbacks, reasons = read_rollbacks(run), {}
    for step in run.checkpoint_steps() if rollbacks else ():
        with suppress(StorageError):  # a damaged checkpoint is reported by its own verification
            attempt = read_manifest(run.checkpoint(step)).attempt
            if reason := invalidation_reason(step, attempt, rollbacks):
                reasons[step] = reason
    return reasons


@dataclass(frozen=True)
class CheckpointEntry:
    """One checkpoint folder.

    Attributes:
        manifest: None if it is missing or damaged.
        faults: One line each; None if the files have not been verified.
        replica_url: Location of the copy, if the entry is a replica.
    """

    directory: Path
    manifest: CheckpointManifest | None
    faults: tuple[str, ...] | None
    replica_url: str | None = None

    @property
    def num_bytes(self) -> int:
        """Size of the files according to the manifest."""
        return sum(file.bytes for file in self.manifest.files) if self.manifest else 0


def read_entry(directory: Path) -> CheckpointEntry:
    """Reads the manifest of a checkpoint without verifying its files."""
    try:
        return CheckpointEntry(directory, read_manifest(directory), None)
    except StorageError as error:
        return CheckpointEntry(directory, None, (str(error),))


def list_checkpoints(run: RunDir) -> list[CheckpointEntry]:
    """Returns the checkpoints of a run, oldest first, not verified."""
    return [read_entry(run.checkpoint(step)) for step in run.checkpoint_steps()]


def verify_entry(
    entry: CheckpointEntry, on_progress: OnProgress = lambda _: None
) -> CheckpointEntry:
    """Checks size and checksum of every file; `on_progress` receives the bytes checked so far."""
    if entry.manifest is None:
        return entry
    faults: list[str] = []
    done_bytes = 0
    for file in entry.manifest.files:
        faults += file_faults(entry.directory, [file])
        done_bytes += file.bytes
        on_progress(done_bytes)
    return replace(entry, faults=tuple(faults))


def newest_verified(run: RunDir) -> tuple[Path, list[str]]:
    """Finds the newest checkpoint that verifies and is not invalidated.

    Returns:
        Its folder, and a line for each newer checkpoint that was skipped.

    Raises:
        CheckpointError: No checkpoint qualifies.
    """
    skipped: list[str] = []
    invalidated = {run.checkpoint(step): why for step, why in invalidated_checkpoints(run).items()}
    for entry in reversed(list_checkpoints(run)):
        if entry.directory in invalidated:
            skipped.append(f"{entry.directory.name}: {invalidated[entry.directory]}")
            continue
        entry = verify_entry(entry)
        if not entry.faults:
            return entry.directory, skipped
        skipped.append(f"{entry.directory.name}: {'; '.join(entry.faults)}")
    if not skipped:
        raise CheckpointError(f"run {run.name} has no checkpoint yet; see `slurmllm status`")
    lines = "\n".join(f"  {line}" for line in skipped)
    raise CheckpointError(f"none of the checkpoints of run {run.name} verifies:\n{lines}")
