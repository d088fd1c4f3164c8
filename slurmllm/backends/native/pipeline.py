"""Pipeline parallelism: the layers of a worker and the schedule of its passes.

torch.distributed.pipelining runs the passes. A worker has `virtual_pipeline` chunks of layers: with
one, the schedule is 1F1B (Narayanan et al. 2019, arXiv 1806.03377); with more, interleaved 1F1B
(Narayanan et al. 2021, arXiv 2104.04473), where worker p of P has chunks p, p + P, ….
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from slurmllm.backends.base import ModelFactory
from slurmllm.model.decoder import Decoder
from slurmllm.plan.mesh import Mesh


def chunks_of(pipeline_rank: int, mesh: Mesh) -> list[int]:
    """Return the numbers of a pipeline worker's chunks, of `mesh.chunks` in all."""
    return list(range(pipeline_rank, mesh.chunks, mesh.pipeline))


def make_chunk(model_factory: ModelFactory, chunk: int, mesh: Mesh) -> Decoder:
    """Make one chunk of the model; its parameters have their names in the whole model."""
    model = model_factory()
    assert isinstance(model, Decoder)
    each = model.config.num_layers // mesh.chunks
    layers = range(chunk * each, (chunk + 1) * each)
    model.keep(layers, first=chunk == 0, last=chunk == mesh.chunks - 1)
    return model


def combine_chunks(chunks: Sequence[Decoder]) -> nn.Module:
    """Return one module with the parameters of all chunks, under their names."""
    if len(chunks) == 1:
        return chunks[0]
    whole = nn.Module()
    whole.layers = nn.ModuleDict({n: b for chunk in chunks for n, b in chunk.layers.items()})
    for name in ("embed", "positions", "final_norm", "head"):
        for part in (getattr(chunk, name) for chunk in chunks):
            if part is not None:
                setattr(whole, name, part)
    return whole


class Pipeline:
    """This worker's chunks and their schedule.

    Args:
        chunks: This worker's, in order.
        group: The pipeline workers, a one-dimensional mesh.
        hidden: Activations between chunks: [micro_batch, seq or a shard of it, hidden], on meta.
    """

    def __init__(
        self,
        chunks: Sequence[Decoder],
        mesh: Mesh,
        group: DeviceMesh,
        device: torch.device,
        hidden: Tensor,
        seq_len: int,
    ) -> None:
        # Imported here, because it takes half a second.
        from torch.distributed.pipelining import PipelineStage

        numbers = chunks_of(group.get_local_rank(), mesh)
        tokens = torch.empty(mesh.micro_batch, seq_len, dtype=torch.int64, device="meta")
        loss = torch.empty((), dtype=torch.float32, device="meta")
        stages = [
            PipelineStage(
                chunk,
                number,
                mesh.chunks,
                device,
                input_args=tokens if chunk.first else hidden,
                output_args=loss if chunk.last else hidden,
                group=group.get_group(),
            )
            for number, chunk in zip(numbers, chunks, strict=True)
        ]
        self.first, self.last = chunks[0].first, chunks[-1].last
        self._weight = 1.0
        self._schedule = _schedule(
            stages, mesh.accumulation, lambda loss: loss * self._weight / mesh.accumulation
        )

    def forward_backward(
        self, tokens: Tensor, labels: Tensor, positions: Tensor | None, weight: float
    ) -> Tensor | None:
        """Accumulate the gradients of all micro batches.

        Args:
            tokens: [accumulation · micro_batch, seq], as labels and positions.
            positions: Read by every stage.
            weight: Factor of every loss.

        Returns:
            The mean loss; None if this worker does not have the last chunk.
        """
        self._weight = weight
        losses: list[Tensor] = []
        inputs = (tokens,) if self.first else ()
        more: dict[str, Any] = {} if positions is None else {"positions": positions}
        if self.last:
            more |= {"labels": labels, "target": labels, "losses": losses}
        try:
            self._schedule.step(*inputs, return_outputs=False, **more)
        except RuntimeError as error:
            # Errors of a stage's forward pass are wrapped into one about its arguments; the cause
            # (out of memory, a lost peer) decides on the exit code.
            raise error.__cause__ or error from None
        return torch.stack(losses).sum().detach() if self.last else None


def _schedule(stages: list[Any], count: int, scaled: Any) -> Any:
    from torch.distributed.pipelining import (
        Schedule1F1B,
        ScheduleGPipe,
        ScheduleInterleaved1F1B,
    )

    # The model's output is the loss; gradients are scaled through it, not a second time.
    options: dict[str, Any] = {"loss_fn": lambda loss, labels: scaled(loss), "scale_grads": False}
    if len(stages) > 1:
        return ScheduleInterleaved1F1B(stages, count, **options)
    if count < stages[0].num_stages:  # 1F1B needs at least one micro batch for each stage
        return ScheduleGPipe(stages[0], count, **options)
    return Schedule1F1B(stages[0], count, **options)
