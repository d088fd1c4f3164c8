"""Selects the checkpoint from which another project's trainer resumes: the newest that verifies.

A checkpoint that made the loss wrong after a resume is passed over too. For a trainer that looks
for the newest checkpoint itself, its tracker (the file that names the newest) is rewritten; without
one, broken newer checkpoints are moved into the run's `set_aside`. Nothing is deleted.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from slurmllm.core.config.command import CommandConfig, fill
from slurmllm.core.errors import CheckpointError
from slurmllm.core.format import format_lines
from slurmllm.core.run.records import AttemptRecord, PassedOver, SkipsRecord
from slurmllm.core.run.rundir import RunDir, storage_errors
from slurmllm.core.run.safe_files import read_limited, write_whole
from slurmllm.train.checkpoint.foreign import TrainerCheckpoint, list_trainer_checkpoints
from slurmllm.train.checkpoint.verification import VERIFY_S, verify_checkpoint

# NVIDIA/Megatron-LM megatron/training/checkpointing.py (get_checkpoint_tracker_filename); others
# contain a folder's name, as deepspeedai/DeepSpeed deepspeed/runtime/engine.py (load_checkpoint).
_WITH_STEP = "latest_checkpointed_iteration.txt"


def select_checkpoint(
    run: RunDir, command: CommandConfig
) -> tuple[TrainerCheckpoint | None, tuple[PassedOver, ...]]:
    """Return the newest complete checkpoint that verifies, and the newer ones that do not."""
    entries = list_trainer_checkpoints(run, command)
    rejected = SkipsRecord.of(run).rejected
    until = time.monotonic() + VERIFY_S
    passed_over = list[PassedOver]()
    while entries:
        entry = entries.pop()
        # Without a completion file the trainer takes what is half-written.
        if not entry.complete and (command.names_checkpoint or command.completion_file):
            continue
        faults: Sequence[str] = [
            f"attempt {rejection.attempt}: {rejection.reason}"
            for rejection in rejected
            if entry.step >= rejection.onset and entry.changed_at <= rejection.until
        ]
        if not faults and command.verify:
            faults = _faults(run, command, entry, entries, until)
        if faults:
            passed_over.append(
                PassedOver(step=entry.step, path=str(entry.path), reason="; ".join(faults))
            )
        elif entry.complete:
            return entry, tuple(passed_over)
    return None, tuple(passed_over)


def _faults(
    run: RunDir,
    command: CommandConfig,
    entry: TrainerCheckpoint,
    older: Sequence[TrainerCheckpoint],
    until: float,
) -> Sequence[str]:
    faults, _, is_listed = verify_checkpoint(entry.path, until)
    tracker, _ = _tracker(run, command, entry.step, entry.path)
    if tracker is None or faults or is_listed:
        return faults
    # A trainer writes the tracker last: without a list of files, only it shows that all are there.
    stored = tracker, _read(tracker)
    if any(_tracker(run, command, *old[:2]) == stored for old in older if old.complete):
        faults = (f"{tracker.name} still names {stored[1]}, so files may be missing here",)
    return faults


def _tracker(run: RunDir, command: CommandConfig, step: int, path: Path) -> tuple[Path | None, str]:
    """Return the path and content of a checkpoint's tracker, found by its name if not set."""
    if command.tracker is not None:
        name = fill(command.tracker, {"run": run.path, "checkpoint": path})
        tracker: Path | None = Path(command.folder or "/", name)
    else:
        trackers = (path.with_name(name) for name in (_WITH_STEP, "latest"))
        tracker = next(filter(Path.is_file, trackers), None)
    with_step = tracker is not None and tracker.name == _WITH_STEP
    return tracker, str(step) if with_step else path.name


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
            raise CheckpointError(
                f"none of the checkpoints verifies:{format_lines(record.passed_over)}\n"
                "restore one of them, or move all away to start again from step 0; "
                "command.verify=false uses them unverified"
            )
        return record
    path = Path(record.checkpoint_path)
    tracker, content = _tracker(run, command, record.checkpoint_before or 0, path)
    is_link = "{checkpoint}" in (command.tracker or "")
    if tracker is not None and not is_link:
        if _read(tracker) != content:
            with storage_errors(f"cannot write {tracker}, which must name {content}"):
                write_whole(tracker, content.encode())
    elif not command.names_checkpoint:
        passed_over = tuple(_set_aside(run, record.attempt, entry) for entry in record.passed_over)
        record = record.model_copy(update={"passed_over": passed_over})
        if tracker is not None and passed_over and not tracker.exists():
            with storage_errors(f"cannot make the link {tracker}"):
                tracker.symlink_to(path.name)
    return record


def _set_aside(run: RunDir, attempt: int, entry: PassedOver) -> PassedOver:
    """Move a checkpoint where its trainer does not look, if it is in the run's directory."""
    path, folder = Path(entry.path), run.path.resolve()
    if folder not in path.resolve().parents:
        more = f"; not moved, as it is outside {folder}; its trainer may still load it"
        return entry.model_copy(update={"reason": entry.reason + more})
    target = run.set_aside / f"{attempt:03d}" / path.resolve().relative_to(folder)
    with storage_errors(f"cannot move {path} to {target}"):
        target.parent.mkdir(parents=True, exist_ok=True)
        path.rename(target)
    return entry.model_copy(update={"moved_to": str(target)})
