"""Offline write of NxD's checkpoint format: one process, one worker's file in memory at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from slurmllm.checkpoint.folder import fsync_file
from slurmllm.checkpoint.formats.dcp_write import ChecksumFiles
from slurmllm.checkpoint.formats.nxd_files import (
    LAYOUT,
    MASTERS,
    TAG,
    NxdLayout,
    StoredPart,
    model_file,
    optimizer_file,
    part_of_worker,
    shard_of_replica,
)
from slurmllm.checkpoint.formats.safetensors_files import TensorFiles
from slurmllm.checkpoint.formats.weights import TrainingFiles
from slurmllm.checkpoint.state import MOMENTS
from slurmllm.config.recipe import ModelConfig, OptimConfig
from slurmllm.plan.parameters import Shape, parameter_shapes

if TYPE_CHECKING:
    from slurmllm.display.progress import OnProgress


@dataclass
class NxdWriter:
    """Writer of NxD's files, which calls `on_progress` with the bytes read so far."""

    layout: NxdLayout
    model: ModelConfig
    weights: TensorFiles
    training: TrainingFiles | None  # weights and optimizer state; None writes the weights only
    optim: OptimConfig  # hyperparameters for the optimizer's parameter groups
    kept_dtype: torch.dtype  # type of the weights that the optimizer updates, and of its state
    on_progress: OnProgress = lambda _: None
    _done_bytes: int = 0

    @cached_property
    def shapes(self) -> dict[str, Shape]:
        return parameter_shapes(self.model)

    @property
    def replicas(self) -> int:
        """Number of optimizer files per tensor-parallel worker and stage."""
        return self.layout.data if self.layout.zero else 1

    @property
    def written_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.layout.dtype)
        return dtype

    @property
    def masters(self) -> bool:
        """Whether the optimizer's files hold master weights."""
        return self.layout.zero and self.written_dtype != self.kept_dtype

    def file_sizes(self) -> Iterator[tuple[int, int]]:
        """Yield the bytes of each worker's weights, and of its optimizer state in one replica."""
        layout = self.layout
        state_bytes = self.kept_dtype.itemsize * (len(MOMENTS) + self.masters) * layout.trained
        for names in layout.names:
            for rank in range(layout.tensor):
                parts = [self._part(name, rank) for name in names]
                shards = (shard_of_replica(part, self.replicas, 0) for part in parts)
                yield (
                    sum(math.prod(part.shape) for part in parts) * self.written_dtype.itemsize,
                    sum(math.prod(shard.shape) for shard in shards) * state_bytes,
                )

    def write(self, folder: Path) -> None:
        """Write all files into an existing folder."""
        layout = self.layout
        for sub in ("model", "optim") if layout.trained else ("model",):
            (folder / TAG / sub).mkdir(parents=True)
        for stage in range(layout.pipeline):
            for rank in range(layout.tensor):
                _save(folder / model_file(rank, stage), self._weights(stage, rank))
                for replica in range(self.replicas if layout.trained else 0):
                    state = self._optimizer_state(stage, rank, replica)
                    _save(folder / optimizer_file(replica, rank, stage), state)
        for mark in ("checkpoint", "done"):
            (folder / TAG / mark).write_text("1", encoding="utf-8")
            fsync_file(folder / TAG / mark)
        layout.save(folder / LAYOUT)

    def _weights(self, stage: int, rank: int) -> dict[str, Tensor]:
        layout, dtype = self.layout, self.written_dtype
        of_stage = set(layout.names[stage])
        weights = {
            name: self._fill(self._part(name, rank), dtype, name)
            for name in self.shapes  # in the model's order, not the optimizer's
            if name in of_stage
        }
        if self.model.tied_embeddings and stage == layout.pipeline - 1:
            weights["head.weight"] = weights["embed.weight"]
            if layout.pipeline > 1:
                del weights["embed.weight"]
        return weights

    def _optimizer_state(self, stage: int, rank: int, replica: int) -> dict[str, Any]:
        training, layout, dtype = self.training, self.layout, self.kept_dtype
        assert training is not None
        names = layout.names[stage]
        shards = parts = [self._part(name, rank) for name in names]
        if layout.zero:
            shards = [shard_of_replica(part, layout.data, replica) for part in parts]
        state = {
            number: {
                "step": torch.tensor(training.step(name), dtype=torch.float32),
                **{kind: self._fill(shard, dtype, name, kind) for kind in MOMENTS},
            }
            for number, (name, shard) in enumerate(zip(names, shards, strict=True))
        }
        groups = self._param_groups(names)
        if not layout.zero:
            return {"state": state, "param_groups": groups}
        # The keys of NxD's ZeRO-1 optimizer; `state` is empty there.
        content: dict[str, Any] = {
            "state": {},
            "param_groups": groups,
            "base_state": state,
            "shape_info": {i: torch.Size(part.shape) for i, part in enumerate(parts)},
        }
        if self.masters:
            content[MASTERS] = {
                number: self._fill(shard, dtype, name)
                for number, (name, shard) in enumerate(zip(names, shards, strict=True))
            }
        return content

    def _param_groups(self, names: tuple[str, ...]) -> list[dict[str, Any]]:
        """Return the groups as torch's own AdamW writes them: matrices, then all others."""
        optim = self.optim
        matrices = [len(self.shapes[name]) > 1 for name in names]
        of_others = optim.weight_decay if optim.decay_norms_and_biases else 0.0
        groups = [
            {
                "params": [torch.nn.Parameter(torch.empty(0)) for m in matrices if m is which],
                "weight_decay": optim.weight_decay if which else of_others,
            }
            for which in (True, False)
        ]
        # Empty parameters: only the groups are wanted, with all keys of this torch version.
        adamw = torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps)
        written: list[dict[str, Any]] = adamw.state_dict()["param_groups"]
        return written

    def _part(self, name: str, rank: int) -> StoredPart:
        return part_of_worker(name, self.shapes[name], self.model, self.layout.tensor, rank)

    def _fill(self, stored: StoredPart, dtype: torch.dtype, name: str, kind: str = "") -> Tensor:
        """Return a part of a parameter, or of its moment of a kind."""
        out = torch.zeros(stored.shape, dtype=dtype)  # padding rows of ZeRO-1 stay 0
        for local, whole in ((part.local, part.whole) for part in stored.parts):
            if kind and self.training is not None:
                out[local] = self.training.read_moment(kind, name, whole)
            else:
                out[local] = self.weights.read(name, whole)
        self._done_bytes += out.nbytes
        self.on_progress(self._done_bytes)
        return out


def _save(path: Path, content: Mapping[Any, Any]) -> None:
    with ChecksumFiles().create(path) as stream:
        torch.save(content, stream)
