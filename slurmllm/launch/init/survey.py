"""What Slurm and this machine tell of a site. Read only: no job is submitted."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from slurmllm.core.errors import SlurmError
from slurmllm.core.run.safe_files import replaceable_error
from slurmllm.core.slurm.client import SlurmClient
from slurmllm.core.slurm.site import Partition, Site
from slurmllm.launch.diagnose.storage import SHARED_TYPES, file_system

# Where sites mount the disks of a node.
_DISKS = (
    *("/raid", "/scratch", "/local", "/localscratch", "/local_scratch", "/lscratch", "/nvme"),
    *("/mnt/nvme", "/mnt/local", "/mnt/scratch", "/var/tmp", "/tmp"),  # noqa: S108
)
_IN_MEMORY = {"tmpfs", "ramfs"}
_RUNTIMES = ("apptainer", "singularity", "podman", "docker")


@dataclass(frozen=True)
class Machine:
    """The machine that this process runs on."""

    host: str
    modules: str  # such as `Lmod 8.7`; empty without a module system
    loaded: tuple[str, ...]  # modules of this shell
    disks: tuple[str, ...]  # its own, such as `/var/tmp (69 GB free)`
    python: str
    python_file_system: str
    containers: tuple[str, ...]  # runtimes of `cluster.container`

    @property
    def python_is_shared(self) -> bool:
        return self.python_file_system in SHARED_TYPES


@dataclass(frozen=True)
class Survey:
    """A cluster as Slurm shows it, and the machine that asked."""

    site: Site
    partitions: Mapping[str, Partition]  # those with nodes
    machine: Machine

    @property
    def name(self) -> str:
        cluster = self.site.settings.get("ClusterName", "")
        return re.sub(r"[^A-Za-z0-9._-]+", "-", cluster) or "cluster"

    @property
    def suggested(self) -> Partition:
        """The partition with the most GPUs of one kind, then of equal nodes, then the default."""
        return max(
            self.partitions.values(),
            key=lambda p: (p.kinds[0].num_gpus, -len(p.kinds), p.is_default),
        )


_ELSEWHERE = (
    "run `slurmllm init` on a login node of the cluster. Without Slurm no profile is needed: "
    "`slurmllm submit RECIPE --local`"
)


def survey(client: SlurmClient) -> Survey:
    """Return what Slurm and this machine tell.

    Raises:
        SlurmError: no Slurm here, no answer, or no partition for this user.
    """
    if "scontrol" in client.missing_commands():
        raise SlurmError(f"no Slurm here: scontrol is not on the PATH; {_ELSEWHERE}")
    site = Site(client)
    try:
        partitions = {name: row for name, row in site.partitions.items() if row.nodes}
    except SlurmError as error:
        raise SlurmError(f"{error}; {_ELSEWHERE}") from error
    if not partitions:
        raise SlurmError("Slurm shows no partition with nodes that you may use: `sinfo --all`")
    return Survey(site, partitions, _this_machine(client))


def _this_machine(client: SlurmClient) -> Machine:
    python, lmod = Path(sys.executable), os.environ.get("LMOD_VERSION")
    has_modules = bool({"MODULES_CMD", "MODULESHOME"} & os.environ.keys())
    modules = "Environment Modules" if has_modules else ""
    return Machine(
        host=os.uname().nodename,
        modules=f"Lmod {lmod}" if lmod else modules,
        loaded=tuple(filter(None, os.environ.get("LOADEDMODULES", "").split(":"))),
        disks=tuple(_disks()),
        python=str(python),
        python_file_system=file_system(python.parent.resolve())[0],
        containers=tuple(_runtimes(client)),
    )


def _disks() -> Iterator[str]:
    for path in map(Path, _DISKS):
        with suppress(OSError):  # a mount that does not answer, or a folder that is closed
            kind, _ = file_system(path.resolve(strict=True))
            unfit = kind in SHARED_TYPES | _IN_MEMORY or not os.access(path, os.W_OK)
            if not (unfit or replaceable_error(path)):
                yield f"{path} ({shutil.disk_usage(path).free / 1e9:.0f} GB free)"


def _runtimes(client: SlurmClient) -> Iterator[str]:
    with suppress(SlurmError):
        client.check_srun(["--container-image=/image"])  # an option of pyxis, a plugin of srun
        yield "pyxis"
    installed = [name for name in _RUNTIMES if shutil.which(name)]
    # Apptainer installs the former name too.
    yield from (n for n in installed if n != "singularity" or "apptainer" not in installed)
