"""The checkpoints of a trainer of another project, as `command.checkpoints` describes them.

They are looked at from outside; `selection` verifies them before a resume. With `completion_file`
a checkpoint is complete once it holds that file; a file of `torch.save` with its table of contents,
which comes last; another one if it had not changed for QUIET_S when its attempt ended, or its
trainer finished, or left after the signal to save, or a later attempt finished or resumed from it,
or it is as large as a complete one: else it may have been killed while it saved.
"""

from __future__ import annotations

import glob
import os
import re
import shutil
import time
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from slurmllm.core.config.command import CommandConfig
from slurmllm.core.config.load import load
from slurmllm.core.config.operation import EvaluateConfig
from slurmllm.core.config.resolve import RunConfig
from slurmllm.core.errors import ConfigError, RunError, StorageError
from slurmllm.core.metrics.row_reader import last_rows, read_rows
from slurmllm.core.run.records import AttemptRecord, JobsRecord
from slurmllm.core.run.rundir import RunDir
from slurmllm.core.run.safe_files import open_regular
from slurmllm.train.checkpoint.holds import held_steps
from slurmllm.train.checkpoint.verification import verify_checkpoint

QUIET_S = 10.0
_FEW_ROWS = 1000
_MOST_FILES = 10_000  # of a checkpoint that are looked at
_STEP = "{step}"


class TrainerCheckpoint(NamedTuple):
    """A checkpoint of a trainer."""

    step: int
    path: Path
    complete: bool
    changed_at: float  # Unix time of the last change of one of its files, s


def list_trainer_checkpoints(
    run: RunDir,
    command: CommandConfig,
    *,
    newest_only: bool = False,
    closing: AttemptRecord | None = None,
) -> list[TrainerCheckpoint]:
    """Return the checkpoints of a run in the order of their steps, all or those of the last step.

    `closing` is an attempt's record with its end, in place of the one that is written. A pattern
    without {step} is a file that is written again and again; its step is the last one that
    was read before it changed.
    """
    if command.checkpoints is None:
        return []
    attempts = [] if command.completion_file else _attempts(run, closing)
    checkpoints: list[TrainerCheckpoint] = []
    unclear: dict[int, int] = {}  # index of a checkpoint → its bytes
    complete_bytes = set()
    matching = sorted(_matching(run, command), key=lambda entry: entry[1] or 0)
    if newest_only:
        matching = [entry for entry in matching if entry[1] == matching[-1][1]]
    for path, step in matching:
        completed_at: float | None = None
        if command.completion_file is not None:  # it saves a look at all other files
            with suppress(OSError):
                marks = (file.stat().st_mtime for file in path.glob(command.completion_file))
                completed_at = max(marks, default=None)
        changed_at = completed_at
        num_bytes = 0
        if changed_at is None or step is None:
            with suppress(OSError):  # removed meanwhile
                changed_at, num_bytes = _change(path)
        if changed_at is None:
            continue
        if step is None and (step := _step_at(run, changed_at)) is None:
            continue
        complete = completed_at is not None or _is_complete(path, changed_at, command, attempts)
        if complete:
            complete_bytes.add(num_bytes)
        elif complete is None:
            unclear[len(checkpoints)] = num_bytes
        checkpoints.append(TrainerCheckpoint(step, path, complete is True, changed_at))
    for index, num_bytes in unclear.items():
        entry = checkpoints[index]
        later = (a for a in attempts if a.started_at > entry.changed_at)
        # It is resumed from, or would have been written again before the end.
        used = any(a.ending == "done" or (a.first_step or 0) > entry.step for a in later)
        checkpoints[index] = entry._replace(complete=used or num_bytes in complete_bytes)
    return sorted(checkpoints, key=lambda entry: (entry.step, entry.changed_at))


def _attempts(run: RunDir, closing: AttemptRecord | None) -> list[AttemptRecord]:
    attempts: list[AttemptRecord] = []
    for attempt in run.attempts("train"):
        with suppress(StorageError):
            if (record := AttemptRecord.find(attempt.record)) is not None:
                if closing is not None and closing.attempt == record.attempt:
                    record = closing
                attempts.append(record)
    return attempts


def newest_complete(checkpoints: Sequence[TrainerCheckpoint]) -> TrainerCheckpoint | None:
    return next((checkpoint for checkpoint in reversed(checkpoints) if checkpoint.complete), None)


def saved_steps(run: RunDir, config: RunConfig, closing: AttemptRecord | None = None) -> list[int]:
    """Return the steps of a run's checkpoints, of its own trainer or of another project's."""
    if config.recipe.command is None:
        return run.checkpoint_steps()
    checkpoints = list_trainer_checkpoints(run, config.recipe.command, closing=closing)
    return [checkpoint.step for checkpoint in checkpoints if checkpoint.complete]


def command_of(run: RunDir) -> CommandConfig | None:
    """Return a run's command; None if it has none, or its configuration cannot be read."""
    with suppress(ConfigError):
        return load(run.config).recipe.command
    return None


def require_own_trainer(run: RunDir) -> None:
    """Raise RunError if the checkpoints of a run are those of a trainer of another project."""
    if command_of(run) is not None:
        raise RunError(
            f"{run.name}: its checkpoints are its trainer's, which slurmllm only lists "
            f"and verifies (`slurmllm checkpoint verify {run.name}`); use the trainer's own tools"
        )


def remove_old(
    run: RunDir, command: CommandConfig, keep: int, evaluate: EvaluateConfig | None = None
) -> list[Path]:
    """Remove all complete checkpoints of this run but the `keep` newest; return those removed.

    They are in its directory, through no link out of it, and have changed since it was submitted. A
    file without a step in its name is never removed. Without a completion file the newest one may
    still be written, slowly, and one more stays.
    """
    if command.checkpoints is None or _STEP not in command.checkpoints:
        return []
    begin = JobsRecord.of(run).created_at
    folder = run.path.resolve()
    complete = [
        entry
        for entry in list_trainer_checkpoints(run, command)
        if entry.complete and entry.changed_at >= begin and folder in entry.path.resolve().parents
    ]
    # A broken checkpoint is none of the `keep`. Only sizes and headers are checked: that is quick.
    first = len(complete)
    left = keep + (command.completion_file is None)
    while first and left:
        first -= 1
        path = complete[first].path
        left -= not (command.verify and verify_checkpoint(path, time.monotonic()).faults)
    removed = []
    held = held_steps(run, evaluate, {entry.step: entry.changed_at for entry in complete})
    for entry in complete[: first if not left else 0]:
        if entry.step in held:
            continue
        with suppress(OSError):
            if entry.path.is_dir() and not entry.path.is_symlink():
                shutil.rmtree(entry.path)
            else:
                entry.path.unlink()
            removed.append(entry.path)
    return removed


def _matching(run: RunDir, command: CommandConfig) -> Iterator[tuple[Path, int | None]]:
    """Yield the paths that match, each with the step in its name, if it has one."""
    assert command.checkpoints is not None
    path = str(run.path)
    special = {"{run}": (glob.escape(path), re.escape(path)), "*": ("*", "[^/]*")}
    special[_STEP] = "*", r"(?P<step>\d+)"
    pieces = re.split(r"(\{run\}|\{step\}|\*)", command.checkpoints)
    pairs = [special.get(piece) or (glob.escape(piece), re.escape(piece)) for piece in pieces]
    pattern, expression = ("".join(column) for column in zip(*pairs, strict=True))
    base = Path(command.folder or "/")
    for name in glob.glob(pattern, root_dir=base):  # noqa: PTH207 - the pattern may be absolute
        if match := re.fullmatch(expression, name):
            yield base / name, int(match["step"]) if _STEP in command.checkpoints else None


def unmatched_checkpoints(run: RunDir, command: CommandConfig) -> str:
    """Return that nothing matches `checkpoints`, and what is there; empty if something does."""
    if command.checkpoints is None or next(_matching(run, command), None) is not None:
        return ""
    from slurmllm.core.metrics.following import no_match  # numpy, which `submit` does without

    return no_match(
        Path(command.folder or "/", command.checkpoints.replace("{run}", str(run.path)))
    )


def _change(path: Path) -> tuple[float, int]:
    """Return the last change of a file or folder, Unix time in s, and its bytes."""
    entries = [path.stat()]
    files = (Path(folder, name) for folder, dirs, names in os.walk(path) for name in dirs + names)
    for file in islice(files, _MOST_FILES):
        with suppress(OSError):
            entries.append(file.stat())
    return max(entry.st_mtime for entry in entries), sum(entry.st_size for entry in entries)


def _is_complete(
    path: Path, changed_at: float, command: CommandConfig, attempts: Iterable[AttemptRecord]
) -> bool | None:
    """Return whether a checkpoint is complete; None if its attempt may have ended within it."""
    if command.completion_file is not None:
        return False
    with suppress(OSError), open_regular(path) as stream:
        if stream.read(4) == b"PK\x03\x04":  # a zip archive, as of torch.save
            return zipfile.is_zipfile(path)
    writer = next((a for a in reversed([*attempts]) if a.started_at <= changed_at), None)
    ending, ended_at = (writer.ending, writer.ended_at) if writer is not None else (None, None)
    left = ending == "advance_signal" and command.stop_signal is not None
    quiet = (ended_at or time.time()) - changed_at >= QUIET_S
    return ending == "done" or left or quiet or None


def _step_at(run: RunDir, time_s: float) -> int | None:
    """Return the last step that was read before a time."""
    for path in reversed(run.metrics_files()):
        step: int | None = None
        with suppress(RunError, OSError):
            # From the end, where it mostly is: this is asked every few seconds.
            for count in (_FEW_ROWS, 64 * _FEW_ROWS):
                for row in reversed(last_rows(path, count)):
                    if row.get("time", time_s + 1) <= time_s:
                        return int(row["step"])
            for _, row in read_rows(path):  # it was saved long ago
                if row.get("time", time_s + 1) <= time_s:
                    step = int(row["step"])
        if step is not None:
            return step
    return None
