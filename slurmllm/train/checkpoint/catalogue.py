"""The checkpoints of a run: which exist, verify, are invalidated or expired.

A roll-back invalidates the checkpoints saved after training began to diverge. Their files verify,
so a resume must know them by the run's records. They stay on disk for inspection until training
reaches their step again.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from slurmllm.core.errors import CheckpointError, RunError, StorageError
from slurmllm.core.format import format_lines, format_time
from slurmllm.core.metrics.row_reader import read_events
from slurmllm.core.run.artifact_records import CheckpointManifest
from slurmllm.core.run.records import (
    AttemptRecord,
    JobsRecord,
    RejectedCheckpoint,
    SkippedBatches,
    SkipsRecord,
)
from slurmllm.core.run.rundir import RunDir, find_run, fsync_dir, is_run, read_all
from slurmllm.train.checkpoint.folder import file_faults, read_manifest
from slurmllm.train.checkpoint.foreign import require_own_trainer
from slurmllm.train.checkpoint.holds import held_steps

if TYPE_CHECKING:
    from slurmllm.core.config.operation import CheckpointConfig, EvaluateConfig
    from slurmllm.core.display.progress import OnProgress

log = logging.getLogger(__name__)

Saves = dict[int, float]  # step of a checkpoint → Unix time of its save
_PICKLED = (".metadata", ".distcp", ".pt")  # files of DCP and of neuronx-distributed
REMOVED = "removed"  # suffix of a folder that is being removed


def invalidation_reason(
    step: int, attempt: int, rollbacks: Sequence[SkippedBatches | RejectedCheckpoint]
) -> str | None:
    """Return why the checkpoint of an attempt was invalidated; None if it was not."""
    for rollback in rollbacks:
        # A later attempt trained past the divergence again, without the skipped batches: what it
        # saved at the same step is valid.
        if step >= rollback.onset and attempt <= rollback.attempt:
            if isinstance(rollback, RejectedCheckpoint):
                return f"attempt {rollback.attempt}: {rollback.reason}"
            return (
                f"attempt {attempt} saved it after the divergence from step {rollback.onset} on, "
                f"which attempt {rollback.attempt} rolled back"
            )
    return None


def first_attempt_used(run: RunDir) -> int:
    """Return the first attempt since `resume --from-scratch`; those before it do not count."""
    return max(
        (entry.first_attempt for entry in JobsRecord.of(run).submissions if entry.from_scratch),
        default=0,
    )


def invalidated_checkpoints(
    run: RunDir, manifests: Mapping[int, CheckpointManifest] | None = None
) -> dict[int, str]:
    """Return step → reason; StorageError if a record of the run's is damaged.

    `manifests` are those of the run's checkpoints; None: read them if they are needed.
    """
    rollbacks = SkipsRecord.of(run).invalidations
    begin = first_attempt_used(run)
    reasons = {}
    steps = run.checkpoint_steps() if manifests is None else manifests
    for step in steps if rollbacks or begin else ():
        with suppress(StorageError):  # a damaged checkpoint is reported by its own verification
            manifest = None if manifests is None else manifests[step]
            attempt = (manifest or read_manifest(run.checkpoint(step))).attempt
            if attempt < begin:
                reasons[step] = f"attempt {attempt} saved it, before `resume --from-scratch`"
            elif reason := invalidation_reason(step, attempt, rollbacks):
                reasons[step] = reason
    return reasons


def recorded_saves(run: RunDir) -> Saves:
    """Return step → Unix time of what a run may resume from, by its records; some may be gone."""
    rollbacks = SkipsRecord.of(run).invalidations
    begin = first_attempt_used(run)
    saves: Saves = {}
    for attempt in run.attempts("train"):
        if attempt.number < begin:
            continue
        record: AttemptRecord | None = None
        attempt_saves: Saves = {}
        with suppress(RunError):  # one damaged file leaves the others
            events = read_events(run, attempt.number)
            attempt_saves = {event.step: event.time for event in events if event.kind == "save"}
        with suppress(StorageError):
            record = AttemptRecord.load(attempt.record)
        if record is not None and record.first_step is not None:
            saves = {step: saved_at for step, saved_at in saves.items() if step < record.first_step}
        if not attempt_saves and record and record.steps_gained and record.checkpoint_after:
            attempt_saves = {record.checkpoint_after: record.ended_at or record.started_at}
        saves |= {
            step: saved_at
            for step, saved_at in attempt_saves.items()
            if not invalidation_reason(step, attempt.number, rollbacks)
        }
    return saves


def lost_attempts(run: RunDir) -> list[int]:
    """Return the attempts that may have saved, and whose records are gone or damaged."""
    records = {attempt.number: attempt.record for attempt in run.attempts("train")}
    files = [file for kind in ("metrics", "events") for file in run.path.glob(f"{kind}/attempt_*")]
    trained = {int(file.stem[8:]) for file in files if file.stem[8:].isdecimal()}
    last = JobsRecord.of(run).last
    begun = max([0 if last is None else last.first_attempt, *(n + 1 for n in {*records, *trained})])

    def is_known(number: int) -> bool:
        with suppress(StorageError):
            record = AttemptRecord.find(records[number]) if number in records else None
            return record is not None or number in records.keys() - trained
        return False

    return [number for number in range(first_attempt_used(run), begun) if not is_known(number)]


def usable_steps(run: RunDir) -> set[int]:
    """Return the steps of the checkpoints that are not invalidated; files are not verified."""
    return set(run.checkpoint_steps()) - set(invalidated_checkpoints(run))


def require_recorded(run: RunDir) -> None:
    """Raise a CheckpointError if a run without usable checkpoints has, or may have, saved some."""
    if not usable_steps(run):
        refuse_unknown(run, recorded_saves(run), lost_attempts(run))


def refuse_unknown(run: RunDir, saves: Saves, lost: Sequence[int]) -> None:
    """Raise a CheckpointError if a run without checkpoints has saved some, or may have."""
    restart = f"or `slurmllm resume {run.name} --from-scratch` starts again from step 0"
    if saves:  # a scratch file system removes what is old
        newest = max(saves)
        raise CheckpointError(
            f"{run.checkpoint(newest)} was saved {format_time(saves[newest])} and is gone, and run "
            f"{run.name} has no other checkpoint: restore it from a copy (checkpoint.replica names "
            f"one), {restart}"
        )
    if lost:
        raise CheckpointError(
            f"{run.checkpoints} holds no checkpoint, and what attempt {lost[0]} saved is unknown: "
            f"{run.attempt('train', lost[0]).record} is gone or damaged; restore them from a "
            f"copy, {restart}"
        )


def missing_checkpoint_messages(saves: Saves, step: int, steps: Collection[int]) -> list[str]:
    """Return a line for each recorded checkpoint after `step` that is not in `steps`."""
    return [
        f"step {lost}: saved {format_time(saves[lost])} and gone; its steps are recomputed"
        for lost in sorted(saves, reverse=True)
        if lost > step and lost not in steps
    ]


@dataclass(frozen=True)
class CheckpointEntry:
    """One checkpoint folder."""

    directory: Path
    manifest: CheckpointManifest | None  # None if it is missing or damaged
    faults: tuple[str, ...] | None  # one line each; None if the files have not been verified
    replica_url: str | None = None  # location of the copy, if the entry is a replica

    @property
    def step(self) -> int:
        """By the folder's name: a damaged checkpoint may have no readable manifest."""
        return int(self.directory.name.rpartition("_")[2])

    @property
    def num_bytes(self) -> int:
        return sum(file.bytes for file in self.manifest.files) if self.manifest else 0


def read_entry(directory: Path) -> CheckpointEntry:
    """Read the manifest of a checkpoint without verifying its files."""
    try:
        return CheckpointEntry(directory, read_manifest(directory), None)
    except StorageError as error:
        return CheckpointEntry(directory, None, (str(error),))


def list_checkpoints(run: RunDir) -> list[CheckpointEntry]:
    """Return the checkpoints of a run, oldest first, not verified."""
    return read_all(read_entry, map(run.checkpoint, run.checkpoint_steps()))


def require_step(run: RunDir, step: str, alternatives: str) -> Path:
    """Return the folder of the checkpoint of a step, as given by a user; RunError if none."""
    steps = run.checkpoint_steps()
    if not step.isdecimal() or int(step) not in steps:
        present = ", ".join(map(str, steps[-10:])) or "none"
        raise RunError(
            f"run {run.name} has no checkpoint of step {step or repr(step)}; it has: {present} (or "
            f"use {alternatives})"
        )
    return run.checkpoint(int(step))


def verify_entry(
    entry: CheckpointEntry, on_progress: OnProgress = lambda _: None, checksums: bool = True
) -> CheckpointEntry:
    """Check every file, with checksums its pickles too; see `file_faults`."""
    if entry.manifest is None:
        return entry
    files = entry.manifest.files
    faults = file_faults(entry.directory, files, checksums=checksums, on_progress=on_progress)
    pickled = [file.path for file in files if file.path.endswith(_PICKLED)]
    if pickled and checksums and not faults:
        from slurmllm.train.checkpoint.formats.pickles import pickle_faults  # imports torch

        faults = pickle_faults(entry.directory, pickled)
    return replace(entry, faults=tuple(faults))


def find_checkpoint(name: str, root: Path, trainers: bool = False) -> RunDir | Path:
    """Find a checkpoint by its folder, or as RUN, RUN@latest or RUN@STEP.

    Returns the folder; for RUN and RUN@latest the run, whose newest checkpoint the caller verifies.
    Raises a RunError if there is none of that name, or RUN is of another project's trainer, unless
    `trainers` allows that.
    """
    path = Path(name)
    if path.is_dir() and not is_run(path) and not is_run(root / name):
        return path
    run, separator, step = name.rpartition("@")
    if separator and not is_run(root / name):
        run_dir = find_run(run, root)
        require_own_trainer(run_dir)
        return run_dir if step == "latest" else require_step(run_dir, step, "latest")
    try:
        run_dir = find_run(name, root)
    except RunError as error:
        raise RunError(
            f"no checkpoint folder {name!r}, and {error}; write RUN, RUN@STEP, RUN@latest, or the "
            "folder's path"
        ) from error
    if not trainers:
        require_own_trainer(run_dir)
    return run_dir


def newest_verified(run: RunDir, checksums: bool = True) -> tuple[Path, list[str]]:
    """Return the newest checkpoint that verifies, or whose sizes do, and a line for newer ones."""
    skipped: list[str] = []
    invalidated = invalidated_checkpoints(run)
    for entry in reversed(list_checkpoints(run)):
        if entry.step in invalidated:
            skipped.append(f"{entry.directory.name}: {invalidated[entry.step]}")
            continue
        entry = verify_entry(entry, checksums=checksums)
        if not entry.faults:
            return entry.directory, skipped
        skipped.append(f"{entry.directory.name}: {'; '.join(entry.faults)}")
    if not skipped:
        raise CheckpointError(f"run {run.name} has no checkpoint yet; see `slurmllm status`")
    raise CheckpointError(
        f"none of the checkpoints of run {run.name} verifies:{format_lines(skipped)}"
    )


class RetainedCheckpoint(NamedTuple):
    """A checkpoint on disk, considered for removal."""

    step: int
    saved_at: float  # Unix time, s
    usable: bool = True  # whether a run may resume from it, as far as known without reading files


def expired_steps(
    checkpoints: Sequence[RetainedCheckpoint], now: float, config: CheckpointConfig
) -> list[int]:
    """Return the steps of the checkpoints, oldest first, to remove; one usable one always remains.

    Of the usable ones, the `keep` newest, those younger than `keep_hours` at the Unix time `now`
    and multiples of `keep_every` are kept.
    """
    # If the newest is unusable, the older ones are all that a resume has.
    if not checkpoints or not checkpoints[-1].usable:
        return []
    usable = [checkpoint for checkpoint in checkpoints if checkpoint.usable]
    retained = {checkpoint.step for checkpoint in usable[-config.keep :]}
    retained |= {c.step for c in usable if now - c.saved_at < config.keep_hours * 3600}
    retained |= {c.step for c in usable if config.keep_every and c.step % config.keep_every == 0}
    return [checkpoint.step for checkpoint in checkpoints if checkpoint.step not in retained]


def remove_expired(
    run: RunDir,
    newest: int,
    config: CheckpointConfig,
    in_use: Collection[int] = (),
    evaluate: EvaluateConfig | None = None,
) -> None:
    """Remove a run's expired checkpoints after that of step `newest`; failures are only logged."""
    checkpoints = []
    try:
        invalidated = invalidated_checkpoints(run)
        for step in run.checkpoint_steps():
            # The resume skipped later ones as damaged or invalidated; they stay for inspection
            # until training reaches their step again.
            if step > newest:
                continue
            directory = run.checkpoint(step)
            try:
                manifest = read_manifest(directory)
            except StorageError:
                checkpoints.append(RetainedCheckpoint(step, 0.0, usable=False))
                continue
            # Sizes only: the checksums are of the bytes as they were written, and reading the files
            # again so soon would verify the page cache, not the disk.
            usable = step not in invalidated and (
                step < newest or not file_faults(directory, manifest.files, checksums=False)
            )
            checkpoints.append(RetainedCheckpoint(step, manifest.saved_at, usable))
    except StorageError as error:
        log.warning("no checkpoint is removed: %s", error)
        return
    expired = expired_steps(checkpoints, time.time(), config)
    held = held_steps(run, evaluate, {c.step: c.saved_at for c in checkpoints if c.usable})
    unremovable = {*held, *in_use}
    for directory in (run.checkpoint(step) for step in expired if step not in unremovable):
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
