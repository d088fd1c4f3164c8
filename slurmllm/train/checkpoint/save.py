"""Saving a checkpoint.

1. Rank 0 creates `.step_XXXXXXXX.NNN.tmp` in the checkpoints' folder (NNN: the attempt, so that a
   late process of an orphaned attempt never writes into the next one's folder). The backend begins
   to write its shards there. An asynchronous save lets training continue from here.
2. A thread of each worker waits for the worker's files, their checksums and their fsync.
3. `finish`: rank 0 fsyncs all folders, writes the manifest last, fsyncs it, checks that no newer
   attempt has begun, renames the folder, fsyncs the parent.
4. Retention: rank 0 removes expired checkpoints in a thread.

After each part the workers agree on whether it succeeded on all of them, so that a full disk on one
node ends the save everywhere: the temporary folder is removed, older checkpoints stay.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain
from threading import Thread
from typing import TypeVar

from slurmllm.core.errors import CheckpointError, NodeError, StorageError
from slurmllm.core.run.artifact_records import CheckpointFile, CheckpointManifest
from slurmllm.core.run.rundir import RunDir, fsync_dir
from slurmllm.train.checkpoint.catalogue import REMOVED, remove_expired
from slurmllm.train.checkpoint.folder import MANIFEST, describe, fsync_file, publish
from slurmllm.train.checkpoint.shards import ShardBackend, ShardWrite
from slurmllm.train.checkpoint.state import TRAIN_STATE, TrainState, fingerprint_digest

T = TypeVar("T")

_TEMPORARY = re.compile(
    rf"^\.step_\d{{8,}}\.(?:(?:(?P<attempt>\d{{3,}})\.|fetched\.)?tmp|replaced|{REMOVED})$"
)


class Save:
    """A save in progress, created and finished by all workers together (collective).

    On rank 0 `num_bytes` is the size of all files when it has finished. Raises on all workers a
    CheckpointError if the save failed on one, a NodeError if a newer attempt has superseded this
    one.
    """

    num_bytes = 0
    _shards: ShardWrite | None = None
    _retention: Thread | None = None

    def __init__(self, run: RunDir, backend: ShardBackend, state: TrainState, attempt: int) -> None:
        self.step = state.step
        self._started = time.monotonic()
        self._run = run
        self._backend = backend
        self._state = state
        self._attempt = attempt
        self._target = run.checkpoint(state.step)
        self._temporary = run.checkpoints / f".{self._target.name}.{attempt:03d}.tmp"
        self._first = backend.worker.rank == 0
        with self._all_or_nothing():
            self._agree(self._create_folder)
            self._shards = self._agree(lambda: backend.save_shards(self._temporary))
        executor = ThreadPoolExecutor(1, thread_name_prefix=self._target.name)
        self._files = executor.submit(self._describe_shards, self._shards)
        executor.shutdown(wait=False)

    def written(self) -> bool:
        """Return whether this worker's files are written."""
        return self._files.done()

    @property
    def waited_s(self) -> float:
        """Seconds that training waited for this worker's shards."""
        return self._shards.waited_s if self._shards is not None else 0.0

    def finish(self, in_use: Collection[int] = ()) -> float:
        """Publish the checkpoint when all files are written (collective); return seconds."""
        with self._all_or_nothing():
            self._agree(self._files.result)
            shards = self._shards
            assert shards is not None
            more = self._agree(lambda: self._describe(shards, shards.finish()))
            files = self._backend.control.gather(self._files.result() + more)
            manifest = None if files is None else self._manifest(files)
            self._agree(lambda: self._publish(manifest) if manifest else None)
        if manifest is not None:
            self.num_bytes = sum(file.bytes for file in manifest.files)
            recipe = self._backend.config.recipe
            # In a thread: removing gigabytes takes as long as writing some.
            retention = self._run, self.step, recipe.checkpoint, in_use, recipe.evaluate
            self._retention = Thread(target=remove_expired, args=retention)
            self._retention.start()
        return time.monotonic() - self._started

    def _manifest(self, files: Sequence[Sequence[CheckpointFile]]) -> CheckpointManifest:
        return CheckpointManifest(
            step=self.step,
            tokens=self._state.tokens,
            world_size=self._backend.worker.world_size,
            attempt=self._attempt,
            recipe=self._backend.config.recipe.name,
            saved_at=time.time(),
            save_s=time.monotonic() - self._started,
            fingerprint=fingerprint_digest(self._state.fingerprint),
            files=tuple(sorted(chain.from_iterable(files), key=lambda file: file.path)),
        )

    def join_retention(self) -> None:
        """Wait until expired checkpoints are removed; required before the next `finish`."""
        if self._retention is not None:
            self._retention.join()

    def _create_folder(self) -> None:
        if not self._first:
            return
        if self._temporary.exists():  # a save of this attempt failed at this step before
            shutil.rmtree(self._temporary)
        self._temporary.mkdir(parents=True)
        fsync_dir(self._run.path)  # the first save creates the checkpoints' folder too

    def _describe_shards(self, shards: ShardWrite) -> list[CheckpointFile]:
        names = []
        if self._first:
            self._state.save(self._temporary / TRAIN_STATE)
            names.append(TRAIN_STATE)
        return self._describe(shards, names + shards.wait())

    def _describe(self, shards: ShardWrite, names: Sequence[str]) -> list[CheckpointFile]:
        for name in names:  # who wrote the file may have closed it without an fsync
            fsync_file(self._temporary / name)
        return [describe(self._temporary, name, shards.sha256(name)) for name in names]

    def _publish(self, manifest: CheckpointManifest) -> None:
        # The files are durable already; without these their names may be lost in a power failure.
        parents = {(self._temporary / file.path).parent for file in manifest.files}
        for folder in sorted(parents, reverse=True):
            fsync_dir(folder)
        manifest.save(self._temporary / MANIFEST)  # fsyncs the file and the folder
        # As late as possible: a frozen node may wake up long after its attempt was replaced.
        refuse_if_superseded(self._run, self._attempt)
        publish(self._temporary, self._target)

    def _agree(self, work: Callable[[], T]) -> T:
        """Run a part of the save on every worker; if one fails, all raise. Results stay local."""
        worker = self._backend.worker

        def run() -> T:
            try:
                return work()
            except OSError as error:
                raise StorageError(
                    f"{error.strerror or error} (rank {worker.rank} on {worker.node})"
                ) from error

        return self._backend.control.agree(run)

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        try:
            yield
        except NodeError:
            self._give_up()
            raise
        except StorageError as failure:
            message = f"cannot save {self._target}: {failure}"
            if self._first:  # before the clean-up, which frees the space that was missing
                free = shutil.disk_usage(self._run.path).free
                message += (
                    f"; {free / 1e6:.1f} MB are free there. Older checkpoints are untouched: "
                    "free space (or raise the quota or the file size limit), then `slurmllm resume`"
                )
            self._give_up()
            raise CheckpointError(message) from failure

    def _give_up(self) -> None:
        if self._shards is not None:
            self._shards.abandon()
        if self._first:
            shutil.rmtree(self._temporary, ignore_errors=True)


def refuse_if_superseded(run: RunDir, attempt: int) -> None:
    """Raise a NodeError if a newer attempt exists: an orphaned one must publish nothing."""
    newest = max((other.number for other in run.attempts("train")), default=attempt)
    if newest > attempt:
        raise NodeError(
            f"attempt {attempt} was superseded by attempt {newest} of run {run.name}: it saves "
            "nothing more"
        )


def remove_leftovers(run: RunDir, attempt: int | None = None) -> None:
    """Remove temporary folders of interrupted saves, but not those of attempts after `attempt`."""
    if not run.checkpoints.is_dir():
        return
    for entry in run.checkpoints.iterdir():
        match = _TEMPORARY.match(entry.name)
        if match is None:
            continue
        writer = match["attempt"]
        if attempt is None or writer is None or int(writer) <= attempt:
            shutil.rmtree(entry, ignore_errors=True)
