"""Replicas: copies of a run's checkpoints in a folder or any fsspec file system (s3://…).

<checkpoint.replica>/<run>/step_XXXXXXXX/ holds the files of the run's folder, the manifest last: a
replica with a manifest is complete. Its checksums are verified before it replaces a checkpoint.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from slurmllm.core.config.operation import CheckpointConfig
from slurmllm.core.errors import SlurmllmError, StorageError
from slurmllm.core.run.artifact_records import CheckpointManifest
from slurmllm.core.run.records import JobsRecord, first_problem
from slurmllm.core.run.rundir import RunDir, fsync_dir
from slurmllm.core.run.safe_files import untrusted_error
from slurmllm.train.checkpoint.folder import (
    MANIFEST,
    file_faults,
    fsync_file,
    publish,
    read_manifest,
)

_STEP = re.compile(r"/step_([0-9]{8,18})/?$")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Replica:
    """The replicas of one run. All methods raise a StorageError if the file system fails."""

    location: str  # `checkpoint.replica` as written in the recipe
    folder: str  # the run's folder, as the file system names it
    file_system: Any  # an fsspec file system

    def path(self, step: int, name: str = "") -> str:
        return f"{self.folder}/step_{step:08d}/{name}".removesuffix("/")

    def url(self, step: int) -> str:
        url: str = self.file_system.unstrip_protocol(self.path(step))
        return url.removeprefix("file://")

    def make_folder(self, group: str | None) -> None:
        """Make the run's folder on a local file system; StorageError if users outside `group` may
        write to it.
        """
        if "file" not in self.file_system.protocol:
            return
        with _storage_errors("use", self.folder):
            Path(self.folder).mkdir(parents=True, exist_ok=True)
            info = os.lstat(self.folder)
            why = untrusted_error(info, group) if stat.S_ISDIR(info.st_mode) else "it is a link"
            if why:
                why += "; `chmod go-w` it if it is yours, else choose another folder"
                raise PermissionError(errno.EPERM, why, self.folder)

    def steps(self) -> list[int]:
        """Return the steps of the complete replicas, oldest first."""
        return [step for step in self._folders() if self._complete(step)]

    def manifest(self, step: int) -> CheckpointManifest:
        path = self.path(step, MANIFEST)
        with _storage_errors("read", path):
            content = self.file_system.cat_file(path)
        try:
            return CheckpointManifest.model_validate_json(content)
        except ValidationError as error:
            raise StorageError(
                f"checkpoint.replica: {path} is damaged: {first_problem(error)}; remove that folder"
            ) from error

    def put(self, directory: Path) -> int:
        """Upload a checkpoint, in place of any replica of its step; return its size in bytes."""
        manifest = read_manifest(directory)
        target = self.path(manifest.step)
        with _storage_errors("write", target):
            if self.file_system.exists(target):  # incomplete, or saved again after a roll-back
                self._remove(manifest.step)
            for file in manifest.files:
                path = f"{target}/{file.path}"
                self.file_system.makedirs(path.rpartition("/")[0], exist_ok=True)
                self.file_system.put_file(str(directory / file.path), path)
                size = self.file_system.size(path)
                if size != file.bytes:  # some file systems report a short upload as success
                    raise OSError(f"{file.path} has {size} bytes there instead of {file.bytes}")
            # Last: a replica is complete once it has a manifest.
            self.file_system.put_file(str(directory / MANIFEST), f"{target}/{MANIFEST}")
        return sum(file.bytes for file in manifest.files)

    def retain(self, keep: int, since: float = 0.0) -> None:
        """Remove incomplete replicas, and complete ones except the `keep` most recently saved.

        By time, not step: after a roll-back a higher step may be older. A replica whose manifest
        cannot be read is not removed, with a warning; without a readable one nothing is removed.
        Those saved before `since` are of an older run of the same name, and stay.
        """
        saved_at = dict[int, float]()
        unreadable = set[int]()
        for step in self.steps():
            try:
                saved_at[step] = self.manifest(step).saved_at
            except StorageError as error:
                unreadable.add(step)
                log.warning("a replica is not removed: %s", error)
        earlier = {step for step, time_s in saved_at.items() if time_s < since}
        newest = sorted(saved_at.keys() - earlier, key=lambda step: saved_at[step])[-keep:]
        for step in self._folders():
            if newest and step not in (*newest, *unreadable, *earlier):
                with _storage_errors("remove", self.path(step)):
                    self._remove(step)

    def fetch(self, step: int, run: RunDir) -> None:
        """Restore a checkpoint in place from its replica; the run is unchanged if this raises."""
        target = run.checkpoint(step)
        temporary = target.with_name(f".{target.name}.fetched.tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        manifest = self.manifest(step)
        try:
            with _storage_errors("read", self.path(step)):
                for file in manifest.files:
                    path = temporary / file.path
                    path.parent.mkdir(parents=True, exist_ok=True)
                    self.file_system.get_file(self.path(step, file.path), str(path))
                    fsync_file(path)
                if faults := file_faults(temporary, manifest.files):
                    raise OSError("; ".join(faults))
                for folder in {(temporary / file.path).parent for file in manifest.files}:
                    fsync_dir(folder)
                manifest.save(temporary / MANIFEST)
                publish(temporary, target)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def _folders(self) -> list[int]:
        with _storage_errors("list", self.folder):
            self.file_system.invalidate_cache()  # other processes write there
            if not self.file_system.exists(self.folder):
                return []
            paths: list[str] = self.file_system.ls(self.folder, detail=False)
        return sorted(int(match[1]) for path in paths if (match := _STEP.search(path)))

    def _complete(self, step: int) -> bool:
        with _storage_errors("read", self.path(step)):
            return bool(self.file_system.exists(self.path(step, MANIFEST)))

    def _remove(self, step: int) -> None:
        # The manifest first, so that an interrupted removal leaves an incomplete replica.
        if self._complete(step):
            self.file_system.rm_file(self.path(step, MANIFEST))
        self.file_system.rm(self.path(step), recursive=True)


def open_replica(config: CheckpointConfig, run: str) -> Replica | None:
    """Open the recipe's replica, if any; StorageError if no installed file system can open it."""
    if (location := config.replica) is None:
        return None
    from fsspec.core import url_to_fs

    with _storage_errors("open", location):
        file_system, root = url_to_fs(location)
    return Replica(location, f"{root.rstrip('/')}/{run}", file_system)


@contextmanager
def _storage_errors(verb: str, path: str) -> Iterator[None]:
    try:
        yield
    except StorageError:  # of a nested block
        raise
    except Exception as error:  # each fsspec file system raises errors of its own
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise StorageError(f"checkpoint.replica: cannot {verb} {path}: {reason}") from error


@dataclass
class ReplicaCopier:
    """Background copies of checkpoints to the replica, one at a time, always the newest.

    `keep` replicas remain. `refuse_if_superseded` raises a SlurmllmError if a newer attempt owns
    the run; `on_copied` is called from the thread with step, seconds, bytes, and error message.
    """

    replica: Replica
    run: RunDir
    keep: int
    refuse_if_superseded: Callable[[], None]
    on_copied: Callable[[int, float, int, str | None], None]
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _pending: int | None = None
    _copying: int | None = None
    _thread: threading.Thread | None = None

    @property
    def in_use(self) -> tuple[int, ...]:
        """Steps of checkpoints being copied or next to be: retention must not remove them."""
        with self._changed:
            return tuple(step for step in (self._copying, self._pending) if step is not None)

    def copy(self, step: int) -> None:
        """Schedule a checkpoint of the run, in place of one that is still pending."""
        with self._changed:
            self._pending = step
            self._changed.notify_all()
        if self._thread is None:  # a daemon: a copy must not delay the end of the process
            self._thread = threading.Thread(target=self._copy_loop, name="replica", daemon=True)
            self._thread.start()

    def finish(self, limit_s: float) -> bool:
        """Wait up to `limit_s` for all copies; return whether they ended, failed or not."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._pending is None and self._copying is None, max(0.0, limit_s)
            )

    def _copy_loop(self) -> None:
        # Below the data loader and training; on Linux the niceness is the thread's own.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 15)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending is not None)
                step = self._pending
                self._copying = self._pending
                self._pending = None
            assert step is not None
            began = time.monotonic()
            num_bytes = 0
            fault = None
            try:
                self.refuse_if_superseded()
                num_bytes = self.replica.put(self.run.checkpoint(step))
                self.replica.retain(self.keep, JobsRecord.of(self.run).created_at)
            except SlurmllmError as error:  # reported; the next checkpoint is tried again
                fault = str(error)
            self.on_copied(step, time.monotonic() - began, num_bytes, fault)
            with self._changed:
                self._copying = None
                self._changed.notify_all()
