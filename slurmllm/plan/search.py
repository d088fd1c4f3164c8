"""The estimate of one layout of a run, and the search over all of them; torch-free.

The search varies the degrees, the micro batch, sequence parallelism, activation checkpointing and
ZeRO. Model, global batch and precision are the recipe's, so that every layout computes the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from operator import attrgetter

from slurmllm.core.config.cluster import Hardware
from slurmllm.core.config.recipe import Checkpointing
from slurmllm.core.config.resolve import RunConfig
from slurmllm.core.config.rules import RULES, divisors
from slurmllm.core.config.yaml_source import Values
from slurmllm.core.errors import ConfigError
from slurmllm.core.format import format_gib, format_number, format_plural
from slurmllm.plan.memory import worker_memory
from slurmllm.plan.mesh import (
    Mesh,
    MeshError,
    make_mesh,
    measures_micro_batch,
    micro_batches,
    replicate_degree,
    shard_node_options,
)
from slurmllm.plan.neuron_memory import neuron_memory
from slurmllm.plan.parameters import model_flops
from slurmllm.plan.step import StepTime, peak_flops, step_time

# The settings that the search varies, unless `fixed` names them.
DEGREES = (
    "parallel.tensor",
    "parallel.pipeline",
    "parallel.virtual_pipeline",
    "parallel.sequence",
    "parallel.zero",
    "parallel.shard_nodes",
)
VARIED = (*DEGREES, "train.micro_batch", "train.activation_checkpointing")
LARGEST = 4096  # nodes
_LARGEST_MICRO_BATCH = 64
# A tight layout is ranked as if it were slower by this: the next one is preferred if it costs less.
TIGHT_COST = 0.03
_LEAST_DATA = 0.03  # of the step: data-parallel communication from which on copies are tried
# Tensor-parallel degrees of AWS's training examples on trn1, and none. For others (2 is valid too)
# no published run exists to validate a prediction; they are predicted if fixed.
_NEURON_TENSOR = (1, 8, 32)
# From the fastest to the smallest; the list is of AWS's 70B runs.
CHECKPOINTING: tuple[Checkpointing, ...] = ("none", "selective", ("core", "mlp"), "full")
_PARALLEL_RULES = [
    (check, [attrgetter(path) for path in paths])
    for paths, check in RULES
    if any(path.startswith("parallel.") for path in paths)
]

Unsupported = Callable[[RunConfig], Sequence[str]]


@dataclass(frozen=True)
class SearchResult:
    """The layouts of a run on a number of nodes."""

    fitting: Sequence[LayoutEstimate]  # layouts that fit into memory, the best first
    too_large: Sequence[LayoutEstimate]  # layouts that do not, smallest first
    refused: Mapping[str, int]  # Reason → number of layouts that were not considered


def search(
    config: RunConfig, nodes: int, unsupported: Unsupported, fixed: Collection[str] = ()
) -> SearchResult:
    """Predict all layouts of a run.

    Args:
        unsupported: Returns why the backend cannot train a configuration
            (`backends/environment.py`).
        fixed: Those of `VARIED` that keep the configuration's value.

    Raises:
        ConfigError: no hardware figures, or no nodes.
    """
    known_hardware(config)
    if nodes < 1:
        raise ConfigError("the mesh does not fit", [f"--nodes: {nodes} is less than 1"])
    refused: Counter[str] = Counter()
    fitting: list[LayoutEstimate] = []
    too_large: list[LayoutEstimate] = []
    for layout in _layouts(config, nodes, fixed):
        sizes = _micro_batches(layout, nodes, unsupported, fixed)
        if isinstance(sizes, str):
            refused[sizes] += 1
            continue
        overflows = False
        for size in sizes:
            sized = layout.with_settings("train", micro_batch=size)
            mesh = make_mesh(sized, nodes)
            # Larger ones do not fit either, except one for the whole step, which does not
            # accumulate gradients. A measurement starts with the smallest and never gets there.
            if overflows and (mesh.accumulation > 1 or measures_micro_batch(config)):
                continue
            candidate = predict(sized, mesh)
            if candidate.fits:
                fitting.append(candidate)
                if "parallel.shard_nodes" not in fixed:
                    fitting += _faster_with_copies(candidate)
            elif not overflows:
                too_large.append(candidate)
                overflows = True
    return SearchResult(
        sorted(fitting, key=order),
        sorted(too_large, key=lambda layout: layout.memory.peak),
        dict(refused.most_common()),
    )


def _faster_with_copies(plain: LayoutEstimate) -> list[LayoutEstimate]:
    """Return a layout with copies of its shards on groups of nodes, where that is faster and fits.

    They can save no more than the time of data-parallel communication.
    """
    parallel, mesh = plain.config.recipe.parallel, plain.mesh
    small = plain.step.data < _LEAST_DATA * plain.step.total
    if small or parallel.zero == 0 or plain.config.backend == "nxd":
        return []
    faster = []
    for count in shard_node_options(plain.config, mesh.nodes):
        config = plain.config.with_settings("parallel", shard_nodes=count)
        shared = replace(mesh, replicate=replicate_degree(config, mesh.nodes))
        if step_time(config, shared).total < plain.step.total:
            copies = predict(config, shared)
            if copies.fits:
                faster.append(copies)
    return faster


def order(candidate: LayoutEstimate) -> tuple[float, int]:
    """Return the key that sorts layouts, the best first: by throughput, tight ones as if slower."""
    cost = TIGHT_COST if candidate.memory.tight else 0.0
    return -candidate.seq_per_s * (1 - cost), candidate.memory.peak


def some_fits(
    config: RunConfig, nodes: int, unsupported: Unsupported, fixed: Collection[str]
) -> bool:
    """Whether any layout fits; faster than `search`, with its arguments."""
    return any(layout.fits for layout in smallest_layouts(config, nodes, unsupported, fixed))


def smallest_layouts(
    config: RunConfig, nodes: int, unsupported: Unsupported, fixed: Collection[str]
) -> Iterator[LayoutEstimate]:
    """Yield the layout of each mesh that needs the least memory; arguments as for `search`."""
    for layout in _layouts(config, nodes, fixed, smallest=True):
        sizes = _micro_batches(layout, nodes, unsupported, fixed)
        if not isinstance(sizes, str):
            # The largest may fit although smaller ones do not: it accumulates no gradients.
            ends = sizes[:1] if measures_micro_batch(config) else {*sizes[:1], *sizes[-1:]}
            for size in ends:
                sized = layout.with_settings("train", micro_batch=size)
                yield predict(sized, make_mesh(sized, nodes))


def model_degrees(
    config: RunConfig, nodes: int, fixed: Collection[str]
) -> Iterator[tuple[int, int]]:
    """Yield the tensor and pipeline degrees that the search tries on up to a number of nodes."""
    recipe, per_node = config.recipe, config.cluster.devices_per_node
    world = nodes * per_node
    # Within a node, or across nodes if each has one worker.
    largest = per_node if per_node > 1 else world
    tensors = [t for t in divisors(recipe.model.num_heads) if t <= largest]
    if config.cluster.device == "neuron":
        tensors = [t for t in tensors if t in _NEURON_TENSOR]
    for tensor in [recipe.parallel.tensor] if "parallel.tensor" in fixed else tensors:
        stages = [p for p in divisors(recipe.model.num_layers) if tensor * p <= world]
        if "parallel.pipeline" in fixed:
            stages = [recipe.parallel.pipeline]
        yield from product([tensor], stages)


def _layouts(
    config: RunConfig, nodes: int, fixed: Collection[str], smallest: bool = False
) -> Iterator[RunConfig]:
    """Yield all combinations but those of the micro batch.

    With `smallest` only the one of each mesh that needs the least memory.
    """
    if "train.micro_batch" in config.open_settings():  # auto would be one to measure
        config = config.with_settings("train", micro_batch=1)
    parallel, world = config.recipe.parallel, nodes * config.cluster.devices_per_node
    for tensor, pipeline in model_degrees(config, nodes, fixed):
        chunks = sorted({1, parallel.virtual_pipeline}) if pipeline > 1 else [1]
        data = world // (tensor * pipeline)
        sequences = [True, False] if tensor > 1 else [False]
        # Distinct ZeRO stages, from the fastest to the smallest.
        zeros = [1] if data == 1 or pipeline > 1 else [1, 2, 3]
        if config.backend == "nxd":
            zeros = [0, 1]
        modes: Sequence[Checkpointing] = CHECKPOINTING
        if smallest:
            chunks, sequences, modes = [1], sequences[:1], modes[-1:]
            # ZeRO-1 gives the only data-parallel worker a copy of the weights, and saves nothing.
            zeros = zeros if data == 1 else zeros[-1:]
        options: Values = {
            "tensor": [tensor],
            "pipeline": [pipeline],
            "virtual_pipeline": chunks,
            "sequence": sequences,
            "zero": zeros,
            "shard_nodes": [None],
        }
        for name in options:
            if f"parallel.{name}" in fixed:
                options[name] = [getattr(parallel, name)]
        if "train.activation_checkpointing" in fixed:
            modes = [config.recipe.train.activation_checkpointing]
        for degrees in product(*options.values()):
            layout = config.with_settings("parallel", **dict(zip(options, degrees, strict=True)))
            for mode in modes:
                yield layout.with_settings("train", activation_checkpointing=mode)


def _micro_batches(
    layout: RunConfig, nodes: int, unsupported: Unsupported, fixed: Collection[str]
) -> list[int] | str:
    """Return the micro batches that a layout may have, or why it is not considered."""
    parallel, size = layout.recipe.parallel, layout.recipe.train.micro_batch
    varied = layout
    if "train.micro_batch" not in fixed:
        varied = layout.with_settings("train", micro_batch="auto")
    try:
        mesh = make_mesh(varied, nodes)
    except MeshError as error:
        return error.rule
    for check, values in _PARALLEL_RULES:
        if fault := check(*[value(layout.recipe) for value in values]):
            return fault
    if reasons := unsupported(layout):
        return reasons[0]
    if "train.micro_batch" in fixed and size != "auto":
        return [size]
    share = mesh.global_batch // mesh.data
    sizes = micro_batches(share, parallel.pipeline, parallel.virtual_pipeline)
    smaller = [size for size in sizes if size <= _LARGEST_MICRO_BATCH]
    return smaller or f"micro batches are {sizes[0]} sequences or more, too large to be tried"


# A layout that uses more than this share of the memory is tight: the prediction's error, and what
# the allocator cannot use of fragmented memory, may exceed the rest.
TIGHT = 0.95


@dataclass(frozen=True)
class MemoryUse:
    """Memory of the worker that needs the most, bytes."""

    parts: Mapping[str, int]  # Name → bytes at the peak; they add up to it
    limit: int  # device memory available to a model

    def __str__(self) -> str:
        return f"{format_gib(self.peak)} of {format_gib(self.limit)} GiB"

    @property
    def peak(self) -> int:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        return self.peak <= self.limit

    @property
    def tight(self) -> bool:
        return TIGHT * self.limit < self.peak <= self.limit


@dataclass(frozen=True)
class LayoutEstimate:
    """The estimate of one layout of a run on a number of nodes."""

    config: RunConfig
    mesh: Mesh
    memory: MemoryUse
    step: StepTime
    model_flops: float  # FLOPs of one step as in MFU: without recomputation and padding

    def __repr__(self) -> str:
        config, nodes = self.config, format_plural(self.mesh.nodes, "node")
        speed = f"{format_number(self.seq_per_s)} seq/s, MFU {100 * self.mfu:.1f} %"
        name = f"{config.recipe.name} on {nodes} of {config.cluster.name}"
        return f"<LayoutEstimate of {name}: {self.description}; {self.memory}, {speed}>"

    @property
    def description(self) -> str:
        """`TP 32 × PP 8 × DP 4, micro batch 1, selective checkpointing, ZeRO 1, …`."""
        recipe = self.config.recipe
        nodes = recipe.parallel.shard_nodes
        shards = f" over {format_plural(nodes, 'node')}" if nodes else ""
        sequence = ", sequence parallel" if recipe.parallel.sequence else ""
        checkpointing = recipe.train.checkpointing_text if recipe.train.recomputed else "no"
        return (
            f"{self.mesh.degrees}, micro batch {self.mesh.micro_batch}, "
            f"{checkpointing} checkpointing, ZeRO {recipe.parallel.zero}{shards}{sequence}"
        )

    @property
    def fits(self) -> bool:
        return self.memory.fits

    @property
    def seq_per_s(self) -> float:
        """Throughput of all nodes, sequences/s."""
        return self.mesh.global_batch / self.step.total

    @property
    def tokens_per_s(self) -> float:
        """Throughput of all nodes, tokens/s."""
        return self.seq_per_s * self.config.recipe.model.seq_len

    @property
    def mfu(self) -> float:
        """Model-FLOPs utilization, relative to the peak in the run's precision."""
        return self.model_flops / self.step.total / (self.mesh.world_size * peak_flops(self.config))


def predict(config: RunConfig, mesh: Mesh) -> LayoutEstimate:
    """Predict memory and step time; raises ConfigError if the profile has no hardware figures."""
    hardware = known_hardware(config)
    # The worker that needs the most is in the first or the last pipeline stage.
    stages = sorted({0, mesh.tensor * mesh.data * (mesh.pipeline - 1)})
    if config.backend == "nxd":
        parts = [neuron_memory(config, mesh, rank) for rank in stages]
    else:
        parts = [worker_memory(config, mesh, rank) for rank in stages]
    return LayoutEstimate(
        config=config,
        mesh=mesh,
        memory=MemoryUse(max(parts, key=lambda use: sum(use.values())), hardware.usable_bytes),
        step=step_time(config, mesh),
        model_flops=model_flops(config.recipe.model, mesh.global_batch),
    )


def known_hardware(config: RunConfig) -> Hardware:
    """Return the cluster's hardware figures; raises ConfigError if there are none."""
    cluster = config.cluster
    if cluster.hardware is not None:
        return cluster.hardware
    fix = (
        "take that section from a shipped profile, trn1 or trn1n"
        if cluster.device == "neuron"  # which `calibrate` does not measure
        else f"`slurmllm calibrate --cluster {cluster.name} --out FILE.yaml` measures it on the "
        "nodes, and --cluster FILE.yaml uses it"
    )
    raise ConfigError(
        f"cluster profile {cluster.name} cannot be planned for",
        [f"cluster.hardware: missing; {fix}"],
    )
