"""The model on a mesh: tensor-parallel layouts, pipeline stages, norms over sharded tensors.

Tensor and sequence parallelism are the family's sharding plan as DTensor layouts. Between the
sharded modules activations are plain local tensors: whole, or under sequence parallelism each
worker's shard of the sequence.

torch.distributed.pipelining runs the passes of a pipeline. A worker has `virtual_pipeline` chunks
of layers: with one, the schedule is 1F1B (Narayanan et al. 2019, arXiv 1806.03377); with more,
interleaved 1F1B (Narayanan et al. 2021, arXiv 2104.04473): worker p of P has chunks p, p + P, ….
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import Placement
from torch.nn import functional as F

from slurmllm.core.config.families import Sharding, sharding_plan
from slurmllm.core.config.recipe import ModelConfig
from slurmllm.plan.mesh import Mesh
from slurmllm.train.backends.native.device import send
from slurmllm.train.model.decoder import Decoder, build_model
from slurmllm.train.model.init import local_part
from slurmllm.train.model.output import Output, VocabularyShare

_SEQUENCE_DIM = 1
_HEAD_DIM = 2  # of queries and keys, [batch, seq, heads, head_dim]
_BLOCK = 4096  # elements that a norm sums in fp32


def apply_tensor_parallel(model: Decoder, mesh: DeviceMesh, *, sequence: bool) -> None:
    """Make a decoder, or a stage of one, tensor-parallel in place, over a one-dimensional mesh.

    It is on meta or has equal weights on all workers; `sequence` shards activations by sequence.
    """
    config = model.config
    plan = sharding_plan(config.family, config.tied_embeddings, config.qk_norm)
    stream: Placement = Shard(_SEQUENCE_DIM) if sequence else Replicate()
    for block in model.blocks():
        parallelize_module(block, mesh, _styles(block, plan.block, stream))
    parallelize_module(model, mesh, _styles(model, plan.outside, stream))
    for name, how in plan.outside.items():
        module = getattr(model, name)
        if how == "vocabulary" and module is not None:
            shared = distribute_tensor(module.weight, mesh, [Shard(0)], src_data_rank=None)
            if isinstance(module, nn.Embedding):
                entries, width = module.weight.shape
                setattr(model, name, ParallelEmbedding(entries, width, mesh, stream))
            getattr(model, name).weight = nn.Parameter(shared)
    model.output = ParallelOutput(config, mesh, stream)


def _styles(
    module: nn.Module, plan: Mapping[str, Sharding], stream: Placement
) -> dict[str, ParallelStyle]:
    present = dict(module.named_modules())
    styles: dict[str, ParallelStyle] = {}
    for name, how in plan.items():
        if name not in present:
            continue
        if how == "column":
            styles[name] = ColwiseParallel(input_layouts=stream)
        elif how == "row":
            styles[name] = RowwiseParallel(output_layouts=stream)
        elif how == "sequence" and stream.is_shard():
            styles[name] = SequenceParallel(sequence_dim=_SEQUENCE_DIM, use_local_output=True)
        elif how == "head":  # the same, with heads in place of the sequence
            styles[name] = SequenceParallel(sequence_dim=_HEAD_DIM, use_local_output=True)
        elif how == "heads":
            styles[name] = HeadsParallel()
    return styles


class HeadsParallel(ParallelStyle):
    """A norm over all heads, of which each worker has a share: the norm itself sums over them."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module.weight, Tensor)
        weight = distribute_tensor(module.weight, device_mesh, [Shard(0)], src_data_rank=None)
        module.weight = nn.Parameter(weight)
        return distribute_module(
            module,
            device_mesh,
            None,
            lambda _, inputs, mesh: DTensor.from_local(  # type: ignore[arg-type]
                inputs[0], mesh, [Shard(_HEAD_DIM)], run_check=False
            ),
            lambda _, outputs, mesh: outputs.to_local(),
        )


class ParallelEmbedding(nn.Embedding):
    """An embedding of which each worker has a shard of the entries.

    CAUTION: RowwiseParallel's backward pass computes the gradient of the whole vocabulary on every
    worker (torch 2.13). An asynchronous result gets no gradient from a compiled function.
    """

    def __init__(self, entries: int, width: int, mesh: DeviceMesh, stream: Placement) -> None:
        super().__init__(entries, width, device="meta")
        self.mesh = mesh
        self.stream = stream

    def forward(self, entries: Tensor) -> Tensor:
        """[batch, seq] → [batch, seq or a shard of it, hidden]; entries equal on all workers."""
        assert isinstance(self.weight, DTensor)
        local = self.weight.to_local()
        rows = entries - self.mesh.get_local_rank() * local.shape[0]
        is_elsewhere = (rows < 0) | (rows >= local.shape[0])
        vectors = F.embedding(rows.masked_fill(is_elsewhere, 0), local)
        vectors = vectors.masked_fill(is_elsewhere.unsqueeze(-1), 0)
        partial = DTensor.from_local(vectors, self.mesh, [Partial()], run_check=False)
        return partial.redistribute(self.mesh, [self.stream]).to_local()


class ParallelOutput(Output):
    """`Output` with a shard of the vocabulary on each worker; logits are never gathered."""

    def __init__(self, config: ModelConfig, mesh: DeviceMesh, stream: Placement) -> None:
        super().__init__(config.vocab_size, config.logits_softcap)
        self.mesh = mesh
        self.stream = stream

    def forward(self, x: Tensor, weight: Tensor, labels: Tensor | None) -> Tensor:
        """Local x [batch, seq or a shard of it, hidden] → logits [batch, seq, own shard], or loss.

        The weight is a DTensor [padded vocabulary, hidden], sharded by rows; labels [batch, seq]
        are equal on all workers.
        """
        assert isinstance(weight, DTensor)
        whole = DTensor.from_local(x, self.mesh, [self.stream], run_check=False)
        # Each worker's gradient is a partial sum, over its shard of the vocabulary.
        x = whole.redistribute(self.mesh, [Replicate()]).to_local(grad_placements=[Partial()])
        local = weight.to_local()
        if labels is None:
            return super().forward(x, local, None)
        first = self.mesh.get_local_rank() * local.shape[0]
        rows = min(max(self.vocab_size - first, 0), local.shape[0])
        return self.loss(x, local, labels, VocabularyShare(first, rows, self.mesh.get_group()))


def make_chunk(config: ModelConfig, chunk: int, mesh: Mesh) -> Decoder:
    """Make one chunk of the model; its parameters have their names in the whole model."""
    model = build_model(config)
    each = config.num_layers // mesh.chunks
    model.keep(
        range(chunk * each, (chunk + 1) * each), first=chunk == 0, last=chunk == mesh.chunks - 1
    )
    return model


def combine_chunks(chunks: Sequence[Decoder]) -> nn.Module:
    if len(chunks) == 1:
        return chunks[0]
    whole = nn.Module()
    whole.layers = nn.ModuleDict({n: b for chunk in chunks for n, b in chunk.layers.items()})
    for name in ("embed", "positions", "embedding_norm", "final_norm", "head"):
        for module in (getattr(chunk, name) for chunk in chunks):
            if module is not None:
                setattr(whole, name, module)
    return whole


class Pipeline:
    """This worker's chunks, in order, and their schedule over `group`, a one-dimensional mesh.

    `hidden`, the activations between chunks: [micro_batch, seq or a shard of it, hidden], on meta.
    """

    _weight = 1.0

    def __init__(
        self,
        chunks: Sequence[Decoder],
        mesh: Mesh,
        group: DeviceMesh,
        device: torch.device,
        hidden: Tensor,
        seq_len: int,
        annotated: Callable[[str, Callable[..., Any]], Callable[..., Any]],
    ) -> None:
        # Imported here, because it takes half a second.
        from torch.distributed.pipelining import (
            PipelineStage,
            Schedule1F1B,
            ScheduleGPipe,
            ScheduleInterleaved1F1B,
        )

        numbers = range(group.get_local_rank(), mesh.chunks, mesh.pipeline)
        tokens = torch.empty(mesh.micro_batch, seq_len, dtype=torch.int64, device="meta")
        loss = torch.empty((), dtype=torch.float32, device="meta")
        stages = []
        for number, chunk in zip(numbers, chunks, strict=True):
            stage: Any = PipelineStage(
                chunk,
                number,
                mesh.chunks,
                device,
                input_args=tokens if chunk.first else hidden,
                output_args=loss if chunk.last else hidden,
                group=group.get_group(),
            )
            stage.forward_one_chunk = annotated("forward", stage.forward_one_chunk)
            stage.backward_one_chunk = annotated("backward", stage.backward_one_chunk)
            stages.append(stage)
        self.first = chunks[0].first
        self.last = chunks[-1].last
        count = mesh.accumulation
        schedule: Any = Schedule1F1B
        if len(stages) > 1:
            schedule = ScheduleInterleaved1F1B
        elif count < mesh.chunks:  # 1F1B needs at least one micro batch for each stage
            schedule = ScheduleGPipe
        # The model's output is the loss; gradients are scaled through it, not a second time.
        self._schedule = schedule(
            stages if len(stages) > 1 else stages[0],
            count,
            loss_fn=lambda loss, labels: loss * self._weight / count,
            scale_grads=False,
        )

    def forward_backward(
        self,
        tokens: Tensor,
        labels: Tensor,
        positions: Tensor | None,
        weight: float,
        *,
        backward: bool = True,
    ) -> Tensor | None:
        """Accumulate the gradients of all micro batches, each loss times `weight`.

        Tokens, labels and positions: [accumulation · micro_batch, seq]; every stage reads the
        positions. Returns the mean loss; None if this worker does not have the last chunk. Without
        `backward`, no gradients are computed.
        """
        self._weight = weight
        losses: list[Tensor] = []
        inputs = (tokens,) if self.first else ()
        more: dict[str, Any] = {} if positions is None else {"positions": positions}
        if self.last:
            more |= {"labels": labels, "target": labels, "losses": losses}
        try:
            run = self._schedule.step if backward else self._schedule.eval
            run(*inputs, return_outputs=False, **more)
        except RuntimeError as error:
            # Errors of a stage's forward pass are wrapped into one about its arguments; the cause
            # (out of memory, a lost peer) decides on the exit code.
            raise error.__cause__ or error from None
        return torch.stack(losses).sum().detach() if self.last else None


def num_copies(tensor: Tensor, workers: int) -> int:
    """Return on how many of the `workers` of one pipeline stage each element is."""
    if not isinstance(tensor, DTensor):
        return workers
    assert not any(placement.is_partial() for placement in tensor.placements)
    shards = math.prod(
        tensor.device_mesh.size(axis)
        for axis, placement in enumerate(tensor.placements)
        if not placement.is_replicate()  # is_shard() is False for FSDP's strided shards
    )
    return workers // shards


def total_norm(
    tensors: Sequence[Tensor], copies: Sequence[int], *, foreach: bool = False
) -> Tensor:
    """Return the 2-norm over all elements of all tensors, fp64 (collective over all workers).

    One message for all, pipeline stages included, and the host waits for nothing. `copies` has
    `num_copies` of each tensor; `foreach`: one call sums all tensors' squares, in fp64.
    """
    with torch.no_grad():
        parts = [local_part(tensor) for tensor in tensors]
        if foreach:
            squares = torch.stack(torch._foreach_norm(parts, dtype=torch.float64)).square()
        else:
            squares = torch.stack([_sum_of_squares(tensor) for tensor in parts])
    total = (squares / _on_device(tuple(copies), squares.device)).sum()
    dist.all_reduce(total)
    if not total.is_cpu:
        return total.sqrt()
    # Not torch's, which is MKL's on CPUs: one result in a hundred is wrong in the last bit.
    np.sqrt(total.numpy(), out=total.numpy())
    return total


@lru_cache(maxsize=8)
def _on_device(values: tuple[int, ...], device: torch.device) -> Tensor:
    return send(torch.tensor(values, dtype=torch.float64), device)


def _sum_of_squares(tensor: Tensor) -> Tensor:
    # fp32 sums over a large matrix are wrong in the sixth digit, and differ with the sharding. So
    # blocks are summed in fp32 and their sums in fp64: within 4e-9 of fp64 throughout for 70
    # million elements, in a tenth of its time.
    flat = tensor.flatten()
    whole = flat.numel() // _BLOCK * _BLOCK
    norms = [
        torch.linalg.vector_norm(flat[:whole].view(-1, _BLOCK), dim=1, dtype=torch.float32),
        torch.linalg.vector_norm(flat[whole:], dtype=torch.float32).unsqueeze(0),
    ]
    return torch.cat(norms).double().square().sum()


def clip_factor(norm: Tensor, limit: float) -> Tensor:
    """Return what makes a larger norm `limit`, which is 0 for none; else 1, which changes no bit.

    Without a branch, for which the host would wait for the norm.
    """
    return torch.where(norm > (limit or math.inf), limit / (norm + 1e-6), 1.0)


def scale_(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply tensors of one format by a factor without dimensions."""
    with torch.no_grad():
        parts = [local_part(tensor) for tensor in tensors]
    # In the tensors' format: CUDA has one kernel for all of them then.
    torch._foreach_mul_(parts, factor.to(parts[0].dtype))
