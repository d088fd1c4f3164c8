"""A Python function over a list of arguments, as the jobs of one Slurm array, by submitit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slurmllm.errors import SlurmError

if TYPE_CHECKING:
    from pathlib import Path

# Slurm's own limit (MaxArraySize) is 1001 unless a site has changed it.
MOST_TASKS = 1000


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


@dataclass(frozen=True)
class Resources:
    """What a job of an array takes.

    Attributes:
        cpus: CPUs; None leaves it to Slurm.
        gpus: GPUs; None asks for none.
    """

    cpus: int | None = None
    gpus: int | None = None


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
    """Submit one call of a function a job.

    Args:
        function: Importable on the nodes.
        arguments: Of each call, at most MOST_TASKS.
        logs: Folder for submitit's files, on a file system that the nodes share.
        name: Of the jobs.
        at_once: Jobs that may run at a time.
        options: How they are submitted.
        resources: What each takes.
        what: Which jobs they are, for the message where Slurm refuses them.
        instead: What to do then, for the same.

    Returns:
        submitit's jobs, in the order of the arguments.

    Raises:
        SlurmError: Slurm refused.
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


def array_of(jobs: Sequence[Any]) -> str:
    """The id of the array that jobs are of."""
    return str(jobs[0].job_id).split("_")[0]


def cancel(array: str) -> None:
    """Cancel what is left of an array, if Slurm can be reached."""
    import subprocess

    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(["scancel", array], check=False, timeout=60, capture_output=True)
