"""The mesh of a run: how many workers, and which part of the work each of them has."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from slurmllm.config.resolve import RunConfig
from slurmllm.config.rules import choose, divisors
from slurmllm.errors import ConfigError


@dataclass(frozen=True)
class Mesh:
    """Degrees of parallelism and the batch arithmetic that follows from them.

    Ranks count through tensor first, then data, then pipeline, so that a tensor-parallel group
    lies inside a node and pipeline stages lie on different nodes.
    """

    nodes: int
    devices_per_node: int
    tensor: int
    pipeline: int
    data: int
    global_batch: int
    micro_batch: int

    @property
    def world_size(self) -> int:
        """Workers on all nodes."""
        return self.nodes * self.devices_per_node

    @property
    def accumulation(self) -> int:
        """Micro batches that a worker sees in one optimizer step."""
        return self.global_batch // (self.data * self.micro_batch)

    def data_rank(self, rank: int) -> int:
        """Which of the `data` shares of the global batch a worker reads."""
        return rank // self.tensor % self.data

    def to_json(self) -> dict[str, Any]:
        """The content of a run's plan.json."""
        return {
            **asdict(self),
            "world_size": self.world_size,
            "accumulation": self.accumulation,
        }


def make_mesh(config: RunConfig, nodes: int) -> Mesh:
    """Work out the mesh of a run.

    Raises:
        ConfigError: degrees that do not divide the workers, or a global batch that cannot be
            shared out; the message names node counts or batches that would do.
    """
    recipe, per_node = config.recipe, config.cluster.devices_per_node
    tensor, pipeline = recipe.parallel.tensor, recipe.parallel.pipeline
    batch, micro = recipe.train.global_batch, recipe.train.micro_batch
    if nodes < 1:
        raise ConfigError("the mesh does not fit", [f"--nodes: {nodes} is less than 1"])
    world, model = nodes * per_node, tensor * pipeline
    if world % model:
        fitting = [n for n in range(1, 4 * nodes + model + 1) if n * per_node % model == 0][:6]
        raise ConfigError(
            "the mesh does not fit",
            [
                f"parallel: tensor {tensor} × pipeline {pipeline} = {model} does not divide the "
                f"{world} workers of {nodes} node(s) × {per_node}; {choose(fitting)} nodes, or "
                "change the degrees with --set"
            ],
        )
    data = world // model
    if batch % (data * micro):
        shares = [d * model / per_node for d in divisors(batch // micro)]
        fitting = [int(n) for n in shares if n >= 1 and n == int(n)][-8:]
        remedy = f"{choose(fitting)} nodes" if fitting else "choose another micro batch"
        raise ConfigError(
            "the mesh does not fit",
            [
                f"train.global_batch: {batch} sequences are not a multiple of {data} data-parallel "
                f"workers × train.micro_batch {micro}; {remedy}, or change the batch with --set"
            ],
        )
    return Mesh(nodes, per_node, tensor, pipeline, data, batch, micro)
