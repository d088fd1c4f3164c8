"""The mesh of a run: its workers, and the share of the work that each of them has."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from pathlib import Path

from slurmllm.core.config.recipe import ADAMW, Recipe
from slurmllm.core.config.resolve import RunConfig
from slurmllm.core.config.rules import choose, divisors
from slurmllm.core.config.validate import PLANNER
from slurmllm.core.errors import ConfigError, StorageError
from slurmllm.core.format import Json, format_plural
from slurmllm.core.plugins import OPTIMIZERS
from slurmllm.core.run.rundir import storage_errors, write_atomic
from slurmllm.core.run.safe_files import read_limited


class MeshError(ConfigError):
    """A mesh that the workers or the global batch cannot be divided into.

    Attributes:
        rule: The value and the rule, without the fix.
    """

    def __init__(self, rule: str, fix: str) -> None:
        super().__init__("the mesh does not fit", [f"{rule}; {fix}"])
        self.rule = rule


@dataclass(frozen=True)
class Mesh:
    """Degrees of parallelism and the resulting batch arithmetic.

    Ranks count through tensor first, then data, then pipeline, so that a tensor-parallel group
    is inside a node and pipeline stages are on different nodes. Data-parallel workers count through
    the shards of a copy first, then through the copies.
    """

    nodes: int
    devices_per_node: int
    tensor: int
    pipeline: int
    data: int
    global_batch: int
    micro_batch: int  # sequences in one forward pass of one worker
    virtual_pipeline: int = 1  # chunks of layers that a pipeline stage holds
    # Whether `train.micro_batch` is `auto` and not measured yet; `micro_batch` is then the smallest
    # possible one.
    unmeasured: bool = False
    replicate: int = 1  # copies of each shard among the data-parallel workers

    @property
    def shard(self) -> int:
        """Data-parallel workers that share out a copy of weights and optimizer state."""
        return self.data // self.replicate

    @property
    def stage_workers(self) -> int:
        """Workers of a pipeline stage."""
        return self.data * self.tensor

    @property
    def degrees(self) -> str:
        """`TP 32 × PP 8 × DP 4`; `PP 8 (2 chunks)` if interleaved."""
        chunks = f" ({self.virtual_pipeline} chunks)" if self.virtual_pipeline > 1 else ""
        return f"TP {self.tensor} × PP {self.pipeline}{chunks} × DP {self.data}"

    @property
    def description(self) -> str:
        """`tensor 8, pipeline 4 × 2 chunks, data 512 (64 copies of 8 shards)`."""
        chunks = f" × {self.virtual_pipeline} chunks" if self.virtual_pipeline > 1 else ""
        copies = f" ({self.replicate} copies of {self.shard} shards)" if self.replicate > 1 else ""
        return f"tensor {self.tensor}, pipeline {self.pipeline}{chunks}, data {self.data}{copies}"

    @property
    def data_axes(self) -> dict[str, int]:
        """Name → degree of the axes of data-parallel workers."""
        copies = {"replicate": self.replicate} if self.replicate > 1 else {}
        return {**copies, "shard": self.shard}

    @property
    def chunks(self) -> int:
        """Pieces that the layers are cut into: stages times chunks a stage."""
        return self.pipeline * self.virtual_pipeline

    def layers(self, count: int, stage: int) -> list[int]:
        """Return which of `count` layers a pipeline stage has: those of its chunks."""
        size = count // self.chunks
        starts = range(stage * size, count, self.pipeline * size)
        return [layer for start in starts for layer in range(start, start + size)]

    def in_flight(self, stage: int, all_forward_first: bool) -> int:
        """Return passes of a chunk whose backward pass is still to come, at most.

        Narayanan et al. 2021 (arXiv 2104.04473), figure 4.
        """
        passes, warm_up = self.accumulation * self.virtual_pipeline, self.pipeline - 1 - stage
        if all_forward_first:
            return passes
        if self.virtual_pipeline > 1:
            warm_up = 2 * warm_up + (self.virtual_pipeline - 1) * self.pipeline
        return min(passes, warm_up + 1)

    @property
    def world_size(self) -> int:
        return self.nodes * self.devices_per_node

    @property
    def accumulation(self) -> int:
        """Micro batches that a worker sees in one optimizer step."""
        return self.global_batch // (self.data * self.micro_batch)

    def data_rank(self, rank: int) -> int:
        """Return which of the `data` shares of the global batch a worker reads."""
        return rank // self.tensor % self.data

    def shard_rank(self, rank: int) -> int:
        return self.data_rank(rank) % self.shard

    def pipeline_rank(self, rank: int) -> int:
        return rank // (self.tensor * self.data)

    def size_json(self) -> dict[str, int]:
        """Return what is known of the mesh of another project's trainer."""
        names = ("nodes", "devices_per_node", "world_size")
        return {name: getattr(self, name) for name in names}

    def to_json(self) -> Json:
        """Return the content of plan.json; null for a micro batch that is not measured yet."""
        values = {**asdict(self), "world_size": self.world_size, "accumulation": self.accumulation}
        if values.pop("unmeasured"):
            values |= {"micro_batch": None, "accumulation": None}
        return values


def pipelines(mesh: Mesh) -> list[list[int]]:
    """Return the ranks of each pipeline, first stage first."""
    apart = mesh.tensor * mesh.data
    return [[first + stage * apart for stage in range(mesh.pipeline)] for first in range(apart)]


def replica_nodes(config: RunConfig) -> int:
    """Return the fewest nodes whose workers are whole replicas of the model."""
    model = config.recipe.parallel.tensor * config.recipe.parallel.pipeline
    return model // math.gcd(model, config.cluster.devices_per_node)


@lru_cache(maxsize=4096)
def micro_batches(sequences: int, pipeline: int, virtual_pipeline: int) -> list[int]:
    """Return the possible micro batches for a worker's share of the global batch.

    Args:
        sequences: The share: sequences in one step of one data-parallel worker.
        pipeline: Number of stages. Sizes that give fewer micro batches than stages leave stages
            idle and are returned only if there is no other.
        virtual_pipeline: With more than one chunk a stage, micro batches come in whole rounds
            over the stages (Narayanan et al. 2021, arXiv 2104.04473, section 2.2).

    Returns:
        Sizes, smallest first; empty if no size gives whole rounds.
    """
    sizes = divisors(sequences)
    if pipeline == 1:
        return sizes
    if virtual_pipeline > 1:
        return [size for size in sizes if sequences // size % pipeline == 0]
    return [size for size in sizes if sequences // size >= pipeline] or sizes


def possible_nodes(config: RunConfig, minimum: int, maximum: int) -> list[int]:
    possible = []
    for nodes in range(minimum, maximum + 1):
        with suppress(ConfigError):
            make_mesh(config, nodes)
            possible.append(nodes)
    return possible


def fsdp_disabled(config: RunConfig, mesh: Mesh) -> bool:
    """Whether the native backend trains without FSDP (its `unsharded.py`).

    Tensor-parallel weights are DTensors already, and parts of other packages get DTensors.
    """
    recipe = config.recipe
    single = config.backend != "nxd" and mesh.data * mesh.tensor == 1
    return single and recipe.optim.name in OPTIMIZERS and not recipe.hooks


def one_pass_adamw(config: RunConfig, mesh: Mesh) -> bool:
    """Whether the optimizer reads bf16 gradients, and updates fp32 weights and their bf16 copy.

    The native backend's `unsharded.py`, with torch 2.10 or later.
    """
    train = config.recipe.train
    if config.cluster.device == "cpu" or config.recipe.optim.name != ADAMW:
        return False
    return train.compile and train.is_mixed and fsdp_disabled(config, mesh)


# Devices on which the native backend has flex_attention, as `Device.document_attention`.
FLEX_DEVICES = {"cuda"}
BLOCK = 128  # tokens, as in model/attention.py


def suits_block_masks(recipe: Recipe) -> bool:
    """Whether flex_attention is for these blocks: uncompiled it makes a tensor of all scores.

    Its kernels are for heads of at least 16 dimensions, and for short sequences another one.
    """
    model = recipe.model
    return recipe.train.compile and model.head_width >= 16 and model.seq_len >= BLOCK


def has_block_masks(config: RunConfig) -> bool:
    """Whether attention between documents computes blocks of tokens; else its mask is dense."""
    flex = config.backend != "nxd" and config.cluster.device in FLEX_DEVICES
    return flex and suits_block_masks(config.recipe)


def make_mesh(config: RunConfig, nodes: int, measured: int | None = None) -> Mesh:
    """Compute the mesh of a run.

    Args:
        measured: The measured micro batch, for `train.micro_batch: auto`: the largest possible
            one up to it is used. None: not measured yet.

    Raises:
        ConfigError: degrees that do not divide the workers, or a global batch that cannot be
            divided among them; the message names node counts or batches that are possible.
    """
    recipe, per_node = config.recipe, config.cluster.devices_per_node
    tensor, pipeline = recipe.parallel.tensor, recipe.parallel.pipeline
    if nodes < 1:
        raise MeshError(f"--nodes: {nodes} is less than 1", "give a whole number, from 1")
    if not recipe.worker.has_model:  # its trainer makes a mesh of its own
        return Mesh(nodes, per_node, 1, 1, nodes * per_node, nodes * per_node, 1)
    world, model = nodes * per_node, tensor * pipeline
    if world % model:
        raise MeshError(
            f"parallel: tensor {tensor} × pipeline {pipeline} = {model} does not divide the "
            f"{world} workers of {format_plural(nodes, 'node')} × {per_node}",
            f"{_choose_nodes(config, nodes)}change the degrees with --set (parallel=auto leaves "
            "them to the planner)",
        )
    data, virtual = world // model, recipe.parallel.virtual_pipeline
    _require_shares(config, nodes, data)
    sequences = recipe.train.global_batch // data
    fitting = micro_batches(sequences, pipeline, virtual)
    micro_batch = recipe.train.micro_batch
    measured = measured or assumed_micro_batch(config)
    if not fitting or (
        micro_batch != "auto" and pipeline > 1 < virtual and micro_batch not in fitting
    ):
        raise _no_whole_rounds(config, data, fitting)
    if micro_batch == "auto":
        size = max((size for size in fitting if size <= (measured or 0)), default=fitting[0])
    else:
        size = micro_batch
    unmeasured = micro_batch == "auto" and measured is None
    batch = recipe.train.global_batch
    copies = replicate_degree(config, nodes)
    return Mesh(nodes, per_node, tensor, pipeline, data, batch, size, virtual, unmeasured, copies)


def replicate_degree(config: RunConfig, nodes: int) -> int:
    """Return the copies of a shard, one on every `parallel.shard_nodes` nodes; raises MeshError."""
    parallel, per_node = config.recipe.parallel, config.cluster.devices_per_node
    if parallel.shard_nodes is None:
        return 1
    options = shard_node_options(config, nodes)
    if parallel.shard_nodes in options:
        return nodes // (parallel.pipeline * parallel.shard_nodes)
    stage, workers = nodes * per_node // parallel.pipeline, parallel.shard_nodes * per_node
    rule = f"is not two or more data-parallel workers of parallel.tensor {parallel.tensor}"
    if stage % workers:
        rule = f"does not divide the {format_plural(stage, 'worker')} of a pipeline stage"
    also = f"{choose(options)} with --set parallel.shard_nodes, or " if options else ""
    raise MeshError(
        f"parallel.shard_nodes: {parallel.shard_nodes} ({format_plural(workers, 'worker')}) {rule}",
        f"{also}--set parallel.shard_nodes=null",
    )


def shard_node_options(config: RunConfig, nodes: int) -> list[int]:
    parallel, per_node = config.recipe.parallel, config.cluster.devices_per_node
    of_stage, remainder = divmod(nodes, parallel.pipeline)
    if remainder:
        return []
    return [
        count
        for count in divisors(of_stage)
        if count * per_node % parallel.tensor == 0
        and (count * per_node > parallel.tensor or count == of_stage)
    ]


def adapt_to_nodes(config: RunConfig, nodes: int) -> RunConfig:
    """Adapt what the planner chose to another number of nodes; what the user set stays.

    `parallel.shard_nodes` becomes the smallest possible value that is not below the planner's, and
    the micro batch the largest one, up to the planner's, that divides each worker's part of the
    global batch.
    """
    if not config.recipe.worker.has_model:
        return config
    shards = config.recipe.parallel.shard_nodes
    options = shard_node_options(config, nodes)
    planned = config.origins.get("parallel.shard_nodes", "").startswith(PLANNER)
    if planned and shards is not None and shards not in options:
        fitting = min((count for count in options if count >= shards), default=None)
        config = config.with_settings("parallel", shard_nodes=fitting)
    micro_batch = config.recipe.train.micro_batch
    if micro_batch == "auto" or not config.origins.get("train.micro_batch", "").startswith(PLANNER):
        return config
    mesh = make_mesh(config.with_settings("train", micro_batch="auto"), nodes, micro_batch)
    return config.with_settings("train", micro_batch=mesh.micro_batch)


def assumed_micro_batch(config: RunConfig) -> int | None:
    """Return the value of an `auto` micro batch on devices that cannot measure it, else None.

    On Neuron devices the precompile stage compiles without computing. Nearly all published trn1
    runs use 1.
    """
    return 1 if config.cluster.device == "neuron" else None


def measures_micro_batch(config: RunConfig) -> bool:
    """Whether the precompile stage measures the micro batch, which the planner does not choose."""
    if not config.recipe.worker.has_model:
        return False
    is_open = "train.micro_batch" in config.open_settings()
    auto = config.recipe.train.micro_batch == "auto" and not is_open
    return auto and assumed_micro_batch(config) is None


def save_mesh(mesh: Mesh, plan: Path) -> None:
    write_atomic(plan, json.dumps(mesh.to_json(), indent=2) + "\n")


def load_mesh(plan: Path) -> Mesh:
    """Return the mesh in a run's plan.json; raises StorageError if it is unreadable or damaged."""
    fix = "`slurmllm resume` writes it again"
    with storage_errors(f"cannot read {plan}", fix):
        content = read_limited(plan)
    try:
        held = json.loads(content)
        names = [field.name for field in fields(Mesh) if field.name != "unmeasured"]
        # null, a micro batch that is not measured yet, reads as 1; older plans lack later fields.
        values = {name: int(held[name] or 1) for name in names if name in held}
        return Mesh(**values, unmeasured=held["micro_batch"] is None)
    except (ValueError, TypeError, LookupError, OverflowError, RecursionError) as error:
        raise StorageError(f"{plan} is damaged: {error}; {fix}") from error


def _require_shares(config: RunConfig, nodes: int, data: int) -> None:
    """Check that the global batch is whole micro batches for each data-parallel worker."""
    batch, micro_batch = config.recipe.train.global_batch, config.recipe.train.micro_batch
    micro = 1 if micro_batch == "auto" else micro_batch
    if batch % (data * micro) == 0:
        return
    sizes = near_batches(batch, data * micro * _rounds(config))
    batches = " or ".join(f"{size:,} ({format_change(size, batch)})" for size in sizes)
    by = "" if micro_batch == "auto" else f" × train.micro_batch {micro}"
    raise MeshError(
        f"train.global_batch: {batch} sequences are not a multiple of "
        f"{format_plural(data, 'data-parallel worker')}{by}",
        f"{_choose_nodes(config, nodes)}set train.global_batch to {batches}",
    )


def near_batches(batch: int, unit: int) -> list[int]:
    """Return the multiples of `unit` below and above a global batch, which is none itself."""
    below = batch // unit * unit
    return [size for size in (below, below + unit) if size]


def near_nodes(config: RunConfig, meshes: Iterable[tuple[int, int]], micro: int) -> set[int]:
    """Return the node counts that divide the global batch among the workers of some mesh.

    Args:
        meshes: Tensor and pipeline degrees.
        micro: Sequences that each worker takes at once, at least.
    """
    per_node = config.cluster.devices_per_node
    shares = divisors(config.recipe.train.global_batch // micro)
    counts = (divmod(t * p * data, per_node) for t, p in meshes for data in shares)
    return {count for count, remainder in counts if not remainder}


def next_to(requested: int, values: Iterable[int]) -> tuple[list[int], list[int]]:
    """Return the values below and above what is requested, the nearest first."""
    ordered = sorted(values)
    below = [value for value in reversed(ordered) if value < requested]
    return below, [value for value in ordered if value > requested]


def format_change(size: int, requested: int) -> str:
    """Return `3.1 % more`, `1.6 % fewer`, `16 times as many`."""
    if size >= 2 * requested:
        return f"{size / requested:.3g} times as many"
    return f"{100 * abs(size / requested - 1):.2g} % {'more' if size > requested else 'fewer'}"


def _rounds(config: RunConfig) -> int:
    """Return the number of which micro batches come in multiples."""
    parallel = config.recipe.parallel
    return parallel.pipeline if parallel.pipeline > 1 < parallel.virtual_pipeline else 1


def _choose_nodes(config: RunConfig, nodes: int) -> str:
    """Return `choose 8 or 16 nodes, or `, the nearest that the mesh divides, or nothing."""
    parallel, micro_batch = config.recipe.parallel, config.recipe.train.micro_batch
    micro = (1 if micro_batch == "auto" else micro_batch) * _rounds(config)
    possible = near_nodes(config, [(parallel.tensor, parallel.pipeline)], micro)
    near = sorted(count for side in next_to(nodes, possible) for count in side[:1])
    return f"{choose(near)} {'node' if near == [1] else 'nodes'}, or " if near else ""


def _no_whole_rounds(config: RunConfig, data: int, fitting: list[int]) -> MeshError:
    train, parallel = config.recipe.train, config.recipe.parallel
    share = train.global_batch // data
    rule = (
        f"parallel.virtual_pipeline: {parallel.virtual_pipeline} chunks a stage take micro "
        f"batches in rounds of {parallel.pipeline} (parallel.pipeline)"
    )
    if not fitting:
        return MeshError(
            f"{rule}, and train.global_batch {train.global_batch} gives each of {data} "
            f"data-parallel workers {share} sequences",
            f"make it a multiple of {data * parallel.pipeline} with --set, or --set "
            "parallel.virtual_pipeline=1",
        )
    assert train.micro_batch != "auto"
    return MeshError(
        f"{rule}, and train.micro_batch {train.micro_batch} makes {share // train.micro_batch} a "
        "step",
        f"{choose(fitting)} with --set train.micro_batch, or --set parallel.virtual_pipeline=1",
    )
