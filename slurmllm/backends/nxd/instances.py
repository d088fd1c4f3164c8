"""The EC2 instances that NxD trains on here: their cores and network; torch-free."""

from __future__ import annotations

from typing import NamedTuple

from slurmllm.config.cluster import Cluster


class Instance(NamedTuple):
    """One type of node.

    Attributes:
        cores: NeuronCores, each of which takes one worker.
        efa_devices: Network devices that collectives between nodes need.
    """

    cores: int
    efa_devices: int


# Neuron's "How to prepare trn1.32xlarge for multi-node execution" and its trn1 architecture page.
INSTANCES = {
    "trn1.2xlarge": Instance(cores=2, efa_devices=0),
    "trn1.32xlarge": Instance(cores=32, efa_devices=8),
    "trn1n.32xlarge": Instance(cores=32, efa_devices=16),
}
DEFAULT = "trn1.32xlarge"


def instance_of(cluster: Cluster) -> Instance:
    """The type of a cluster's nodes; trn1.32xlarge where the profile names none."""
    return INSTANCES.get(cluster.instance_type or DEFAULT, INSTANCES[DEFAULT])


def instance_faults(cluster: Cluster) -> list[str]:
    """What a profile of Neuron devices says that its nodes do not bear out, one line each."""
    if cluster.device != "neuron" or cluster.instance_type is None:
        return []
    name = cluster.instance_type
    if name not in INSTANCES:
        return [
            f"cluster.instance_type: {name} is not known to backend nxd; choose "
            f"{', '.join(INSTANCES)}, or train with --set backend=native on another cluster"
        ]
    cores = INSTANCES[name].cores
    if cluster.devices_per_node <= cores:
        return []
    return [
        f"cluster.devices_per_node: {cluster.devices_per_node} workers, and {name} has "
        f"{cores} NeuronCores; set {cores}"
    ]
