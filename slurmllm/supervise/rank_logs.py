"""The logs of a node's workers: on the node's disk, collected into the run directory.

Rank 0 writes to the log of the stage. The others write to files on the disk of their node, so that
thousands of workers do not keep files open on the shared file system. The launcher copies requested
logs during the attempt and all at its end (docs/status.md), before it writes the node's final
record. If the node's disk cannot be written, the workers write into the run directory.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import cast

from slurmllm.backends.environment import make_cache_folder, node_disk
from slurmllm.config.resolve import RunConfig
from slurmllm.errors import NodeError, StorageError
from slurmllm.run.records import AttemptRecord
from slurmllm.run.rundir import STAGES, RunDir, Stage
from slurmllm.run.safe_files import (
    check_private_folder,
    open_append,
    open_lock,
    open_regular,
    os_error_text,
    read_limited,
    write_whole,
)

MIRROR_S = 2.0  # interval between copies of a log that is asked for
MOST_BYTES = 64 << 20  # of one log per copy: the first BEGIN_BYTES and the end
BEGIN_BYTES = 1 << 20
# <stage>_<attempt>-<start of the attempt, Unix time in ms>-<node>: if a run is removed, another one
# may have its name and its attempt's number.
_FOLDER = re.compile(rf"^({'|'.join(STAGES)})_(\d{{3,}})-(\d+)-.+$")
_LOG = re.compile(r"^rank_(\d{5,})(?:\.log)?$")  # a log, or a request for it

log = logging.getLogger(__name__)


class RankLogs:
    """The logs of the workers that this launcher starts; `look_s`: seconds between checks for
    requests.
    """

    def __init__(
        self, config: RunConfig, run: RunDir, record: AttemptRecord, node: str, look_s: float
    ) -> None:
        self._config, self._run, self._record, self._node = config, run, record, node
        self._look_s, self._next_look = look_s, 0.0
        self._files: _LocalFiles | None = None
        self._refused = False

    def open(self, rank: int) -> int:
        """Return a descriptor of a worker's new log; StorageError if no folder takes it."""
        stage, number = self._record.stage, self._record.attempt
        if not self._refused:
            try:
                if self._files is None:
                    base = _logs_folder(self._config, self._run)
                    start = f"{round(self._record.started_at * 1000)}-{self._node}"
                    folder = base / f"{stage}_{number:03d}-{start}"
                    with node_disk(f"make a folder in {base}"):
                        base.mkdir(mode=0o700, exist_ok=True)
                        check_private_folder(base)
                        folder.mkdir(mode=0o700, exist_ok=True)
                        self._files = _LocalFiles(folder, self._run, stage, number)
                return self._files.open_new(rank)
            except (NodeError, OSError) as error:
                self._refused = True
                cause = os_error_text(error) if isinstance(error, OSError) else str(error)
                target = "are written to the run directory, not to its own disk"
                log.warning("the logs of %s %s: %s", self._node, target, cause)
        path = self._run.worker_log(stage, number, rank)
        try:
            return open_append(path)
        except OSError as error:
            raise StorageError(f"cannot write {path}: {os_error_text(error)}") from error

    def copy(self, ranks: Iterable[int]) -> None:
        if self._files is not None:
            self._files.copy(ranks)

    def update(self) -> None:
        """Look for requests, and copy the logs that are asked for, if it is time."""
        if self._files is None or time.monotonic() < self._next_look:
            return
        attempt, names = self._run.attempt(self._record.stage, self._record.attempt), set[str]()
        with suppress(OSError):
            names = {entry.name for entry in attempt.log_requests.iterdir()}
        ranks = set(self._files.copied)
        if attempt.log_request(None).name not in names:  # a request for all ranks
            ranks &= _ranks(names)
        self._files.copy(ranks, requested=True)
        interval_s = min(MIRROR_S, self._look_s) if ranks else self._look_s
        self._next_look = time.monotonic() + interval_s

    def collect(self) -> None:
        """After the workers have ended: copy all logs, then remove them unless a copy failed."""
        if self._files is not None:
            self._files.collect()
            self._files = None


class _LocalFiles:
    """The log files of one launcher on the node's disk; OSError if another launcher uses them."""

    def __init__(self, folder: Path, run: RunDir, stage: Stage, attempt: int) -> None:
        # rank → size of the log when this process last copied it completely; -1: it has not yet
        self.copied: dict[int, int] = {}
        # rank → bytes left out of the copy, minus the length of the lines that say so
        self._absent: dict[int, int] = {}
        self._folder, self._run, self._stage, self._attempt = folder, run, stage, attempt
        # Held as long as this process lives and by no other: workers do not inherit it.
        self.lock = open_lock(folder / "lock")
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.lock.close()
            raise

    def open_new(self, rank: int) -> int:
        descriptor = open_append(self._path(rank))
        self.copied[rank] = -1
        return descriptor

    def register(self) -> None:
        """Register the files of a launcher that has ended, which may have copied parts."""
        self.copied = dict.fromkeys(_ranks(entry.name for entry in self._folder.iterdir()), -1)

    def copy(self, ranks: Iterable[int], *, requested: bool = False) -> bool:
        """Append to the copies what they lack; returns whether all of it was copied.

        `requested`: logs without content are copied too, and errors are not reported, because the
        copy is repeated.
        """
        complete = True
        for rank in sorted(self.copied.keys() & ranks):
            try:
                self._append(rank, requested)
            except OSError as error:
                complete = False
                if not requested:
                    fate = f"{os_error_text(error)}; it stays there until the next attempt"
                    target = self._target(rank).parent
                    log.warning("cannot copy %s to %s: %s", self._path(rank), target, fate)
        return complete

    def collect(self) -> bool:
        """Copy all logs, then remove them unless a copy failed."""
        with self.lock:
            complete = self.copy(self.copied)
            if complete:
                shutil.rmtree(self._folder, ignore_errors=True)
        return complete

    def _append(self, rank: int, empty_too: bool) -> None:
        """Append what is new; of more than MOST_BYTES the middle is left out, which a line says."""
        with open_regular(self._path(rank), follow=False) as source:
            size = os.fstat(source.fileno()).st_size
            if size == self.copied[rank] or (size == 0 and not empty_too):
                return
            with os.fdopen(open_append(self._target(rank)), "ab") as target:
                # Where the copy ends: an earlier copying may have failed or been killed halfway.
                skipped = self._path(rank).with_suffix(".skipped")
                if rank not in self._absent:
                    with suppress(OSError, ValueError):
                        self._absent[rank] = int(read_limited(skipped, 32))
                begin = target.tell() + self._absent.get(rank, 0)
                source.seek(begin)
                if (left_out := size - begin - MOST_BYTES) > 0:
                    line = f"\n[{left_out} bytes left out]\n".encode()
                    absent = begin - target.tell() + left_out - len(line)
                    target.write(source.read(BEGIN_BYTES))
                    target.flush()
                    self._absent[rank] = absent
                    with suppress(OSError):  # only now: this process may end anywhere
                        write_whole(skipped, str(absent).encode(), durable=False)
                    target.write(line)
                    source.seek(left_out, os.SEEK_CUR)
                target.write(source.read(max(size - source.tell(), 0)))
        self.copied[rank] = size

    def _path(self, rank: int) -> Path:
        return self._folder / f"rank_{rank:05d}.log"

    def _target(self, rank: int) -> Path:
        return self._run.worker_log(self._stage, self._attempt, rank)


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
        of_stage, number = cast("Stage", match[1]), int(match[2])
        try:
            record = AttemptRecord.find(run.attempt(of_stage, number).record)
        except StorageError as error:  # it is not known whose logs they are
            log.warning("%s; the logs in %s wait for the next attempt", error, folder)
            continue
        with suppress(OSError):  # its launcher may live: with --local several use one disk
            files = _LocalFiles(folder, run, of_stage, number)
            if record is not None and round(record.started_at * 1000) == int(match[3]):
                files.register()
            if files.collect() and files.copied:
                workers = f"{len(files.copied)} workers of {of_stage} attempt {number}"
                log.info("collected the logs of %s, whose launcher was killed", workers)


def _ranks(names: Iterable[str]) -> set[int]:
    return {int(match[1]) for match in map(_LOG.match, names) if match}


def _logs_folder(config: RunConfig, run: RunDir) -> Path:
    cache = make_cache_folder(config, run)
    return cache.with_name(f"{cache.name}.logs")
