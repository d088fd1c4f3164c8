"""Checks of `doctor` on the login node: this Python and its packages, and Slurm."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import islice

from slurmllm.core.config.cluster import Cluster
from slurmllm.core.config.directives import parse_options
from slurmllm.core.config.operation import SlurmConfig
from slurmllm.core.errors import SlurmError
from slurmllm.core.format import format_names
from slurmllm.core.run.records import Finding
from slurmllm.core.slurm.client import (
    COMMANDS,
    PartitionNode,
    SlurmClient,
    count_gpus,
)
from slurmllm.core.slurm.container import container_faults
from slurmllm.core.slurm.limits import (
    EQUAL_NODES,
    check_limits,
    describe_difference,
    suitable_nodes,
)
from slurmllm.core.slurm.setup import setup_faults
from slurmllm.core.slurm.site import Site, explain_drain
from slurmllm.launch.diagnose import Findings, fail, judge, ok, skipped, unfit, warn

# The same as in constraints.txt: numerics and compiled graphs were checked on this version.
TESTED_TORCH = "2.13.0"
IMPORT_TIMEOUT_S = 300  # a cold import of torch from a slow shared file system

# Neuron 2.28, on which NxD's users are to stay: docs/parallelcluster.md#the-neuron-environment.
# Distribution → (module, supported series, the version that configs/parallelcluster installs).
NEURON_PACKAGES: dict[str, tuple[str, tuple[str, ...], str]] = {
    "torch-xla": ("torch_xla", ("2.9",), "2.9.0"),
    "torch-neuronx": ("torch_neuronx", ("2.9",), "2.9.0.2.12.22436"),
    "neuronx-cc": ("neuronxcc", ("2.23",), "2.23.6484.0"),
    "libneuronxla": ("libneuronxla", ("2.2",), "2.2.15515.0"),
    "neuronx-distributed": ("neuronx_distributed", ("0.17", "0.18"), "0.17.26814"),
}
NEURON_TORCH = "2.9"
NEURON_PYTHON = ((3, 11), (3, 12))
_NEURON_FIX = (
    "make the environment with `configs/parallelcluster/neuron.sh python DIR` (Neuron 2.28.1)"
)
OLDEST_SLURM = "22.05"  # the development cluster's, on which the tests run
_GPU_REQUESTS = {"gpus", "gpus-per-node", "gpus-per-task", "gres"}
_NODE_CHECKS = ("nodes", "limits", "equal nodes", "CPUs", "devices")
_CONTROLLER_CHECKS = ("slurm version", "requeue", "accounting", "partition", *_NODE_CHECKS)


def installation_findings(cluster: Cluster) -> Findings:
    """Checks of this Python, for the backend of the profile's device."""
    neuron = cluster.device == "neuron" and cluster.container is None
    lowest, highest = NEURON_PYTHON
    fix = ""  # pip refuses to install slurmllm with a Python before 3.11
    if neuron and not lowest <= sys.version_info[:2] <= highest:
        fix = "the Neuron 2.28 wheels need Python 3.11 or 3.12; a new venv"
    yield judge("python", f"{platform.python_version()}, {sys.executable}", fix, unfit)
    yield packages_finding()
    if cluster.container:
        for check in ("torch", "private APIs", "C++ compiler"):
            yield skipped(check, "those of the container's image count")
        return
    yield torch_finding(cluster)
    yield private_names_finding()
    if neuron:
        yield from neuron_findings()
        yield skipped("C++ compiler", "the nxd backend compiles with neuronx-cc")
    else:
        yield compiler_finding()


def profile_finding(cluster: Cluster, source: str) -> Finding:
    """Whether jobs can run with a profile; `source` is what chose it."""
    state = f"{cluster.name}, by {source}"
    faults = setup_faults(cluster.setup)
    if cluster.planning_only:
        faults.append(f"for planning only: {cluster.planning_only}")
    if not faults:
        return ok("profile", state)
    return unfit(
        "profile",
        f"{state}: {'; '.join(faults)}",
        fix="correct the profile, or another --cluster",
    )


def container_findings(cluster: Cluster, client: SlurmClient) -> Findings:
    """What is known here of `cluster.container`: its paths and its runtime."""
    container = cluster.container
    if container is None:
        return
    state = f"{container.runtime} {container.image}"
    if faults := container_faults(cluster, local=False):
        yield unfit("container", "; ".join(faults), fix="correct the profile")
        return
    if container.srun_runs_it:
        try:
            client.check_srun([f"--container-image={container.image}"])
        except SlurmError as error:
            yield unfit(
                "container",
                f"{state}: {error}",
                fix="pyxis must be installed on the cluster; else another runtime",
            )
            return
    elif shutil.which(container.runtime) is None:
        yield warn(
            "container",
            f"{state}: no {container.runtime} on this PATH",
            fix="nothing, if the nodes have it or cluster.setup loads it; else another runtime",
        )
        return
    yield ok("container", f"{state}; the first attempt of a run starts it once")


def installed_version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def at_least(version: str, minimum: str) -> bool:
    """Whether a version such as `2.13.0+cpu` is not older than another."""
    begins = (re.split(r"[^\d.]", name)[0] for name in (version, minimum))
    here, needed = ([int(part) for part in begin.split(".") if part] for begin in begins)
    return here >= needed


def in_series(version: str, series: str) -> bool:
    """Whether a version belongs to a series: `2.9.0` to `2.9`, `2.90` not."""
    return re.match(rf"{re.escape(series)}(?!\d)", version) is not None


def packages_finding() -> Finding:
    """The requirements of slurmllm's own metadata."""
    version = installed_version("slurmllm")
    if version is None:
        return warn(
            "packages", "slurmllm runs from a folder and is not installed", fix="pip install ."
        )
    requirements = importlib.metadata.requires("slurmllm") or []
    names = [re.split(r"[^\w.-]", line)[0] for line in requirements if "extra" not in line]
    names = [name for name in names if name != "torch"]  # which has its own check
    missing = [name for name in names if installed_version(name) is None]
    if missing:
        return unfit(
            "packages",
            f"missing: {', '.join(missing)}",
            fix="pip install slurmllm again, in this environment",
        )
    return ok("packages", f"slurmllm {version} and the {len(names)} packages that it requires")


def torch_finding(cluster: Cluster) -> Finding:
    present = installed_version("torch")
    if present is None:
        return unfit("torch", "not installed", fix="pip install torch, in this environment")
    imported = import_torch()
    if imported is None:
        return warn(
            "torch",
            f"{present}; not imported within {IMPORT_TIMEOUT_S} s",
            fix="move the environment to a faster file system",
        )
    status, _, versions = imported.partition(" ")
    version, _, cuda = versions.partition(" ")
    if status != "imported":
        return unfit("torch", f"{present} does not import: {imported}", fix="install it again")
    if cluster.device == "neuron":
        if not in_series(version, NEURON_TORCH):
            return unfit("torch", f"{version}; torch-neuronx needs {NEURON_TORCH}", fix=_NEURON_FIX)
    elif not at_least(version, "2.9"):
        return unfit("torch", f"{version}, older than 2.9", fix="pip install 'torch>=2.9'")
    elif cluster.device == "cuda" and cuda == "None":
        return unfit("torch", f"{version} is built without CUDA", fix="install a build for CUDA")
    elif not in_series(version, TESTED_TORCH):
        return warn(
            "torch",
            f"{version}; the tests ran on {TESTED_TORCH}",
            fix=f"pip install torch=={TESTED_TORCH}, unless you need another version",
        )
    return ok("torch", version if cuda in ("None", "") else f"{version}, CUDA {cuda}")


def _run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Import in a child process: if that crashes or hangs, it does not take this one with it."""
    # -P: not the torch.py of the working directory, which may be another user's.
    return subprocess.run(
        [sys.executable, "-P", *arguments], capture_output=True, text=True, timeout=IMPORT_TIMEOUT_S
    )


def import_torch() -> str | None:
    """Return `imported VERSION CUDA`, or the last line of the import's error; None: too slow."""
    try:
        done = _run_python(
            "-c", "import torch; print('imported', torch.__version__, torch.version.cuda)"
        )
    except subprocess.TimeoutExpired:
        return None
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    return lines[-1] if lines else f"exit code {done.returncode}"


def private_names_finding() -> Finding:
    try:
        done = _run_python("-m", "slurmllm.train.model.private_names")
        done.check_returncode()
    except subprocess.SubprocessError:
        return skipped("private APIs", "torch or lm_eval does not import")
    if lines := done.stdout.strip().splitlines():
        return warn("private APIs", "; ".join(lines), fix="another version of the package")
    return ok("private APIs", "all that slurmllm uses of torch and lm_eval are there")


def neuron_findings() -> Findings:
    """The wheels of AWS's package index, one finding each."""
    for distribution, (module, series, pinned) in NEURON_PACKAGES.items():
        present = installed_version(distribution)
        if present is None:
            yield unfit(distribution, f"not installed; {pinned} is supported", fix=_NEURON_FIX)
        elif importlib.util.find_spec(module) is None:
            yield unfit(
                distribution,
                f"{present} is the public index's placeholder: no module {module}",
                fix=f"pip uninstall {distribution}; {_NEURON_FIX}",
            )
        elif not any(in_series(present, prefix) for prefix in series):
            yield unfit(
                distribution,
                f"{present}; supported: {' and '.join(f'{s}.*' for s in series)}",
                fix=_NEURON_FIX,
            )
        elif present.partition("+")[0] != pinned:
            yield warn(distribution, f"{present}; pinned is {pinned}", fix=_NEURON_FIX)
        else:
            yield ok(distribution, present)


def compiler_finding() -> Finding:
    compiler = os.environ.get("CXX", "g++")
    if (path := shutil.which(compiler)) is not None:
        return ok("C++ compiler", path)
    return warn(
        "C++ compiler",
        f"no {compiler!r} here",
        fix="torch.compile needs one, on the nodes too: install g++, set $CXX, or --set "
        "train.compile=false",
    )


def slurm_findings(client: SlurmClient, cluster: Cluster, partition: str | None = None) -> Findings:
    """Checks of Slurm, and of the given, the profile's or the default partition.

    Without Slurm there is one warning, and the others are skipped.
    """
    missing = client.missing_commands()
    if len(missing) == len(COMMANDS):
        yield warn(
            "slurm commands",
            "none on the PATH",
            fix="--local trains on this machine; for a cluster, run this on its login node",
        )
        for check in ("slurm controller", *_CONTROLLER_CHECKS):
            yield skipped(check, "no Slurm here")
        return
    if missing:
        yield fail(
            "slurm commands",
            f"{', '.join(missing)}: not on the PATH",
            fix="install Slurm's client commands here",
        )
    else:
        yield ok("slurm commands", ", ".join(COMMANDS))
    site = Site(client)
    try:
        settings = site.settings
        _ = site.nodes
    except SlurmError as error:
        # scontrol prints a line for each step that failed; the last one is the reason.
        yield fail(
            "slurm controller",
            str(error).rpartition("scontrol: ")[2],
            fix="`scontrol ping`; --local does without Slurm",
        )
        for check in _CONTROLLER_CHECKS:
            yield skipped(check, "slurmctld is unreachable")
        return
    yield ok("slurm controller", settings.get("ClusterName") or "responds")
    version = settings.get("SLURM_VERSION", "unknown")
    fix = "" if at_least(version, OLDEST_SLURM) else f"Slurm {OLDEST_SLURM} or later"
    yield judge("slurm version", version, fix, fail)
    requeue = f"JobRequeue={settings.get('JobRequeue', 'unknown')}"
    if requeue == "JobRequeue=1":
        yield ok("requeue", f"{requeue}: slurm.restart: auto requeues")
    else:
        yield warn(
            "requeue", requeue, fix="slurm.restart: auto continues runs by successor jobs (chain)"
        )
    storage = settings.get("AccountingStorageType", "")
    if not storage or storage.endswith("none"):
        fix = "slurmdbd; without it, an orphaned attempt counts as a node failure"
        yield warn("accounting", "none", fix=fix)
    else:
        try:
            client.check_accounting()
            yield ok("accounting", storage)
        except SlurmError as error:
            yield fail("accounting", str(error), fix="is slurmdbd running? `sacctmgr show cluster`")
    yield from _partition_findings(site, cluster, partition or cluster.partition)


def _device_findings(
    cluster: Cluster, suited: Sequence[PartitionNode], options: Mapping[str, str]
) -> Findings:
    """The CPUs and devices of the nodes that a job may get."""
    # A job may get any node: the smallest one counts.
    cpus = min(n.cpus for n in suited)
    gpus = min(count_gpus(n.gres) for n in suited)
    devices = cluster.devices_per_node
    required = cluster.cpus_per_node
    state = f"{cpus} a node"
    fix = ""
    if required not in (None, cpus):
        state += f"; profile {cluster.name} has {required}"
        fix = f"--set cluster.cpus_per_node={cpus}, or another --cluster or --partition"
    elif cluster.device == "cpu" and cpus < devices:
        state += f" for {devices} workers"
        fix = f"--set cluster.devices_per_node={cpus}"
    yield judge("CPUs", state, fix)
    if cluster.device == "cpu":
        yield ok("devices", f"CPUs, {devices} worker(s) a node")
    elif cluster.device == "neuron":
        yield skipped(
            "devices",
            f"Slurm counts no NeuronCores: the profile's {devices} a node cannot be checked here",
        )
    else:
        state = f"{gpus} GPU(s) a node"
        if gpus < devices:
            state += f"; profile {cluster.name} requires {devices}"
            yield unfit(
                "devices",
                state,
                fix=f"another --partition, or a profile with devices_per_node: {gpus}; Slurm "
                "counts GPUs if slurm.conf has Gres=gpu:N",
            )
        elif not options.keys() & _GPU_REQUESTS:
            yield warn(
                "devices",
                f"{state}; the profile requests none",
                fix=f"directives: [--gpus-per-node={devices}] in profile {cluster.name}",
            )
        else:
            yield ok("devices", state)


def _partition_findings(site: Site, cluster: Cluster, partition: str | None) -> Findings:
    """The partition that jobs are submitted to, and its nodes."""
    nodes = site.nodes
    members = [n for n in nodes if (n.partition == partition if partition else n.default)]
    if not members:
        names = ", ".join(sorted({node.partition for node in nodes})) or "none"
        fault = f"{partition!r} is unknown, closed to you or empty" if partition else "no default"
        yield unfit(
            "partition",
            f"{fault}; partitions: {names}",
            fix="one of these with --partition, or as the profile's partition",
        )
        for check in _NODE_CHECKS:
            yield skipped(check, "no partition")
        return
    name = members[0].partition
    if members[0].up:
        yield ok("partition", name if partition else f"{name}, the default")
    else:
        yield fail("partition", f"{name} is down", fix=f"`scontrol show partition {name}`")
    unusable = [node for node in members if not node.in_service]
    state = f"{len(members) - len(unusable)} of {len(members)} usable"
    fix = ""
    if unusable:
        state += f"; {format_names([f'{node.name} {node.state}' for node in unusable])}"
        fix = "; ".join(
            ["`sinfo --list-reasons`", *islice(filter(None, map(explain_drain, unusable)), 3)]
        )
    yield judge("nodes", state, fix, fail if len(unusable) == len(members) else warn)
    # As of a run of one node with the profile's options and the default time limit.
    options = {"partition": name, "time": SlurmConfig().time}
    options |= {n: str(value) for n, value in parse_options(cluster.directives).items()}
    if faults := check_limits(options, site).faults:
        status = warn if all(fault.startswith("--time") for fault in faults) else fail
        yield status("limits", "; ".join(faults), fix=f"`scontrol show partition {name}`")
    else:
        yield ok("limits", "a node and the default time limit are within the partition's")
    suited = suitable_nodes(options, members, site.client) or members
    if difference := describe_difference(suited):
        yield warn("equal nodes", difference, fix=EQUAL_NODES)
    else:
        yield ok("equal nodes", "CPUs, memory and GPUs are the same")
    yield from _device_findings(cluster, suited, options)
