"""The checkpoint that a trainer of another project resumes from: the newest that verifies.

One whose resume spoiled the loss is passed over as well. A trainer that finds the newest by itself
gets the chosen one by its tracker, the file that names it, or finds no newer one: broken ones are
moved into the run's `set_aside`. Nothing is deleted.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from slurmllm.core.config.command import CommandConfig, fill
from slurmllm.core.errors import CheckpointError
from slurmllm.core.run.records import (
    AttemptRecord,
    PassedOver,
    RejectedCheckpoint,
    SkipsRecord,
)
from slurmllm.core.run.rundir import RunDir, storage_errors
from slurmllm.core.run.safe_files import read_limited, write_whole
from slurmllm.train.checkpoint.foreign import TrainerCheckpoint, list_trainer_checkpoints
from slurmllm.train.checkpoint.verification import VERIFY_S, verify_checkpoint

# NVIDIA/Megatron-LM megatron/training/checkpointing.py (get_checkpoint_tracker_filename); others
# hold a folder's name, as deepspeedai/DeepSpeed deepspeed/runtime/engine.py (load_checkpoint).
_WITH_STEP = "latest_checkpointed_iteration.txt"


def select_checkpoint(
    run: RunDir, command: CommandConfig
) -> tuple[TrainerCheckpoint | None, tuple[PassedOver, ...]]:
    """Return the newest complete checkpoint that verifies, and the newer ones that do not."""
    entries = list_trainer_checkpoints(run, command)
    rejected = (SkipsRecord.find(run.skips) or SkipsRecord()).rejected
    until = time.monotonic() + VERIFY_S
    passed_over = []
    for index, entry in reversed([*enumerate(entries)]):
        # Without a completion file the trainer takes what is half-written.
        if not entry.complete and (command.names_checkpoint or command.completion_file):
            continue
        reason = _rejection(entry, rejected)
        if not reason and command.verify:
            reason = _fault(run, command, entry, entries[:index], until)
        if reason:
            passed = PassedOver(step=entry.step, path=str(entry.path), reason=reason)
            passed_over.append(passed)
        elif entry.complete:
            return entry, tuple(passed_over)
    return None, tuple(passed_over)


def _rejection(entry: TrainerCheckpoint, rejected: Sequence[RejectedCheckpoint]) -> str:
    for other in rejected:
        of_attempt = entry.changed_at >= other.since or entry.step == other.step
        if of_attempt and entry.changed_at <= other.until:
            return f"attempt {other.attempt}: {other.reason}"
    return ""


def _fault(
    run: RunDir,
    command: CommandConfig,
    entry: TrainerCheckpoint,
    older: Sequence[TrainerCheckpoint],
    until: float,
) -> str:
    verified = verify_checkpoint(entry.path, until)
    tracker = _tracker(run, command, entry.path)
    if not verified.faults and not verified.is_listed and tracker is not None:
        # A trainer writes the tracker last, and only that shows that no file is missing.
        named = _read(tracker)
        if any(other.complete and named == _name_of(other, tracker) for other in older):
            return f"{tracker.name} names {named}, and no list shows that its files are all there"
    return "; ".join(verified.faults)


def _tracker(run: RunDir, command: CommandConfig, path: Path) -> Path | None:
    """Return the tracker of a checkpoint; by its name if the recipe does not name it."""
    if command.tracker is None:
        trackers = (path.with_name(name) for name in (_WITH_STEP, "latest"))
        return next((tracker for tracker in trackers if tracker.is_file()), None)
    return Path(command.folder or "/", fill(command.tracker, {"run": run.path, "checkpoint": path}))


def _name_of(entry: TrainerCheckpoint, tracker: Path) -> str:
    return str(entry.step) if tracker.name == _WITH_STEP else entry.path.name


def _read(tracker: Path) -> str:
    with suppress(OSError):
        return read_limited(tracker, 4096).decode("utf-8", "replace").strip()
    return ""


def use_checkpoint(run: RunDir, command: CommandConfig, record: AttemptRecord) -> AttemptRecord:
    """Let the trainer find the checkpoint of an attempt; returns the record with what was moved.

    Raises:
        CheckpointError: None of the checkpoints verifies.
        StorageError: A tracker cannot be written, or a folder not moved.
    """
    if record.checkpoint_path is None:
        if record.passed_over:
            lines = "".join(f"\n  {entry.path}: {entry.reason}" for entry in record.passed_over)
            raise CheckpointError(
                f"none of the checkpoints verifies:{lines}\nrestore one of them, or move them away "
                "to start again from step 0; command.verify=false takes them as they are"
            )
        return record
    path = Path(record.checkpoint_path)
    chosen = TrainerCheckpoint(record.checkpoint_before or 0, path, True, 0.0)
    tracker = _tracker(run, command, path)
    is_link = "{checkpoint}" in (command.tracker or "")
    if tracker is not None and not is_link:
        name = _name_of(chosen, tracker)
        if _read(tracker) != name:
            with storage_errors(f"cannot write {tracker}, which must name {name}"):
                write_whole(tracker, name.encode())
    elif not command.names_checkpoint:
        passed_over = [_set_aside(run, record.attempt, entry) for entry in record.passed_over]
        record = record.model_copy(update={"passed_over": tuple(passed_over)})
        if tracker is not None and passed_over and not tracker.exists():
            with storage_errors(f"cannot make the link {tracker}"):
                tracker.symlink_to(path.name)
    return record


def _set_aside(run: RunDir, attempt: int, entry: PassedOver) -> PassedOver:
    """Move a checkpoint where its trainer does not look; none that is not this run's own."""
    path, folder = Path(entry.path), run.path.resolve()
    if folder not in path.resolve().parents:
        return entry
    target = run.set_aside / f"{attempt:03d}" / path.resolve().relative_to(folder)
    with storage_errors(f"cannot move {path} to {target}"):
        target.parent.mkdir(parents=True, exist_ok=True)
        path.rename(target)
    return entry.model_copy(update={"moved_to": str(target)})
