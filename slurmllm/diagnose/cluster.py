"""Slurm as the login node sees it, against what the cluster profile says of the nodes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from slurmllm.config.cluster import Cluster
from slurmllm.diagnose.finding import (
    Finding,
    cluster_fail,
    finding_fail,
    finding_ok,
    finding_warn,
    skipped,
)
from slurmllm.diagnose.installation import at_least
from slurmllm.errors import SlurmError
from slurmllm.slurm.client import COMMANDS, PartitionNode, SlurmClient

OLDEST_SLURM = "22.05"  # the development cluster's, on which the tests run
_LATER = ("slurm version", "requeue", "accounting", "partition", "nodes", "CPUs", "devices")
# Base states (sinfo(1), NODE STATE CODES) of a node that no job can have without somebody's help.
_LOST = re.compile(r"down|drain|fail|error|unknown|inval")


def slurm_findings(
    client: SlurmClient, cluster: Cluster, partition: str | None = None
) -> Iterator[Finding]:
    """Everything about Slurm; without Slurm a warning, and the rest is skipped.

    Args:
        client: The seam to Slurm.
        cluster: The profile.
        partition: The partition asked for; else the profile's, else Slurm's default.
    """
    missing = client.missing_commands()
    if len(missing) == len(COMMANDS):
        yield finding_warn(
            "slurm commands", "none on the PATH",
            "--local trains on this machine; for a cluster, run this on its login node",
        )  # fmt: skip
        yield from (skipped(name, "no Slurm here") for name in ("slurm controller", *_LATER))
        return
    if missing:
        words = f"{', '.join(missing)}: not on the PATH"
        yield cluster_fail("slurm commands", words, "install Slurm's client commands here")
    else:
        yield finding_ok("slurm commands", ", ".join(COMMANDS))
    try:
        settings = client.settings()
        nodes = client.partition_nodes()
    except SlurmError as error:
        yield cluster_fail(
            "slurm controller", str(error), "`scontrol ping`; --local does without Slurm"
        )
        yield from (skipped(name, "slurmctld does not answer") for name in _LATER)
        return
    yield finding_ok("slurm controller", settings.get("ClusterName") or "answers")
    yield _version(settings.get("SLURM_VERSION", ""))
    yield _requeue(settings.get("JobRequeue", ""))
    yield _accounting(client, settings.get("AccountingStorageType", ""))
    yield from _nodes(nodes, cluster, partition or cluster.partition)


def _version(version: str) -> Finding:
    if not at_least(version, OLDEST_SLURM):
        found = f"{version or 'unknown'}, older than {OLDEST_SLURM}"
        return cluster_fail("slurm version", found, f"Slurm {OLDEST_SLURM} or later")
    return finding_ok("slurm version", version)


def _requeue(setting: str) -> Finding:
    if setting != "1":
        return finding_warn(
            "requeue", f"JobRequeue={setting or 'unknown'}",
            "JobRequeue=1 in slurm.conf; until then the scripts' own --requeue must do",
        )  # fmt: skip
    return finding_ok("requeue", "JobRequeue=1")


def _accounting(client: SlurmClient, storage: str) -> Finding:
    if not storage or storage.endswith("none"):
        return finding_warn(
            "accounting", "none",
            "slurmdbd; without it, a lost supervisor's attempt counts as a node failure",
        )  # fmt: skip
    try:
        client.ask_accounting()
    except SlurmError as error:
        return cluster_fail("accounting", str(error), "is slurmdbd up? `sacctmgr show cluster`")
    return finding_ok("accounting", storage)


def _nodes(
    nodes: Sequence[PartitionNode], cluster: Cluster, wanted: str | None
) -> Iterator[Finding]:
    """The partition that jobs go to, and its nodes."""
    here = [node for node in nodes if (node.partition == wanted if wanted else node.default)]
    if not here:
        known = ", ".join(sorted({node.partition for node in nodes})) or "none"
        what = f"{wanted!r} is unknown, closed to you or empty" if wanted else "no default"
        yield finding_fail(
            "partition",
            f"{what}; there are: {known}",
            "one of these with --partition, or as the profile's partition",
        )
        yield from (skipped(name, "no partition") for name in ("nodes", "CPUs", "devices"))
        return
    name = here[0].partition
    if not here[0].up:
        yield cluster_fail("partition", f"{name} is down", f"`scontrol show partition {name}`")
    else:
        yield finding_ok("partition", name + ("" if wanted else ", the default"))
    yield _states(here)
    yield _cpus(here, cluster)
    yield _devices(here, cluster)


def _states(nodes: Sequence[PartitionNode]) -> Finding:
    lost = [node for node in nodes if _LOST.match(node.state) or node.state.endswith("*")]
    found = f"{len(nodes) - len(lost)} of {len(nodes)} usable"
    if not lost:
        return finding_ok("nodes", found)
    names = ", ".join(f"{node.name} {node.state}" for node in lost[:5])
    found += f"; {names}" + (", …" if len(lost) > 5 else "")
    remedy = "`sinfo --list-reasons`"
    return (cluster_fail if len(lost) == len(nodes) else finding_warn)("nodes", found, remedy)


def _cpus(nodes: Sequence[PartitionNode], cluster: Cluster) -> Finding:
    fewest = min(node.cpus for node in nodes)
    wanted = cluster.cpus_per_node
    if wanted is not None and fewest != wanted:
        return finding_warn(
            "CPUs", f"{fewest} a node; profile {cluster.name} says {wanted}",
            f"--set cluster.cpus_per_node={fewest}, or another --cluster or --partition",
        )  # fmt: skip
    if cluster.device == "cpu" and fewest < cluster.devices_per_node:
        return finding_warn(
            "CPUs", f"{fewest} a node for {cluster.devices_per_node} workers",
            f"--set cluster.devices_per_node={fewest}",
        )  # fmt: skip
    return finding_ok("CPUs", f"{fewest} a node")


def _devices(nodes: Sequence[PartitionNode], cluster: Cluster) -> Finding:
    """GPUs are what Slurm counts; it knows no NeuronCores."""
    if cluster.device == "cpu":
        return finding_ok("devices", f"CPUs, {cluster.devices_per_node} worker(s) a node")
    if cluster.device == "neuron":
        wanted = f"the profile's {cluster.devices_per_node} a node"
        return skipped("devices", f"Slurm counts no NeuronCores: {wanted} cannot be checked here")
    fewest = min(_gpus(node.gres) for node in nodes)
    if fewest < cluster.devices_per_node:
        return finding_fail(
            "devices", f"{fewest} GPU(s) a node; profile {cluster.name} asks for "
            f"{cluster.devices_per_node}",
            f"another --partition, or a profile with devices_per_node: {fewest}; Slurm counts "
            "GPUs where slurm.conf has Gres=gpu:N",
        )  # fmt: skip
    return finding_ok("devices", f"{fewest} GPUs a node")


def _gpus(gres: str) -> int:
    """`gpu:a100:8(S:0-1),gpu:2` → 10."""
    counts = re.findall(r"(?:^|,)gpu(?::[A-Za-z][^:,(]*)?:(\d+)", gres)
    return sum(int(count) for count in counts)
