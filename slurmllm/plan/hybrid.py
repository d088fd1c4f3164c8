"""Hybrid shards (PyTorch's HYBRID_SHARD), for planning only: no backend trains with them.

Weights, gradients and optimizer state are sharded among the data-parallel workers of a node, and
each node has all of them: what is gathered in every micro batch stays inside the node, and the
network carries one all-reduce of gradients in a step (Zhao et al. 2023, arXiv 2304.11277, section
3.2.2).
"""

from __future__ import annotations

from dataclasses import replace

from slurmllm.plan.estimate import LayoutEstimate, known_hardware, predict
from slurmllm.plan.parameters import parameter_counts
from slurmllm.plan.step import all_reduce_s, formats, group


def hybrid(candidate: LayoutEstimate) -> LayoutEstimate | None:
    """A layout with shards within a node in place of over all data-parallel workers.

    Returns:
        None if its workers of a node are no share of them, or the backend does not shard weights.
    """
    config, mesh = candidate.config, candidate.mesh
    shards, rest = divmod(mesh.devices_per_node, mesh.tensor)
    if config.backend != "native" or mesh.pipeline > 1 or rest or not 1 < shards < mesh.data:
        return None
    # One node with its share of the batch: what each of its workers has and does.
    node = replace(mesh, nodes=1, data=shards, global_batch=mesh.global_batch * shards // mesh.data)
    alone, hardware = predict(config, node), known_hardware(config)
    share = parameter_counts(config.recipe.model, mesh.tensor, 1, 0, shards).total
    across = group(mesh.tensor * shards, mesh.data // shards, mesh.devices_per_node)
    reduced_s = all_reduce_s(share * formats(config).reduced, across, hardware)
    exposed_s = alone.step.data + reduced_s * (1 - hardware.overlap)
    step = replace(alone.step, data=exposed_s)
    return replace(alone, mesh=mesh, step=step)
