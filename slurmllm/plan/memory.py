"""Memory of a worker under the native backend, by arithmetic; torch-free.

What is held between steps (weights, optimizer state) is exact: shapes, sharding plan and formats
decide it. What a step adds is the sum of what its operators keep for the backward pass, after
Korthikanti et al. 2022 (arXiv 2205.05198, section 4), whose count of 34 · tokens · hidden bytes a
layer is for another block: no dropout here, no saved attention scores (they are computed again
from their log-sums), and head and loss in one operator (`model/output.py`). A tied embedding
is on the first and the last stage. Not counted: the interpreter and its libraries, an accelerator's
context, communication libraries' buffers, the allocator's fragments.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from slurmllm.core.config.families import FAMILIES
from slurmllm.core.config.recipe import MUON, ModelConfig
from slurmllm.core.config.resolve import RunConfig
from slurmllm.core.format import format_gib
from slurmllm.plan.mesh import (
    BLOCK,
    Mesh,
    fsdp_disabled,
    has_block_masks,
    one_pass_adamw,
)
from slurmllm.plan.parameters import (
    head_widths,
    layer_windows,
    muon_shapes,
    num_norms,
    parameter_counts,
    up_width,
)
from slurmllm.plan.step import formats

PartBytes = dict[str, int]  # by part of a worker's memory
_FP32, _FP64, _BF16, _INT32, _INT64 = 4, 8, 2, 4, 8
_MASK_SHARE = 1 / 8  # of the memory, from which the dense mask of a sequence is warned of


def worker_memory(config: RunConfig, mesh: Mesh, rank: int = 0) -> PartBytes:
    """Return the bytes of each part at the peak of a step; their sum is the peak.

    The first worker of a stage has the largest shares of it.
    """
    resting, *moments = memory_moments(config, mesh, rank)
    fullest = max(moments, key=lambda parts: sum(parts.values()))
    return {name: size for name, size in {**resting, **fullest}.items() if size}


def memory_moments(config: RunConfig, mesh: Mesh, rank: int) -> tuple[PartBytes, ...]:
    """Return bytes by part: between steps, and added within the passes and at the step's end."""
    zero, width = config.recipe.parallel.zero, formats(config)
    position = config.recipe.model, mesh.tensor, mesh.pipeline, mesh.pipeline_rank(rank)
    held = parameter_counts(*position, 1)
    share = parameter_counts(*position, mesh.shard, mesh.shard_rank(rank))
    stored = parameter_counts(*position, mesh.shard).total
    whole = stored * mesh.shard  # FSDP pads every share to the first one's size
    outside = held.outside
    two_blocks = outside + 2 * held.block  # and what is outside
    accumulates = mesh.accumulation > 1
    until_last = accumulates and (zero <= 1 or mesh.pipeline > 1)
    dropped = zero == 3 and mesh.pipeline == 1  # pipelining keeps a stage's weights gathered
    # Sums that copies have not exchanged yet stay in the format of sums.
    summed = width.stored if mesh.replicate == 1 else width.reduced
    carried = whole * width.reduced if until_last else stored * summed if accumulates else 0
    steps = StepMemory(config, mesh, rank)
    transient = 0 if until_last else two_blocks
    gathered = two_blocks if dropped else whole
    if fsdp_disabled(config, mesh):
        converted = width.computed != width.stored
        gathered, transient, outside = (whole, share.largest, 0) if converted else (0, 0, 0)
        carried = stored * width.reduced if accumulates else 0
    copies, summed = 0, width.stored
    if one_pass_adamw(config, mesh):
        gathered, copies = 0, gathered * width.computed
        summed = width.reduced if accumulates else width.computed
    moments, passing = 2 * share.total, 0
    if config.recipe.optim.name == MUON:
        moments -= share.matrices
        passing = muon_round(config, mesh)
    resting = {
        "weights": stored * width.stored + copies,  # its share, in the formats they are kept in
        "optimizer": moments * width.stored,  # of its share
        # Of pipeline stages, one a micro batch each way.
        "pipeline buffers": steps.receive_buffers(),
        "batch": batch_bytes(config, mesh) * steps.batches(),  # tokens, labels and positions
    }
    within = {
        # What FSDP gathers within a step, of this worker's tensor-parallel share.
        "whole weights": gathered * width.computed,
        "gradients": carried,  # from one micro batch to the next
        # What the blocks keep for the backward pass, of all micro batches in flight.
        "activations": steps.activations(),
        "masks": steps.masks(),  # between documents, one for all blocks, likewise
        # Logits, their gradient and the head's at the loss, or the largest passing need of one
        # block's backward pass.
        "output or block": max(steps.output(), steps.block() + transient * width.reduced),
    }
    if config.cluster.device == "cpu":  # the norm's fp64 sum copies one tensor at a time
        passing = max(passing, share.largest * _FP64)
    after = {
        # Of its share, from the end of the backward pass to the optimizer's step.
        "gradients": stored * summed,
        # Whole gradients of embedding and head and their copy on its way, or the optimizer's need.
        "end of the step": max(2 * outside * width.reduced, passing),
    }
    return resting, within, after


def muon_round(config: RunConfig, mesh: Mesh) -> int:
    """Return the bytes of a round of Muon (`train/backends/native/muon.py`) on a worker.

    Buffers of the largest matrix, in bf16, in the fuller of two phases. The iteration has seven:
    sent, received, the whole matrix, two temporaries, two products. Distribution has the result,
    and what is sent to and received from all copies.
    """
    largest = max(map(math.prod, muon_shapes(config.recipe.model)))
    return _BF16 * max(7, 1 + 2 * mesh.replicate) * largest


def dense_mask_warning(config: RunConfig) -> list[str]:
    """Return a warning if dense masks, of documents or windows, take much of a worker's memory."""
    recipe, hardware = config.recipe, config.cluster.hardware
    length, documents = recipe.model.seq_len, recipe.data.mask == "document"
    count = len(masked_windows(recipe.model, range(recipe.model.num_layers), documents))
    if not count or hardware is None or has_block_masks(config):
        return []
    mask = count * length**2 * (1 if config.backend == "nxd" else formats(config).computed)
    if mask <= _MASK_SHARE * hardware.usable_bytes:
        return []
    fix = "choose a smaller model.seq_len"
    if config.cluster.device == "cuda" and not recipe.train.compile:
        fix = "--set train.compile=true, which needs no such mask"
    elif documents:
        fix = f"--set data.mask=none, or {fix}"
    setting = "data.mask: document" if documents else "model.attention_pattern"
    masks = "mask of one sequence" if count == 1 else f"{count} masks of one sequence"
    return [
        f"{setting}: the {masks} of {length:,} tokens {'takes' if count == 1 else 'take'} "
        f"{format_gib(mask)} of {format_gib(hardware.usable_bytes)} GiB a worker, and attention "
        f"computes all pairs of tokens; {fix}"
    ]


def masked_windows(model: ModelConfig, layers: Iterable[int], documents: bool) -> set[int]:
    """Return the windows for which some layers need a mask; full attention's is seq_len."""
    windows = layer_windows(model)
    always = documents or model.attention_softcap is not None
    return {windows[layer] for layer in layers if always or windows[layer] < model.seq_len}


def batch_bytes(config: RunConfig, mesh: Mesh) -> int:
    """Return tokens and labels of a micro batch, and positions if documents are separated."""
    arrays = 3 if config.recipe.data.mask == "document" else 2
    return arrays * mesh.micro_batch * config.recipe.model.seq_len * _INT64


class StepMemory:
    """What one step of a worker adds, part by part, bytes."""

    def __init__(self, config: RunConfig, mesh: Mesh, rank: int) -> None:
        self.model, self.train, self.mesh = config.recipe.model, config.recipe.train, mesh
        self.masked = config.recipe.data.mask == "document"
        self.block_masks = has_block_masks(config)
        self.device = config.cluster.device
        self.stage = mesh.pipeline_rank(rank)
        self.layers = mesh.layers(self.model.num_layers, self.stage)
        # GPipe where there are too few for 1F1B
        self.in_flight = mesh.in_flight(self.stage, mesh.accumulation < mesh.pipeline)
        self.tokens = mesh.micro_batch * self.model.seq_len
        # Tokens of the stretches that sequence parallelism shares.
        self.own_tokens = self.tokens // (mesh.tensor if config.recipe.parallel.sequence else 1)
        self.hidden = self.model.hidden_size
        self.bytes = formats(config).computed
        self.stream = self.own_tokens * self.hidden * self.bytes  # activations between two blocks
        self.gathered = self.tokens * self.hidden * self.bytes
        # What RMSNorm keeps: its input, and with a weight what that multiplies.
        self._norm_copies = 1 if FAMILIES[self.model.family].norm_weight == "none" else 2

    def activations(self) -> int:
        """Return what all blocks of this worker, and the final norm, keep."""
        full = "block" in self.train.recomputed
        blocks = sum(self.stream if full else self._block(layer) for layer in self.layers)
        total = self.in_flight * blocks // self.mesh.virtual_pipeline
        if self.stage == 0 and FAMILIES[self.model.family].embedding_norm:
            total += self.in_flight * self._norm()
        return total + (self._norm() if self.stage == self.mesh.pipeline - 1 else 0)

    def masks(self) -> int:
        """Return the bytes of masks, dense or lists of blocks, and of rotations by position.

        Masks of windows alone are one for all sequences.
        """
        model = self.model
        count = len(masked_windows(model, self.layers, self.masked))
        tokens = self.tokens if self.masked or self.block_masks else model.seq_len
        mask = model.seq_len * self.bytes
        if self.block_masks:  # partial and full blocks, by queries and by keys; first keys
            mask = (4 * math.ceil(model.seq_len / BLOCK**2) + 1) * _INT32
        rotations = 0
        if self.masked and model.rotary_pct > 0:
            schemes = {model.rotary_scheme(model.layer_kinds[layer]) for layer in self.layers}
            rotations = len(schemes) * model.head_width * _FP32
        return self.in_flight * (tokens * count * mask + self.tokens * rotations)

    def batches(self) -> int:
        """Return the micro batches whose tokens are in memory: in a pipeline all of the step.

        CPUs have the arrays that the data's stream gave, of the step, as well.
        """
        count = self.mesh.accumulation
        return (count if self.mesh.pipeline > 1 else 1) + count * (self.device == "cpu")

    def output(self) -> int:
        """Return the need at the loss: forward, or backward with each gradient and its copy."""
        if self.stage != self.mesh.pipeline - 1:
            return 0
        rows = self.model.padded_vocab_size // self.mesh.tensor
        limit = 2**27 if self.device == "cpu" else 2**29  # as in backends/native/device.py
        at_once = min(self.tokens, max(1, limit // rows))
        gradients = (self.tokens + rows) * self.hidden * self.bytes
        # Uncompiled, the softmax makes copies in fp32.
        count = (2 if self.bytes == _FP32 else 3) + (self.model.logits_softcap is not None)
        copies = 0 if self.train.compile else count * _FP32
        logits = at_once * rows * (self.bytes + copies)
        sums = rows * self.hidden * (_FP32 + self.bytes)
        in_parts = at_once < self.tokens and self.bytes == _BF16
        return max(self.gathered + logits + gradients + (sums if in_parts else 0), 2 * gradients)

    def block(self) -> int:
        """Return the need of a block's backward pass: its widest gradients, and a matrix's."""
        width = up_width(self.model) // self.mesh.tensor
        passing = 2 * self.tokens * (self.hidden + width) * self.bytes
        matrix = self.hidden * width * self.bytes
        recomputed = 0
        if "block" in self.train.recomputed:
            recomputed = max(map(self._block, self.layers))
        elif "mlp" in self.train.recomputed:  # and its gathered input
            recomputed = self._feed_forward() + self.gathered
        return passing + matrix + recomputed

    def receive_buffers(self) -> int:
        """Return the bytes that torch.distributed.pipelining keeps, for each micro batch."""
        mesh = self.mesh
        chunks = [self.stage + mesh.pipeline * i for i in range(mesh.virtual_pipeline)]
        ways = sum((chunk > 0) + (chunk < mesh.chunks - 1) for chunk in chunks)
        return ways * mesh.accumulation * self.stream if mesh.pipeline > 1 else 0

    def _norm(self) -> int:
        """Return the input's bytes; uncompiled, RMSNorm keeps copies in fp32."""
        if FAMILIES[self.model.family].norm == "layer" or self.train.compile:
            return self.stream
        return self._norm_copies * self.own_tokens * self.hidden * _FP32

    def _block(self, layer: int) -> int:
        """Return the bytes of activations that a layer keeps for its backward pass."""
        model, recomputed = self.model, self.train.recomputed
        norms = (num_norms(model) - model.parallel_residual) * (
            self.stream if "norm" in recomputed else self._norm()
        )
        # Both matrices' inputs, which norms before them have made, or the stream: gathered. A
        # recomputed feed-forward layer keeps its own input.
        norms += self.gathered + (self.stream if "mlp" in recomputed else self.gathered)
        total = norms + self._attention(layer)
        return total + (0 if "mlp" in recomputed else self._feed_forward())

    def _attention(self, layer: int) -> int:
        """Return the outputs of qkv, of the norms of queries and keys, and of attention."""
        model, tensor, recomputed = self.model, self.mesh.tensor, self.train.recomputed
        queries, keys = head_widths(model, tensor)
        shared = queries + 2 * keys + queries  # of qkv, and what attention gives
        recomputes_core = bool({"core", "block"} & {*recomputed})
        rotates = model.rotary_pct > 0 and model.layer_kinds[layer].rope != "none"
        if (model.qk_norm and "block" not in recomputed) or (rotates and not recomputes_core):
            shared += queries + keys
        elif "core" in recomputed and keys < queries and not self.train.compile:
            shared += queries  # the core's input, a copy if queries share keys
        dense = not self.block_masks and masked_windows(model, [layer], self.masked)
        capped = model.attention_softcap is not None and not self.block_masks
        copied = dense and (capped or self.device == "cuda") and keys < queries
        if copied and not recomputes_core:
            shared += 2 * (queries - keys)  # copies of keys and values (`model/decoder.py`)
        size = self.tokens * model.num_heads // tensor * _FP32  # log-sums
        if capped and not recomputes_core:  # of tanh, of the softmax, and in the products' format
            converted = self.bytes if self.bytes < _FP32 else 0
            size *= model.seq_len * (self.bytes + _FP32 + converted) // _FP32
        if model.qk_norm and not self.train.compile and "norm" not in recomputed:
            # As `_norm`; in fp32 the norm's input is a part of what the matrix gave.
            copies = 1 if self.bytes == _FP32 else self._norm_copies
            size += copies * self.tokens * (queries + keys) * _FP32
        return size + self.tokens * shared * self.bytes

    def _feed_forward(self) -> int:
        """Return the bytes of the inputs of the activation and of the last matrix.

        The gated layer keeps the activated gate too, which a compiled block computes again.
        """
        width = up_width(self.model) + self.model.ffn_hidden_size
        if self.model.gated and not self.train.compile:
            width += self.model.ffn_hidden_size
        return self.tokens * width // self.mesh.tensor * self.bytes
