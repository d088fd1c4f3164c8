"""A second place for checkpoints: a folder or whatever fsspec has a URL for (s3://…).

<second tier>/<run>/step_XXXXXXXX/ holds the files of the run's folder, the manifest last: where it
is, the checkpoint is whole. What comes back is checked against it before it is a checkpoint again.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmllm.checkpoint.manifest import MANIFEST, read_manifest
from slurmllm.config.recipe import CheckpointConfig
from slurmllm.errors import SlurmllmError, StorageError
from slurmllm.records import CheckpointManifest
from slurmllm.rundir import RunDir, fsync_dir

_STEP = re.compile(r"^step_(\d{8,})$")
_CHUNK_BYTES = 16 * 2**20


@dataclass(frozen=True)
class Replica:
    """The second place of one run.

    Attributes:
        location: As the recipe has it.
        folder: The run's, as the file system names it.
        file_system: fsspec's.
    """

    location: str
    folder: str
    file_system: Any

    def path(self, step: int, name: str = "") -> str:
        """A checkpoint's folder there, or one of its files."""
        folder = f"{self.folder}/step_{step:08d}"
        return f"{folder}/{name}" if name else folder

    def url(self, step: int) -> str:
        """A checkpoint's folder there, for people and programs."""
        url: str = self.file_system.unstrip_protocol(self.path(step))
        return url.removeprefix("file://")

    def steps(self) -> list[int]:
        """The steps of the checkpoints that are whole there, oldest first.

        Raises:
            StorageError: the place cannot be reached.
        """
        return [step for step in self._folders() if self._whole(step)]

    def manifest(self, step: int) -> CheckpointManifest:
        """The manifest of a checkpoint there.

        Raises:
            StorageError: it cannot be read.
        """
        path = self.path(step, MANIFEST)
        with _told("read", path):
            return CheckpointManifest.model_validate_json(self.file_system.cat_file(path))

    def put(self, directory: Path) -> int:
        """Copy a checkpoint there.

        Returns:
            Its size in bytes.

        Raises:
            StorageError: it cannot be read here or written there.
        """
        manifest = read_manifest(directory)
        target = self.path(manifest.step)
        with _told("write", target):
            if self.file_system.exists(target):  # cut off, or replaced in the run
                self._remove(manifest.step)
            for file in manifest.files:
                self._put(directory / file.path, f"{target}/{file.path}")
                size = self.file_system.size(f"{target}/{file.path}")
                if size != file.bytes:
                    raise OSError(f"{file.path} has {size} bytes there instead of {file.bytes}")
            self._put(directory / MANIFEST, f"{target}/{MANIFEST}")
        return sum(file.bytes for file in manifest.files)

    def retain(self, keep: int) -> None:
        """Remove all but the `keep` whole ones saved last, and what is not whole.

        By time and not by step, for a run may have gone back, or another of its name before it.

        Raises:
            StorageError: the place cannot be reached.
        """
        saved = {step: self.manifest(step).saved_at for step in self.steps()}
        newest = sorted(saved, key=lambda step: saved[step])[-keep:]
        for step in self._folders():
            if newest and step not in newest:
                with _told("remove", self.path(step)):
                    self._remove(step)

    def fetch(self, step: int, run: RunDir) -> None:
        """Make a checkpoint there one of the run, in place of a damaged one of the same step.

        Raises:
            StorageError: it cannot be read or does not verify; the run is as before.
        """
        target = run.checkpoint(step)
        temporary = target.with_name(f".{target.name}.fetched.tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        manifest = self.manifest(step)
        try:
            with _told("read", self.path(step)):
                for file in manifest.files:
                    path = temporary / file.path
                    path.parent.mkdir(parents=True, exist_ok=True)
                    if self._get(self.path(step, file.path), path) != file.sha256:
                        raise OSError(f"{file.path} does not match its checksum there")
                for folder in {(temporary / file.path).parent for file in manifest.files}:
                    fsync_dir(folder)
                manifest.save(temporary / MANIFEST)
                replace(temporary, target)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def _folders(self) -> list[int]:
        with _told("list", self.folder):
            self.file_system.invalidate_cache()
            if not self.file_system.exists(self.folder):
                return []
            names = [path.rstrip("/").rpartition("/")[2] for path in self._listed()]
        return sorted(int(found[1]) for name in names if (found := _STEP.match(name)))

    def _listed(self) -> list[str]:
        found: list[str] = self.file_system.ls(self.folder, detail=False)
        return found

    def _whole(self, step: int) -> bool:
        with _told("read", self.path(step)):
            return bool(self.file_system.exists(self.path(step, MANIFEST)))

    def _remove(self, step: int) -> None:
        """The manifest first: what is left of a removal that was cut off is not whole."""
        if self._whole(step):
            self.file_system.rm_file(self.path(step, MANIFEST))
        self.file_system.rm(self.path(step), recursive=True)

    def _put(self, source: Path, target: str) -> None:
        self.file_system.makedirs(target.rpartition("/")[0], exist_ok=True)
        self.file_system.put_file(str(source), target)

    def _get(self, source: str, target: Path) -> str:
        """Copy a file here, on disk for good; its sha256."""
        checksum = hashlib.sha256()
        with self.file_system.open(source, "rb") as stream, target.open("wb") as copy:
            while chunk := stream.read(_CHUNK_BYTES):
                checksum.update(chunk)
                copy.write(chunk)
            copy.flush()
            os.fsync(copy.fileno())
        return checksum.hexdigest()


def open_replica(config: CheckpointConfig, run: str) -> Replica | None:
    """The second place of a run; None where the recipe has none.

    Raises:
        StorageError: nothing that is installed here can open it.
    """
    location = config.replica
    if location is None:
        return None
    from fsspec.core import url_to_fs  # type: ignore[import-untyped]

    with _told("open", location):
        file_system, root = url_to_fs(location)
    return Replica(location, f"{root.rstrip('/')}/{run}", file_system)


@contextmanager
def _told(verb: str, path: str) -> Iterator[None]:
    """What a file system refuses, as a StorageError."""
    try:
        yield
    except StorageError:  # told already
        raise
    except Exception as error:  # each file system has errors of its own
        words = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise StorageError(f"checkpoint.replica: cannot {verb} {path}: {words}") from error


def replace(temporary: Path, target: Path) -> None:
    """Give a whole checkpoint its name, in place of one that is there, and make that durable."""
    replaced = target.with_name(f".{target.name}.replaced")
    if target.exists():  # damaged or set aside: it was passed over
        shutil.rmtree(replaced, ignore_errors=True)
        target.rename(replaced)
    temporary.rename(target)
    fsync_dir(target.parent)
    shutil.rmtree(replaced, ignore_errors=True)


_BACKGROUND_NICENESS = 15

# step, seconds, bytes, what went wrong
OnCopied = Callable[[int, float, int, str | None], None]


class ReplicaCopier:
    """One copy at a time, of the newest checkpoint there is when the one before is done.

    A refusal is told and costs nothing else; the next checkpoint is tried again. A copy under way
    does not hold up the end of the process.

    Args:
        tier: The second place.
        run: The run.
        keep: Newest checkpoints kept there.
        still_ours: Raises where a newer attempt has taken the run over.
        on_copied: Told of every copy, from another thread.
    """

    def __init__(
        self,
        tier: Replica,
        run: RunDir,
        keep: int,
        still_ours: Callable[[], None],
        on_copied: OnCopied,
    ) -> None:
        self._tier, self._run, self._keep = tier, run, keep
        self._still_ours, self._on_copied = still_ours, on_copied
        self._changed = threading.Condition()
        self._wanted: int | None = None
        self._copying: int | None = None
        self._thread: threading.Thread | None = None

    @property
    def in_use(self) -> tuple[int, ...]:
        """The checkpoints of the run that it reads or is about to."""
        with self._changed:
            return tuple(s for s in (self._copying, self._wanted) if s is not None)

    def copy(self, step: int) -> None:
        """Copy a checkpoint of the run as soon as the one under way is done."""
        with self._changed:
            self._wanted = step
            self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="second-tier", daemon=True)
            self._thread.start()

    def finish(self, limit_s: float) -> bool:
        """Wait until everything is copied, so long at most; whether it is."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._wanted is None and self._copying is None, max(0.0, limit_s)
            )

    def _work(self) -> None:
        # On Linux of this thread alone.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _BACKGROUND_NICENESS)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._wanted is not None)
                step, self._copying, self._wanted = self._wanted, self._wanted, None
            assert step is not None
            began, num_bytes, fault = time.monotonic(), 0, None
            try:
                self._still_ours()
                num_bytes = self._tier.put(self._run.checkpoint(step))
                self._tier.retain(self._keep)
            except SlurmllmError as error:
                fault = str(error)
            self._on_copied(step, time.monotonic() - began, num_bytes, fault)
            with self._changed:
                self._copying = None
                self._changed.notify_all()
