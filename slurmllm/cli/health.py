"""`slurmllm health`: check nodes, and the two verbs that run on each of them for it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from slurmllm.cli import options

if TYPE_CHECKING:
    from collections.abc import Mapping

    from slurmllm.config.resolve import RunConfig
    from slurmllm.records import HealthFinding, NodeHealth
    from slurmllm.supervise.allocation import Allocation

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


@click.command()
@options.cluster
@click.option("--nodes", type=click.IntRange(min=1), help="How many nodes.  [default: 1]")
@click.option("--nodelist", help="Which nodes, as n3 or n[1-4].")
@click.option("--partition", help="Slurm partition.  [default: the profile's, else Slurm's]")
@click.option("--account", help="Slurm account.")
@click.option("--qos", help="Slurm quality of service.")
@click.option("--reservation", help="Slurm reservation.")
@click.option("--exclude", help="Nodes to keep away from, as n3 or n[1-4].")
@click.option(
    "--time", default="15", show_default=True, help="Time limit of the job that holds the nodes."
)
@click.option(
    "--bandwidth/--no-bandwidth",
    default=None,
    help="Measure the all-reduce over all nodes.  [default: as the profile says]",
)
@click.option(
    "--set", "overrides", multiple=True, metavar="PATH=VALUE",
    help="Override a value of the profile, such as cluster.health.min_allreduce_gb_s=20.",
)  # fmt: skip
@click.option("--local", is_flag=True, help="Check this machine, without Slurm.")
@options.runs_dir
@options.as_json
@click.pass_context
def health(
    ctx: click.Context,
    cluster: str | None,
    nodes: int | None,
    nodelist: str | None,
    bandwidth: bool | None,
    overrides: tuple[str, ...],
    local: bool,
    runs_dir: str | None,
    as_json: bool,
    partition: str | None,
    account: str | None,
    qos: str | None,
    reservation: str | None,
    exclude: str | None,
    time: str,
) -> None:
    """Check nodes: devices, versions, network, disks, clocks, bandwidth. Trains nothing.

    Waits for a job of its own on nodes that nobody else uses; inside an allocation (salloc, a
    batch script) it checks the nodes of that. Exit codes: 0 every node is fit, perhaps with
    warnings; 2 something you can put right; 3 a node failed, or Slurm did.
    """
    import os

    from slurmllm.config.resolve import resolve
    from slurmllm.errors import EXIT_OK, NodeError
    from slurmllm.rundir import runs_root
    from slurmllm.supervise.allocation import LOCAL_NODES, LocalAllocation, SlurmAllocation

    # Profiles are read beside a recipe; of this one, the backend's name at most is used.
    config = resolve("tiny_neox", cluster, overrides)
    wanted = config.cluster.health.bandwidth != "never" if bandwidth is None else bandwidth
    folder = runs_root(runs_dir)
    allocation: Allocation
    if local:
        os.environ[LOCAL_NODES] = str(nodes or 1)
        allocation = LocalAllocation()
    elif "SLURM_JOB_ID" in os.environ and nodes is None and nodelist is None:
        allocation = SlurmAllocation()
    else:
        rest = ["--bandwidth" if wanted else "--no-bandwidth", "--runs-dir", str(folder)]
        rest += ["--cluster", cluster] if cluster else []
        rest += [f"--set={override}" for override in overrides] + ["--json"] * as_json
        given = {
            "nodes": str(nodes or "") or None, "nodelist": nodelist, "partition": partition,
            "account": account, "qos": qos, "reservation": reservation, "exclude": exclude,
            "time": time,
        }  # fmt: skip
        _in_allocation(config, given, rest)
    found = _check(allocation, config, folder, wanted)
    failed = any(record.of("fail") for record in found.values())
    code = NodeError.exit_code if failed else EXIT_OK
    if as_json:
        _print_json(config.cluster.name, found, code)
    else:
        _print_table(config.cluster.name, found)
    ctx.exit(code)


def _in_allocation(
    config: RunConfig, given: Mapping[str, str | None], arguments: list[str]
) -> None:
    """Become salloc, which runs this verb again with nodes at hand.

    Raises:
        SlurmError: there is no salloc here.
    """
    import os
    import shutil

    from slurmllm.errors import SlurmError
    from slurmllm.supervise.allocation import SLURMLLM

    if shutil.which("salloc") is None:
        raise SlurmError(
            "salloc is not on the PATH; run this on a node of the Slurm cluster, or add --local "
            "to check this machine"
        )
    cluster = config.cluster
    options = {**given, "partition": given["partition"] or cluster.partition}
    if not options["nodes"] and not options["nodelist"]:
        options["nodes"] = "1"
    words = [f"--{name}={value}" for name, value in options.items() if value]
    words += [*(["--exclusive"] if cluster.exclusive else []), *cluster.directives]
    command = ["salloc", "--job-name=slurmllm-health", "--ntasks-per-node=1", *words]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_JOB")}
    os.execvpe("salloc", [*command, *SLURMLLM, "health", *arguments], environment)


def _check(
    allocation: Allocation, config: RunConfig, folder: Path, bandwidth: bool
) -> dict[str, NodeHealth]:
    import os
    import re

    from slurmllm.backends.environment import load_environment
    from slurmllm.diagnose.bandwidth import with_bandwidth
    from slurmllm.diagnose.probe import check_nodes
    from slurmllm.supervise.allocation import SLURMLLM, free_port

    # What batch jobs are given and salloc's command is not.
    if cpus := re.match(r"\d+", os.environ.get("SLURM_JOB_CPUS_PER_NODE", "")):
        os.environ.setdefault("SLURM_CPUS_ON_NODE", cpus.group())
    found = check_nodes(allocation, config, folder, SLURMLLM)
    assert found is not None  # nobody broke it off
    answering = all(record.checks_s is not None for record in found.values())
    if not bandwidth or not answering:
        return found
    variables = load_environment(config.backend).variables(config)
    os.environ.update({name: variable.value for name, variable in variables.items()})
    os.environ.update(config.cluster.env)
    return with_bandwidth(found, allocation, allocation.job_id, config, SLURMLLM, free_port())


def _print_json(cluster: str, found: Mapping[str, NodeHealth], code: int) -> None:
    import json

    nodes = {name: record.model_dump(mode="json") for name, record in found.items()}
    click.echo(json.dumps({"cluster": cluster, "exit_code": code, "nodes": nodes}, indent=2))


def _print_table(cluster: str, found: Mapping[str, NodeHealth]) -> None:
    from slurmllm.tables import print_table

    checks = list(dict.fromkeys(f.check for record in found.values() for f in record.findings))
    rows = []
    for name, record in found.items():
        by_check = {finding.check: finding for finding in record.findings}
        shown = [_cell(by_check[c]) if c in by_check else "" for c in checks]
        rows.append((name, _state(record), *shown))
    click.echo(f"cluster profile {cluster}")
    print_table(("node", "state", *checks), rows)
    states = [_state(record) for record in found.values()]
    for status in ("fail", "warn"):
        alike: dict[str, list[str]] = {}  # message → nodes
        for name, record in found.items():
            for finding in record.of(status):
                alike.setdefault(finding.message, []).append(name)
        for message, names in alike.items():
            mark = click.style(f"{status}:", fg=_COLOURS[status], bold=True)
            click.echo(f"{mark} {' '.join(names)}: {message}")
    click.echo(", ".join(f"{states.count(status)} {status}" for status in _COLOURS))


def _state(record: NodeHealth) -> str:
    return "fail" if record.of("fail") else "warn" if record.of("warn") else "ok"


_UNITS = {
    "memory": " GB", "node-local disk": " GB", "shared file system": " s", "clock": " s",
    "all-reduce": " GB/s",
}  # fmt: skip


def _cell(finding: HealthFinding) -> str:
    unit = "" if isinstance(finding.value, str) else _UNITS.get(finding.check, "")
    mark = "" if finding.status == "ok" else f" {finding.status}"
    return f"{finding.value}{unit}{mark}"


@click.command("check-node", hidden=True)
@click.option("--profile", required=True, help="The cluster profile, as JSON.")
@click.option("--backend", required=True)
@click.option("--token", type=click.Path(path_type=Path), required=True)
def check_node(profile: str, backend: str, token: Path) -> None:
    """Check this node and say what was found, a line a finding (called through srun)."""
    from slurmllm.config.cluster import Cluster
    from slurmllm.diagnose.node import check_node as check

    check(_node_name(), Cluster.model_validate_json(profile), backend, token)


@click.command(hidden=True)
@click.option("--nodes", type=int, required=True)
@click.option("--workers", type=int, required=True, help="On each node.")
@click.option("--device", required=True)
@click.option("--address", required=True)
@click.option("--port", required=True)
@click.option("--floor", required=True)
@click.pass_context
def allreduce(
    ctx: click.Context,
    nodes: int,
    workers: int,
    device: str,
    address: str,
    port: str,
    floor: str,
) -> None:
    """Run this node's workers of an all-reduce (called through srun)."""
    import os
    import subprocess
    import sys

    from slurmllm.supervise.allocation import NODE_RANK, die_with_parent
    from slurmllm.supervise.interfaces import interface_variables

    node = int(os.environ.get(NODE_RANK) or os.environ.get("SLURM_NODEID") or 0)
    shared = {
        "WORLD_SIZE": str(nodes * workers), "LOCAL_WORLD_SIZE": str(workers),
        "MASTER_ADDR": address, "MASTER_PORT": port, "OMP_NUM_THREADS": "1",
        **interface_variables(address),
    }  # fmt: skip
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "slurmllm.diagnose.allreduce", device, floor],
            env={**os.environ, **shared, "RANK": str(node * workers + n), "LOCAL_RANK": str(n)},
            preexec_fn=die_with_parent,
        )
        for n in range(workers)
    ]  # fmt: skip
    ctx.exit(max(abs(worker.wait()) for worker in started))


def _node_name() -> str:
    import os
    import socket

    from slurmllm.supervise.allocation import NODE_NAME

    own = os.environ.get(NODE_NAME) or os.environ.get("SLURMD_NODENAME")
    return own or socket.gethostname()
