"""A Python function over a list of arguments: in local processes, or in a job array by submitit."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slurmllm.core.errors import ConfigError, SlurmError, StorageError
from slurmllm.core.run.safe_files import check_private_folder
from slurmllm.core.slurm.container import behind_prefix
from slurmllm.core.slurm.processes import Arguments, FailedCall, Function, Results, map_locally
from slurmllm.core.slurm.setup import limits_script, setup_faults, setup_script, slurm_environment

# Below Slurm's default MaxArraySize of 1001.
MOST_TASKS = 1000
Directives = Mapping[str, str | bool]
_POLL_S = 1.0  # submitit looks for a file of each job, on the shared file system


@dataclass(frozen=True)
class SlurmOptions:
    """Options of a submission; None leaves a choice to Slurm."""

    time: str = "60"  # time limit of a job: minutes, H:MM:SS or D-HH:MM:SS
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    setup: tuple[str, ...] = ()  # cluster.setup
    python: str | None = None  # cluster.python; None: this interpreter
    directives: Directives = field(default_factory=dict)  # further options
    # Arguments that start a job's task in cluster.container, for the folders that it is shown, or
    # options of srun that do; none by default.
    container: Callable[[Sequence[Path]], Sequence[str]] = lambda folders: ()
    by_srun: bool = False  # whether these are options of srun


@dataclass(frozen=True)
class ArrayRequest:
    """How calls are submitted to Slurm."""

    name: str  # of the job
    options: SlurmOptions
    description: str  # what the jobs do, for error messages
    alternative: str  # what to do without Slurm
    # Called with the id of each array, and its number of jobs.
    on_submit: Callable[[str, int], None] = lambda job_id, num_jobs: None
    cpus: int | None = None  # of a job; None leaves them to Slurm
    gpus: int | None = None


def map_calls(
    function: Function,
    arguments: Arguments,
    *,
    logs: Path,
    at_once: int,
    on_poll: Callable[[], None],
    names: Sequence[str] = (),
    array: ArrayRequest | None = None,
) -> Results:
    """Call a function once for each tuple of arguments; yield index and result as calls end.

    A call that ends without a result yields a `FailedCall`. Closing the generator ends the calls
    that still run.

    Args:
        function: A function that a new process can import.
        logs: The folder of the logs; with `array`, on a file system that the nodes share.
        at_once: Calls that run at a time.
        on_poll: Called regularly meanwhile.
        names: A name of each call, for the log of its local process.
        array: Submit the calls to Slurm; by default they are processes of this machine.

    Raises:
        SlurmError: Slurm refused the jobs.
        StorageError: The folder cannot be written, or is not this user's any more.
    """
    if array is None:
        yield from map_locally(function, arguments, names, logs, at_once, on_poll)
        return
    for begin in range(0, len(arguments), MOST_TASKS):
        jobs = _submit(function, arguments[begin : begin + MOST_TASKS], logs, at_once, array)
        array_id = str(jobs[0].job_id).split("_")[0]
        array.on_submit(array_id, len(jobs))
        running = dict(enumerate(jobs, begin))
        try:
            while running:
                time.sleep(_POLL_S)
                on_poll()
                for index in [index for index, job in running.items() if job.done()]:
                    yield index, _result(running.pop(index))
        finally:
            if running:
                with suppress(OSError, subprocess.TimeoutExpired):
                    subprocess.run(["scancel", array_id], timeout=60, capture_output=True)


def _submit(
    function: Function,
    arguments: Arguments,
    logs: Path,
    at_once: int,
    array: ArrayRequest,
) -> list[Any]:
    """Submit one job for each call; return submitit's jobs, in the order of `arguments`."""
    import submitit

    for variable in os.environ.keys() - slurm_environment().keys():  # submitit calls Slurm itself
        del os.environ[variable]
    options = array.options
    choices = {
        "slurm_partition": options.partition,
        "slurm_account": options.account,
        "slurm_qos": options.qos,
        "slurm_gpus_per_node": array.gpus,
        "cpus_per_task": array.cpus,
    }
    try:
        logs.mkdir(parents=True, exist_ok=True)
        # With mode 0700: submitit's requests and results are pickles, which run code when read.
        folder = tempfile.mkdtemp(prefix="array-", dir=logs)
        # -P: not the modules of the working directory, which may be another user's.
        inside = [options.python or sys.executable, "-P"]
        prefix = options.container([logs.absolute().parents[1]])
        if not options.by_srun:
            inside = behind_prefix(prefix, inside[0], inside)
        executor = submitit.AutoExecutor(folder, cluster="slurm", slurm_python=shlex.join(inside))
        executor.update_parameters(
            name=array.name,
            slurm_array_parallelism=at_once,
            # Once: a job is one task, on the node of its batch script.
            slurm_srun_args=list(prefix) if options.by_srun else None,
            slurm_setup=[*limits_script(), *setup_script(options.setup, stop=True)],
            slurm_additional_parameters={"time": options.time, **options.directives},
            **{name: value for name, value in choices.items() if value is not None},
        )
        return list(executor.map_array(function, *zip(*arguments, strict=True)))
    except (submitit.core.utils.FailedJobError, RuntimeError, OSError) as error:
        raise SlurmError(
            f"Slurm refused {array.description}: {error}; {array.alternative}, or see --partition, "
            "--account, --qos and --time"
        ) from error


def _result(job: Any) -> Any:
    """Return what a job's call returned, or how the job ended."""
    import submitit

    folder = job.paths.folder
    try:
        check_private_folder(folder)
        return job.result()
    except PermissionError as error:
        raise StorageError(
            f"{folder}: {error.strerror}, so the results of the Slurm jobs in it are not read: "
            "they run code; use a folder that only you can write to"
        ) from error
    except (submitit.core.utils.UncompletedJobError, submitit.core.utils.FailedJobError) as error:
        log = job.paths.stderr
        hint = f"see {log}" if log.exists() else "it never started"
        reason = " ".join(str(error).split())[:120]
        return FailedCall(f"job {job.job_id} ended in state {job.state} ({hint}): {reason}")


def slurm_options(
    cluster: str | None,
    fields: Mapping[str, Any],
    directives: Directives | None = None,
) -> SlurmOptions:
    """Return options of an array, with what the profile `cluster`, or the user's default one, has.

    Args:
        cluster: The profile's name or file.
        fields: Of the result, by name; None leaves one out.
        directives: Further options of sbatch.

    Raises:
        ConfigError: the profile, or a line of its cluster.setup, is faulty.
    """
    from slurmllm.core.config.directives import USER_DEFAULTS, parse_options, user_defaults
    from slurmllm.core.config.profiles import choose_cluster

    places = dict[str, Any](user_defaults())
    values = {name: value for name, value in fields.items() if value is not None}
    if choose_cluster(cluster)[0]:
        from slurmllm.core.config.resolve import resolve
        from slurmllm.core.slurm.container import container_arguments

        config = resolve("tiny_neox", cluster)  # of the recipe, only what is the shell's is used
        profile = config.cluster
        places = config.recipe.slurm.model_dump(include=set(USER_DEFAULTS), exclude_none=True)
        places = {"partition": profile.partition, **places}
        if faults := setup_faults(profile.setup):
            raise ConfigError(f"cluster profile {profile.name}", faults)
        values = {"setup": profile.setup, "python": profile.python, **values}
        if (container := profile.container) is not None:
            extra_folders = (Path.cwd(), profile.node_local)
            values |= {"python": container.python, "by_srun": container.srun_runs_it}
            values["container"] = lambda folders: container_arguments(
                container, profile.device, [*folders, *extra_folders]
            )
        directives = {**parse_options(profile.directives), **(directives or {})}
    if "reservation" in places:
        directives = {"reservation": places.pop("reservation"), **(directives or {})}
    return SlurmOptions(**{**places, **values}, directives=directives or {})
