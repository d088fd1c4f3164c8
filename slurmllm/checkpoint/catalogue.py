"""Checkpoints that a roll-back has set aside: saved after training had begun to diverge.

They verify, so a resume must know them. They stay on disk for whoever wants to look, until training
reaches their step again.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from slurmllm.checkpoint.manifest import file_faults, read_manifest
from slurmllm.errors import CheckpointError, StorageError
from slurmllm.records import CheckpointManifest, SkippedBatches, SkipsRecord
from slurmllm.rundir import RunDir

if TYPE_CHECKING:
    from slurmllm.progress import OnProgress


def read_rollbacks(run: RunDir) -> tuple[SkippedBatches, ...]:
    """The roll-backs of a run, oldest first.

    Raises:
        StorageError: their file is damaged.
    """
    return SkipsRecord.load(run.skips).skips if run.skips.exists() else ()


def invalidation_reason(step: int, attempt: int, skips: Sequence[SkippedBatches]) -> str | None:
    """Why a checkpoint counts no more; None where it does.

    Args:
        step: Its own.
        attempt: The one that saved it.
        skips: The run's roll-backs.
    """
    for skip in skips:
        if step >= skip.onset and attempt <= skip.attempt:
            return (
                f"attempt {attempt} saved it after the divergence from step {skip.onset} on, which "
                f"attempt {skip.attempt} rolled back"
            )
    return None


def invalidated_checkpoints(run: RunDir) -> dict[int, str]:
    """The checkpoints of a run that count no more: step → why.

    Raises:
        StorageError: the file of the run's roll-backs is damaged.
    """
    skips, found = read_rollbacks(run), {}
    for step in run.checkpoint_steps() if skips else ():
        with suppress(StorageError):  # a damaged checkpoint is another matter
            attempt = read_manifest(run.checkpoint(step)).attempt
            if reason := invalidation_reason(step, attempt, skips):
                found[step] = reason
    return found


@dataclass(frozen=True)
class CheckpointEntry:
    """One checkpoint folder.

    Attributes:
        directory: The folder.
        manifest: None where it is missing or damaged.
        faults: What is wrong, a line each; None where nobody has looked at the files.
        copy_at: Where it lies, of a copy in the second place.
    """

    directory: Path
    manifest: CheckpointManifest | None
    faults: tuple[str, ...] | None
    copy_at: str | None = None

    @property
    def num_bytes(self) -> int:
        """Size of its files by the manifest."""
        return sum(file.bytes for file in self.manifest.files) if self.manifest else 0


def read_entry(directory: Path) -> CheckpointEntry:
    """A checkpoint by its manifest alone."""
    try:
        return CheckpointEntry(directory, read_manifest(directory), None)
    except StorageError as error:
        return CheckpointEntry(directory, None, (str(error),))


def list_checkpoints(run: RunDir) -> list[CheckpointEntry]:
    """The checkpoints of a run, oldest first."""
    return [read_entry(run.checkpoint(step)) for step in run.checkpoint_steps()]


def verify_entry(
    entry: CheckpointEntry, on_progress: OnProgress = lambda _: None
) -> CheckpointEntry:
    """Check every file's size and checksum.

    Args:
        entry: What to look at.
        on_progress: Told the bytes checked so far, of this checkpoint.
    """
    if entry.manifest is None:
        return entry
    found: list[str] = []
    done_bytes = 0
    for file in entry.manifest.files:
        found += file_faults(entry.directory, [file])
        done_bytes += file.bytes
        on_progress(done_bytes)
    return CheckpointEntry(entry.directory, entry.manifest, tuple(found))


def newest_verified(run: RunDir) -> tuple[Path, list[str]]:
    """The newest checkpoint that verifies and that no roll-back has set aside.

    Returns:
        Its folder, and a line for each newer one that does not serve.

    Raises:
        CheckpointError: there is none.
    """
    skipped: list[str] = []
    aside = {run.checkpoint(step): reason for step, reason in invalidated_checkpoints(run).items()}
    for entry in reversed(list_checkpoints(run)):
        if entry.directory in aside:
            skipped.append(f"{entry.directory.name}: {aside[entry.directory]}")
            continue
        entry = verify_entry(entry)
        if not entry.faults:
            return entry.directory, skipped
        skipped.append(f"{entry.directory.name}: {'; '.join(entry.faults)}")
    if not skipped:
        raise CheckpointError(f"run {run.name} has no checkpoint yet; see `slurmllm status`")
    lines = "\n".join(f"  {line}" for line in skipped)
    raise CheckpointError(f"none of the checkpoints of run {run.name} verifies:\n{lines}")
