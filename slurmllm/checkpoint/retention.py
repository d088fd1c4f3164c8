"""Which checkpoints go when a new one is there."""

from __future__ import annotations

import shutil
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from slurmllm.checkpoint.catalogue import invalidated_checkpoints
from slurmllm.checkpoint.manifest import read_manifest, size_faults
from slurmllm.errors import StorageError
from slurmllm.rundir import RunDir, fsync_dir

_HOUR_S = 3600.0
REMOVED = "removed"  # ending of a folder on its way out


class RetainedCheckpoint(NamedTuple):
    """A checkpoint that is kept or goes.

    Attributes:
        saved_at: Unix time, s.
        counts: Whether a run may go on from it, as far as is known.
    """

    step: int
    saved_at: float
    counts: bool = True


def expired_steps(
    candidates: Sequence[RetainedCheckpoint],
    now: float,
    *,
    keep: int,
    keep_hours: float = 0.0,
    keep_every: int | None = None,
) -> list[int]:
    """The steps of the checkpoints that go.

    Nothing goes where the newest does not count: the older ones are all there is. So one that
    counts is always left where there was one.

    Args:
        candidates: Oldest first; the last has just been looked at on disk.
        now: Unix time, s.
        keep: So many of the newest that count stay.
        keep_hours: Those saved within so many hours stay.
        keep_every: Those at multiples of this step stay.
    """
    if not candidates or not candidates[-1].counts:
        return []
    newest = {candidate.step for candidate in [c for c in candidates if c.counts][-keep:]}
    return [
        candidate.step
        for candidate in candidates
        if candidate.step not in newest
        and not (candidate.counts and now - candidate.saved_at < keep_hours * _HOUR_S)
        and not (candidate.counts and keep_every and candidate.step % keep_every == 0)
    ]


def remove_expired(
    run: RunDir,
    newest: int,
    keep: int,
    keep_hours: float = 0.0,
    keep_every: int | None = None,
    in_use: Collection[int] = (),
) -> None:
    """Remove the checkpoints of a run that have expired; what cannot be removed is told, no more.

    The newest is looked at again before: its manifest and the sizes of its files. Not their
    checksums: they were made of the bytes as they were written, and what a second reading would get
    right after that is the system's memory, not the disk.

    Those after step `newest` are damaged or set aside and were passed over: they count for nothing
    and stay for whoever wants to look, until training reaches their step again.

    Args:
        run: The run.
        newest: Step of the checkpoint that has just been written.
        keep: See `expired`.
        keep_hours: Likewise.
        keep_every: Likewise.
        in_use: Steps that somebody is reading.
    """
    try:
        candidates = _candidates(run, newest)
    except StorageError as error:
        print(f"warning: no checkpoint is removed: {error}", flush=True)
        return
    going = expired_steps(
        candidates, time.time(), keep=keep, keep_hours=keep_hours, keep_every=keep_every
    )
    for step in going:
        if step not in in_use:
            _remove(run.checkpoint(step))


def _candidates(run: RunDir, newest: int) -> list[RetainedCheckpoint]:
    aside = invalidated_checkpoints(run)
    found = []
    for step in run.checkpoint_steps():
        if step > newest:
            continue
        try:
            manifest = read_manifest(run.checkpoint(step))
        except StorageError:
            found.append(RetainedCheckpoint(step, 0.0, counts=False))
            continue
        sound = step < newest or not size_faults(run.checkpoint(step), manifest.files)
        found.append(
            RetainedCheckpoint(step, manifest.saved_at, counts=sound and step not in aside)
        )
    return found


def _remove(directory: Path) -> None:
    """Remove a checkpoint; killed half-way, no half checkpoint is left under its name."""
    hidden = directory.with_name(f".{directory.name}.{REMOVED}")
    try:
        if hidden.exists():
            shutil.rmtree(hidden)
        directory.rename(hidden)
        fsync_dir(directory.parent)
        shutil.rmtree(hidden)
    except OSError as error:
        print(f"warning: cannot remove {directory}: {error.strerror}", flush=True)
        _put_back(hidden, directory)


def _put_back(hidden: Path, directory: Path) -> None:
    try:
        if not size_faults(hidden, read_manifest(hidden).files):
            hidden.rename(directory)
    except (OSError, StorageError):
        return
