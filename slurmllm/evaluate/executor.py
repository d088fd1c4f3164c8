"""Jobs, a checkpoint each: processes of this machine, or an array on Slurm."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmllm.evaluate.process import JobProcess, cuda_devices
from slurmllm.evaluate.request import Outcome, Work
from slurmllm.rundir import RunDir
from slurmllm.slurm.arrays import (
    MOST_TASKS,
    Resources,
    SlurmOptions,
    array_of,
    cancel,
    submit_array,
)

_POLL_S = 0.2
_POLL_SLURM_S = 1.0


@dataclass(frozen=True)
class Listeners:
    """Whom to tell.

    Attributes:
        on_poll: Called again and again while jobs run.
        on_note: Called with what happened.
    """

    on_poll: Callable[[], None]
    on_note: Callable[[str], None]


def logs_of(store: RunDir) -> Path:
    """The folder of the jobs' logs."""
    return store.logs / "evaluate"


def run_here(
    works: Sequence[Work], at_once: int, logs: Path, tell: Listeners
) -> Iterator[tuple[Work, Outcome]]:
    """Do the work in processes of this machine.

    Args:
        works: A process each.
        at_once: Processes at a time.
        logs: Folder for what they print.
        tell: Whom to tell.

    Yields:
        What became of each, in the order they end.
    """
    devices = cuda_devices()
    left = list(works)
    # By slot: of several devices, each slot has one to itself.
    running: dict[int, tuple[JobProcess, Work]] = {}
    try:
        while left or running:
            for slot in range(at_once):
                if left and slot not in running:
                    device = devices[slot % len(devices)] if at_once > 1 and devices else None
                    work = left.pop(0)
                    running[slot] = JobProcess(work, logs, device), work
            time.sleep(_POLL_S)
            tell.on_poll()
            for slot in [slot for slot, (job, _) in running.items() if job.done()]:
                job, work = running.pop(slot)
                yield work, job.outcome()
    finally:
        for job, _ in running.values():
            job.end()


def run_on_slurm(
    works: Sequence[Work],
    at_once: int,
    logs: Path,
    tell: Listeners,
    options: SlurmOptions,
    resources: Resources,
) -> Iterator[tuple[Work, Outcome]]:
    """Do the work in the jobs of one array; it is cancelled when this ends early.

    Args:
        works: A job each.
        at_once: Jobs at a time.
        logs: Folder for what they print, on a file system that the nodes share.
        tell: Whom to tell.
        options: How the jobs are submitted.
        resources: What each takes.

    Yields:
        What became of each, in the order they end.

    Raises:
        SlurmError: Slurm refused the jobs.
    """
    for begin in range(0, len(works), MOST_TASKS):
        part = works[begin : begin + MOST_TASKS]
        jobs = submit_array(
            _evaluate,
            [(work,) for work in part],
            logs=logs,
            name="slurmllm-evaluate",
            at_once=at_once,
            options=options,
            resources=resources,
            what="the jobs that evaluate",
            instead="evaluate on this machine without --slurm",
        )
        array = array_of(jobs)
        tell.on_note(f"Slurm job {array}: {len(part):,} checkpoint(s), {at_once:,} at a time")
        waiting = dict(zip(jobs, part, strict=True))
        try:
            while waiting:
                time.sleep(_POLL_SLURM_S)
                tell.on_poll()
                for job in [job for job in waiting if job.done()]:
                    yield waiting.pop(job), _outcome(job)
        finally:
            if waiting:
                cancel(array)


def _evaluate(work: Work) -> Outcome:
    from slurmllm.evaluate.job import evaluate

    return evaluate(work)


def _outcome(job: Any) -> Outcome:
    """What a job said; where it ended without a word, why all its tasks failed."""
    import submitit

    try:
        outcome: Outcome = job.result()
    except (submitit.core.utils.UncompletedJobError, submitit.core.utils.FailedJobError) as error:
        log = job.paths.stderr
        said = f"its log is {log}" if log.exists() else "it never began"
        first = " ".join(str(error).split())[:120]
        return Outcome(lost=f"job {job.job_id} ended as {job.state} ({said}): {first}")
    return outcome
