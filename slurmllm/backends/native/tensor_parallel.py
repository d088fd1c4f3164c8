"""Tensor and sequence parallelism: the family's sharding plan as DTensor layouts.

Between the sharded modules activations are plain local tensors: whole, or under sequence
parallelism each worker's shard of the sequence.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import Placement
from torch.nn import functional as F

from slurmllm.config.families import Sharding, sharding_plan
from slurmllm.model.decoder import Decoder
from slurmllm.model.output import Output, VocabularyShare

_SEQUENCE_DIM = 1


def apply_tensor_parallel(model: Decoder, mesh: DeviceMesh, *, sequence: bool) -> None:
    """Make a decoder, or a stage of one, tensor-parallel in place.

    Args:
        model: On the meta device or with weights that are equal on all workers.
        mesh: One-dimensional, the tensor-parallel workers.
        sequence: Whether activations between the matrices are sharded by sequence.
    """
    config = model.config
    plan = sharding_plan(config.family, config.tied_embeddings)
    stream: Placement = Shard(_SEQUENCE_DIM) if sequence else Replicate()
    for block in model.blocks():
        parallelize_module(block, mesh, _styles(block, plan.block, stream))
    parallelize_module(model, mesh, _styles(model, plan.rest, stream))
    for name, how in plan.rest.items():
        module = getattr(model, name)
        if how == "vocabulary" and module is not None:
            shared = distribute_tensor(module.weight, mesh, [Shard(0)], src_data_rank=None)
            if isinstance(module, nn.Embedding):
                entries, width = module.weight.shape
                setattr(model, name, ParallelEmbedding(entries, width, mesh, stream))
            getattr(model, name).weight = nn.Parameter(shared)
    model.output = ParallelOutput(config.vocab_size, mesh, stream)


def _styles(
    module: nn.Module, plan: Mapping[str, Sharding], stream: Placement
) -> dict[str, ParallelStyle]:
    present = dict(module.named_modules())
    found: dict[str, ParallelStyle] = {}
    for name, how in plan.items():
        if name not in present:
            continue
        if how == "column":
            found[name] = ColwiseParallel(input_layouts=stream)
        elif how == "row":
            found[name] = RowwiseParallel(output_layouts=stream)
        elif how == "sequence" and stream.is_shard():
            found[name] = SequenceParallel(sequence_dim=_SEQUENCE_DIM, use_local_output=True)
    return found


class ParallelEmbedding(nn.Embedding):
    """An embedding of which each worker has a shard of the entries.

    Not RowwiseParallel, whose backward pass computes the gradient of the whole vocabulary on every
    worker and sums these (torch 2.13). The result must not be asynchronous either: a compiled
    function, the first block, returns no gradient to such an input.
    """

    def __init__(self, entries: int, width: int, mesh: DeviceMesh, stream: Placement) -> None:
        super().__init__(entries, width, device="meta")
        self.mesh, self.stream = mesh, stream

    def forward(self, entries: Tensor) -> Tensor:
        """[batch, seq] → [batch, seq or a shard of it, hidden]; entries equal on all workers."""
        assert isinstance(self.weight, DTensor)
        local = self.weight.to_local()
        own = entries - self.mesh.get_local_rank() * local.shape[0]
        others = (own < 0) | (own >= local.shape[0])
        rows = F.embedding(own.masked_fill(others, 0), local).masked_fill(others.unsqueeze(-1), 0)
        partial = DTensor.from_local(rows, self.mesh, [Partial()], run_check=False)
        return partial.redistribute(self.mesh, [self.stream]).to_local()


class ParallelOutput(Output):
    """`Output` with a shard of the vocabulary on each worker; logits are never gathered."""

    def __init__(self, vocab_size: int, mesh: DeviceMesh, stream: Placement) -> None:
        super().__init__(vocab_size)
        self.mesh, self.stream = mesh, stream

    def forward(self, x: Tensor, weight: Tensor, labels: Tensor | None) -> Tensor:
        """Return this worker's logits [batch, seq, its shard], or the mean loss.

        Args:
            x: Local, [batch, seq or a shard of it, hidden].
            weight: DTensor [padded vocabulary, hidden], sharded by rows.
            labels: [batch, seq], equal on all workers.
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
