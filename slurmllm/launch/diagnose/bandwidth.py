"""The all-reduce over all nodes: starts the measurement, and derives a finding for each node."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping
from typing import NamedTuple

from slurmllm.core.config.resolve import RunConfig
from slurmllm.core.errors import NodeError, SlurmllmError
from slurmllm.core.run.records import Finding, NodeHealths
from slurmllm.core.slurm.error_texts import Command, StopCheck
from slurmllm.core.slurm.setup import slurm_environment
from slurmllm.launch.diagnose import fail, ok, warn
from slurmllm.launch.diagnose.probe import Nodes, ProbeLine, read_lines
from slurmllm.launch.diagnose.programs import FOLDERS, find
from slurmllm.train.control.rendezvous import free_port

CHECK = "all-reduce"
LIMIT_S = 300.0  # most of it: PyTorch's import on cold nodes, or nccom-test's compilation
NCCOM_SIZE = "64MB"


class Bandwidth(NamedTuple):
    """Measured bus bandwidths, GB/s."""

    gb_s: float  # over all nodes
    by_node: Mapping[str, float]  # of each node's faster pair; empty if no pairs were measured


def with_bandwidth(
    health: NodeHealths,
    nodes: Nodes,
    config: RunConfig,
    command: Command,
    stop: StopCheck = lambda: False,
) -> NodeHealths:
    """Measure the all-reduce and add a finding to each node; a single worker has none.

    `command` is `python -m slurmllm`; `stop` is polled. This process is on the first node.
    """
    floor = config.cluster.health.min_allreduce_gb_s
    if len(nodes.nodes) * config.cluster.devices_per_node == 1:
        return dict(health)
    try:
        if config.cluster.device == "neuron":
            measured = measure_with_nccom(nodes, config.cluster.devices_per_node, stop)
        else:
            measured = measure_with_torch(nodes, config, command, stop)
        findings = {name: _bandwidth_finding(name, measured, floor) for name in health}
    except SlurmllmError as error:
        status = warn if floor is None else fail
        findings = dict.fromkeys(health, status(CHECK, "unusable", floor or "", str(error)))
    return {
        name: record.model_copy(update={"findings": (*record.findings, findings[name])})
        for name, record in health.items()
    }


def _bandwidth_finding(name: str, measured: Bandwidth, floor: float | None) -> Finding:
    """Fail the slow nodes; if no pair is slow, the slow one is unknown and all nodes fail."""
    gb_s = round(measured.gb_s, 2)
    if floor is None or measured.gb_s >= floor:
        return ok(CHECK, gb_s, floor or "")
    slow = {node for node, best in measured.by_node.items() if best < floor}
    if slow and name not in slow:
        return ok(CHECK, round(measured.by_node[name], 2), floor)
    message = f"{gb_s:g} GB/s over all nodes; the profile requires {floor:g}"
    if name in slow:
        message += f"; {measured.by_node[name]:.2f} GB/s with the faster of its neighbours"
    return fail(CHECK, gb_s, floor, message)


def measure_with_torch(
    nodes: Nodes, config: RunConfig, command: Command, stop: StopCheck
) -> Bandwidth:
    cluster = config.cluster
    processes = nodes.ask(
        [
            *command,
            "allreduce",
            f"--nodes={len(nodes.nodes)}",
            f"--workers={cluster.devices_per_node}",
            f"--device={cluster.device}",
            f"--address={nodes.master_addr}",
            f"--port={free_port()}",
            f"--floor={cluster.health.min_allreduce_gb_s or 0.0}",
        ]
    )
    overall = None
    by_node = {}
    started = time.monotonic()
    last_line = "no output"
    for _, output in read_lines(processes, LIMIT_S, stop):
        line = ProbeLine.parse(output)
        if not line or line.gb_s is None:
            last_line = output.strip() or last_line
        elif line.node:
            by_node[nodes.nodes[int(line.node)]] = line.gb_s
        else:
            overall = line.gb_s
    if overall is None:
        raise NodeError(
            f"PyTorch measured nothing in {time.monotonic() - started:.1f} s: {last_line}"
        )
    return Bandwidth(overall, by_node)


def measure_with_nccom(nodes: Nodes, per_node: int, stop: StopCheck) -> Bandwidth:
    """Call nccom-test, which starts a Slurm step in the job for several nodes."""
    path = find("nccom-test")
    count = len(nodes.nodes)
    call = [path or f"{FOLDERS[0]}/nccom-test", "--nworkers", str(count * per_node)]
    if count > 1:
        call += ["--nnodes", str(count), "--slurm-mode", "--slurm-job-id", nodes.job_id or "alloc"]
    call += [
        "--minbytes",
        NCCOM_SIZE,
        "--maxbytes",
        NCCOM_SIZE,
        "--datatype",
        "bf16",
        "--non-interactive",
        "allr",
    ]
    if count == 1:
        processes = nodes.ask(call)
    elif path is None:
        raise NodeError(f"nccom-test is neither on $PATH nor in {FOLDERS[0]}")
    else:
        processes = [
            subprocess.Popen(
                call,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=slurm_environment(in_job=True),  # it calls srun
            )
        ]
    return Bandwidth(bus_bandwidth("".join(t for _, t in read_lines(processes, LIMIT_S, stop))), {})


def bus_bandwidth(output: str) -> float:
    """Return the bus bandwidth that nccom-test printed, GB of 2^30 bytes, or raise a NodeError."""
    column = 0
    measured = None
    messages = []
    for line in output.splitlines():
        fields = line.split()
        if fields[:1] == ["size(B)"]:
            column = next((n for n, name in enumerate(fields) if name.startswith("busbw")), 0)
        elif 0 < column < len(fields) and (fields[0] + fields[column]).replace(".", "").isdigit():
            measured = float(fields[column])  # of the largest size, which comes last
        elif fields:
            messages.append(line.strip())
    if measured is None:
        raise NodeError(f"nccom-test measured nothing: {[*messages, 'no output'][0]}")
    return measured
