"""Job arrays: a Python function over a list of arguments, submitted by submitit."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from slurmllm.errors import SlurmError

if TYPE_CHECKING:
    from pathlib import Path

# Below Slurm's default MaxArraySize of 1001.
MOST_TASKS = 1000
_POLL_S = 1.0  # submitit looks for a file of each job, on the shared file system


@dataclass(frozen=True)
class SlurmOptions:
    """Options of a submission; None leaves a choice to Slurm."""

    time: str = "60"  # time limit of a job: minutes, H:MM:SS or D-HH:MM:SS
    partition: str | None = None
    account: str | None = None
    qos: str | None = None


@dataclass(frozen=True)
class Resources:
    """Resources of one job of an array."""

    cpus: int | None = None  # number of CPUs; None leaves it to Slurm
    gpus: int | None = None  # number of GPUs; None requests none


def submit_array(
    function: Callable[..., Any],
    arguments: Sequence[tuple[Any, ...]],
    *,
    logs: Path,
    name: str,
    at_once: int,
    options: SlurmOptions,
    resources: Resources,
    what: str,
    instead: str,
) -> list[Any]:
    """Submit one job for each call of a function.

    Args:
        function: A function that the nodes can import.
        arguments: Arguments of each call, at most `MOST_TASKS`.
        logs: Folder for submitit's files, on a file system that the nodes share.
        at_once: Maximum number of jobs that run simultaneously.
        what: Description of the jobs, for the error message.
        instead: The alternative to Slurm, for the error message.

    Returns:
        submitit's jobs, in the order of the arguments.

    Raises:
        SlurmError: Slurm refused the array.
    """
    import submitit

    chosen = {
        f"slurm_{choice}": value
        for choice in ("partition", "account", "qos")
        if (value := getattr(options, choice)) is not None
    }
    if resources.gpus is not None:
        chosen["slurm_gpus_per_node"] = resources.gpus
    if resources.cpus is not None:
        chosen["cpus_per_task"] = resources.cpus
    try:
        executor = submitit.AutoExecutor(logs, cluster="slurm")
        executor.update_parameters(
            name=name,
            slurm_array_parallelism=at_once,
            slurm_additional_parameters={"time": options.time},
            **chosen,
        )
        return list(executor.map_array(function, *zip(*arguments, strict=True)))
    except (submitit.core.utils.FailedJobError, RuntimeError, OSError) as error:
        raise SlurmError(
            f"Slurm refused {what}: {error}; {instead}, or see --partition, --account, --qos and "
            "--time"
        ) from error


class FailedJob(NamedTuple):
    """A job of an array that ended without a result."""

    how: str  # `ended in state FAILED (see LOG)`
    reason: str  # submitit's error, on one line


def finished_jobs(
    jobs: Sequence[Any], on_poll: Callable[[], None]
) -> Generator[tuple[str, int, Any], None, None]:
    """Wait for the jobs of an array, which is cancelled if this is closed early.

    Yields:
        Id, place in `jobs`, and result (or `FailedJob`) of each, in the order in which they end.
    """
    import submitit

    failures = (submitit.core.utils.UncompletedJobError, submitit.core.utils.FailedJobError)
    running = dict(enumerate(jobs))
    try:
        while running:
            time.sleep(_POLL_S)
            on_poll()
            for place in [place for place, job in running.items() if job.done()]:
                job = running.pop(place)
                try:
                    found = job.result()
                except failures as error:
                    log = job.paths.stderr
                    hint = f"see {log}" if log.exists() else "it never started"
                    reason = " ".join(str(error).split())[:120]
                    found = FailedJob(f"ended in state {job.state} ({hint})", reason)
                yield job.job_id, place, found
    finally:
        if running:
            _cancel(array_of(jobs))


def array_of(jobs: Sequence[Any]) -> str:
    """The id of the array that the jobs belong to."""
    return str(jobs[0].job_id).split("_")[0]


def _cancel(array: str) -> None:
    """Cancel the unfinished jobs of an array; errors are ignored."""
    import subprocess

    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(["scancel", array], check=False, timeout=60, capture_output=True)
