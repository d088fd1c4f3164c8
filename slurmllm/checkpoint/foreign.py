"""The checkpoints of a trainer of another project, as `command.checkpoints` describes them.

They are looked at from outside: nothing of them is read, changed or moved. With `completion_file`
a checkpoint is complete once it holds that file; a file of `torch.save` with its table of contents,
which comes last; another one if it had not changed for QUIET_S when its attempt ended, or its
attempt ended by itself.
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

from slurmllm.config.command import CommandConfig
from slurmllm.config.load import load
from slurmllm.config.resolve import RunConfig
from slurmllm.errors import ConfigError, RunError, StorageError
from slurmllm.metrics.row_reader import read_rows
from slurmllm.run.records import AttemptRecord
from slurmllm.run.rundir import RunDir
from slurmllm.run.safe_files import open_regular

QUIET_S = 10.0
_MOST_FILES = 10_000  # of a checkpoint that are looked at
_STEP = "{step}"
_BY_ITSELF = ("done", "advance_signal", "code_error", "bad_configuration", "divergence")


class TrainerCheckpoint(NamedTuple):
    """A checkpoint of a trainer."""

    step: int
    path: Path
    complete: bool
    changed_at: float  # Unix time of the last change of one of its files, s


def list_trainer_checkpoints(
    run: RunDir, command: CommandConfig, *, newest_only: bool = False
) -> list[TrainerCheckpoint]:
    """Return the checkpoints of a run, in the order of their steps; with all or the last one.

    A pattern without {step} is a file that is written again and again: its step is the last one
    that was read before it changed.
    """
    if command.checkpoints is None:
        return []
    attempts = _attempts(run)
    checkpoints = []
    matching = sorted(_matching(run, command), key=lambda entry: entry[1] or 0)
    for path, step in matching[-1:] if newest_only else matching:
        changed_at = _changed_at(path)
        if changed_at is None:  # removed meanwhile
            continue
        if step is None and (step := _step_at(run, changed_at)) is None:
            continue
        complete = _is_complete(path, changed_at, command.completion_file, attempts)
        checkpoints.append(TrainerCheckpoint(step, path, complete, changed_at))
    return sorted(checkpoints)


def newest_complete(checkpoints: Sequence[TrainerCheckpoint]) -> TrainerCheckpoint | None:
    return next((checkpoint for checkpoint in reversed(checkpoints) if checkpoint.complete), None)


def saved_steps(run: RunDir, config: RunConfig) -> list[int]:
    """Return the steps of a run's checkpoints, of its own trainer or of another project's."""
    if config.recipe.command is None:
        return run.checkpoint_steps()
    checkpoints = list_trainer_checkpoints(run, config.recipe.command)
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
            f"{run.name}: its checkpoints are its trainer's, and slurmllm only lists them "
            f"(`slurmllm checkpoint list {run.name}`); use the trainer's own tools"
        )


def remove_old(run: RunDir, command: CommandConfig, keep: int) -> list[Path]:
    """Remove all complete checkpoints but the `keep` newest; returns those removed.

    What has no step in its name is one file, which is never removed.
    """
    if command.checkpoints is None or _STEP not in command.checkpoints:
        return []
    complete = [entry for entry in list_trainer_checkpoints(run, command) if entry.complete]
    removed = []
    for entry in complete[:-keep]:
        with suppress(OSError):
            if entry.path.is_dir() and not entry.path.is_symlink():
                shutil.rmtree(entry.path)
            else:
                entry.path.unlink()
            removed.append(entry.path)
    return removed


def _attempts(run: RunDir) -> list[AttemptRecord]:
    records = []
    for attempt in run.attempts("train"):
        with suppress(StorageError):
            if (record := AttemptRecord.find(attempt.record)) is not None:
                records.append(record)
    return records


def _matching(run: RunDir, command: CommandConfig) -> Iterator[tuple[Path, int | None]]:
    """Yield the paths that match, each with the step in its name, if it has one."""
    assert command.checkpoints is not None
    path = str(run.path)
    special = {"{run}": (glob.escape(path), re.escape(path)), "*": ("*", "[^/]*")}
    special[_STEP] = "*", r"(?P<step>\d+)"
    pieces = re.split(r"(\{run\}|\{step\}|\*)", command.checkpoints)
    pairs = [special.get(piece) or (glob.escape(piece), re.escape(piece)) for piece in pieces]
    pattern, expression = ("".join(part) for part in zip(*pairs, strict=True))
    base = Path(command.folder or "/")
    for name in glob.glob(pattern, root_dir=base):  # noqa: PTH207 - the pattern may be absolute
        if match := re.fullmatch(expression, name):
            yield base / name, int(match["step"]) if _STEP in command.checkpoints else None


def _changed_at(path: Path) -> float | None:
    try:
        times = [path.stat().st_mtime]
    except OSError:
        return None
    if path.is_dir():
        for file in islice(_files(path), _MOST_FILES):
            with suppress(OSError):
                times.append(file.stat().st_mtime)
    return max(times)


def _files(folder: Path) -> Iterator[os.DirEntry[str]]:
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            yield entry
            if entry.is_dir(follow_symlinks=False):
                yield from _files(Path(entry.path))


def _is_complete(
    path: Path, changed_at: float, completion_file: str | None, attempts: Iterable[AttemptRecord]
) -> bool:
    if completion_file is not None:
        return next(path.glob(completion_file), None) is not None
    if _begins_as_archive(path):
        return zipfile.is_zipfile(path)
    writer = next((a for a in reversed([*attempts]) if a.started_at <= changed_at), None)
    if writer is None or writer.ended_at is None:
        return time.time() - changed_at >= QUIET_S
    return writer.ended_at - changed_at >= QUIET_S or writer.ending in _BY_ITSELF


def _begins_as_archive(path: Path) -> bool:
    """Whether a path is a file of `torch.save`: a zip archive."""
    with suppress(OSError), open_regular(path) as stream:
        return stream.read(4) == b"PK\x03\x04"
    return False


def _step_at(run: RunDir, time_s: float) -> int | None:
    """Return the last step that was read before a time."""
    step: int | None = None
    for path in run.metrics_files():
        with suppress(RunError, OSError):
            for _, row in read_rows(path):
                if row.get("time", time_s + 1) <= time_s:
                    step = int(row["step"])
    return step
