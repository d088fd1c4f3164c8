"""Shards in jobs of a Slurm array, by submitit."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from slurmllm.data.build.local_workers import Report
from slurmllm.data.build.run_shard import Outcome, run_shard
from slurmllm.data.build.shards import Shard
from slurmllm.data.build.work import WorkFolder
from slurmllm.errors import SlurmError
from slurmllm.job_array import (
    MOST_TASKS,
    Resources,
    SlurmOptions,
    array_of,
    cancel,
    submit_array,
)

if TYPE_CHECKING:
    from pathlib import Path

_POLL_S = 1.0
# What a task takes, at least, so that it reads for longer than it waits: a few shards.
_TASKS_PER_WORKER = 4


def run_on_slurm(
    shards: Sequence[Shard],
    work: WorkFolder,
    workers: int,
    options: SlurmOptions,
    report: Report,
    on_note: Callable[[str], None],
) -> Iterator[Outcome]:
    """Write shards in the jobs of one array; it is cancelled when this ends early.

    Args:
        shards: What to write.
        work: The work folder, on a file system that the nodes share.
        workers: Jobs at a time.
        options: How they are submitted.
        report: Called every second.
        on_note: Called with the job's id.

    Yields:
        How each shard ended, in the order they do.

    Raises:
        SlurmError: Slurm refused the jobs, or one of them failed.
    """
    count = min(len(shards), workers * _TASKS_PER_WORKER, MOST_TASKS)
    parts = [list(shards[index::count]) for index in range(count)]
    jobs = submit_array(
        run_shards,
        [(part, work.path) for part in parts],
        logs=work.logs,
        name="slurmllm-data",
        at_once=workers,
        options=options,
        resources=Resources(cpus=1),
        what="the jobs that read the inputs",
        instead="read them on this machine without --slurm",
    )
    array = array_of(jobs)
    on_note(f"Slurm job {array}: {len(shards):,} shards in {count:,} tasks, {workers:,} at a time")
    waiting = dict(zip(jobs, parts, strict=True))
    try:
        while waiting:
            time.sleep(_POLL_S)
            report(work.running())
            for job in [job for job in waiting if job.done()]:
                del waiting[job]
                yield from _outcomes(job)
    finally:
        if waiting:
            cancel(array)


def run_shards(shards: Sequence[Shard], work: Path) -> list[Outcome]:
    """What one job does: some shards, up to the first error."""
    outcomes = []
    for shard in shards:
        outcomes.append(run_shard(shard, work))
        if outcomes[-1].error is not None:
            break
    return outcomes


def _outcomes(job: Any) -> list[Outcome]:
    import submitit

    try:
        outcomes: list[Outcome] = job.result()
    except (submitit.core.utils.UncompletedJobError, submitit.core.utils.FailedJobError) as error:
        log = job.paths.stderr
        raise SlurmError(
            f"Slurm job {job.job_id}, which read inputs, ended as {job.state}; "
            f"{f'its log is {log}' if log.exists() else 'it never began'}. Finished shards are "
            "kept: the same command goes on from them"
        ) from error
    return outcomes
