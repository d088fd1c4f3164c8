"""Estimate of the duration of an optimizer step, by parts; torch-free.

A worker's work in a micro batch is counted exactly (`flops.py`) and divided by the rate
of its device: matrix products at `matrix_efficiency` of the peak, less if a dimension is small
(d / (d + matrix_half)), or at the memory's bandwidth if that is slower (the "roofline" of
Williams et al. 2009); attention at `attention_efficiency`; elementwise work at
`memory_efficiency` of the memory's bandwidth. Collectives follow `collectives.py`. A pipeline takes
as many turns as there are micro batches, at the pace of its slowest stage, and fills and drains
once through the others, in `virtual_pipeline` smaller pieces if interleaved (Narayanan et al.
2021, arXiv 2104.04473).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from slurmllm.config.cluster import Hardware
from slurmllm.config.resolve import RunConfig
from slurmllm.plan.collectives import (
    all_reduce_s,
    data_group,
    gather_s,
    stage_to_stage_s,
    tensor_group,
)
from slurmllm.plan.estimate import StepTime, peak_flops
from slurmllm.plan.flops import (
    Product,
    attention_flops,
    block_elements,
    block_products,
    head_product,
)
from slurmllm.plan.mesh import Mesh
from slurmllm.plan.parameters import block_parameters, rest_parameters

_BF16, _FP32 = 2, 4
# Numbers a parameter that AdamW reads and writes: weight, gradient, both moments, and all but the
# gradient again; the gradient once more for its norm.
_ADAMW = 8
# Adding a gradient to the sum of the micro batches before: two reads and a write.
_ADD = 3
# Passes over the logits: written and read for the loss, likewise for their gradient.
_LOGITS = 4


@dataclass(frozen=True)
class Formats:
    """Bytes of one number.

    Attributes:
        computed: Activations and products.
        kept: Weights and moments in the optimizer.
        reduced: Gradients between data-parallel workers.
    """

    computed: int
    kept: int
    reduced: int


def formats(config: RunConfig) -> Formats:
    """Of a run's precision, on its backend."""
    precision = config.recipe.train.precision
    if precision == "fp32":
        return Formats(_FP32, _FP32, _FP32)
    mixed = precision == "bf16_mixed"
    # FSDP2 adds gradients up in fp32; NxD does so only with fp32 master weights.
    whole = mixed or config.backend != "nxd"
    return Formats(_BF16, _FP32 if mixed else _BF16, _FP32 if whole else _BF16)


def step_time(config: RunConfig, mesh: Mesh) -> StepTime:
    """Predict one optimizer step.

    Args:
        config: The configuration of the mesh, on a cluster with hardware figures.
        mesh: Degrees and batch arithmetic.
    """
    return _Step(config, mesh).time()


class _Step:
    """One step of a run, on one mesh."""

    def __init__(self, config: RunConfig, mesh: Mesh) -> None:
        hardware = config.cluster.hardware
        assert hardware is not None, "the planner needs cluster.hardware"
        self.config, self.mesh, self.hardware = config, mesh, hardware
        self.model, self.recipe = config.recipe.model, config.recipe
        self.formats = formats(config)
        self.tokens = mesh.micro_batch * self.model.seq_len
        self.layers = self.model.num_layers // mesh.pipeline
        self.peak = peak_flops(config)
        self.bandwidth = hardware.memory_gb_s * hardware.memory_efficiency * 1e9

    def time(self) -> StepTime:
        """All parts, of the slowest pipeline stage: the last one, which has the head."""
        mesh, hardware = self.mesh, self.hardware
        turns = mesh.accumulation
        block = self._block_s()
        recomputed = self._recomputed_s()
        collective = self._block_collectives_s()
        head = self._head_s()
        edge = self._edge_collectives_s()
        launches = self._launches_s()
        compute, again = turns * (self.layers * block + head), turns * self.layers * recomputed
        tensor = turns * (self.layers * collective + edge)
        stage = self.layers * (block + recomputed + collective + launches)
        # Filling and draining: once through the other stages, the last of them with the head.
        bubble = (mesh.pipeline - 1) * stage / mesh.virtual_pipeline
        crossing = 2 * stage_to_stage_s(self._stream_bytes(), mesh, hardware)
        transfer = crossing * (turns * mesh.virtual_pipeline + mesh.pipeline - 1)
        exposed = self._data_s(compute + again)
        return StepTime(
            compute=compute,
            recompute=again,
            tensor=tensor,
            bubble=bubble,
            transfer=transfer if mesh.pipeline > 1 else 0.0,
            data=exposed,
            optimizer=self._optimizer_s(),
            overhead=turns * self.layers * launches + hardware.step_overhead_s,
        )

    def _block_s(self) -> float:
        """Forward and backward of one block and micro batch."""
        return 3 * self._forward_s() + self._added_s(self._own(block_parameters(self.model)))

    def _forward_s(self) -> float:
        mesh, parallel = self.mesh, self.recipe.parallel
        products = block_products(self.model, self.tokens, mesh.tensor)
        elements = block_elements(self.model, self.tokens, mesh.tensor, parallel.sequence)
        work = sum(self._product_s(product) for product in products) + self._attention_s()
        return work + elements * self.formats.computed / self.bandwidth

    def _recomputed_s(self) -> float:
        """Recomputation in the backward pass of a block."""
        how = self.recipe.train.activation_checkpointing
        if how == "none":
            return 0.0
        return self._attention_s() if how == "selective" else self._forward_s()

    def _product_s(self, product: Product) -> float:
        return product_s(product, self.peak, self.formats.computed, self.hardware)

    def _attention_s(self) -> float:
        flops = attention_flops(self.model, self.tokens, self.mesh.tensor)
        return flops / (self.peak * self.hardware.attention_efficiency)

    def _head_s(self) -> float:
        """Forward and backward of head and loss."""
        logits = head_product(self.model, self.tokens, self.mesh.tensor)
        passes = _LOGITS * self.tokens * logits.n * _FP32 / self.bandwidth
        added = self._added_s(logits.n * logits.k)
        return 3 * self._product_s(logits) + passes + added

    def _added_s(self, numbers: float) -> float:
        """Adding gradients to those of earlier micro batches."""
        if self.mesh.accumulation == 1:
            return 0.0
        return _ADD * numbers * self.formats.reduced / self.bandwidth

    def _block_collectives_s(self) -> float:
        """Tensor-parallel collectives of a block and micro batch.

        Forward, attention and feed-forward each sum up their output, and backward the gradient of
        their input; under sequence parallelism they gather the one and scatter the other's sum, the
        same bytes. Full checkpointing repeats the forward ones. NxD gathers the inputs of both anew
        for the weights' gradients, instead of keeping them
        (neuronx_distributed/parallel_layers/layers.py).
        """
        passes = 3 if self.recipe.train.activation_checkpointing == "full" else 2
        again = 2 if self.recipe.parallel.sequence and self.config.backend == "nxd" else 0
        return 2 * passes * self._sum_s() + again * self._gathered_s()

    def _edge_collectives_s(self) -> float:
        """Collectives of embedding and head: sums of the residual stream, forward and backward."""
        return 2 * self._sum_s()

    def _sum_s(self) -> float:
        """Partial sums of the stream added up for all workers, or scattered and gathered again."""
        if self.recipe.parallel.sequence:
            return 2 * self._gathered_s()
        return all_reduce_s(self._whole_stream(), tensor_group(self.mesh), self.hardware)

    def _gathered_s(self) -> float:
        return gather_s(self._whole_stream(), tensor_group(self.mesh), self.hardware)

    def _whole_stream(self) -> int:
        """Bytes of a micro batch's activations between two blocks."""
        return self.tokens * self.model.hidden_size * self.formats.computed

    def _launches_s(self) -> float:
        """Launch overhead of a block's operators, forward and backward."""
        again = self.recipe.train.activation_checkpointing == "full"
        return (3 + again) * self.hardware.operator_us * 1e-6

    def _stream_bytes(self) -> float:
        """Bytes of activations that one worker sends to the next stage."""
        shared = self.mesh.tensor if self.recipe.parallel.sequence else 1
        return self._whole_stream() / shared

    def _own(self, parameters: int) -> float:
        """A worker's share of a matrix's parameters."""
        return parameters / self.mesh.tensor

    def _stage_parameters(self) -> float:
        """Parameters of a worker of the fullest stage."""
        return self._own(
            self.layers * block_parameters(self.model)
            + rest_parameters(self.model, self.mesh.pipeline)
        )

    def _data_s(self, computing: float) -> float:
        """Data-parallel communication that computing does not hide."""
        members = data_group(self.mesh)
        numbers = self._stage_parameters()
        if members.size == 1:
            return self._copies_s(numbers)
        if self.config.backend == "nxd" and self.recipe.parallel.zero == 0:
            total = all_reduce_s(numbers * self.formats.reduced, members, self.hardware)
        else:
            weights = gather_s(numbers * self.formats.computed, members, self.hardware)
            gradients = gather_s(numbers * self.formats.reduced, members, self.hardware)
            gathers, scatters = self._rounds()
            total = gathers * weights + scatters * gradients
        return total - min(total * self.hardware.overlap, computing)

    def _copies_s(self, numbers: float) -> float:
        """Copies of FSDP2 into and out of its buffers, without other data-parallel workers.

        With others, the copies are part of the measured rate of the collectives.
        """
        if self.config.backend == "nxd":
            return 0.0
        gathers, scatters = self._rounds()
        size = numbers * (gathers * self.formats.computed + scatters * self.formats.reduced)
        return 2 * size / self.bandwidth

    def _rounds(self) -> tuple[int, int]:
        """How often a step gathers all weights, and reduces and scatters all gradients."""
        zero, turns = self.recipe.parallel.zero, self.mesh.accumulation
        if self.config.backend == "nxd" or self.mesh.pipeline > 1 or zero <= 1:
            return 1, 1
        return (2 * turns if zero == 3 else 1), turns

    def _optimizer_s(self) -> float:
        zero = self.recipe.parallel.zero
        whole = self.config.backend == "nxd" and zero == 0
        own = self._stage_parameters() / (1 if whole else self.mesh.data)
        return _ADAMW * own * self.formats.kept / self.bandwidth


@lru_cache(maxsize=65536)
def product_s(product: Product, peak: float, width: int, hardware: Hardware) -> float:
    """Duration of a matrix product on one device, s: of its work or its memory traffic.

    Args:
        product: Its sizes.
        peak: Peak FLOP/s of the device.
        width: Bytes of a number.
        hardware: Its efficiencies and bandwidth.
    """
    filled = product.smallest / (product.smallest + hardware.matrix_half)
    work = product.flops / (peak * hardware.matrix_efficiency * filled)
    moved = product.numbers * width / (hardware.memory_gb_s * hardware.memory_efficiency * 1e9)
    return max(work, moved)
