"""Which links a group spans, and how long its collectives take there."""

from __future__ import annotations

import pytest

from slurmllm.config.resolve import resolve
from slurmllm.plan.mesh import Mesh
from slurmllm.plan.step import (
    Group,
    all_reduce_s,
    gather_s,
    group,
    shard_group,
    stage_to_stage_s,
    tensor_group,
)

KNOWN = resolve("llama2_70b").cluster.hardware
assert KNOWN is not None
PLAIN = KNOWN.model_copy(
    update={
        "node_link_gb_s": 100.0,
        "node_link_efficiency": 1.0,
        "part_of_node": 0.5,
        "network_gb_s": 100.0,
        "network_efficiency": 0.5,
        "node_link_latency_us": 0.0,
        "network_latency_us": 0.0,
    }
)


def mesh(tensor: int, pipeline: int, data: int) -> Mesh:
    nodes = tensor * pipeline * data // 32
    return Mesh(nodes, 32, tensor, pipeline, data, 1024, 1)


@pytest.mark.parametrize(
    ("stride", "size", "expected"),
    [
        (1, 8, Group(8, 1, 0, False)),  # tensor parallel inside a node
        (1, 32, Group(32, 1, 0, True)),
        (8, 64, Group(64, 16, 8, False)),  # 8 rings through each node's network
        (32, 8, Group(8, 8, 32, False)),  # each worker a ring of its own
        (1, 64, Group(64, 2, 1, True)),
        (8, 3, Group(3, 2, 8, False)),  # stages of 24 workers: the second lies on two nodes
    ],
)
def test_groups(stride: int, size: int, expected: Group) -> None:
    assert group(stride, size, 32) == expected


def test_a_ring_carries_its_bytes_over_the_slowest_link() -> None:
    inside = gather_s(1e9, tensor_group(mesh(32, 1, 4)), PLAIN)
    assert inside == pytest.approx(31 / 32 * 1e9 / 100e9)
    part = gather_s(1e9, tensor_group(mesh(8, 1, 16)), PLAIN)
    assert part == pytest.approx(7 / 8 * 1e9 / 50e9), "a torus's row has half of the links"
    # 50 GB/s of a node, shared by 8 rings of data-parallel workers, and by 32.
    assert gather_s(1e9, shard_group(mesh(8, 1, 64)), PLAIN) == pytest.approx(63 / 64 * 8 / 50)
    assert gather_s(1e9, shard_group(mesh(32, 1, 64)), PLAIN) == pytest.approx(63 / 64 * 32 / 50)
    assert gather_s(1e9, shard_group(mesh(32, 1, 1)), PLAIN) == 0
    gloo = PLAIN.model_copy(update={"shard_efficiency": 0.5})
    assert gather_s(1e9, tensor_group(mesh(32, 1, 4)), gloo) == 2 * inside
    assert all_reduce_s(1e9, tensor_group(mesh(32, 1, 4)), gloo) == 2 * inside


def test_hops_grow_with_the_logarithm_of_the_group() -> None:
    hops = PLAIN.model_copy(update={"network_latency_us": 30.0})

    def latency(data: int) -> float:
        members = shard_group(mesh(32, 1, data))
        return gather_s(0.0, members, hops)

    assert latency(2) == pytest.approx(30e-6)
    assert latency(1024) == pytest.approx(300e-6)


def test_stages_pass_on_over_the_network_of_their_node() -> None:
    assert stage_to_stage_s(1e6, mesh(32, 1, 4), PLAIN) == 0
    assert stage_to_stage_s(1e6, mesh(32, 4, 1), PLAIN) == pytest.approx(32 * 1e6 / 50e9)
    within = Mesh(1, 32, 8, 4, 1, 1024, 1)
    assert stage_to_stage_s(1e6, within, PLAIN) == pytest.approx(1e6 / 100e9)
