"""Tasks of srun in a container: the command that starts it, and what the batch script passes on.

The batch script and its supervisor run outside, with the host's Python. Process ids are the host's
inside too, and a task becomes the container's main process, so that signals reach it.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from slurmllm.core.config.cluster import Cluster, Container
from slurmllm.core.errors import ConfigError

CONTAINER = "SLURMLLM_CONTAINER"  # the arguments that start it, the image last
CONTAINER_PYTHON = "SLURMLLM_CONTAINER_PYTHON"  # the interpreter inside
_START_S = 1800.0  # the first start may fetch an image
_ENGINES = ("docker", "podman")  # which pass no variables and no devices on
# Variables by name: their values may be secrets, and command lines are public.
_ENGINE_RUN = """\
count=$1
shift
options=()
while IFS= read -r name; do
  case $name in
    PATH | HOME | PWD | OLDPWD | SHLVL | _ | HOSTNAME | TMPDIR | LD_LIBRARY_PATH) ;;
    *) options+=(--env "$name") ;;
  esac
done < <(compgen -e)
for device in /dev/neuron* /dev/infiniband; do
  [ -e "$device" ] && options+=(--device "$device")
done
exec "${@:1:count}" "${options[@]}" "${@:count+1}"
"""


def behind_prefix(prefix: Sequence[str], python: str, command: Sequence[str]) -> list[str]:
    """Return the arguments that run a command in a container, by its interpreter `python`.

    `prefix` starts the container; empty if srun does (pyxis).
    """
    inside = [python if argument == sys.executable else argument for argument in command]
    if prefix and prefix[0] in _ENGINES:
        return ["bash", "-c", _ENGINE_RUN, "slurmllm", str(len(prefix) - 1), *prefix, *inside]
    return [*prefix, *inside]


def in_container(command: Sequence[str]) -> list[str]:
    """Return the command of a task, in the container of this job if it has one."""
    python = os.environ.get(CONTAINER_PYTHON)
    if python is None:
        return list(command)
    return behind_prefix(shlex.split(os.environ.get(CONTAINER, "")), python, command)


def container_faults(cluster: Cluster, local: bool) -> list[str]:
    """Return the faults of `cluster.container` that are known on this machine."""
    container = cluster.container
    path = "cluster.container"
    if container is None:
        return []
    faults = [
        f"{path}: {file} does not exist; correct image and mounts"
        for file in paths_of(container)
        if not file.exists()
    ]
    if local and container.srun_runs_it:
        faults.append(f"{path}.runtime: pyxis needs srun; leave out --local, or set another one")
    return faults


def check_container(version: str, paths: Sequence[Path]) -> None:
    """Start the job's container once; ConfigError if it does not have slurmllm of `version`.

    `paths` are the image and the mounts, as far as they are paths.
    """
    prefix = shlex.split(os.environ.get(CONTAINER, ""))
    node = os.uname().nodename
    if missing := [str(path) for path in paths if not path.exists()]:
        raise ConfigError(
            f"cluster.container: {node} has no {', '.join(missing)}; correct image and mounts, "
            "which must be on all nodes"
        )
    if not prefix:  # pyxis, which only srun starts
        return
    if shutil.which(prefix[0]) is None:
        raise ConfigError(
            f"cluster.container: {node} has no {prefix[0]} on the PATH; load its module in "
            "cluster.setup, or choose another runtime"
        )
    image = prefix[-1]
    script = "import slurmllm; print('slurmllm', slurmllm.__version__)"
    try:
        done = subprocess.run(
            in_container([sys.executable, "-P", "-c", script]),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_START_S,
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"cluster.container: {image} has not started on {node} within {_START_S:.0f} s; "
            "fetch the image beforehand"
        ) from error
    answers = [line for line in done.stdout.splitlines() if line.startswith("slurmllm ")]
    if done.returncode or not answers:
        last = (done.stderr.strip() or done.stdout.strip()).rpartition("\n")[2][:300]
        raise ConfigError(
            f"cluster.container: slurmllm cannot be started in {image} on {node} (exit code "
            f"{done.returncode}): {last}; correct the image, the mounts or container.python"
        )
    if answers[-1] != f"slurmllm {version}":
        raise ConfigError(
            f"cluster.container: {image} has {answers[-1]}, and the run was submitted with "
            f"{version}; install that in the image"
        )


def paths_of(container: Container) -> list[Path]:
    """Return the image and the mounts, as far as they are paths of the host."""
    files = [container.image] if container.image.startswith("/") else []
    return [Path(path) for path in (*files, *(m.partition(":")[0] for m in container.mounts))]


def container_arguments(
    container: Container, device: str, folders: Iterable[Path | str]
) -> list[str]:
    """Return the options of srun, for pyxis, or the command that a task follows.

    Args:
        container: The container.
        device: `cluster.device`.
        folders: Further folders of the host, for the same paths inside.
    """
    outermost: list[str] = []  # without those that are in another one
    for folder in sorted({Path(os.path.normpath(folder)) for folder in folders}):
        if not any(folder.is_relative_to(other) for other in outermost):
            outermost.append(str(folder))
    full = [
        mount if ":" in mount else f"{mount}:{mount}" for mount in [*outermost, *container.mounts]
    ]
    gpu = device == "cuda"
    if container.runtime == "pyxis":
        return [
            f"--container-image={container.image}",
            f"--container-mounts={','.join(full)}",
            *container.options,
        ]
    if container.runtime in ("apptainer", "singularity"):
        binds = [argument for mount in full for argument in ("--bind", mount)]
        nvidia = ["--nv"] if gpu else []
        return [container.runtime, "exec", *nvidia, *binds, *container.options, container.image]
    user = "--userns=keep-id"  # podman
    gpus = "--device=nvidia.com/gpu=all"
    if container.runtime == "docker":
        user = f"--user={os.getuid()}:{os.getgid()}"
        gpus = "--gpus=all"
    return [
        container.runtime,
        "run",
        "--rm",
        "--init",  # processes that lose their parent are reaped, and signals passed on
        "--network=host",
        "--ipc=host",
        "--pid=host",
        "--ulimit=memlock=-1",
        user,
        *([gpus] if gpu else []),
        *(f"--volume={mount}" for mount in full),
        *container.options,
        container.image,
    ]
