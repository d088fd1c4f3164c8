"""What Slurm and this machine tell of a site. Read only: no job is submitted."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from slurmllm.diagnose.storage import SHARED_TYPES, file_system
from slurmllm.errors import SlurmError
from slurmllm.run.safe_files import replaceable_error
from slurmllm.slurm.client import Association, PartitionNode, SlurmClient, count_gpus

# Where sites mount the disks of a node.
_DISKS = (
    *("/raid", "/scratch", "/local", "/localscratch", "/local_scratch", "/lscratch", "/nvme"),
    *("/mnt/nvme", "/mnt/local", "/mnt/scratch", "/var/tmp", "/tmp"),  # noqa: S108
)
_IN_MEMORY = {"tmpfs", "ramfs"}
_RUNTIMES = ("apptainer", "singularity", "podman", "docker")


@dataclass(frozen=True)
class NodeKind:
    """The nodes of a partition that have the same GPUs."""

    nodes: tuple[str, ...]
    cpus: int  # of the smallest of them, as is memory_mb
    memory_mb: int
    gpus: int
    gpu_type: str  # as GRES names it; may be empty
    features: tuple[str, ...]  # that all of them have

    @property
    def num_gpus(self) -> int:
        return self.gpus * len(self.nodes)


@dataclass(frozen=True)
class Partition:
    """A partition that this user may use."""

    name: str
    default: bool
    up: bool
    fields: Mapping[str, str]  # as of `scontrol show partition`
    kinds: tuple[NodeKind, ...]  # the most devices first

    @property
    def time_limit(self) -> str:
        return self.fields.get("MaxTime", "UNLIMITED").lower()


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

    settings: Mapping[str, str]  # slurm.conf and SLURM_VERSION
    partitions: Mapping[str, Partition]
    associations: Sequence[Association]
    machine: Machine

    @property
    def name(self) -> str:
        return re.sub(r"[^A-Za-z0-9._-]+", "-", self.settings.get("ClusterName", "")) or "cluster"

    @property
    def suggested(self) -> Partition:
        """The partition with the most GPUs of one kind, then of equal nodes, then the default."""
        return max(
            self.partitions.values(),
            key=lambda p: (p.kinds[0].num_gpus, -len(p.kinds), p.default),
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
    try:
        settings, fields = client.settings(), client.partitions()
    except SlurmError as error:
        raise SlurmError(f"{error}; {_ELSEWHERE}") from error
    members: dict[str, list[PartitionNode]] = {}
    for node in client.partition_nodes():
        members.setdefault(node.partition, []).append(node)
    partitions = {
        name: Partition(name, nodes[0].default, nodes[0].up, fields.get(name, {}), _kinds(nodes))
        for name, nodes in sorted(members.items(), key=lambda row: not row[1][0].default)
    }
    if not partitions:
        raise SlurmError("Slurm shows no partition with nodes that you may use: `sinfo --all`")
    return Survey(settings, partitions, client.associations(), _this_machine(client))


def _kinds(nodes: Sequence[PartitionNode]) -> tuple[NodeKind, ...]:
    groups: dict[tuple[int, str], list[PartitionNode]] = {}
    for node in nodes:
        match = re.search(r"(?:^|,)gpu:(\d*[^:,(\d][^:,(]*)", node.gres)
        groups.setdefault((count_gpus(node.gres), match[1] if match else ""), []).append(node)
    kinds = [
        NodeKind(
            tuple(node.name for node in group),
            min(node.cpus for node in group),
            min(node.memory_mb for node in group),
            gpus,
            gpu_type,
            tuple(sorted(set.intersection(*({*n.features.split(",")} for n in group)) - {""})),
        )
        for (gpus, gpu_type), group in groups.items()
    ]
    return tuple(sorted(kinds, key=lambda kind: (-kind.num_gpus, -len(kind.nodes))))


def _this_machine(client: SlurmClient) -> Machine:
    python, lmod = Path(sys.executable), os.environ.get("LMOD_VERSION")
    has_modules = bool({"MODULES_CMD", "MODULESHOME"} & os.environ.keys())
    return Machine(
        host=os.uname().nodename,
        modules=f"Lmod {lmod}" if lmod else "Environment Modules" * has_modules,
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
