"""Predicts the duration of collectives on the links that their groups span; torch-free.

Ring algorithms (Thakur, Rabenseifner, Gropp 2005, "Optimization of collective communication
operations in MPICH"): an all-gather or reduce-scatter of `size` bytes over n workers sends
(n - 1) / n · size bytes per worker; an all-reduce is a reduce-scatter followed by an all-gather. A
ring over several nodes crosses each node's network once; all rings of a node share its bandwidth.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from slurmllm.config.cluster import Hardware
from slurmllm.plan.mesh import Mesh


@dataclass(frozen=True)
class Group:
    """A group of workers that communicate, such as a tensor-parallel group."""

    size: int
    nodes: int
    rings: int  # groups of the same kind that share a node's network; 0 within a node
    whole_nodes: bool  # whether it contains all workers of its nodes

    @property
    def within_node(self) -> bool:
        return self.nodes == 1


def group(stride: int, size: int, per_node: int) -> Group:
    """Return the group of `size` ranks spaced by `stride` that spans the most nodes."""
    if per_node % (stride * size) == 0:  # else one of the groups crosses a node's boundary
        return Group(size, 1, 0, size == per_node)
    ranks_per_node = max(1, per_node // stride)
    whole = ranks_per_node == per_node and size % per_node == 0
    return Group(
        size, max(2, math.ceil(size / ranks_per_node)), max(1, per_node // ranks_per_node), whole
    )


def tensor_group(mesh: Mesh) -> Group:
    return group(1, mesh.tensor, mesh.devices_per_node)


def data_group(mesh: Mesh) -> Group:
    """The group of workers that hold the same shard of the model."""
    return group(mesh.tensor, mesh.data, mesh.devices_per_node)


def rate(members: Group, hardware: Hardware) -> float:
    """Bandwidth at which each worker of a group sends, bytes/s."""
    inside = hardware.node_link_gb_s * hardware.node_link_efficiency * 1e9
    if not members.whole_nodes:
        inside *= hardware.part_of_node
    if members.within_node:
        return inside
    network = hardware.network_gb_s * hardware.network_efficiency * 1e9
    return min(inside, network / members.rings)


def gather_s(size: float, members: Group, hardware: Hardware) -> float:
    """Time of an all-gather or reduce-scatter, s; `size` is the unsharded tensor, in bytes."""
    return _one_pass_s(size, members, hardware, hardware.shard_efficiency)


def all_reduce_s(size: float, members: Group, hardware: Hardware) -> float:
    """Time of an all-reduce of `size` bytes, s."""
    return 2 * _one_pass_s(size, members, hardware, 1.0)


def _one_pass_s(size: float, members: Group, hardware: Hardware, efficiency: float) -> float:
    """Time of one all-gather or reduce-scatter, s."""
    if members.size == 1:
        return 0.0
    sent = size * (members.size - 1) / members.size
    return sent / (rate(members, hardware) * efficiency) + latency_s(members, hardware)


def latency_s(members: Group, hardware: Hardware) -> float:
    """Latency of one collective, s: that of log2(workers) hops, as in a tree."""
    hop_us = hardware.node_link_latency_us if members.within_node else hardware.network_latency_us
    return math.log2(members.size) * hop_us * 1e-6


def stage_to_stage_s(size: float, mesh: Mesh, hardware: Hardware) -> float:
    """Time for each worker of a pipeline stage to send `size` bytes to the next stage, s."""
    if mesh.pipeline == 1:
        return 0.0
    stage = mesh.tensor * mesh.data
    if stage * mesh.pipeline <= mesh.devices_per_node:
        link = hardware.node_link_gb_s * hardware.node_link_efficiency * 1e9
        return size / link + hardware.node_link_latency_us * 1e-6
    # All workers of a node that send at once share its network.
    sending = min(stage, mesh.devices_per_node)
    link = hardware.network_gb_s * hardware.network_efficiency * 1e9 / sending
    return size / link + hardware.network_latency_us * 1e-6
