"""The logs of a node's workers: on the node's own disk, collected into the run directory.

Rank 0 writes to the log of the stage. The others write to files on the disk of their node, so that
thousands of workers do not keep files open on the shared file system. The launcher collects them:

- of a worker that fails, at once;
- of workers that `slurmllm logs` asks for (files in the attempt's `log_requests`), every MIRROR_S
  until the attempt ends;
- of all, when the attempt ends, before the node's record shows how the workers ended. Files without
  content are left out.

If a launcher is killed, its files stay, and the next launcher of the run on that node collects
them. If the node's disk refuses, the workers write into the run directory.
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
from typing import BinaryIO

from slurmllm.backends.environment import make_cache_folder, node_disk
from slurmllm.config.resolve import RunConfig
from slurmllm.errors import NodeError, StorageError
from slurmllm.records import AttemptRecord
from slurmllm.rundir import STAGES, RunDir, Stage
from slurmllm.safe_files import (
    check_private_folder,
    open_append,
    open_folder,
    open_lock,
    open_regular,
    reason,
)

MIRROR_S = 2.0  # interval between copies of a log that is asked for
MOST_BYTES = 64 << 20  # of a log that is copied at a time: its beginning and its end
BEGIN_BYTES = 1 << 20
_BLOCK_BYTES = 1 << 20
_LOCK = "lock"
# <stage>_<attempt>-<start of the attempt, Unix time in ms>-<node>: if a run is removed, another one
# may have its name and its attempt's number.
_FOLDER = re.compile(r"^(?P<stage>[a-z]+)_(?P<attempt>\d{3,})-(?P<started>\d+)-.+$")
_LOG = re.compile(r"^rank_(?P<rank>\d{5,})(?:\.log)?$")

log = logging.getLogger(__name__)


class RankLogs:
    """The logs of the workers that this launcher starts.

    Args:
        look_s: Interval between looks for requests, s.
    """

    def __init__(
        self, config: RunConfig, run: RunDir, record: AttemptRecord, node: str, look_s: float
    ) -> None:
        self._config, self._run, self._record, self._node = config, run, record, node
        self._attempt = run.attempt(record.stage, record.attempt)
        self._look_s = look_s
        self._next_look = self._next_copy = 0.0
        self._requested: frozenset[int] = frozenset()
        self._files: _LocalFiles | None = None
        self._lock: BinaryIO | None = None
        self._refused = False

    def open(self, rank: int) -> int:
        """Return a descriptor of a worker's new log.

        Raises:
            OSError: The node's disk refuses, and the run directory too.
        """
        if not self._refused:
            try:
                if self._files is None:
                    self._files = self._make_folder()
                return self._files.open_new(rank)
            except (NodeError, OSError) as error:
                self._refused = True
                why = reason(error) if isinstance(error, OSError) else str(error)
                log.warning(
                    "the logs of %s are written to the run directory, not to its own disk: %s",
                    self._node, why,
                )  # fmt: skip
        return open_append(self._run.worker_log(self._record.stage, self._record.attempt, rank))

    def _make_folder(self) -> _LocalFiles:
        base = _logs_folder(self._config, self._run)
        stage, number = self._record.stage, self._record.attempt
        with node_disk(f"make a folder in {base}"):
            base.mkdir(mode=0o700, exist_ok=True)
            check_private_folder(base)
            started = _milliseconds(self._record)
            folder = base / f"{stage}_{number:03d}-{started}-{self._node}"
            folder.mkdir(mode=0o700, exist_ok=True)
            # Held as long as this process lives and by no other: workers do not inherit it.
            self._lock = open_lock(folder / _LOCK)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return _LocalFiles(folder, self._run, stage, number)

    def copy(self, ranks: Iterable[int]) -> None:
        """Copy what is new in the logs of some workers, such as those that failed."""
        if self._files is not None:
            self._files.copy(ranks)

    def update(self) -> None:
        """Look for requests, and copy the logs that are asked for, if it is time."""
        now = time.monotonic()
        if self._files is None or now < min(self._next_look, self._next_copy):
            return
        if now >= self._next_look:
            self._next_look = now + self._look_s
            with suppress(OSError):
                self._requested = self._read_requests()
        self._next_copy = now + MIRROR_S if self._requested else self._next_look
        self._files.copy(self._requested, empty_too=True)

    def _read_requests(self) -> frozenset[int]:
        assert self._files is not None
        names = {entry.name for entry in self._attempt.log_requests.iterdir()}
        if self._attempt.log_request(None).name in names:
            return frozenset(self._files.ranks)
        matches = filter(None, map(_LOG.match, names))
        return frozenset(int(match["rank"]) for match in matches) & self._files.ranks

    def collect(self) -> None:
        """Copy all logs and remove them from the node's disk; after the workers have ended.

        If the run directory refuses, they stay for the next launcher on this node.
        """
        if self._files is None:
            return
        if self._files.copy(self._files.ranks):
            shutil.rmtree(self._files.folder, ignore_errors=True)
        self._files = None
        if self._lock is not None:
            self._lock.close()


class _LocalFiles:
    """The log files of one launcher on the node's disk, and how much of each was copied."""

    def __init__(self, folder: Path, run: RunDir, stage: Stage, attempt: int) -> None:
        self.folder = folder
        self._target = run.worker_log(stage, attempt, 0).parent
        self._copied: dict[int, int | None] = {}  # rank → bytes; None: as many as the copy has
        self._created: set[int] = set()  # copies that exist

    @property
    def ranks(self) -> frozenset[int]:
        return frozenset(self._copied)

    def open_new(self, rank: int) -> int:
        descriptor = open_append(self._path(rank))
        self._copied[rank] = 0
        return descriptor

    def find(self) -> None:
        """Take over the files of a launcher that has ended, which may have copied parts."""
        for entry in self.folder.iterdir():
            if match := _LOG.match(entry.name):
                self._copied[int(match["rank"])] = None

    def copy(self, ranks: Iterable[int], *, empty_too: bool = False) -> bool:
        """Append to the copies what they lack; returns whether all of it was copied."""
        target: int | None = None
        complete = True
        try:
            for rank in sorted(self.ranks.intersection(ranks)):
                try:
                    with open_regular(self._path(rank), follow=False) as stream:
                        size = os.fstat(stream.fileno()).st_size
                        done = self._copied[rank]
                        missing = empty_too and rank not in self._created
                        if size == (done or 0) and not missing:
                            continue
                        if target is None:
                            target = open_folder(self._target)
                        self._copied[rank] = _append(stream, size, target, self._name(rank), done)
                        self._created.add(rank)
                except OSError as error:
                    complete = False
                    if not empty_too:  # of a request: it is repeated
                        log.warning(
                            "cannot copy %s to %s: %s; it stays there until the next attempt",
                            self._path(rank), self._target, reason(error),
                        )  # fmt: skip
        finally:
            if target is not None:
                os.close(target)
        return complete

    def _path(self, rank: int) -> Path:
        return self.folder / self._name(rank)

    def _name(self, rank: int) -> str:
        return f"rank_{rank:05d}.log"


def _append(source: BinaryIO, size: int, folder: int, name: str, done: int | None) -> int:
    """Append the bytes from `done` to `size` to a file in an open folder; returns the new `done`.

    Of more than MOST_BYTES the middle is left out, which a line says.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with os.fdopen(os.open(name, flags, 0o644, dir_fd=folder), "ab", buffering=0) as target:
        at = min(os.fstat(target.fileno()).st_size, size) if done is None else done
        parts = [(at, size)]
        if size - at > MOST_BYTES:
            parts = [(at, at + BEGIN_BYTES), (size - MOST_BYTES + BEGIN_BYTES, size)]
        for begin, end in parts:
            if begin > at:
                target.write(f"\n[{begin - at} bytes left out]\n".encode())
            source.seek(begin)
            at = begin
            while at < end and (block := source.read(min(_BLOCK_BYTES, end - at))):
                while block:
                    written = target.write(block)
                    at += written
                    block = block[written:]
    return at


def collect_leftovers(config: RunConfig, run: RunDir, stage: Stage, attempt: int) -> None:
    """Collect the logs that killed launchers of earlier attempts left on this node."""
    try:
        base = _logs_folder(config, run)
        check_private_folder(base)
        entries = sorted(base.iterdir())
    except (NodeError, OSError):  # there are none, or not of this user
        return
    for folder in entries:
        match = _FOLDER.match(folder.name)
        known = next((name for name in STAGES if match and match["stage"] == name), None)
        if match is None or known is None:
            continue
        number = int(match["attempt"])
        if known == stage and number >= attempt:  # it may have just been made
            continue
        with suppress(OSError), open_lock(folder / _LOCK) as lock:
            # Free if its launcher has ended: with --local several use one disk.
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            files = _LocalFiles(folder, run, known, number)
            record = None
            with suppress(StorageError):
                record = AttemptRecord.find(run.attempt(known, number).record)
            if record is not None and str(_milliseconds(record)) == match["started"]:
                files.find()
                if not files.copy(files.ranks):
                    continue
                log.info(
                    "collected the logs of %d workers of %s attempt %d, whose launcher was killed",
                    len(files.ranks), known, number,
                )  # fmt: skip
            shutil.rmtree(folder, ignore_errors=True)


def _logs_folder(config: RunConfig, run: RunDir) -> Path:
    """The folder for the logs of a run's workers on this node, in the user's private folder."""
    cache = make_cache_folder(config, run)
    return cache.with_name(f"{cache.name}.logs")


def _milliseconds(record: AttemptRecord) -> int:
    return round(record.started_at * 1000)
