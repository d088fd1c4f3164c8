"""Writing a checkpoint.

1. Rank 0 makes `.step_XXXXXXXX.tmp` beside the checkpoints; the backend begins to write its shards
   into it. Where the backend can, training goes on from here.
2. A thread of each worker waits for its files and checksums them.
3. `finish`: rank 0 writes the manifest last, fsyncs, renames the folder, fsyncs the parent.
4. Retention: rank 0 removes what is beyond `checkpoint.keep`.

After each part the workers agree on whether it went well everywhere, so that a full disk on one
node ends the save on all of them: the temporary folder goes, older checkpoints stay.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from slurmllm.backends.base import Backend, Saving
from slurmllm.checkpoint.manifest import MANIFEST, describe, read_manifest
from slurmllm.checkpoint.state import TRAIN_STATE, TrainState, digest
from slurmllm.errors import CheckpointError, StorageError
from slurmllm.records import CheckpointFile, CheckpointManifest
from slurmllm.rundir import RunDir, fsync_dir

T = TypeVar("T")

_TEMPORARY = re.compile(r"^\.step_\d{8,}\.(tmp|replaced)$")


def save(run: RunDir, backend: Backend, state: TrainState, attempt: int) -> float:
    """Write the checkpoint of a step and remove those beyond the number to keep (collective).

    Returns:
        Seconds that it took.

    Raises:
        CheckpointError: on all workers, if it failed on one.
    """
    return Save(run, backend, state, attempt).finish()


class Save:
    """A checkpoint that is being written; made and finished by all workers together (collective).

    Args:
        run: The run.
        backend: Whose shards are written.
        state: What goes beside the shards.
        attempt: Of the train stage.

    Raises:
        CheckpointError: on all workers, if it failed on one; so does `finish`.
    """

    def __init__(self, run: RunDir, backend: Backend, state: TrainState, attempt: int) -> None:
        self.step = state.step
        self._started = time.monotonic()
        self._run, self._backend, self._state, self._attempt = run, backend, state, attempt
        self._target = run.checkpoint(state.step)
        self._temporary = run.checkpoints / f".{self._target.name}.tmp"
        self._first = backend.worker.rank == 0
        self._saving: Saving | None = None
        with self._whole_or_not():
            _agree(backend, lambda: _fresh(self._temporary) if self._first else None)
            self._saving = _agree(backend, lambda: backend.save_shards(self._temporary))
        executor = ThreadPoolExecutor(1, thread_name_prefix=self._target.name)
        self._files = executor.submit(self._describe_shards, self._saving)
        executor.shutdown(wait=False)

    def written(self) -> bool:
        """Whether this worker's files are written, as far as it goes without the others."""
        return self._files.done()

    def finish(self) -> float:
        """Wait for all workers' files, and make the checkpoint one.

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
                fingerprint=digest(self._state.fingerprint),
                files=tuple(sorted((f for part in files for f in part), key=lambda f: f.path)),
            )
            _agree(
                self._backend,
                lambda: _publish(manifest, self._temporary, self._target) if self._first else None,
            )
        if self._first:
            retain(self._run, self.step, self._backend.config.recipe.checkpoint.keep)
        return time.monotonic() - self._started

    def _describe_shards(self, saving: Saving) -> list[CheckpointFile]:
        return [describe(self._temporary, name) for name in saving.wait()]

    def _complete(self) -> list[CheckpointFile]:
        assert self._saving is not None
        names = self._saving.finish()
        if self._first:
            self._state.save(self._temporary / TRAIN_STATE)
            names = [*names, TRAIN_STATE]
        return self._files.result() + [describe(self._temporary, name) for name in names]

    @contextmanager
    def _whole_or_not(self) -> Iterator[None]:
        try:
            yield
        except _SaveFailed as failure:
            if self._saving is not None:
                self._saving.abandon()
            if self._first:
                message = _advice(self._run, self._target, failure)
                shutil.rmtree(self._temporary, ignore_errors=True)
            else:
                message = f"cannot save {self._target}: {failure}"
            raise CheckpointError(message) from failure


class _SaveFailed(Exception):
    """A part of the save failed on one worker or more."""


def _agree(backend: Backend, part: Callable[[], T]) -> T:
    """Do a part of the save on every worker; all go on, each with its own result, or all fail."""
    result: list[T] = []
    _agree_all(backend, lambda: result.append(part()))
    return result[0]


def _agree_all(backend: Backend, part: Callable[[], T]) -> list[T]:
    """Likewise, with the results of all workers, by rank; they are sent."""
    result, fault = None, None
    try:
        result = part()
    except OSError as error:
        worker = backend.worker
        fault = f"{error.strerror or error} (rank {worker.rank} on {worker.node})"
    except StorageError as error:
        fault = str(error)
    answers = backend.gather((result, fault))
    failed = [fault for _, fault in answers if fault is not None]
    if failed:
        raise _SaveFailed(failed[0])
    return [answer for answer, _ in answers]


def _fresh(temporary: Path) -> None:
    if temporary.exists():
        shutil.rmtree(temporary)
    temporary.mkdir(parents=True)


def _publish(manifest: CheckpointManifest, temporary: Path, target: Path) -> None:
    manifest.save(temporary / MANIFEST)  # fsyncs the file and the folder
    replaced = target.with_name(f".{target.name}.replaced")
    if target.exists():  # a damaged one that this attempt had passed over
        shutil.rmtree(replaced, ignore_errors=True)
        target.rename(replaced)
    temporary.rename(target)
    fsync_dir(target.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def retain(run: RunDir, newest: int, keep: int) -> None:
    """Remove checkpoints older than the `keep` newest up to step `newest`.

    Later ones are damaged and were passed over: they count for nothing and stay for whoever wants
    to look, until training reaches their step again. What cannot be removed is told, no more.
    """
    steps = [step for step in run.checkpoint_steps() if step <= newest]
    for step in steps[:-keep]:
        try:
            shutil.rmtree(run.checkpoint(step))
        except OSError as error:
            print(f"warning: cannot remove {run.checkpoint(step)}: {error.strerror}", flush=True)


def remove_leftovers(run: RunDir) -> None:
    """Remove temporary folders of attempts that died while saving; rank 0 alone, at the start."""
    if not run.checkpoints.is_dir():
        return
    for entry in run.checkpoints.iterdir():
        if _TEMPORARY.match(entry.name):
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
