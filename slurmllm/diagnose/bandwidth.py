"""The all-reduce over all nodes: how it is measured, and what it means for each of them."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from slurmllm.config.cluster import HealthChecks
from slurmllm.config.resolve import RunConfig
from slurmllm.diagnose.devices import FOLDERS, find
from slurmllm.diagnose.finding import fail, ok, warn
from slurmllm.diagnose.probe import Line, Nodes, read
from slurmllm.errors import NodeError, SlurmllmError
from slurmllm.records import HealthFinding, NodeHealth

CHECK = "all-reduce"
LIMIT_S = 300.0  # importing PyTorch on cold nodes, or compiling nccom-test's graphs, is most of it


@dataclass(frozen=True)
class Bandwidth:
    """What was measured, in GB/s of the bus.

    Attributes:
        gb_s: Over all nodes.
        by_node: Of the better pair that a node is part of, where pairs were measured.
    """

    gb_s: float
    by_node: Mapping[str, float] = field(default_factory=dict)


def with_bandwidth(
    health: Mapping[str, NodeHealth],
    nodes: Nodes,
    job_id: str | None,
    config: RunConfig,
    command: Sequence[str],
    port: int,
    stop: Callable[[], bool] = lambda: False,
) -> dict[str, NodeHealth]:
    """Measure, and add what follows to the nodes' findings; a lone worker has nothing to measure.

    Args:
        health: The nodes' own checks.
        nodes: The same nodes.
        job_id: The Slurm job that they are of.
        config: With the profile, whose floor counts.
        command: `python -m slurmllm`.
        port: Free on the first node.
        stop: Asked now and then whether to break off.
    """
    limits, per_node = config.cluster.health, config.cluster.devices_per_node
    if len(nodes.nodes) * per_node == 1:
        return dict(health)
    try:
        if config.cluster.device == "neuron":
            measured = _with_nccom(nodes, per_node, job_id, stop)
        else:
            measured = _with_torch(nodes, config, command, port, stop)
        found = {name: _judged(name, measured, limits) for name in health}
    except SlurmllmError as error:
        floor = limits.min_allreduce_gb_s
        told = warn if floor is None else fail
        found = dict.fromkeys(health, told(CHECK, "unusable", floor or "", str(error)))
    return {
        name: record.model_copy(update={"findings": (*record.findings, found[name])})
        for name, record in health.items()
    }


def _judged(name: str, measured: Bandwidth, limits: HealthChecks) -> HealthFinding:
    floor, gb_s = limits.min_allreduce_gb_s, round(measured.gb_s, 2)
    if floor is None or measured.gb_s >= floor:
        return ok(CHECK, gb_s, floor or "")
    slow = {node for node, best in measured.by_node.items() if best < floor}
    if slow and name not in slow:
        return ok(CHECK, round(measured.by_node[name], 2), floor)
    words = f"{gb_s:g} GB/s over all nodes, the profile says {floor:g}"
    if name in slow:
        words += f"; {measured.by_node[name]:.2f} GB/s with the better of its neighbours"
    return fail(CHECK, gb_s, floor, words)


def _with_torch(
    nodes: Nodes, config: RunConfig, command: Sequence[str], port: int, stop: Callable[[], bool]
) -> Bandwidth:
    cluster = config.cluster
    processes = nodes.ask(
        [*command, "allreduce", "--nodes", str(len(nodes.nodes)),
         "--workers", str(cluster.devices_per_node), "--device", cluster.device,
         "--address", nodes.master_addr, "--port", str(port),
         "--floor", str(cluster.health.min_allreduce_gb_s or 0.0)]
    )  # fmt: skip
    whole: float | None = None
    by_node: dict[str, float] = {}
    words = "no output"
    for _, text in read(processes, LIMIT_S, stop):
        line = Line.read(text)
        if line is None or line.gb_s is None:
            words = text.strip() or words
        elif line.node:
            by_node[nodes.nodes[int(line.node)]] = line.gb_s
        else:
            whole = line.gb_s
    if whole is None:
        raise NodeError(f"PyTorch measured nothing within {LIMIT_S:.0f} s: {words}")
    return Bandwidth(whole, by_node)


def _with_nccom(
    nodes: Nodes, per_node: int, job_id: str | None, stop: Callable[[], bool]
) -> Bandwidth:
    several = len(nodes.nodes) > 1
    name, *options = command(len(nodes.nodes), per_node, job_id)
    path = find(name)
    if several and path is None:
        raise NodeError(f"{name} is neither on $PATH nor in {FOLDERS[0]}")
    call = [path or f"{FOLDERS[0]}/{name}", *options]
    if several:
        processes = [subprocess.Popen(call, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)]
    else:
        processes = nodes.ask(call)
    return Bandwidth(bus_bandwidth("".join(t for _, t in read(processes, LIMIT_S, stop))))


SIZE = "64MB"


def command(nodes: int, per_node: int, job_id: str | None) -> list[str]:
    """The call; over several nodes it starts its own Slurm step in the job that is there."""
    options = ["--minbytes", SIZE, "--maxbytes", SIZE, "--datatype", "bf16", "--non-interactive"]
    over = ["--nnodes", str(nodes), "--slurm-mode", "--slurm-job-id", job_id or "alloc"]
    return [
        "nccom-test", "--nworkers", str(nodes * per_node), *(over if nodes > 1 else []), *options,
        "allr",
    ]  # fmt: skip


def bus_bandwidth(output: str) -> float:
    """The bus bandwidth of the largest size, GiB/s, from what nccom-test prints.

    Raises:
        NodeError: it measured nothing; the message holds its own words.
    """
    place: int | None = None
    rows: list[tuple[int, float]] = []
    for line in output.splitlines():
        fields = line.split()
        if fields and fields[0] == "size(B)":
            place = next((n for n, name in enumerate(fields) if name.startswith("busbw")), None)
        elif place is not None and len(fields) > place and fields[0].isdigit():
            try:
                rows.append((int(fields[0]), float(fields[place])))
            except ValueError:  # "33554432  Failure running neuron-bench - log file …"
                continue
    if not rows:
        words = [line.strip() for line in output.splitlines() if line.strip()]
        telling = [line for line in words if not line.startswith("size(B)")] or ["no output"]
        raise NodeError(f"nccom-test measured nothing: {telling[0]}")
    return max(rows)[1]
