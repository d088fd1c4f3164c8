"""Writing a checkpoint.

1. Rank 0 makes `.step_XXXXXXXX.NNN.tmp` beside the checkpoints (NNN: the attempt, so that a late
   process of a lost one never writes into the folder of the next); the backend begins to write its
   shards into it. Where it is to and the backend can, training goes on from here.
2. A thread of each worker waits for its files, their checksums and their fsync.
3. `finish`: rank 0 fsyncs all folders, writes the manifest last, fsyncs, makes sure that no newer
   attempt has begun, renames the folder, fsyncs the parent.
4. Retention, in a thread: rank 0 removes what has expired.

After each part the workers agree on whether it went well everywhere, so that a full disk on one
node ends the save on all of them: the temporary folder goes, older checkpoints stay.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import TypeVar

from slurmllm.checkpoint.manifest import MANIFEST, describe, read_manifest
from slurmllm.checkpoint.replicas import replace
from slurmllm.checkpoint.retention import REMOVED, remove_expired
from slurmllm.checkpoint.shards import ShardBackend, ShardWrite
from slurmllm.checkpoint.state import TRAIN_STATE, TrainState, fingerprint_digest
from slurmllm.errors import CheckpointError, NodeError, StorageError
from slurmllm.records import CheckpointFile, CheckpointManifest
from slurmllm.rundir import RunDir, fsync_dir

T = TypeVar("T")

_TEMPORARY = re.compile(
    rf"^\.step_\d{{8,}}\.(?:(?:(?P<attempt>\d{{3,}})\.|fetched\.)?tmp|replaced|{REMOVED})$"
)


def save(run: RunDir, backend: ShardBackend, state: TrainState, attempt: int) -> float:
    """Write the checkpoint of a step and remove those beyond the number to keep (collective).

    Returns:
        Seconds that it took.

    Raises:
        CheckpointError: on all workers, if it failed on one.
    """
    begun = Save(run, backend, state, attempt)
    seconds = begun.finish()
    begun.settle()
    return seconds


class Save:
    """A checkpoint that is being written; made and finished by all workers together (collective).

    Args:
        run: The run.
        backend: Whose shards are written.
        state: What goes beside the shards.
        attempt: Of the train stage.

    Attributes:
        num_bytes: Of all files, when it is finished.

    Raises:
        CheckpointError: on all workers, if it failed on one; so does `finish`.
        NodeError: likewise, where a newer attempt has taken the run over.
    """

    def __init__(self, run: RunDir, backend: ShardBackend, state: TrainState, attempt: int) -> None:
        self.step = state.step
        self.num_bytes = 0
        self._started = time.monotonic()
        self._run, self._backend, self._state, self._attempt = run, backend, state, attempt
        self._target = run.checkpoint(state.step)
        self._temporary = run.checkpoints / f".{self._target.name}.{attempt:03d}.tmp"
        self._first = backend.worker.rank == 0
        self._saving: ShardWrite | None = None
        self._retention: Thread | None = None
        with self._whole_or_not():
            _agree(backend, lambda: _fresh(run, self._temporary) if self._first else None)
            self._saving = _agree(backend, lambda: backend.save_shards(self._temporary))
        executor = ThreadPoolExecutor(1, thread_name_prefix=self._target.name)
        self._files = executor.submit(self._describe_shards, self._saving)
        executor.shutdown(wait=False)

    def written(self) -> bool:
        """Whether this worker's files are written, as far as it goes without the others."""
        return self._files.done()

    @property
    def waited_s(self) -> float:
        """Seconds that training has waited for this worker's shards within steps."""
        return self._saving.waited_s if self._saving is not None else 0.0

    def finish(self, in_use: Collection[int] = ()) -> float:
        """Wait for all workers' files, and make the checkpoint one.

        Args:
            in_use: Steps of checkpoints that somebody reads, or may have to; they stay.

        Returns:
            Seconds since the save began.
        """
        with self._whole_or_not():
            _agree(self._backend, self._files.result)
            files = _agree_all(self._backend, self._complete)
            manifest = CheckpointManifest(
                step=self.step,
                tokens=self._state.tokens,
                world_size=self._backend.worker.world_size,
                attempt=self._attempt,
                recipe=self._backend.config.recipe.name,
                saved_at=time.time(),
                save_s=time.monotonic() - self._started,
                fingerprint=fingerprint_digest(self._state.fingerprint),
                files=tuple(sorted((f for part in files for f in part), key=lambda f: f.path)),
            )
            _agree(self._backend, lambda: self._publish(manifest) if self._first else None)
        self.num_bytes = sum(file.bytes for file in manifest.files)
        if self._first:
            config = self._backend.config.recipe.checkpoint
            kept = (config.keep, config.keep_hours, config.keep_every, in_use)
            # In a thread: removing gigabytes takes as long as writing some.
            self._retention = Thread(target=remove_expired, args=(self._run, self.step, *kept))
            self._retention.start()
        return time.monotonic() - self._started

    def settle(self) -> None:
        """Wait until what has expired is removed; before another save is finished."""
        if self._retention is not None:
            self._retention.join()

    def _describe_shards(self, saving: ShardWrite) -> list[CheckpointFile]:
        names = []
        if self._first:
            self._state.save(self._temporary / TRAIN_STATE)
            names.append(TRAIN_STATE)
        return [self._settled(name) for name in names + saving.wait()]

    def _complete(self) -> list[CheckpointFile]:
        assert self._saving is not None
        names = self._saving.finish()
        return self._files.result() + [self._settled(name) for name in names]

    def _settled(self, name: str) -> CheckpointFile:
        """A file on disk for good, with its checksum."""
        assert self._saving is not None
        _fsync_file(self._temporary / name)
        return describe(self._temporary, name, self._saving.sha256(name))

    def _publish(self, manifest: CheckpointManifest) -> None:
        temporary, target = self._temporary, self._target
        parents = {(temporary / file.path).parent for file in manifest.files}
        for folder in sorted(parents, reverse=True):
            fsync_dir(folder)
        manifest.save(temporary / MANIFEST)  # fsyncs the file and the folder
        refuse_if_superseded(self._run, self._attempt)
        replace(temporary, target)

    @contextmanager
    def _whole_or_not(self) -> Iterator[None]:
        try:
            yield
        except NodeError:
            self._give_up()
            raise
        except _SaveFailed as failure:
            if self._first:
                message = _advice(self._run, self._target, failure)
            else:
                message = f"cannot save {self._target}: {failure}"
            self._give_up()
            raise CheckpointError(message) from failure

    def _give_up(self) -> None:
        if self._saving is not None:
            self._saving.abandon()
        if self._first:
            shutil.rmtree(self._temporary, ignore_errors=True)


class _SaveFailed(Exception):
    """A part of the save failed on one worker or more."""


def _agree(backend: ShardBackend, part: Callable[[], T]) -> T:
    """Do a part of the save on every worker; all go on, each with its own result, or all fail."""
    result: list[T] = []
    _agree_all(backend, lambda: result.append(part()))
    return result[0]


def _agree_all(backend: ShardBackend, part: Callable[[], T]) -> list[T]:
    """Likewise, with the results of all workers, by rank; they are sent."""
    result, fault, superseded = None, None, False
    try:
        result = part()
    except NodeError as error:
        fault, superseded = str(error), True
    except OSError as error:
        worker = backend.worker
        fault = f"{error.strerror or error} (rank {worker.rank} on {worker.node})"
    except StorageError as error:
        fault = str(error)
    answers = backend.gather((result, fault, superseded))
    for _, fault, superseded in answers:
        if fault is not None:
            raise NodeError(fault) if superseded else _SaveFailed(fault)
    return [answer for answer, _, _ in answers]


def _fresh(run: RunDir, temporary: Path) -> None:
    if temporary.exists():
        shutil.rmtree(temporary)
    temporary.mkdir(parents=True)
    fsync_dir(run.path)  # the first save makes the folder of the checkpoints


def _fsync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def refuse_if_superseded(run: RunDir, attempt: int) -> None:
    """Let a process of a lost attempt publish nothing.

    Raises:
        NodeError: there is a newer attempt.
    """
    newest = max((known.number for known in run.attempts("train")), default=attempt)
    if newest > attempt:
        raise NodeError(
            f"attempt {attempt} was taken over by attempt {newest} of run {run.name}: it saves "
            "nothing more"
        )


def remove_leftovers(run: RunDir, attempt: int | None = None) -> None:
    """Remove what dead attempts left of their saves; rank 0 alone, at the start.

    Args:
        run: The run.
        attempt: This one; what newer ones are writing stays.
    """
    if not run.checkpoints.is_dir():
        return
    for entry in run.checkpoints.iterdir():
        found = _TEMPORARY.match(entry.name)
        if found is None:
            continue
        writer = found["attempt"]
        if attempt is None or writer is None or int(writer) <= attempt:
            shutil.rmtree(entry, ignore_errors=True)


def _advice(run: RunDir, target: Path, failure: _SaveFailed) -> str:
    """The value, the rule and the remedy of a save that failed; called before the clean-up."""
    free = shutil.disk_usage(run.path).free
    needed = _bytes_of_newest(run)
    wanted = f" where the last checkpoint took {needed / 1e6:.1f} MB" if needed else ""
    return (
        f"cannot save {target}: {failure}; {free / 1e6:.1f} MB are free there{wanted}. "
        "Older checkpoints are untouched: free space (or raise the quota or the file size limit), "
        "then `slurmllm resume`"
    )


def _bytes_of_newest(run: RunDir) -> int | None:
    for step in reversed(run.checkpoint_steps()):
        try:
            return sum(file.bytes for file in read_manifest(run.checkpoint(step)).files)
        except StorageError:
            continue
    return None
