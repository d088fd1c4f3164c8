"""Shards in jobs of a Slurm array, by submitit."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slurmllm.data.build.local_workers import Report
from slurmllm.data.build.run_shard import Outcome, run_shard
from slurmllm.data.build.shards import Shard
from slurmllm.data.build.work import WorkFolder
from slurmllm.errors import SlurmError

if TYPE_CHECKING:
    from pathlib import Path

_POLL_S = 1.0
# Slurm's own limit (MaxArraySize) is 1001 unless a site has changed it.
_MOST_TASKS = 1000
# What a task takes, at least, so that it reads for longer than it waits: a few shards.
_TASKS_PER_WORKER = 4


@dataclass(frozen=True)
class SlurmOptions:
    """How the jobs are submitted; None leaves a choice to Slurm.

    Attributes:
        time: Limit of a job: minutes, H:MM:SS or D-HH:MM:SS.
        partition: Slurm partition.
        account: Slurm account.
        qos: Slurm quality of service.
    """

    time: str = "60"
    partition: str | None = None
    account: str | None = None
    qos: str | None = None


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
    count = min(len(shards), workers * _TASKS_PER_WORKER, _MOST_TASKS)
    parts = [list(shards[index::count]) for index in range(count)]
    jobs = _submit(parts, work, workers, options)
    array = jobs[0].job_id.split("_")[0]
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
            _cancel(array)


def run_shards(shards: Sequence[Shard], work: Path) -> list[Outcome]:
    """What one job does: some shards, up to the first error."""
    outcomes = []
    for shard in shards:
        outcomes.append(run_shard(shard, work))
        if outcomes[-1].error is not None:
            break
    return outcomes


def _submit(
    parts: Sequence[Sequence[Shard]], work: WorkFolder, workers: int, options: SlurmOptions
) -> list[Any]:
    import submitit

    try:
        executor = submitit.AutoExecutor(work.logs, cluster="slurm")
        executor.update_parameters(
            name="slurmllm-data",
            cpus_per_task=1,
            slurm_array_parallelism=workers,
            slurm_additional_parameters={"time": options.time},
            **{
                f"slurm_{name}": value
                for name in ("partition", "account", "qos")
                if (value := getattr(options, name)) is not None
            },
        )
        return list(executor.map_array(run_shards, parts, [work.path] * len(parts)))
    except (submitit.core.utils.FailedJobError, RuntimeError, OSError) as error:
        raise SlurmError(
            f"Slurm refused the jobs that read the inputs: {error}; read them on this machine "
            "without --slurm, or see --partition, --account, --qos and --time"
        ) from error


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


def _cancel(array: str) -> None:
    import subprocess

    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(["scancel", array], check=False, timeout=60, capture_output=True)
