"""The nodes to measure: those of an allocation, of a job of its own, or this machine."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from slurmllm.backends.environment import load_environment
from slurmllm.backends.rendezvous import free_port
from slurmllm.calibrate.fits import hardware_of
from slurmllm.calibrate.sample import Sample, Task
from slurmllm.config.cluster import Cluster, Hardware
from slurmllm.config.resolve import RunConfig, clusters_dir
from slurmllm.config.yaml_source import write_yaml
from slurmllm.diagnose.probe import read_lines
from slurmllm.errors import ConfigError, NodeError
from slurmllm.rundir import write_atomic
from slurmllm.supervise.allocation import (
    Allocation,
)

LIMIT_S = 300.0
_BUSY = 0.5  # tasks a CPU
_NODE = (sys.executable, "-m", "slurmllm.calibrate.node")

Say = Callable[[str], None]


@dataclass(frozen=True)
class Calibration:
    """What was measured.

    Attributes:
        hardware: The figures, with their source.
        nodes: The nodes that were measured.
        notes: What could not be measured and what stands in for it, and which nodes others were
            using meanwhile; a line each.
        seconds: How long it took.
    """

    hardware: Hardware
    nodes: tuple[str, ...]
    notes: tuple[str, ...]
    seconds: float


def calibrate(
    config: RunConfig, allocation: Allocation, say: Say, *, quick: bool = False
) -> Calibration:
    """Measure devices, memory and links as the native backend uses them.

    Args:
        config: With the profile that the nodes are taken to be of: device and workers a node; of
            the recipe, the precision (on GPUs bf16 unless --set), whether it compiles and the
            environment alone.
        allocation: The nodes, of `supervise.allocation.allocate_nodes`.
        say: Is told of the progress, a line at a time.
        quick: Measure less of everything, for a look whether it works.

    Raises:
        ConfigError: the profile's devices are not measured here.
        NodeError: a node measured nothing or not all.
    """
    require_measurable(config)
    task = _task(config, allocation, quick)
    begun = time.monotonic()
    processes = allocation.ask([*_NODE, task.model_dump_json()])
    samples: list[Sample] = []
    words: list[str] = []
    for _, text in read_lines(processes, LIMIT_S, lambda: False):
        sample = Sample.parse(text)
        if sample is None:
            words += [text.strip()] if text.strip() else []
        elif sample.kind == "progress":
            say(f"{time.monotonic() - begun:3.0f} s  {sample.of}")
        else:
            samples.append(sample)
    seconds = time.monotonic() - begun
    if any(process.returncode for process in processes) or not samples:
        last = words[-1] if words else f"no word within {LIMIT_S:.0f} s"
        raise NodeError(f"{' '.join(allocation.nodes)}: the measurement failed: {last}")
    found = hardware_of(samples, task, config.cluster.hardware, _source(config, allocation))
    say(f"{seconds:3.0f} s  done")
    busy = _busy(samples)
    # Nothing is to be refused on figures that somebody else's work went into.
    hardware = found.hardware.model_copy(update={"rough": bool(busy)})
    return Calibration(hardware, tuple(allocation.nodes), (*found.notes, *busy), seconds)


def _busy(samples: Sequence[Sample]) -> list[str]:
    return [
        f"{sample.of}: others were using it, {sample.value:.1f} tasks a CPU; the figures are "
        "marked as rough, measure idle nodes"
        for sample in samples
        if sample.kind == "busy" and sample.value > _BUSY
    ]


def require_measurable(config: RunConfig) -> None:
    """Refuse a profile whose devices nothing here measures, before nodes are waited for.

    Raises:
        ConfigError: NeuronCores.
    """
    cluster = config.cluster
    if cluster.device == "neuron":
        raise ConfigError(
            f"cluster profile {cluster.name} cannot be calibrated",
            [
                "cluster.device: neuron is not measured by --calibrate; the figures of the shipped "
                "profiles trn1 and trn1n come from published runs, and `slurmllm plan --against "
                "RUN` holds them against one of yours"
            ],
        )


def _task(config: RunConfig, allocation: Allocation, quick: bool) -> Task:
    cluster, train = config.cluster, config.recipe.train
    nodes, workers = len(allocation.nodes), cluster.devices_per_node
    variables = load_environment("native").variables(config)
    given = {name: variable.value for name, variable in variables.items()}
    return Task(
        nodes=nodes,
        workers=workers,
        sharing=workers * (nodes if allocation.job_id is None else 1),
        cpus=cluster.cpus_per_node,
        device=cluster.device,
        address=allocation.master_addr,
        port=free_port(),
        precision=_precision(config),
        compiled=train.compile,
        variables={**given, **cluster.env, **config.recipe.env},
        quick=quick,
    )


def _precision(config: RunConfig) -> Literal["fp32", "bf16"]:
    """The recipe's; on GPUs bf16, unless --set asks for fp32."""
    asked = config.origins.get("train.precision", "").startswith("--set")
    fp32 = config.recipe.train.precision == "fp32" and (config.cluster.device == "cpu" or asked)
    return "fp32" if fp32 else "bf16"


def _source(config: RunConfig, allocation: Allocation) -> str:
    first, *others = allocation.nodes if allocation.job_id else (socket.gethostname(),)
    more = f" and {len(others)} more" if others else ""
    today = datetime.now(UTC).date().isoformat()
    return f"measured on {first}{more} by slurmllm plan --calibrate, {today}"


def check_target(path: Path, *, replace: bool = False) -> None:
    """Whether a profile may be written there: to be asked before two minutes are spent.

    Args:
        path: Of the profile.
        replace: Whether a file that is there may be overwritten.

    Raises:
        ConfigError: the path does not end in .yaml, is a shipped profile, exists and may not be
            replaced, or lies in no folder.
    """
    said = f"--out {path}"
    if path.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"{said}: a profile's name ends in .yaml; choose such a one")
    if path.resolve().parent == clusters_dir().resolve():
        raise ConfigError(
            f"{said}: the profiles that ship with slurmllm are not written to; choose a file of "
            "your own and name it with --cluster"
        )
    if path.is_dir() or (path.exists() and not replace):
        raise ConfigError(f"{said}: exists and is not overwritten; choose another name")
    if not path.resolve().parent.is_dir():
        raise ConfigError(f"{said}: there is no folder {path.resolve().parent}; make it first")


def profile_text(cluster: Cluster, calibration: Calibration) -> str:
    """The YAML of a profile with the measured figures in place of its own.

    Args:
        cluster: The profile that the nodes were taken to be of.
        calibration: What was measured on them.
    """
    measured = cluster.model_copy(update={"hardware": calibration.hardware})
    values = measured.model_dump(mode="json", exclude_unset=True)
    values["hardware"] = calibration.hardware.model_dump(mode="json")
    return f"# {calibration.hardware.source}\n" + write_yaml(values)


def write_profile(
    cluster: Cluster, calibration: Calibration, path: Path, *, replace: bool = False
) -> None:
    """Write such a profile, whole or not at all; `--cluster PATH` reads it.

    Raises:
        ConfigError: as `check_target` does.
        StorageError: the file system refused.
    """
    check_target(path, replace=replace)
    write_atomic(path, profile_text(cluster, calibration))
