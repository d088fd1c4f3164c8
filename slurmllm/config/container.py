"""`cluster.container`: the image that the tasks of srun run in, and the command that starts them.

The batch script and its supervisor run outside, with the host's Python. Process ids are the host's
inside too, and a task becomes the container's main process, so that signals reach it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from slurmllm.config.operation import ListOf, Section

Argument = Annotated[str, Field(pattern=r"^[^\s\x00]+$")]


def _mount(value: str) -> str:
    source, _, rest = value.partition(":")
    if not source.startswith("/") or not (rest == "" or rest.startswith("/")):
        raise ValueError("must be /SOURCE or /SOURCE:/TARGET, with :ro to forbid writing")
    return value


class Container(Section):
    """The container that the tasks of jobs run in."""

    runtime: Literal["pyxis", "apptainer", "singularity", "docker", "podman"]
    """What starts it."""
    image: Argument
    """File or folder on the shared file system, by its absolute path, or a name that the runtime
    knows, such as docker://nvcr.io/nvidia/pytorch:25.01-py3."""
    mounts: ListOf[Annotated[Argument, AfterValidator(_mount)]] = ()
    """Further folders of the host: /SOURCE, /SOURCE:/TARGET or /SOURCE:/TARGET:ro."""
    options: ListOf[Argument] = ()
    """Further options of the runtime."""
    python: Argument = "python3"
    """Interpreter in the image, with slurmllm of the same version."""

    @property
    def srun_runs_it(self) -> bool:
        """Whether it is started by options of srun, and not by a command of its own."""
        return self.runtime == "pyxis"


def paths_of(container: Container) -> list[Path]:
    """Return the image and the mounts, as far as they are paths of the host."""
    files = [container.image] if container.image.startswith("/") else []
    return [Path(path) for path in (*files, *(m.partition(":")[0] for m in container.mounts))]


def container_arguments(
    container: Container, device: str, folders: Iterable[Path | str], terminal: bool = False
) -> list[str]:
    """Return the options of srun, for pyxis, or the command that a task follows.

    Args:
        container: The container.
        device: `cluster.device`.
        folders: Further folders of the host, for the same paths inside.
        terminal: Whether the command needs a terminal.
    """
    outermost: list[str] = []  # without those that are in another one
    for folder in sorted({Path(os.path.normpath(folder)) for folder in folders}):
        if not any(folder.is_relative_to(other) for other in outermost):
            outermost.append(str(folder))
    mounts = [*outermost, *container.mounts]
    full = [mount if ":" in mount else f"{mount}:{mount}" for mount in mounts]
    gpu = device == "cuda"
    if container.runtime == "pyxis":
        options = [f"--container-image={container.image}", f"--container-mounts={','.join(full)}"]
        return [*options, *container.options]
    if container.runtime in ("apptainer", "singularity"):
        binds = [part for mount in full for part in ("--bind", mount)]
        nvidia = ["--nv"] if gpu else []
        return [container.runtime, "exec", *nvidia, *binds, *container.options, container.image]
    # --init: processes that lose their parent are reaped, and signals passed on.
    command = [
        container.runtime,
        "run",
        "--rm",
        "--init",
        "--network=host",
        "--ipc=host",
        "--pid=host",
    ]
    command += ["--ulimit=memlock=-1", *(["--interactive", "--tty"] if terminal else [])]
    if container.runtime == "docker":
        command += [f"--user={os.getuid()}:{os.getgid()}", *(["--gpus=all"] if gpu else [])]
    else:
        command += ["--userns=keep-id", *(["--device=nvidia.com/gpu=all"] if gpu else [])]
    return [*command, *(f"--volume={mount}" for mount in full), *container.options, container.image]
