"""Which checkpoints a new one makes obsolete, and their removal."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from slurmllm.checkpoint.catalogue import invalidated_checkpoints
from slurmllm.checkpoint.manifest import read_manifest, size_faults
from slurmllm.errors import StorageError
from slurmllm.rundir import RunDir, fsync_dir

log = logging.getLogger(__name__)

_HOUR_S = 3600.0
REMOVED = "removed"  # suffix of a folder that is being removed


class RetainedCheckpoint(NamedTuple):
    """A checkpoint on disk, considered for removal.

    Attributes:
        saved_at: Unix time, s.
        usable: Whether a run may resume from it, as far as is known without reading its files.
    """

    step: int
    saved_at: float
    usable: bool = True


def expired_steps(
    checkpoints: Sequence[RetainedCheckpoint],
    now: float,
    *,
    keep: int,
    keep_hours: float = 0.0,
    keep_every: int | None = None,
) -> list[int]:
    """Returns the steps of the checkpoints to remove.

    None if the newest is unusable: the older ones are then all that a resume has. So at least one
    usable checkpoint always remains.

    Args:
        checkpoints: Oldest first; the newest has just been checked on disk.
        now: Unix time, s.
        keep: Number of newest usable checkpoints to keep.
        keep_hours: Age in hours up to which all usable checkpoints are kept.
        keep_every: Usable checkpoints at multiples of this step are kept.
    """
    if not checkpoints or not checkpoints[-1].usable:
        return []
    newest = {one.step for one in [c for c in checkpoints if c.usable][-keep:]}
    return [
        one.step
        for one in checkpoints
        if one.step not in newest
        and not (one.usable and now - one.saved_at < keep_hours * _HOUR_S)
        and not (one.usable and keep_every and one.step % keep_every == 0)
    ]


def remove_expired(
    run: RunDir,
    newest: int,
    keep: int,
    keep_hours: float = 0.0,
    keep_every: int | None = None,
    in_use: Collection[int] = (),
) -> None:
    """Removes the expired checkpoints of a run; failures are logged and otherwise ignored.

    First checks the newest one's manifest and file sizes. Not its checksums: they were computed
    from the bytes as they were written, and reading the files again so soon would verify the page
    cache, not the disk.

    Checkpoints after step `newest` are damaged or invalidated, since the resume skipped them. They
    are ignored here and stay for inspection until training reaches their step again.

    Args:
        newest: Step of the checkpoint that has just been published.
        keep, keep_hours, keep_every: See `expired_steps`.
        in_use: Steps of checkpoints that are being read.
    """
    found = []
    try:
        invalidated = invalidated_checkpoints(run)
        for step in run.checkpoint_steps():
            if step > newest:
                continue
            directory = run.checkpoint(step)
            try:
                manifest = read_manifest(directory)
            except StorageError:
                found.append(RetainedCheckpoint(step, 0.0, usable=False))
                continue
            whole = step < newest or not size_faults(directory, manifest.files)
            usable = whole and step not in invalidated
            found.append(RetainedCheckpoint(step, manifest.saved_at, usable))
    except StorageError as error:
        log.warning("no checkpoint is removed: %s", error)
        return
    now = time.time()
    for step in expired_steps(found, now, keep=keep, keep_hours=keep_hours, keep_every=keep_every):
        if step not in in_use:
            _remove(run.checkpoint(step))


def _remove(directory: Path) -> None:
    # Renamed first: if the removal is killed, no partial checkpoint keeps the name.
    hidden = directory.with_name(f".{directory.name}.{REMOVED}")
    try:
        if hidden.exists():
            shutil.rmtree(hidden)
        directory.rename(hidden)
        fsync_dir(directory.parent)
        shutil.rmtree(hidden)
    except OSError as error:
        log.warning("cannot remove %s: %s", directory, error.strerror)
        with suppress(OSError, StorageError):  # still complete: it may serve a resume
            if not size_faults(hidden, read_manifest(hidden).files):
                hidden.rename(directory)
