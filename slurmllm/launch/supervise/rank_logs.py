"""The logs of a node's workers: on the node's disk, collected into the run directory.

Rank 0 writes to the log of the stage. The others write to files on the disk of their node, so that
thousands of workers do not keep files open on the shared file system. The launcher copies them when
its workers have ended, before it writes the node's final record. If the node's disk cannot be
written, the workers write into the run directory.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from slurmllm.core.config.resolve import RunConfig
from slurmllm.core.errors import NodeError, StorageError
from slurmllm.core.run.records import AttemptRecord
from slurmllm.core.run.rundir import STAGES, RunDir, Stage, files_by_rank, storage_errors
from slurmllm.core.run.safe_files import (
    check_private_folder,
    open_append,
    open_lock,
    open_regular,
    os_error_text,
    write_whole,
)
from slurmllm.train.backends.environment import make_cache_folder, node_disk

MAX_LOG_BYTES = 64 << 20  # of a log in the run directory: the first BEGIN_BYTES and the end
BEGIN_BYTES = 1 << 20
# <stage>_<attempt>-<start of the attempt, Unix time in ms>-<node>: if a run is removed, another one
# may have its name and its attempt's number.
_FOLDER = re.compile(rf"^({'|'.join(STAGES)})_(\d{{3,}})-(\d+)-.+$")

log = logging.getLogger(__name__)


def take_lock(path: Path) -> BinaryIO:
    """Lock a file on this node's disk; OSError if another launcher holds the lock.

    It is held until the file is closed or this process ends: workers do not inherit it.
    """
    lock = open_lock(path)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise
    return lock


@dataclass
class RankLogs:
    """The logs of the workers that this launcher starts."""

    config: RunConfig
    run: RunDir
    record: AttemptRecord
    node: str
    _files: _LocalFiles | None = None
    _refused: bool = False

    @property
    def folder(self) -> Path | None:
        """The folder on the node's disk; None if the logs are in the run directory."""
        return None if self._files is None else self._files.folder

    def open(self, rank: int) -> int:
        """Return a descriptor of a worker's new log; StorageError if no folder takes it.

        Rank 0's is that of the stage, this process's own output.
        """
        if rank == 0:
            return os.dup(1)
        stage = self.record.stage
        number = self.record.attempt
        if not self._refused:
            try:
                if self._files is None:
                    base = _logs_folder(self.config, self.run)
                    folder = (
                        base
                        / f"{stage}_{number:03d}-{round(self.record.started_at * 1000)}-{self.node}"
                    )
                    with node_disk(f"make a folder in {base}"):
                        base.mkdir(mode=0o700, exist_ok=True)
                        check_private_folder(base)
                        folder.mkdir(mode=0o700, exist_ok=True)
                        self._files = _LocalFiles(folder, self.run, stage, number)
                return open_append(self._files.folder / f"rank_{rank:05d}.log")
            except (NodeError, OSError) as error:
                self._refused = True
                log.warning(
                    "the logs of %s are written to the run directory, not to its own disk: %s",
                    self.node,
                    os_error_text(error),
                )
        path = self.run.worker_log(stage, number, rank)
        with storage_errors(f"cannot write {path}"):
            return open_append(path)

    def collect(self) -> None:
        """After the workers have ended: copy all logs, then remove them unless a copy failed."""
        if self._files is not None:
            self._files.collect()
            self._files = None


@dataclass
class _LocalFiles:
    """The log files of one launcher on the node's disk; OSError if another launcher uses them."""

    folder: Path
    run: RunDir
    stage: Stage
    attempt: int

    def __post_init__(self) -> None:
        self.lock = take_lock(self.folder / "lock")

    def collect(self) -> bool:
        """Copy all logs, then remove them unless a copy failed; returns whether all were copied."""
        complete = True
        with self.lock:
            for rank, path in self.paths().items():
                target = self.run.worker_log(self.stage, self.attempt, rank)
                try:
                    _copy(path, target)
                except OSError as error:
                    complete = False
                    log.warning(
                        "cannot copy %s to %s: %s; it stays there until the next attempt",
                        path,
                        target.parent,
                        os_error_text(error),
                    )
            if complete:
                shutil.rmtree(self.folder, ignore_errors=True)
        return complete

    def paths(self) -> dict[int, Path]:
        """Return the logs by rank."""
        return files_by_rank(str(self.folder / "rank_"), ".log")


def _copy(path: Path, target: Path) -> None:
    """Copy a log that is not empty; of one over MAX_LOG_BYTES the middle is left out."""
    with open_regular(path, follow=False) as source:
        size = os.fstat(source.fileno()).st_size
        if size == 0:
            return
        content = source.read(min(size, BEGIN_BYTES))
        left_out = size - MAX_LOG_BYTES
        if left_out > 0:
            content += f"\n[{left_out} bytes left out]\n".encode()
            source.seek(left_out, os.SEEK_CUR)
        content += source.read(MAX_LOG_BYTES)
    write_whole(target, content, durable=False)


def collect_leftovers(config: RunConfig, run: RunDir, stage: Stage, attempt: int) -> None:
    """Collect the logs that killed launchers of earlier attempts left on this node."""
    try:
        base = _logs_folder(config, run)
        check_private_folder(base)
        folders = sorted(base.iterdir())
    except (NodeError, OSError):  # there are none, or not of this user
        return
    for folder in folders:
        match = _FOLDER.match(folder.name)
        # An attempt of this number or a later one may have just begun.
        if match is None or (match[1] == stage and int(match[2]) >= attempt):
            continue
        log_stage = cast("Stage", match[1])
        number = int(match[2])
        try:
            record = AttemptRecord.find(run.attempt(log_stage, number).record)
        except StorageError as error:  # it is not known whose logs they are
            log.warning("%s; the logs in %s wait for the next attempt", error, folder)
            continue
        with suppress(OSError):  # its launcher may live: with --local several use one disk
            files = _LocalFiles(folder, run, log_stage, number)
            if record is None or round(record.started_at * 1000) != int(match[3]):
                with files.lock:
                    shutil.rmtree(folder, ignore_errors=True)  # of a removed run
                continue
            paths = files.paths()
            if files.collect() and paths:
                log.info(
                    "collected the logs of %s, whose launcher was killed",
                    f"{len(paths)} workers of {log_stage} attempt {number}",
                )


def _logs_folder(config: RunConfig, run: RunDir) -> Path:
    cache = make_cache_folder(config, run)
    return cache.with_name(f"{cache.name}.logs")
