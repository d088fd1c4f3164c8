"""The checkpoints that a run saved: those on disk, and those that only its events remember."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from slurmllm.analysis.reporting.facts import CheckpointState, Saved
from slurmllm.checkpoint.catalogue import checkpoints
from slurmllm.checkpoint.set_aside import all_set_aside
from slurmllm.errors import SlurmllmError
from slurmllm.records import Event
from slurmllm.rundir import RunDir


def saved(run: RunDir, events: Sequence[Event], warnings: list[str]) -> Iterator[Saved]:
    """Every checkpoint of a run, by step; of one that was saved twice the later save.

    Files are not checked: `slurmllm checkpoint verify` does that.

    Args:
        run: The run.
        events: Beside its steps, oldest first.
        warnings: What cannot be read is added.
    """
    told = {event.step: event for event in events if event.kind == "save"}
    try:
        on_disk = {int(one.directory.name[5:]): one for one in checkpoints(run)}
        aside = all_set_aside(run)
    except (SlurmllmError, OSError) as error:
        warnings.append(f"checkpoints: {error}")
        on_disk, aside = {}, {}
    for step in sorted(told.keys() | on_disk.keys()):
        entry, event = on_disk.get(step), told.get(step)
        manifest = None if entry is None else entry.manifest
        state: CheckpointState = "kept"
        if entry is None:
            state = "removed"
        elif manifest is None:
            state = "damaged"
            warnings += [f"{entry.directory}: {fault}" for fault in entry.faults or ()]
        elif step in aside:
            state = "set aside"
        if manifest is not None and event is not None and event.attempt != manifest.attempt:
            event = None  # of another save than the one on disk
        yield Saved(
            step=step,
            attempt=manifest.attempt if manifest else event.attempt if event else None,
            tokens=manifest.tokens if manifest else None,
            num_bytes=entry.num_bytes if entry and manifest else event.bytes if event else None,
            saved_at=manifest.saved_at if manifest else event.time if event else None,
            seconds=event.seconds if event else manifest.save_s if manifest else None,
            waited_s=event.waited_s if event else None,
            state=state,
        )
