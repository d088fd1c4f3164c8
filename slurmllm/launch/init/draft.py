"""The profile of a partition: the shipped one that it extends, and a comment on each line.

What Slurm and this machine tell is read; no job is submitted.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any, Literal

from slurmllm.core.config.layers import plain
from slurmllm.core.config.profiles import available, read_profile
from slurmllm.core.config.resolve import clusters_dir
from slurmllm.core.config.schema import schema_line
from slurmllm.core.config.yaml_source import write_yaml
from slurmllm.core.errors import SlurmError
from slurmllm.core.format import Texts, format_plural
from slurmllm.core.run.safe_files import replaceable_error
from slurmllm.core.slurm.client import SlurmClient
from slurmllm.core.slurm.site import NodeKind, Partition, Site
from slurmllm.launch.diagnose.storage import SHARED_TYPES, file_system

Values = dict[str, Any]  # of a profile
Rows = Iterator[tuple[str, str]]  # line and comment
_DISK = "/var/tmp"  # noqa: S108 (every Linux has it on a disk; the caches there are private)
_COLUMN = 34  # of the comments
# GPU, as a word of GRES types and features → the shipped profile with its data sheet's figures.
_GPUS = {"h200": "p5e", "h100": "h100_ib", "b200": "p6-b200", "a100": "a100_ib"}
# Parts of a GPU, and boards with links and clocks of their own.
_UNLIKE = re.compile(r"\d+g\.\d+gb|\bpcie\b|\bnvl\b|\bgh200\b|\bgb200\b")


@dataclass(frozen=True)
class Figures:
    """A shipped profile to extend, and how sure it is that its figures hold."""

    profile: str
    confidence: Literal["exact", "likely", "guess"]
    reason: str
    # What the new profile changes of it besides what Slurm says.
    changes: Values = field(default_factory=dict)


def nearest_figures(kind: NodeKind) -> Figures:
    """Return the shipped profile whose figures are nearest to those of nodes.

    Exact by the instance type, which ParallelCluster makes a feature of the nodes; else by the
    type of GPU, which says nothing of the network.
    """
    shipped = {name: shipped_values(name) for name in available(clusters_dir())}
    for name, values in shipped.items():
        if values.get("instance_type") in kind.features:
            return Figures(name, "exact", f"the nodes have the feature {values['instance_type']}")
    if not kind.gpus:
        return Figures(
            "local",
            "guess",
            "Slurm counts no GPUs; the figures are a guess at two cores of a server",
        )
    name, gpu = _by_gpu(" ".join([kind.gpu_type, *kind.features]))
    keys = (key for key in ("instance_type", "env") if shipped[name].get(key))
    changes: Values = dict.fromkeys(keys)
    if shipped[name].get("health", {}).get("efa_interfaces"):
        changes["health"] = {"efa_interfaces": 0}
    if gpu is None:
        subject = f"the GPU {kind.gpu_type}" if kind.gpu_type else "a GPU that Slurm does not name"
        reason = f"{subject} has no shipped profile, these are {name}'s"
        changes["hardware"] = {
            "rough": True,
            "source": f"a guess: those of {name}; `slurmllm calibrate` measures",
        }
        return Figures(name, "guess", reason, changes)
    hardware = shipped[name]["hardware"]
    assumed = [*hardware.get("assumed", []), "network_gb_s", "network_efficiency"]
    if kind.gpus != shipped[name]["devices_per_node"]:
        assumed += ["node_link_efficiency", "overlap"]
    changes["hardware"] = {"assumed": list(dict.fromkeys(assumed))}
    return Figures(
        name,
        "likely",
        f"by the GPU {gpu}, of {hardware['memory_gib']:g} GiB; the network is assumed",
        changes,
    )


def shipped_values(name: str) -> Values:
    values: Values = plain(read_profile(clusters_dir() / f"{name}.yaml", clusters_dir()))
    return values


def _by_gpu(device: str) -> tuple[str, str | None]:
    """Return a shipped profile and the GPU by which it was chosen; None: of another GPU."""
    device = re.sub(r"[^a-z0-9.]+", " ", device.lower())
    gpu = next((gpu for gpu in _GPUS if re.search(rf"\b{gpu}\b", device)), None)
    if gpu is None:
        return "a100_ib", None
    name = "p4d" if gpu == "a100" and re.search(r"\b40(gb)?\b", device) else _GPUS[gpu]
    return name, None if _UNLIKE.search(device) else gpu


@dataclass(frozen=True)
class Draft:
    """A profile of a partition's most numerous devices, to be written."""

    figures: Figures
    kind: NodeKind
    text: str


def draft_profile(survey: Survey, partition: Partition) -> Draft:
    kind = partition.kinds[0]
    machine = survey.machine
    figures = nearest_figures(kind)
    header = [
        schema_line("cluster").strip(),
        f"# By `slurmllm init` on {machine.host}, {date.today()}. Check the lines with a comment.",
    ]
    header += (
        f"{line:<{_COLUMN}}  # {comment}" if comment else line
        for line, comment in _lines(survey, partition, kind, figures)
    )
    return Draft(figures, kind, "\n".join(header) + "\n")


def _lines(survey: Survey, partition: Partition, kind: NodeKind, figures: Figures) -> Rows:
    machine = survey.machine
    base = shipped_values(figures.profile)
    yield f"extends: {figures.profile}", f"hardware figures, {figures.confidence}: {figures.reason}"
    gpus = f"{kind.gpus} {kind.gpu_type or 'GPUs'}, " if kind.gpus else ""
    hardware = f"{gpus}{kind.cpus} CPUs, {kind.memory_mb / 1024:.0f} GiB"
    hardware = f"{format_plural(len(kind.nodes), 'node')} of {hardware}"
    yield _yaml({"description": f"{survey.name}, partition {partition.name}: {hardware}"}), ""
    partitions = ", ".join(name for name in survey.partitions if name != partition.name)
    limit = f"time limit {partition.time_limit}"
    if partitions:
        limit += f"; others: {partitions}"
    yield _yaml({"partition": partition.name}), limit
    devices = kind.gpus or base["devices_per_node"]
    yield f"devices_per_node: {devices}", "GPUs by Slurm" if kind.gpus else "workers"
    yield f"cpus_per_node: {kind.cpus}", "by Slurm"
    yield from _disk_line(survey, figures, base)
    yield "exclusive: true", "whole nodes; false: also give --cpus-per-task and --mem"
    inherited = () if kind.gpus else base.get("directives", ())  # a list replaces the other one
    yield from _directive_lines(survey, partition, kind, inherited)
    if machine.modules:
        loaded = f"; loaded now: {' '.join(machine.loaded)}" if machine.loaded else ""
        yield "# setup:", f"lines of shell for each job; {machine.modules}{loaded}"
        yield "#   - module load cuda", ""
    location = machine.python_file_system
    location += "" if location in SHARED_TYPES else ", which the nodes must see too"
    yield f"# python: {machine.python}", f"of the jobs, else that of submit; on {location}"
    if machine.containers:
        yield "# container:", f"on {machine.host}: {', '.join(machine.containers)}"
        yield f"#   runtime: {machine.containers[0]}", ""
        yield "#   image: /shared/slurmllm.sif", "with torch, and slurmllm of this version"
    if figures.changes:
        yield f"# Not as {figures.profile}; `slurmllm calibrate` measures the figures:", ""
        yield _yaml(figures.changes), ""


def _disk_line(survey: Survey, figures: Figures, base: Values) -> Rows:
    seen = f"here: {', '.join(survey.machine.disks) or 'none'}"
    configured = survey.site.settings.get("TmpFS", "")
    if figures.confidence == "exact":
        yield f"node_local: {base['node_local']}", f"a disk of each node, {figures.profile}'s"
    elif configured.startswith("/") and configured != "/tmp":  # noqa: S108 (Slurm's default)
        yield _yaml({"node_local": configured}), f"TmpFS of slurm.conf; {seen}"
    else:
        yield f"node_local: {_DISK}", f"a disk of each node; {seen}"


def _directive_lines(
    survey: Survey, partition: Partition, kind: NodeKind, inherited: Iterable[str]
) -> Rows:
    options = dict.fromkeys(inherited, "")
    if kind.gpus:
        excluded = sum(len(other.nodes) for other in partition.kinds[1:])
        count = f"{kind.gpu_type}:{kind.gpus}" if excluded and kind.gpu_type else str(kind.gpus)
        options[f"--gpus-per-node={count}"] = (
            f"leaves out {format_plural(excluded, 'node')} of the partition" if excluded else ""
        )
    for settings in (survey.site.settings, partition.fields):
        for name in ("DefMemPerNode", "DefMemPerCPU"):
            if (default := settings.get(name, "UNLIMITED")) != "UNLIMITED":
                options["--mem=0"] = f"all of the node's: a job without it gets {name}={default}"
    comments = {}
    for option, names, default, allowed in _charges(survey, partition):
        usable = [name for name in names if allowed is None or name.lower() in allowed]
        choices = ", ".join(f"{name} (default)" if name == default else name for name in names)
        if usable and default not in usable:
            options[f"--{option}={usable[0]}"] = f"{partition.name} takes it; yours: {choices}"
        elif names:
            comments[f"--{option}={default or names[0]}"] = f"yours: {choices}"
    if kind.features:
        comments[f"--constraint={kind.features[0]}"] = f"features: {', '.join(kind.features)}"
    yield "directives:" if options else "# directives:", "further options of sbatch"
    for sign, lines in (("-", options), ("# -", comments)):
        yield from ((f"  {sign} {option}", comment) for option, comment in lines.items())


def _charges(
    survey: Survey, partition: Partition
) -> Iterator[tuple[str, list[str], str, list[str] | None]]:
    """Yield option, the user's values, that of jobs without it, and those that are allowed."""
    rows = [row for row in survey.site.associations if row.partition in ("", partition.name)]
    accounts = list(dict.fromkeys(row.account for row in rows))
    default = next((row.account for row in rows if row.default), "")
    yield "account", accounts, default, partition.allowed("AllowAccounts")
    of_default = [row for row in rows if row.default] or rows[:1]
    qos = list(dict.fromkeys(name for row in of_default for name in row.qos if name))
    yield (
        "qos",
        qos,
        next((row.default_qos for row in of_default if row.default_qos), "") or next(iter(qos), ""),
        partition.allowed("AllowQos"),
    )


def _yaml(values: Values) -> str:
    return write_yaml(values).rstrip("\n")


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
    loaded: Texts  # modules of this shell
    disks: Texts  # its own, such as `/var/tmp (69 GB free)`
    python: str
    python_file_system: str
    containers: Texts  # runtimes of `cluster.container`


@dataclass(frozen=True)
class Survey:
    """A cluster as Slurm shows it, and the machine that asked."""

    site: Site
    partitions: Mapping[str, Partition]  # those with nodes
    machine: Machine

    @property
    def name(self) -> str:
        return (
            re.sub(r"[^A-Za-z0-9._-]+", "-", self.site.settings.get("ClusterName", "")) or "cluster"
        )

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
    python = Path(sys.executable)
    lmod = os.environ.get("LMOD_VERSION")
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
