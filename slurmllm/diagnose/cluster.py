"""Slurm as the login node sees it, compared with the cluster profile."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from slurmllm.config.cluster import Cluster
from slurmllm.diagnose.finding import fail, ok, skipped, warn
from slurmllm.diagnose.installation import at_least
from slurmllm.errors import SlurmError
from slurmllm.records import Finding
from slurmllm.slurm.client import COMMANDS, PartitionNode, SlurmClient

OLDEST_SLURM = "22.05"  # the development cluster's, on which the tests run
_NODE_CHECKS = ("nodes", "CPUs", "devices")
_CONTROLLER_CHECKS = ("slurm version", "requeue", "accounting", "partition", *_NODE_CHECKS)
# Base states (sinfo(1), NODE STATE CODES) of a node that runs no job until an administrator acts.
_UNUSABLE = re.compile(r"down|drain|fail|error|unknown|inval")


def slurm_findings(
    client: SlurmClient, cluster: Cluster, partition: str | None = None
) -> Iterator[Finding]:
    """Checks of Slurm; without Slurm one warning, and the others are skipped.

    Args:
        client: The seam to Slurm.
        cluster: The profile.
        partition: Else the profile's, else Slurm's default.
    """
    missing = client.missing_commands()
    if len(missing) == len(COMMANDS):
        fix = "--local trains on this machine; for a cluster, run this on its login node"
        yield warn("slurm commands", "none on the PATH", fix=fix)
        for check in ("slurm controller", *_CONTROLLER_CHECKS):
            yield skipped(check, "no Slurm here")
        return
    if missing:
        found = f"{', '.join(missing)}: not on the PATH"
        yield fail("slurm commands", found, fix="install Slurm's client commands here")
    else:
        yield ok("slurm commands", ", ".join(COMMANDS))
    try:
        settings = client.settings()
        nodes = client.partition_nodes()
    except SlurmError as error:
        fix = "`scontrol ping`; --local does without Slurm"
        yield fail("slurm controller", str(error), fix=fix)
        for check in _CONTROLLER_CHECKS:
            yield skipped(check, "slurmctld is unreachable")
        return
    yield ok("slurm controller", settings.get("ClusterName") or "responds")
    version = settings.get("SLURM_VERSION", "")
    if at_least(version, OLDEST_SLURM):
        yield ok("slurm version", version)
    else:
        found = f"{version or 'unknown'}, older than {OLDEST_SLURM}"
        yield fail("slurm version", found, fix=f"Slurm {OLDEST_SLURM} or later")
    requeue = settings.get("JobRequeue", "")
    if requeue == "1":
        yield ok("requeue", "JobRequeue=1")
    else:
        fix = "JobRequeue=1 in slurm.conf; until then, only the scripts' own --requeue is used"
        yield warn("requeue", f"JobRequeue={requeue or 'unknown'}", fix=fix)
    yield _accounting(client, settings.get("AccountingStorageType", ""))
    yield from _partition_findings(nodes, cluster, partition or cluster.partition)


def _accounting(client: SlurmClient, storage: str) -> Finding:
    if not storage or storage.endswith("none"):
        fix = "slurmdbd; without it, an orphaned attempt counts as a node failure"
        return warn("accounting", "none", fix=fix)
    try:
        client.check_accounting()
    except SlurmError as error:
        fix = "is slurmdbd running? `sacctmgr show cluster`"
        return fail("accounting", str(error), fix=fix)
    return ok("accounting", storage)


def _partition_findings(
    nodes: Sequence[PartitionNode], cluster: Cluster, partition: str | None
) -> Iterator[Finding]:
    """The partition that jobs are submitted to, and its nodes."""
    own = [node for node in nodes if (node.partition == partition if partition else node.default)]
    if not own:
        known = ", ".join(sorted({node.partition for node in nodes})) or "none"
        fault = f"{partition!r} is unknown, closed to you or empty" if partition else "no default"
        fix = "one of these with --partition, or as the profile's partition"
        found = f"{fault}; partitions: {known}"
        yield fail("partition", found, fix=fix, blame="user")
        for check in _NODE_CHECKS:
            yield skipped(check, "no partition")
        return
    name = own[0].partition
    if own[0].up:
        yield ok("partition", name + ", the default" * (not partition))
    else:
        yield fail("partition", f"{name} is down", fix=f"`scontrol show partition {name}`")
    # `*`: the node does not respond.
    unusable = [node for node in own if _UNUSABLE.match(node.state) or node.state.endswith("*")]
    found = f"{len(own) - len(unusable)} of {len(own)} usable"
    if unusable:
        names = ", ".join(f"{node.name} {node.state}" for node in unusable[:5])
        found += f"; {names}" + ", …" * (len(unusable) > 5)
        status = fail if len(unusable) == len(own) else warn
        yield status("nodes", found, fix="`sinfo --list-reasons`")
    else:
        yield ok("nodes", found)
    # A job may get any node: the smallest one counts.
    yield _cpus(min(node.cpus for node in own), cluster)
    yield _devices(own, cluster)


def _cpus(fewest: int, cluster: Cluster) -> Finding:
    required = cluster.cpus_per_node
    if required is not None and fewest != required:
        fix = f"--set cluster.cpus_per_node={fewest}, or another --cluster or --partition"
        found = f"{fewest} a node; profile {cluster.name} has {required}"
        return warn("CPUs", found, fix=fix)
    if cluster.device == "cpu" and fewest < cluster.devices_per_node:
        fix = f"--set cluster.devices_per_node={fewest}"
        found = f"{fewest} a node for {cluster.devices_per_node} workers"
        return warn("CPUs", found, fix=fix)
    return ok("CPUs", f"{fewest} a node")


def _devices(nodes: Sequence[PartitionNode], cluster: Cluster) -> Finding:
    """GPUs as Slurm counts them; it does not count NeuronCores."""
    required = cluster.devices_per_node
    if cluster.device == "cpu":
        return ok("devices", f"CPUs, {required} worker(s) a node")
    if cluster.device == "neuron":
        reason = f"the profile's {required} a node cannot be checked here"
        return skipped("devices", f"Slurm counts no NeuronCores: {reason}")
    fewest = min(count_gpus(node.gres) for node in nodes)
    if fewest < required:
        return fail(
            "devices", f"{fewest} GPU(s) a node; profile {cluster.name} requires {required}",
            fix=f"another --partition, or a profile with devices_per_node: {fewest}; Slurm "
            "counts GPUs if slurm.conf has Gres=gpu:N",
            blame="user",
        )  # fmt: skip
    return ok("devices", f"{fewest} GPUs a node")


def count_gpus(gres: str) -> int:
    """`gpu:a100:8(S:0-1),gpu:2` → 10."""
    counts = re.findall(r"(?:^|,)gpu(?::[A-Za-z][^:,(]*)?:(\d+)", gres)
    return sum(int(count) for count in counts)
