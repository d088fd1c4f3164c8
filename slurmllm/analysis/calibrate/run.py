"""Calibrate a cluster profile: measure the nodes of an allocation, and write the figures."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from slurmllm.analysis.calibrate.fits import hardware_of
from slurmllm.analysis.calibrate.node import Sample, Samples, Task
from slurmllm.core.config.cluster import Cluster, Hardware
from slurmllm.core.config.resolve import RunConfig, clusters_dir
from slurmllm.core.config.variables import is_secret, mask
from slurmllm.core.config.yaml_source import write_yaml
from slurmllm.core.errors import ConfigError, NodeError
from slurmllm.core.format import Texts, format_names
from slurmllm.core.run.rundir import write_atomic
from slurmllm.launch.diagnose.probe import read_lines
from slurmllm.launch.supervise.allocation import Allocation, node_command
from slurmllm.train.backends.environment import load_environment
from slurmllm.train.control.rendezvous import free_port

LIMIT_S = 300.0  # for all measurements
_BUSY = 0.5  # load average per CPU from which on a node counts as in use


@dataclass(frozen=True)
class Calibration:
    """The result of a calibration."""

    hardware: Hardware
    nodes: Texts
    # One line for each figure that was not measured, with its replacement, and for each node that
    # was in use.
    notes: Texts
    seconds: float  # duration of the measurement, s
    products: Samples = ()  # the matrix products, of both precisions


def calibrate(
    config: RunConfig, allocation: Allocation, show: Callable[[str], None], *, quick: bool = False
) -> Calibration:
    """Measure devices, memory and links as the native backend uses them.

    Args:
        config: The profile of the nodes (device, workers of a node), and of the recipe only the
            precision (bf16 on GPUs unless --set), `compile` and the environment.

    Raises:
        ConfigError: the profile's devices cannot be measured.
        NodeError: the measurement failed on a node.
    """
    require_measurable(config)
    task = task_of(config, allocation, quick)
    samples, seconds = run_task(config.cluster, task, allocation, show)
    names = allocation.nodes if allocation.job_id else (socket.gethostname(),)
    today = f"{datetime.now(UTC):%Y-%m-%d}"
    source = f"measured on {format_names(names, 1)} by slurmllm calibrate, {today}"
    hardware, unmeasured = hardware_of(samples, task, config.cluster.hardware, source)
    busy = [
        f"{sample.of}: in use by others, {sample.value:.1f} tasks a CPU; the figures are marked as "
        "rough, measure idle nodes"
        for sample in samples
        if sample.kind == "busy" and sample.value > _BUSY
    ]
    # Rough: figures measured on a busy node must not refuse a run.
    hardware = hardware.model_copy(update={"rough": bool(busy)})
    products = [sample for sample in samples if sample.kind == "product"]
    return Calibration(hardware, tuple(allocation.nodes), (*unmeasured, *busy), seconds, products)


def run_task(
    cluster: Cluster, task: Task, allocation: Allocation, show: Callable[[str], None]
) -> tuple[list[Sample], float]:
    """Measure a task on the nodes; returns the measurements and their seconds; raises NodeError."""
    begun = time.monotonic()
    command = node_command(cluster, "slurmllm.analysis.calibrate.node")
    processes = allocation.ask([*command, task.model_dump_json()])
    samples = []
    last_line = ""
    for _, line in read_lines(processes, LIMIT_S, lambda: False):
        sample = Sample.parse(line)
        if sample is None:
            # Not a sample: the last such line is the error message if the measurement fails.
            last_line = line.strip() or last_line
        elif sample.kind == "progress":
            show(f"{time.monotonic() - begun:3.0f} s  {sample.of}")
        else:
            samples.append(sample)
    seconds = time.monotonic() - begun
    if any(process.returncode for process in processes) or not samples:
        reason = last_line or f"no output in {seconds:.1f} s"
        raise NodeError(f"{' '.join(allocation.nodes)}: the measurement failed: {reason}")
    show(f"{seconds:3.0f} s  done")
    return samples, seconds


def require_measurable(config: RunConfig) -> None:
    cluster = config.cluster
    if cluster.device == "neuron":
        raise ConfigError(
            f"cluster profile {cluster.name} cannot be calibrated",
            [
                "cluster.device: neuron is not measured by `calibrate`; the figures of the shipped "
                "profiles trn1 and trn1n come from published runs, and `slurmllm report RUN "
                "--prediction` compares them with a run"
            ],
        )


def task_of(config: RunConfig, allocation: Allocation, quick: bool) -> Task:
    cluster = config.cluster
    train = config.recipe.train
    # On GPUs bf16, unless --set chooses fp32.
    chosen = config.origins.get("train.precision", "").startswith("--set")
    fp32 = train.precision == "fp32" and (cluster.device == "cpu" or chosen)
    nodes = len(allocation.nodes)
    workers = cluster.devices_per_node
    variables = load_environment("native").variables(config)
    backend_variables = {name: variable.value for name, variable in variables.items()}
    return Task(
        nodes=nodes,
        workers=workers,
        # Without an allocation all nodes are launchers on this one machine.
        sharing=workers * (nodes if allocation.job_id is None else 1),
        cpus=cluster.cpus_per_node,
        device=cluster.device,
        address=allocation.master_addr,
        port=free_port(),
        precision="fp32" if fp32 else "bf16",
        compiled=train.compile,
        # The last wins: the recipe's variables override the cluster's and the backend's.
        # Without secrets: everybody can see the command line that this becomes a part of.
        variables={
            name: value
            for name, value in {**backend_variables, **cluster.env, **config.recipe.env}.items()
            if not is_secret(name, value)
        },
        quick=quick,
    )


def check_target(path: Path) -> None:
    """Raise ConfigError, before the measurement, unless a new profile can be written to `path`."""
    option = f"--out {path}"
    folder = path.resolve().parent
    if path.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"{option}: a profile's name ends in .yaml; choose such a name")
    if folder == clusters_dir().resolve():
        raise ConfigError(
            f"{option}: the profiles that ship with slurmllm are not written to; choose a file of "
            "your own and name it with --cluster"
        )
    if path.exists():
        raise ConfigError(f"{option}: exists and is not overwritten; choose another name")
    if not folder.is_dir():
        raise ConfigError(f"{option}: there is no folder {folder}; make it first")


def profile_text(cluster: Cluster, calibration: Calibration) -> str:
    """Return the YAML of a profile with its hardware figures replaced by the measured ones."""
    measured = cluster.model_copy(update={"hardware": calibration.hardware})
    # Unset fields are left out, so that the profile follows later versions' defaults.
    values = measured.model_dump(mode="json", exclude_unset=True)
    if cluster.env:
        values["env"] = mask(cluster.env)
    values["hardware"] = calibration.hardware.model_dump(mode="json")
    return f"# {calibration.hardware.source}\n" + write_yaml(values)


def write_profile(cluster: Cluster, calibration: Calibration, path: Path) -> None:
    """Write the calibrated profile atomically, for `--cluster PATH`; raises as `check_target`."""
    check_target(path)
    write_atomic(path, profile_text(cluster, calibration))
