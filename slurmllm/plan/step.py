"""Estimate of the duration of an optimizer step, by parts; torch-free.

A worker's work in a micro batch is counted exactly (`parameters.py`) and divided by the rate
of its device: matrix products at `matrix_efficiency` of the peak; attention at
`attention_efficiency`; elementwise work at `memory_efficiency` of the memory's bandwidth. A product
overlaps in part with the passage of its operands and results through the memory, which makes those
with a small dimension slow: it takes the root of the sum of both times' squares. A pipeline takes
the time of its slowest stage for each micro batch, and fills and drains once through the other
stages, in `virtual_pipeline` smaller pieces if interleaved (Narayanan et al. 2021, arXiv
2104.04473).

Collectives are ring algorithms (Thakur, Rabenseifner, Gropp 2005, "Optimization of collective
communication operations in MPICH"): an all-gather or reduce-scatter of `size` bytes over n workers
sends (n - 1) / n · size bytes per worker, in n - 1 hops; an all-reduce is a reduce-scatter followed
by an all-gather. A ring over several nodes crosses each node's network once; all rings of a node
share its bandwidth, of which congestion leaves less the more nodes there are (`network_half`).
FSDP2 gathers a layer's weights while the layer before computes, forward and backward, and reduces
its gradients while the next one's backward pass computes (Zhao et al. 2023, arXiv 2304.11277,
section 3.3): of what communicates while a layer computes, `overlap` is hidden, up to what the layer
computes for; the first gathering of a pass and the last reduction have nothing to hide behind. The
copies out of the gathered buffers and into the reduced ones are kernels between those of the model
and are never hidden. With `parallel.shard_nodes` these are within a copy of the weights; once a
step each worker sums its share of a layer's gradients over all copies (section 3.2.2), over the
network, at the same time if a copy's own collectives stay within a node.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import fmean

from slurmllm.core.config.cluster import Hardware
from slurmllm.core.config.families import FAMILIES
from slurmllm.core.config.recipe import MUON
from slurmllm.core.config.resolve import RunConfig
from slurmllm.plan.mesh import Mesh, fsdp_disabled, has_block_masks
from slurmllm.plan.parameters import (
    Product,
    attention_flops,
    attention_pairs,
    block_elements,
    block_parameters,
    block_products,
    head_product,
    layer_windows,
    model_flops,
    muon_shapes,
    newton_schulz_product,
    num_norms,
    rest_parameters,
    up_width,
)

_FP8, _BF16, _FP32 = 1, 2, 4
# Bytes moved to convert a number: read and written; its kernel before finds the largest.
_TO_FP8 = _BF16 + _FP8
# Numbers a parameter that AdamW reads and writes: weight, gradient, both moments, and all but the
# gradient again; the gradient once more for its norm.
_ADAMW = 8
# Adding a gradient to the sum of the micro batches before: two reads and a write.
_ADD = 3
# Passes over the logits: written and read for the loss, likewise for their gradient.
_LOGITS = 4


@dataclass(frozen=True)
class Group:
    """A group of workers that communicate, such as a tensor-parallel group."""

    size: int
    nodes: int
    rings: int  # groups of the same kind that share a node's network; 0 within a node
    whole_nodes: bool  # whether it contains all workers of its nodes


@lru_cache(maxsize=4096)
def group(stride: int, size: int, per_node: int) -> Group:
    """Return the group of `size` ranks spaced by `stride` that spans the most nodes."""
    if per_node % (stride * size) == 0:  # else one of the groups crosses a node's boundary
        return Group(size, 1, 0, size == per_node)
    ranks_per_node = max(1, per_node // stride)
    whole = ranks_per_node == per_node and size % per_node == 0
    nodes, rings = max(2, math.ceil(size / ranks_per_node)), max(1, per_node // ranks_per_node)
    return Group(size, nodes, rings, whole)


def rate(members: Group, hardware: Hardware) -> float:
    """Return bandwidth at which each worker of a group sends, bytes/s."""
    inside = hardware.node_link_gb_s * hardware.node_link_efficiency * 1e9
    if not members.whole_nodes:
        inside *= hardware.part_of_node
    if members.nodes == 1:
        return inside
    network = hardware.network_gb_s * hardware.network_efficiency * 1e9
    if hardware.network_half is not None:
        network /= 1 + members.nodes / hardware.network_half
    return min(inside, network / members.rings)


def gather_s(size: float, members: Group, hardware: Hardware, efficiency: float = 0) -> float:
    """Time of an all-gather or reduce-scatter, s; `size` is the unsharded tensor, in bytes."""
    if members.size == 1:
        return 0.0
    reached = efficiency or hardware.shard_efficiency
    sent_bytes = size * (members.size - 1) / members.size
    return sent_bytes / (rate(members, hardware) * reached) + latency_s(members, hardware)


def all_reduce_s(size: float, members: Group, hardware: Hardware) -> float:
    """Time of an all-reduce of `size` bytes, s."""
    return 2 * gather_s(size, members, hardware, 1.0)


def latency_s(members: Group, hardware: Hardware) -> float:
    """Return latency of one collective, s: that of a ring's hops."""
    within_us = (members.size - members.nodes) * hardware.node_link_latency_us
    return 1e-6 * (within_us + (members.nodes - 1) * hardware.network_latency_us)


def stage_to_stage_s(size: float, mesh: Mesh, hardware: Hardware) -> float:
    """Time for each worker of a pipeline stage to send `size` bytes to the next stage, s."""
    nodes = 1 if mesh.stage_workers * mesh.pipeline <= mesh.devices_per_node else 2
    # All workers of a node that send at once share its network.
    sending = min(mesh.stage_workers, mesh.devices_per_node)
    pair = Group(2, nodes, sending, whole_nodes=True)
    return size / rate(pair, hardware) + latency_s(pair, hardware)


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step by part; the parts add up to the step."""

    compute: float  # matrix products, attention and elementwise work, forward and backward
    recompute: float  # recomputation of activation checkpointing
    tensor: float  # collectives within the tensor-parallel groups
    bubble: float  # pipeline stages waiting for others
    transfer: float  # activations and their gradients from stage to stage
    data: float  # data-parallel communication that computing does not hide
    optimizer: float  # the optimizer's own step
    overhead: float  # launches of operators, and the host; of a GPU what it waits for them

    @property
    def total(self) -> float:
        return sum(self.parts().values())

    def parts(self) -> dict[str, float]:
        """Return name → seconds, in the order of a step."""
        return dict(vars(self))


@dataclass(frozen=True)
class Formats:
    """Bytes of one number."""

    computed: int  # activations and products
    stored: int  # weights and moments in the optimizer
    reduced: int  # sums of gradients, and gradients between data-parallel workers


def formats(config: RunConfig) -> Formats:
    """Return the formats of a run's precision, on its backend."""
    train = config.recipe.train
    if train.precision == "fp32":
        return Formats(_FP32, _FP32, _FP32)
    mixed = train.is_mixed
    # FSDP2 adds gradients up in fp32; NxD does so only with fp32 master weights.
    whole = mixed or config.backend != "nxd"
    return Formats(_BF16, _FP32 if mixed else _BF16, _FP32 if whole else _BF16)


def peak_flops(config: RunConfig) -> float:
    """Return peak FLOP/s of one device in the run's precision; of bf16 for fp8_mixed."""
    hardware = config.cluster.hardware
    assert hardware is not None, "the planner needs cluster.hardware"
    computes_fp32 = config.recipe.train.precision == "fp32"
    return (hardware.fp32_tflops if computes_fp32 else hardware.bf16_tflops) * 1e12


def flops_utilization(config: RunConfig, workers: int, seq_per_s: float) -> float | None:
    """Return the MFU of a throughput; None if the devices' peak is unknown, or only a guess."""
    hardware = config.cluster.hardware if config.recipe.worker.has_model else None
    if hardware is None or hardware.rough:
        return None
    return model_flops(config.recipe.model, 1) * seq_per_s / (workers * peak_flops(config))


@dataclass(frozen=True)
class Trainer:
    """What another trainer, whose published runs are predicted, does otherwise than ours."""

    reduced: int = 0  # bytes of a gradient that workers sum; 0: as ours
    # Megatron's: products overlap with tensor-parallel collectives and transfers.
    overlaps_all: bool = False
    bucket: int = 1  # parameters whose gradients are summed in one message; at least a layer's
    # Of ZeRO 1 as InternEvo does it: so many whole tensors are broadcast by their owners, in turn.
    # 0: each worker has a part of every tensor.
    tensors: int = 0


OURS = Trainer()


def step_time(config: RunConfig, mesh: Mesh, trainer: Trainer = OURS) -> StepTime:
    return _Step(config, mesh, trainer).time()


def _attention_pairs(config: RunConfig, mesh: Mesh) -> float:
    """Return the pairs of tokens in a sequence for which a layer's attention computes scores.

    The mean of a pipeline stage's layers, of the stage with the most. Blocks skip what a window
    hides, and what is between documents, of which only the data knows how much: one a sequence is
    assumed. A dense mask has all pairs computed. NxD computes the same in every layer.
    """
    recipe, length = config.recipe, config.recipe.model.seq_len
    windows, dense = layer_windows(recipe.model), not has_block_masks(config)
    if config.backend == "nxd":
        return attention_pairs(length, length)

    def pairs(window: int) -> int:
        if dense and (window < length or recipe.data.mask == "document"):
            return length**2
        return attention_pairs(length, window)

    stages = (mesh.layers(len(windows), stage) for stage in range(mesh.pipeline))
    return max(fmean(pairs(windows[layer]) for layer in layers) for layers in stages)


class _Step:
    """The estimate of one optimizer step."""

    def __init__(self, config: RunConfig, mesh: Mesh, trainer: Trainer) -> None:
        hardware = config.cluster.hardware
        assert hardware is not None, "the planner needs cluster.hardware"
        self.mesh, self.hardware = mesh, hardware
        self.model, self.recipe = config.recipe.model, config.recipe
        self.nxd = config.backend == "nxd"
        self.trainer = trainer
        self.host_runs_ahead = config.cluster.device == "cuda"
        self.fsdp_disabled = fsdp_disabled(config, mesh)
        self.formats = formats(config)
        if trainer.reduced:
            self.formats = replace(self.formats, reduced=trainer.reduced)
        self.overlap_all = hardware.overlap * trainer.overlaps_all
        tensorwise = self.recipe.train.is_fp8 and self.recipe.train.fp8_recipe == "tensorwise"
        # FSDP gathers weights in fp8, of which each worker has converted its share.
        self.gathers_fp8 = tensorwise and mesh.shard > 1
        self.tokens = mesh.micro_batch * self.model.seq_len
        self.tensor_group = group(1, mesh.tensor, mesh.devices_per_node)
        self.layers = self.model.num_layers // mesh.pipeline
        self.peak = peak_flops(config)
        self.pairs = _attention_pairs(config, mesh)
        self.bandwidth = hardware.memory_gb_s * hardware.memory_efficiency * 1e9

    def time(self) -> StepTime:
        """Return all parts, of the slowest pipeline stage: the last one, which has the head."""
        mesh, hardware, recipe = self.mesh, self.hardware, self.recipe
        micro_batches = mesh.accumulation
        recomputed, zero = recipe.train.recomputed, recipe.parallel.zero
        forward = self._forward_s()
        recomputed_s = (
            forward if "block" in recomputed else sum(self._part_s(p) for p in recomputed)
        )
        block = 3 * forward + self._added_s(block_parameters(self.model) / mesh.tensor)
        logits = head_product(self.model, self.tokens, mesh.tensor)
        passes = _LOGITS * self.tokens * logits.n * _FP32 / self.bandwidth
        head = 3 * self._product_s(logits) + passes + self._added_s(logits.n * logits.k)
        computed = block + recomputed_s
        collective = self._block_collectives_s()
        collective -= self.overlap_all * min(collective, computed)
        edge = 2 * self._sum_s()  # of embedding and head, forward and backward
        # Of a block's operators.
        launches = (3 + ("block" in recomputed)) * hardware.operator_us * 1e-6
        launches_s = micro_batches * self.layers * launches + hardware.step_overhead_s
        stage = self.layers * (computed + collective)
        stage += 0.0 if self.host_runs_ahead else self.layers * launches
        in_blocks = self.layers * block_parameters(self.model)
        stage_parameters = (in_blocks + rest_parameters(self.model, mesh.pipeline)) / mesh.tensor
        stream = self._whole_stream() / (mesh.tensor if recipe.parallel.sequence else 1)
        crossing = 2 * stage_to_stage_s(stream, mesh, hardware)
        crossing -= self.overlap_all * min(crossing, stage / mesh.virtual_pipeline)
        crossings = micro_batches * mesh.virtual_pipeline + mesh.pipeline - 1
        # NxD without ZeRO updates every parameter on every data-parallel worker.
        updated = stage_parameters / (1 if self.nxd and zero == 0 else mesh.shard)
        parts = {
            "compute": micro_batches * (self.layers * block + head),
            "recompute": micro_batches * self.layers * recomputed_s,
            "tensor": micro_batches * (self.layers * collective + edge),
            # Filling and draining: once through the other stages, the last of them with the head.
            "bubble": (mesh.pipeline - 1) * stage / mesh.virtual_pipeline,
            "transfer": crossing * crossings if mesh.pipeline > 1 else 0.0,
            "data": self._data_s(stage_parameters, forward, computed - forward),
            "optimizer": _ADAMW * updated * self.formats.stored / self.bandwidth + self._muon_s(),
        }
        # All wait for the slowest, once a step in the collectives of data-parallel workers.
        parts["data"] += hardware.straggler_share * math.log2(mesh.nodes) * sum(parts.values())
        hidden_s = sum(parts.values()) if self.host_runs_ahead else 0.0
        return StepTime(**parts, overhead=max(0.0, launches_s - hidden_s))

    def _muon_s(self) -> float:
        """Return the seconds that Muon takes longer than AdamW (`train/backends/native/muon.py`).

        The owner of a matrix computes its iterations. Workers send shares of matrices to the
        owners, and owners the results, all in bf16.
        """
        if self.recipe.optim.name != MUON:
            return 0.0
        mesh, hardware = self.mesh, self.hardware
        shapes = muon_shapes(self.model)
        iterations_s = [
            product_s(newton_schulz_product(shape), hardware.bf16_tflops * 1e12, _BF16, hardware)
            for shape in shapes
        ]
        owner_s = max(self.layers * sum(iterations_s) / mesh.stage_workers, *iterations_s)
        share = self.layers * sum(map(math.prod, shapes)) / (mesh.shard * mesh.tensor)
        workers = group(1, mesh.stage_workers, mesh.devices_per_node)
        steps = self.recipe.optim.ns_steps
        return steps * owner_s + 2 * gather_s(share * _BF16, workers, hardware)

    def _forward_s(self) -> float:
        mesh, parallel = self.mesh, self.recipe.parallel
        products = block_products(self.model, self.tokens, mesh.tensor)
        elements = block_elements(self.model, self.tokens, mesh.tensor, parallel.sequence)
        elements += 0 if self.recipe.train.compile else self._uncompiled_elements()
        work = sum(self._block_product_s(product) for product in products) + self._attention_s()
        return work + elements * self.formats.computed / self.bandwidth

    def _uncompiled_elements(self) -> int:
        """Return the additional numbers that an uncompiled block reads and writes.

        Counted from PyTorch's operators, in numbers of the computed format: RMSNorm in fp32
        accesses 14 for each instead of 2; a gate is multiplied separately; queries and keys are
        rotated in fp32. On CPUs, `calibrate` measures uncompiled blocks.
        """
        model, mesh = self.model, self.mesh
        if not self.host_runs_ahead:
            return 0
        stream = self.tokens * model.hidden_size
        stream //= mesh.tensor if self.recipe.parallel.sequence else 1
        norms = 12 * num_norms(model) * stream if FAMILIES[model.family].norm == "rms" else 0
        heads = (model.num_heads + model.kv_heads) * model.head_width // mesh.tensor
        turned = 6 * heads if model.rotary_pct > 0 else 0
        gated = 2 * model.ffn_hidden_size // mesh.tensor if model.gated else 0
        return norms + self.tokens * (turned + gated)

    def _part_s(self, name: str) -> float:
        """Return the forward pass of a part of a block, as far as the backward pass needs it.

        That is not the feed-forward layer's last matrix, whose product is no input of another.
        """
        model, tokens, tensor = self.model, self.tokens, self.mesh.tensor
        if name == "core":
            return self._attention_s()
        width = self.formats.computed
        if name == "mlp":
            up = block_products(model, tokens, tensor)[2]
            moved = tokens * (up_width(model) + model.ffn_hidden_size) // tensor * width
            return self._block_product_s(up) + moved / self.bandwidth
        shared = tensor if self.recipe.parallel.sequence else 1
        return 4 * tokens * model.hidden_size // shared * width / self.bandwidth

    def _product_s(self, product: Product) -> float:
        return product_s(product, self.peak, self.formats.computed, self.hardware)

    def _block_product_s(self, product: Product) -> float:
        rate = self.hardware.fp8_tflops
        if not (self.recipe.train.is_fp8 and rate):
            return self._product_s(product)
        converted = product.m * product.k + product.k * product.n * (not self.gathers_fp8)
        moved = _TO_FP8 * converted / self.bandwidth
        return product_s(product, rate * 1e12, _FP8, self.hardware) + moved

    def _attention_s(self) -> float:
        flops = attention_flops(self.model, self.tokens, self.mesh.tensor, self.pairs)
        return flops / (self.peak * self.hardware.attention_efficiency)

    def _added_s(self, numbers: float) -> float:
        """Return the time to add gradients to those of earlier micro batches."""
        if self.mesh.accumulation == 1:
            return 0.0
        return _ADD * numbers * self.formats.reduced / self.bandwidth

    def _block_collectives_s(self) -> float:
        """Return the time of the tensor-parallel collectives of a block and micro batch.

        Forward, attention and feed-forward each sum up their output, and backward the gradient of
        their input; under sequence parallelism they gather the one and scatter the other's sum, the
        same bytes. Full checkpointing repeats the forward ones, a recomputed feed-forward layer
        the gathering of its input. NxD gathers the inputs of both anew
        for the weights' gradients, instead of keeping them
        (neuronx_distributed/parallel_layers/layers.py).
        """
        recomputed, sequence = self.recipe.train.recomputed, self.recipe.parallel.sequence
        passes = 3 if "block" in recomputed else 2
        gathers = (2 * self.nxd + ("mlp" in recomputed)) * sequence
        return 2 * passes * self._sum_s() + gathers * self._gathered_s()

    def _sum_s(self) -> float:
        """Return the time to add up the stream's partial sums, or to scatter and gather them."""
        if self.recipe.parallel.sequence:
            return 2 * self._gathered_s()
        return all_reduce_s(self._whole_stream(), self.tensor_group, self.hardware)

    def _gathered_s(self) -> float:
        return gather_s(self._whole_stream(), self.tensor_group, self.hardware)

    def _whole_stream(self) -> int:
        """Return bytes of a micro batch's activations between two blocks."""
        return self.tokens * self.model.hidden_size * self.formats.computed

    def _data_s(self, numbers: float, forward: float, backward: float) -> float:
        """Return the data-parallel communication that computing does not hide.

        `forward` and `backward` are for how long a layer computes in a micro batch.
        """
        mesh, zero, hardware = self.mesh, self.recipe.parallel.zero, self.hardware
        per_node, width = mesh.devices_per_node, self.formats
        # The workers that share out a copy of a stage's weights; those with the same share of it.
        members = group(mesh.tensor, mesh.shard, per_node)
        copies = group(mesh.tensor * mesh.shard, mesh.replicate, per_node)
        # Collectives of a pass: one a layer, or fewer.
        count = max(1, min(self.layers, numbers / self.trainer.bucket))

        def exposed(seconds: float, computing: float) -> float:
            """Return exposed seconds of a pass's collectives, of which the first is not hidden."""
            hidden = hardware.overlap * min(seconds, computing * self.layers / count)
            return seconds + (count - 1) * (seconds - hidden)

        # How often a step gathers all weights, and reduces and scatters all gradients.
        passes = gathers = 1
        if not self.nxd and mesh.pipeline == 1 and zero > 1:
            passes = mesh.accumulation
            gathers = 2 * passes if zero == 3 else 1
        if self.fsdp_disabled:
            converted = 0 if width.computed == width.stored else 1 + mesh.accumulation
            return converted * numbers * (width.stored + width.computed) / self.bandwidth
        if self.nxd:  # all layers at once
            total = all_reduce_s(numbers * width.reduced, members, hardware)
            if zero > 0:
                sizes = numbers * width.computed, numbers * width.reduced
                total = sum(gather_s(size, members, hardware) for size in sizes)
            return exposed(total / count, forward + backward)
        # FSDP2 copies out of the buffers that it gathers into, and into those that it reduces.
        gathered = _FP8 if self.gathers_fp8 else width.computed
        size = numbers * (gathers * gathered + passes * width.reduced)
        copied = 2 * size / self.bandwidth
        if members.size == 1:
            return copied
        if not self.host_runs_ahead:
            copied = 0.0  # on CPUs, part of the measured rate of the collectives
        layer = numbers / count
        if tensors := self.trainer.tensors:
            workers = group(mesh.tensor, mesh.data, per_node)
            summed = all_reduce_s(layer * width.reduced, workers, hardware)
            broadcast = min(members.size, tensors) * latency_s(members, hardware)
            broadcast += numbers * gathered / rate(members, hardware)
            return copied + exposed(summed, backward) + broadcast
        weights = gather_s(layer * gathered, members, hardware)
        gradients = gather_s(layer * width.reduced, members, hardware)
        summed = all_reduce_s(layer * width.reduced / mesh.shard, copies, hardware)
        forwards, both = max(1, gathers - passes), gradients + weights * (gathers > 1)
        # Copies sum over the network while each one's collectives, within a node, use its links.
        last = max(both, summed) if members.nodes == 1 < copies.nodes else both + summed
        return (
            copied
            + forwards * exposed(weights, forward)
            + (passes - 1) * exposed(both, backward)
            + exposed(last, backward)
        )


@lru_cache(maxsize=65536)
def product_s(product: Product, peak: float, width: int, hardware: Hardware) -> float:
    """Return the duration of a matrix product, s; `width` is bytes a number."""
    work = product.flops / (peak * hardware.matrix_efficiency)
    moved = product.numbers * width / (hardware.memory_gb_s * hardware.memory_efficiency * 1e9)
    if hardware.matrix_half:  # measured on whole products, their memory traffic included
        filled = product.smallest / (product.smallest + hardware.matrix_half)
        return max(work / filled, moved)
    return math.hypot(work, moved)
