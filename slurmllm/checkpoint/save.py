"""Writing a checkpoint.

1. Rank 0 makes `.step_XXXXXXXX.tmp` beside the checkpoints.
2. The backend writes its shards into it; every worker checksums the files that it wrote.
3. Rank 0 writes the manifest last, fsyncs, renames the folder, fsyncs the parent.
4. Retention: rank 0 removes what is beyond `checkpoint.keep`.

After each part the workers agree on whether it went well everywhere, so that a full disk on one
node ends the save on all of them: the temporary folder goes, older checkpoints stay.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from slurmllm.backends.base import Backend
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
    started = time.monotonic()
    target = run.checkpoint(state.step)
    temporary = run.checkpoints / f".{target.name}.tmp"
    first = backend.worker.rank == 0
    try:
        _agree(backend, lambda: _fresh(temporary) if first else None)
        files = _agree(backend, lambda: _write(backend, state, temporary))
        manifest = CheckpointManifest(
            step=state.step,
            tokens=state.tokens,
            world_size=backend.worker.world_size,
            attempt=attempt,
            recipe=backend.config.recipe.name,
            saved_at=time.time(),
            save_s=time.monotonic() - started,
            fingerprint=digest(state.fingerprint),
            files=tuple(sorted((f for part in files for f in part or []), key=lambda f: f.path)),
        )
        _agree(backend, lambda: _publish(manifest, temporary, target) if first else None)
    except _SaveFailed as failure:
        if first:
            message = _advice(run, target, failure)
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            message = f"cannot save {target}: {failure}"
        raise CheckpointError(message) from failure
    if first:
        retain(run, state.step, backend.config.recipe.checkpoint.keep)
    return time.monotonic() - started


class _SaveFailed(Exception):
    """A part of the save failed on one worker or more."""


def _agree(backend: Backend, part: Callable[[], T]) -> list[T]:
    """Do a part of the save on every worker; all go on with all results, or all fail."""
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
    return [result for result, _ in answers]


def _fresh(temporary: Path) -> None:
    if temporary.exists():
        shutil.rmtree(temporary)
    temporary.mkdir(parents=True)


def _write(backend: Backend, state: TrainState, temporary: Path) -> list[CheckpointFile]:
    names = backend.save_shards(temporary)
    if backend.worker.rank == 0:
        state.save(temporary / TRAIN_STATE)
        names = [*names, TRAIN_STATE]
    return [describe(temporary, name) for name in names]


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
