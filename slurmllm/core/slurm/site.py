"""A cluster as Slurm shows it to this user: its partitions with their nodes, accounts, settings."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from slurmllm.core.format import Texts
from slurmllm.core.slurm.client import Association, PartitionNode, SlurmClient, count_gpus


@dataclass(frozen=True)
class NodeKind:
    """The nodes of a partition that have the same GPUs."""

    nodes: Texts
    cpus: int  # of the smallest of them, as is memory_mb
    memory_mb: int
    gpus: int
    gpu_type: str  # as GRES names it; may be empty
    features: Texts  # that all of them have

    @property
    def num_gpus(self) -> int:
        return self.gpus * len(self.nodes)


@dataclass(frozen=True)
class Partition:
    """A partition that this user may use."""

    name: str
    fields: Mapping[str, str]  # as of `scontrol show partition`; empty if that hides it
    nodes: Sequence[PartitionNode]

    @property
    def is_default(self) -> bool:
        return self.fields.get("Default") == "YES" or any(node.default for node in self.nodes)

    @property
    def is_up(self) -> bool:
        return any(node.up for node in self.nodes)

    @property
    def time_limit(self) -> str:
        return self.fields.get("MaxTime", "UNLIMITED").lower()

    @property
    def hides_nodes(self) -> bool:
        """Whether sinfo hides nodes, as a cloud's that are powered down (PrivateData=cloud)."""
        return len(self.nodes) < int(self.fields.get("TotalNodes", 0))

    def allowed(self, field: str) -> list[str] | None:
        """Return what a field such as AllowQos lists, in lower case; None permits all."""
        names = self.fields.get(field, "ALL")
        return None if names == "ALL" else names.lower().split(",")

    @cached_property
    def kinds(self) -> tuple[NodeKind, ...]:
        """The kinds of its nodes, the most devices first."""
        groups: dict[tuple[int, str], list[PartitionNode]] = {}
        for node in self.nodes:
            match = re.search(r"(?:^|,)gpu:(\d*[^:,(\d][^:,(]*)", node.gres)
            kind = count_gpus(node.gres), match[1] if match else ""
            groups.setdefault(kind, []).append(node)
        kinds = []
        for (gpus, gpu_type), nodes in groups.items():
            features = set.intersection(*(set(node.features.split(",")) for node in nodes))
            kinds.append(
                NodeKind(
                    nodes=tuple(node.name for node in nodes),
                    cpus=min(node.cpus for node in nodes),
                    memory_mb=min(node.memory_mb for node in nodes),
                    gpus=gpus,
                    gpu_type=gpu_type,
                    features=tuple(sorted(features - {""})),
                )
            )
        return tuple(sorted(kinds, key=lambda kind: (-kind.num_gpus, -len(kind.nodes))))


# slurmctld that was killed right after it had started a job starts it again; the node refuses the
# second copy, and slurmctld drains it (job_scheduler.c, ESLURM_DUPLICATE_JOB_ID).
_DUPLICATE = "Duplicate jobid"


def explain_drain(node: PartitionNode) -> str | None:
    """Return why Slurm drained a node that refused a second copy of a job; None for other nodes."""
    if _DUPLICATE.lower() not in node.reason.lower() or not node.state.startswith("drain"):
        return None
    return (
        f"node {node.name} is {node.state} by Slurm: {_DUPLICATE}: slurmctld crashed when it had "
        "just started a job there, and started it again; nothing is wrong with the node. An "
        f"administrator returns it: `scontrol update NodeName={node.name} State=RESUME`"
    )


@dataclass
class Site:
    """A cluster; Slurm is asked at the first use of a fact, which raises a SlurmError."""

    client: SlurmClient

    @cached_property
    def settings(self) -> Mapping[str, str]:
        """slurm.conf and SLURM_VERSION."""
        return self.client.settings()

    @cached_property
    def nodes(self) -> Sequence[PartitionNode]:
        return self.client.partition_nodes()

    @cached_property
    def partitions(self) -> Mapping[str, Partition]:
        """The partitions by name, the default one first."""
        fields = self.client.partitions()
        members: dict[str, list[PartitionNode]] = {name: [] for name in fields}
        for node in self.nodes:
            members.setdefault(node.partition, []).append(node)
        partitions = [
            Partition(name, fields.get(name, {}), nodes) for name, nodes in members.items()
        ]
        partitions.sort(key=lambda partition: not partition.is_default)
        return {partition.name: partition for partition in partitions}

    @cached_property
    def associations(self) -> Sequence[Association]:
        return self.client.associations()
