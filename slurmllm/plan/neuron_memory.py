"""Memory of a worker under the NxD backend, by arithmetic; torch-free.

Between steps there are weights, with ZeRO-1 a shard of them in the optimizer's format, and both
moments, sharded likewise (torch-xla's `ZeroRedundancyOptimizer`, which NxD's uses). In the
backward pass come gradients, under bf16_mixed as fp32 sums (its `main_grad`), and what the
blocks keep: counted operator by operator from `backends/nxd/model.py`, in the manner of
Korthikanti et al. 2022 (arXiv 2205.05198, section 4). Their 34 · tokens · hidden + 5 · heads · seq²
bytes per block are 32 and 6 here: there is no dropout, and the softmax is kept in fp32 with a
bf16 copy. Between a pipeline's graphs RMSNorm keeps two copies in fp32; keys and values that are
on several workers count on each.

A step is fullest in the backward pass or at the optimizer's step, where reduced gradients
exist together with those that they are made of.

Nobody has published what neuronx-cc's graphs take in addition: `_PROGRAMS` and `_COPIES` are
assumed. Attention's mask, a byte for each pair of tokens, is made once in a graph for all its
blocks with the same window. Not counted: runtime and microcode (`cluster.hardware.reserved_gib`),
profiling buffers, what is received ahead of a stage's step.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from slurmllm.core.config.cluster import GIB
from slurmllm.core.config.families import FAMILIES
from slurmllm.core.config.resolve import RunConfig
from slurmllm.plan.memory import PartBytes, batch_bytes, masked_windows
from slurmllm.plan.mesh import Mesh
from slurmllm.plan.parameters import head_widths, num_norms, parameter_counts
from slurmllm.plan.step import formats

_FP32 = 4

# Instructions, DMA descriptors and collectives' memory of a core's graphs, 2.3 GiB less the 96 MB
# of microcode. The one breakdown that was found is of a 70B model's inference (github
# aws-neuron/transformers-neuronx, issue 92): model code 482 MB, dma rings 1.471 GB, collectives
# 367 MB. Assumed to hold for training.
_PROGRAMS = int(2.2 * GIB)

# Number of copies of what a stage keeps. In a pipeline it goes from one graph to another, where
# casts, slices and transposes of one tensor have buffers of their own and graphs that wait in the
# queue hold theirs already; within one graph the compiler uses buffers again. Twice is assumed:
# with 1.96 to 2.07 every layout fits that AWS published, and Llama 2 70B at TP 32 fits on 16 nodes
# and is out of memory on 8 (Neuron SDK 2.19, introducing-pytorch-2-1.rst; its script had PP 4 and
# summed gradients in bf16, which by itself asks for 1.85 or more).
_COPIES = 2

# What collectives of gradients and weights have on the way: ALLREDUCE_BUCKET_CAP_MB at most, or
# ZeRO-1's 130 MB in and out (`backends/nxd/environment.py`).
_ALLREDUCE_BUCKET, _ZERO_BUCKETS = GIB, 2 * 130 * 2**20


def neuron_memory(config: RunConfig, mesh: Mesh, rank: int = 0) -> PartBytes:
    """Return the bytes of each part at the peak of a step; their sum is the peak.

    All workers of a pipeline stage need the same.

    Returns:
        Of these what is not 0: weights; master_weights, ZeRO-1's shard of them; optimizer, both
        moments; gradients; activations, what blocks keep for the backward pass; output, the
        logits and their gradient; buffers, what passes within a block or at the optimizer's step;
        masks; batch, tokens and labels; programs.
    """
    recipe, stage = config.recipe, mesh.pipeline_rank(rank)
    model, zero = recipe.model, recipe.parallel.zero > 0
    width = formats(config)
    whole = parameter_counts(model, mesh.tensor, mesh.pipeline, stage, 1)
    share = parameter_counts(model, mesh.tensor, mesh.pipeline, stage, mesh.data if zero else 1)
    has_master = zero or width.stored != width.computed
    resting = {
        "weights": whole.total * width.computed,
        "master_weights": share.total * width.stored * has_master,
        "optimizer": 2 * share.total * width.stored,
    }
    gradients = whole.total * width.reduced
    moment = max(
        _backward(config, mesh, stage, gradients, whole.block * width.computed),
        {
            "gradients": gradients + (share.total * width.stored if zero else gradients),
            "buffers": min(_ZERO_BUCKETS if zero else _ALLREDUCE_BUCKET, gradients),
        },
        key=lambda parts: sum(parts.values()),
    )
    parts = {**resting, **moment, "programs": _PROGRAMS}
    return {name: size for name, size in parts.items() if size}


def _backward(
    config: RunConfig, mesh: Mesh, stage: int, gradients: int, block_gradients: int
) -> PartBytes:
    """Return what the backward pass adds: at the loss, or in the first block."""
    recipe = config.recipe
    model, recomputed = recipe.model, recipe.train.recomputed
    size = formats(config).computed
    apart = mesh.pipeline > 1
    block = _block(config, mesh)
    layers = model.num_layers // mesh.chunks
    copies = _COPIES if apart else 1
    # NxD's TrainInterleavedSchedule
    all_forward_first = mesh.virtual_pipeline > 1 and mesh.accumulation == mesh.pipeline
    in_flight = mesh.in_flight(stage, all_forward_first)
    activations = copies * in_flight * layers * block.saved(recomputed)
    documents = recipe.data.mask == "document"
    windows = masked_windows(model, mesh.layers(model.num_layers, stage), documents=True)
    mask = (mesh.micro_batch if documents else 1) * model.seq_len**2 * len(windows)
    # A recomputed core makes its mask again.
    masks = mask * (1 if {"core", "block"} & {*recomputed} else copies * in_flight)
    output = 0
    if stage == mesh.pipeline - 1:
        # Final norm, logits and their gradient in both formats, the head's gradient, gathered.
        tokens, rows = mesh.micro_batch * model.seq_len, model.padded_vocab_size // mesh.tensor
        hidden = (2 * tokens + rows) * model.hidden_size * size
        output = block.norm + hidden + 2 * tokens * rows * (size + _FP32)
    buffers = block.passing(recomputed) + block_gradients
    largest = {"output": output} if output > buffers else {"buffers": buffers}
    batch = in_flight * batch_bytes(config, mesh)  # the rest of the step's is on the host
    stored = {"activations": activations, "masks": masks, "batch": batch}
    return {"gradients": gradients, **stored, **largest}


def score_bytes(config: RunConfig, mesh: Mesh) -> int:
    """Return the bytes of attention scores and their gradients, which exist together."""
    return 2 * _block(config, mesh).scores


class _BlockMemory(NamedTuple):
    """Bytes of one micro batch in one block."""

    stream: int  # its input
    norm: int  # what one norm keeps
    outside: int  # what the backward pass needs whichever parts are recomputed
    parts: PartBytes  # what it needs of each part that can be recomputed
    scores: int  # gradients in the core
    widest: int  # gradients in the feed-forward layer, with inputs and outputs gathered

    def saved(self, recomputed: Collection[str]) -> int:
        if "block" in recomputed:
            return self.stream
        return self.outside + sum(n for name, n in self.parts.items() if name not in recomputed)

    def passing(self, recomputed: Collection[str]) -> int:
        """Return the bytes within the backward pass: what is recomputed, and gradients."""
        if "block" in recomputed:
            return self.saved(()) + max(self.scores, self.widest)
        core, mlp = (self.parts[name] * (name in recomputed) for name in ("core", "mlp"))
        return max(core + self.scores, mlp + self.widest)


def _block(config: RunConfig, mesh: Mesh) -> _BlockMemory:
    """Return the memory of one block."""
    model, size, tensor = config.recipe.model, formats(config).computed, mesh.tensor
    apart = mesh.pipeline > 1  # whether forward and backward pass are graphs of their own
    tokens, width = mesh.micro_batch * model.seq_len, model.hidden_size
    stream = tokens // (tensor if config.recipe.parallel.sequence else 1) * width * size
    # A norm's input. RMSNorm is made of parts that keep two copies in fp32, casts that one graph
    # makes anew and does not keep.
    rms = FAMILIES[model.family].norm == "rms"
    norm = 2 * stream // size * _FP32 if rms and apart else stream
    queries, keys = head_widths(model, tensor)
    ffn = model.ffn_hidden_size // tensor
    # Inputs of both column-parallel matrices, a share of them under sequence parallelism.
    count = num_norms(model) - model.parallel_residual
    outside = count * stream + 2 * stream
    # q, k, v, what attention gives; the activation's input and result, and with a gate the other
    # factor and the product. A recomputed norm keeps its input.
    outside += tokens * (2 * queries + 2 * keys) * size
    mlp = tokens * (4 if model.gated else 2) * ffn * size
    norms = count * (norm - stream)
    if model.qk_norm:  # results, which are turned, or the two copies in fp32
        outside += tokens * (queries + keys) * size
        norms += tokens * (queries + keys) * (2 * _FP32 - size) * apart
    # Turned queries and keys; where several queries share a key, keys and values for each of them.
    turned = model.rotary_pct > 0
    core = queries * turned + (2 * queries if keys < queries else keys * turned)
    softmax = _FP32 + (size if size < _FP32 else 0)
    scores = mesh.micro_batch * model.num_heads // tensor * model.seq_len**2 * softmax
    up = ffn * (2 if model.gated else 1)
    return _BlockMemory(
        stream=stream,
        norm=norm,
        outside=outside,
        parts={"core": tokens * core * size + scores, "mlp": mlp, "norm": norms},
        scores=scores,
        widest=2 * tokens * (width + up) * size,
    )
