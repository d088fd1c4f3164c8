"""`slurmllm health` and `slurmllm doctor`: check the nodes; check installation and cluster."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.exceptions import Exit

from slurmllm.cli import commands, options
from slurmllm.core.display.tables import print_table
from slurmllm.core.errors import SlurmllmError
from slurmllm.core.format import Texts, by_key

if TYPE_CHECKING:
    from slurmllm.core.config.resolve import RunConfig
    from slurmllm.core.run.records import Finding, NodeHealth, NodeHealths
    from slurmllm.launch.supervise.allocation import Allocation


_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red", "skipped": "bright_black"}
_PARTITION = "Slurm partition.  [default: the profile's, else Slurm's]"
# In the JSON of doctor → fields of a finding.
_KEYS = {"name": "check", "state": "status", "found": "value", "remedy": "fix", "blame": "blame"}
# Units of the values of a node's checks.
_UNITS = {
    "memory": " GB",
    "shared memory": " GB",
    "node-local disk": " GB",
    "all-reduce": " GB/s",
    "shared file system": " s",
    "clock": " s",
    "temperature": " °C",
    "GPU memory": " MiB",
}


@commands.grouped(common="cluster nodes bandwidth set local json")
@options.cluster
@options.num_nodes(help="Number of nodes.  [default: 1]")
@options.job_options(options.ALLOCATION, partition=_PARTITION, time=options.ALLOCATION_TIME)
@click.option(
    "--bandwidth/--no-bandwidth",
    default=None,
    help="Measure an all-reduce across all nodes, or not.  "
    "[default: measure, unless the profile's health.bandwidth is never]",
)
@options.set_option(
    help="Override a value of the profile, such as cluster.health.min_allreduce_gb_s=20."
)
@options.flag("--local", "Check this machine, without Slurm.")
@options.runs_dir
@options.as_json
def health(
    cluster: str | None,
    nodes: int | None,
    bandwidth: bool | None,
    overrides: Texts,
    local: bool,
    runs_dir: Path,
    as_json: bool,
    **job: str | None,
) -> None:
    """Check that nodes are healthy.

    Checks devices, versions, network, disks, clocks and bandwidth.

    Allocates idle nodes with salloc. Inside an allocation (salloc, a batch script), and without
    --nodes and --nodelist, it checks the nodes of that allocation.

    Exit codes: 0 every node is healthy, possibly with warnings; 1 salloc got no nodes; 2 invalid
    input or configuration; 3 a node or Slurm failed; 4 the shared folder cannot be written.
    """
    from slurmllm.core.config.resolve import local_cluster, resolve
    from slurmllm.launch.diagnose import exit_code
    from slurmllm.launch.supervise.allocation import allocate_nodes

    cluster = local_cluster(cluster, local)
    # A profile is resolved together with a recipe, of which only the backend is used here.
    config = resolve("tiny_neox", cluster, overrides)
    if bandwidth is None:
        bandwidth = config.cluster.health.bandwidth != "never"
    command = ["health", "--bandwidth" if bandwidth else "--no-bandwidth", f"--runs-dir={runs_dir}"]
    command += options.arguments_inside(cluster, overrides, as_json)
    # salloc replaces this process and runs `command` inside the new allocation.
    allocation = allocate_nodes(
        config,
        command,
        "slurmllm-health",
        nodes=nodes,
        local=local,
        options=job,
        folders=[runs_dir.absolute()],
    )
    checked = _check(allocation, config, runs_dir, bandwidth)
    lines = _end_exclusions(allocation, checked, runs_dir)
    code = exit_code(finding for record in checked.values() for finding in record.findings)
    if as_json:
        by_node = {name: record.model_dump(mode="json") for name, record in checked.items()}
        options.echo_json({"cluster": config.cluster.name, "exit_code": code, "nodes": by_node})
    else:
        _print_table(config.cluster.name, checked)
    for line in lines:
        click.echo(line, err=as_json)
    raise Exit(code)


def _end_exclusions(allocation: Allocation, checked: NodeHealths, runs_dir: Path) -> list[str]:
    """End exclusions of nodes that passed the checks; returns a line for each excluded node."""
    from slurmllm.launch.supervise.allocation import SlurmAllocation
    from slurmllm.launch.supervise.site_nodes import end_by_health

    if not isinstance(allocation, SlurmAllocation):
        return []
    cleared = "{0.node}: passed, no longer excluded ({0.evidence}: {0.reason})"
    left = (
        "{0.node}: passed, but stays excluded: no check covers its fault ({0.evidence}: "
        "{0.reason}); `slurmllm nodes --clear {0.node}` ends it"
    )
    try:
        ends = end_by_health(runs_dir, allocation.client.cluster_name(), checked)
        return [(cleared if ended else left).format(record) for record, ended in ends]
    except SlurmllmError as error:
        return [f"warning: no exclusion was ended: {error}"]


def _check(allocation: Allocation, config: RunConfig, folder: Path, bandwidth: bool) -> NodeHealths:
    from slurmllm.launch.diagnose.bandwidth import with_bandwidth
    from slurmllm.launch.diagnose.probe import LaunchError, check_nodes, unstarted
    from slurmllm.launch.supervise.allocation import node_command
    from slurmllm.train.backends.environment import load_environment

    command = node_command(config.cluster)
    try:
        checked = check_nodes(allocation, config, folder, command)
    except LaunchError as error:
        if not error.failure.accused:
            raise
        return unstarted(allocation.nodes, error.failure)
    assert checked is not None  # without a `stop`
    # A collective over a node that does not respond would hang.
    if not bandwidth or any(record.checks_s is None for record in checked.values()):
        return checked
    variables = load_environment(config.backend).variables(config)
    os.environ.update({name: variable.value for name, variable in variables.items()})
    os.environ.update(config.cluster.env)
    return with_bandwidth(checked, allocation, config, command)


def _print_table(cluster: str, nodes: NodeHealths) -> None:
    checks = list(dict.fromkeys(f.check for record in nodes.values() for f in record.findings))
    rows = []
    for name, record in nodes.items():
        cells = {}
        for finding in record.findings:
            unit = "" if isinstance(finding.value, str) else _UNITS.get(finding.check, "")
            mark = "" if finding.status == "ok" else f" {finding.status}"
            cells[finding.check] = f"{finding.value}{unit}{mark}"
        rows.append((name, _status(record), *(cells.get(check, "") for check in checks)))
    click.echo(f"cluster profile {cluster}")
    print_table(("node", "state", *checks), rows)
    echo_by_message(
        (finding.status, name, finding.message)
        for status in ("fail", "warn", "skipped")
        for name, record in nodes.items()
        for finding in record.of(status)
    )
    _print_counts(map(_status, nodes.values()), "ok", "warn", "fail")


def echo_by_message(lines: Iterable[tuple[str, str, str]]) -> None:
    """Print (status, node or check, message), with the names of equal messages on one line."""
    alike = by_key(((status, message), name) for status, name, message in lines)
    for (status, message), names in alike.items():
        mark = click.style(f"{status}:", fg=_COLOURS[status], bold=True)
        click.echo(f"{mark} {', '.join(names)}: {message}")


def _print_counts(statuses: Iterable[str], *names: str) -> None:
    counts = Counter(statuses)
    click.echo(", ".join(f"{counts[name]} {name}" for name in names))


def _status(record: NodeHealth) -> str:
    return "fail" if record.of("fail") else "warn" if record.of("warn") else "ok"


@click.command()
@options.cluster
@options.job_options("partition", partition=_PARTITION)
@click.option("--recipe", metavar="RECIPE", help="Compare the free space with its checkpoints.")
@options.runs_dir
@options.as_json
def doctor(
    cluster: str | None,
    partition: str | None,
    recipe: str | None,
    runs_dir: Path,
    as_json: bool,
) -> None:
    """Check this installation, Slurm and the runs folder.

    Runs on the current machine, submits no job and changes nothing.

    Each check is ok, warn (a run can start), fail (no run can) or skipped, with a suggested fix.
    Exit codes: 0 no check failed; 2 a fault of this installation; 3 a fault of Slurm or a node.
    """
    from rich.console import Console

    from slurmllm.core.config.profiles import choose_cluster
    from slurmllm.core.config.resolve import resolve
    from slurmllm.core.slurm.client import COMMANDS, SlurmClient
    from slurmllm.launch.diagnose import exit_code
    from slurmllm.launch.diagnose.login_node import (
        container_findings,
        installation_findings,
        profile_finding,
        slurm_findings,
    )
    from slurmllm.launch.diagnose.storage import checkpoints_bytes, storage_findings

    # A profile is resolved together with a recipe.
    config = resolve(recipe or "tiny_neox", cluster)
    run_bytes = None
    if recipe is not None:
        config.recipe.require_training("--recipe", "name a recipe of a model")
        run_bytes = checkpoints_bytes(config)
    profile = config.cluster
    client = SlurmClient()
    with_slurm = len(client.missing_commands()) < len(COMMANDS)
    # On a terminal only; the import of torch alone takes seconds on a shared file system.
    with Console(stderr=True).status("checking this Python, Slurm and the runs folder"):
        findings = [
            profile_finding(profile, choose_cluster(cluster)[1]),
            *installation_findings(profile),
            *container_findings(profile, client),
            *slurm_findings(client, profile, partition),
            *storage_findings(runs_dir, profile, with_slurm, run_bytes),
        ]
    code = exit_code(findings)
    if as_json:
        rows = [{key: getattr(f, field) for key, field in _KEYS.items()} for f in findings]
        options.echo_json({"cluster": profile.name, "exit_code": code, "checks": rows})
    else:
        _print_findings(profile.name, findings)
    raise Exit(code)


def _print_findings(cluster: str, findings: Sequence[Finding]) -> None:
    click.echo(f"cluster profile {cluster}")
    rows = ((f.status, f.check, str(f.value)) for f in findings if f.status != "skipped")
    print_table(("state", "check", "found"), rows, fold="found")
    echo_by_message((f.status, f.check, str(f.value)) for f in findings if f.status == "skipped")
    echo_by_message((f.status, f.check, f.fix) for f in findings if f.fix)
    _print_counts((finding.status for finding in findings), "ok", "warn", "fail", "skipped")
