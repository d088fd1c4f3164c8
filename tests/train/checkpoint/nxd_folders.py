"""Checkpoint folders of both formats, made of whole tensors; NxD's by the format's rules alone."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from slurmllm.core.config.recipe import ModelConfig
from slurmllm.core.config.yaml_source import flatten
from slurmllm.plan.parameters import parameter_shapes
from slurmllm.train.checkpoint.formats.dcp_write import (
    ChecksumFiles,
    Chunk,
    Place,
    SaveIndex,
    file_name,
    write_chunk,
)
from slurmllm.train.checkpoint.formats.pickles import METADATA
from slurmllm.train.checkpoint.state import TrainState
from slurmllm.train.control.plane import ControlPlane

MODELS: dict[str, dict[str, Any]] = {
    # Odd sizes, so that ZeRO-1 pads; the vocabulary has padding rows.
    "neox": {"num_heads": 4, "hidden_size": 40, "ffn_hidden_size": 36},
    "llama": {"num_heads": 8, "hidden_size": 48, "ffn_hidden_size": 128, "num_kv_heads": 2},
    "qwen3": {
        **{"num_heads": 8, "hidden_size": 20, "ffn_hidden_size": 128, "num_kv_heads": 2},
        **{"head_dim": 6, "tied_embeddings": True},
    },
    "gpt3": {"num_heads": 4, "hidden_size": 20, "ffn_hidden_size": 44, "seq_len": 12},
}


def model_of(family: str) -> ModelConfig:
    values = {"num_layers": 4, "vocab_size": 45, "vocab_pad_multiple": 4, "seq_len": 10}
    return ModelConfig.model_validate({"family": family, **values, **MODELS[family]})


@dataclass(frozen=True)
class Whole:
    """A model and AdamW's state, nothing shared out."""

    model: ModelConfig
    weights: dict[str, Tensor]
    moments: dict[str, dict[str, Tensor]]
    step: float = 7.0


def random_whole(family: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> Whole:
    model = model_of(family)
    generator = torch.Generator().manual_seed(seed)

    def draw() -> dict[str, Tensor]:
        return {
            name: torch.randn(shape, generator=generator).to(dtype)
            for name, shape in parameter_shapes(model).items()
        }

    weights = draw()
    moments = {kind: draw() for kind in ("exp_avg", "exp_avg_sq")}
    return Whole(model, weights, moments)


@dataclass(frozen=True)
class Layout:
    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    zero: bool = True
    dtype: str = "float32"
    optimizer_dtype: str = "float32"

    @property
    def masters(self) -> bool:
        return self.dtype != self.optimizer_dtype


def tensor_part(model: ModelConfig, name: str, whole: Tensor, tensor: int, rank: int) -> Tensor:
    """What a worker holds, written out case by case."""
    if "norm" in name or name.endswith(("out.bias", "down.bias")):
        return whole
    heads, kv, width = model.num_heads, model.kv_heads, model.head_width
    group = heads // kv
    if tensor > kv and ".attention." in name:
        # Groups of rows: the queries of a key head, that key, its value. Worker r has head r % kv
        # and of its queries the part r // kv.
        head, number, share = rank % kv, rank // kv, group * kv // tensor
        queries = slice(number * share, (number + 1) * share)
        if "qkv" in name:
            rows = whole.reshape(kv, group + 2, width, -1)[head]
            mine = torch.cat([rows[:group][queries], rows[group:]])
            return mine.reshape(-1, *whole.shape[1:])
        columns = whole.reshape(whole.shape[0], kv, group, width)[:, head, queries]
        return columns.reshape(whole.shape[0], -1)
    dim = 1 if name.endswith(("out.weight", "down.weight")) else 0
    return whole.chunk(tensor, dim)[rank]


def zero_shard(local: Tensor, data: int, rank: int) -> Tensor:
    missing = -len(local) % data
    padded = F.pad(local, [0, 0] * (local.dim() - 1) + [0, missing])
    return padded.chunk(data)[rank]


def stage_names(whole: Whole, pipeline: int) -> list[list[str]]:
    """Matrices first. In no particular order besides, as a reader must not ask for one."""
    model, each = whole.model, whole.model.num_layers // pipeline
    stages: list[list[str]] = [[] for _ in range(pipeline)]
    for name in reversed(list(whole.weights)):
        if name.startswith("layers."):
            stages[int(name.split(".")[1]) // each].append(name)
        else:
            stages[0 if name.startswith(("embed", "positions")) else -1].append(name)
    if model.tied_embeddings and pipeline > 1:
        stages[-1].append("embed.weight")
    return [sorted(names, key=lambda n: whole.weights[n].dim() < 2) for names in stages]


def write_nxd(
    folder: Path, whole: Whole, layout: Layout, names: list[list[str]] | None = None
) -> None:
    """The folder, without its manifest."""
    names = names or stage_names(whole, layout.pipeline)
    for sub in ("model", "optim"):
        (folder / "nxd" / sub).mkdir(parents=True)
    for stage in range(layout.pipeline):
        for rank in range(layout.tensor):
            place = f"tp_rank_{rank:02d}_pp_rank_{stage:02d}.pt"
            torch.save(
                _model(whole, layout, names, stage, rank),
                folder / "nxd/model" / f"dp_rank_00_{place}",
            )
            for replica in range(layout.data if layout.zero else 1):
                torch.save(
                    _optimizer(whole, layout, names[stage], rank, replica),
                    folder / "nxd/optim" / f"dp_rank_{replica:02d}_{place}",
                )
    for mark in ("checkpoint", "done"):
        (folder / "nxd" / mark).write_text("1")
    record = {**vars(layout), "virtual_pipeline": 1, "names": names}
    (folder / "nxd_layout.json").write_text(json.dumps(record))
    write_state(folder, whole)


def write_state(folder: Path, whole: Whole) -> None:
    fields = {"data.mask": "none", **flatten(whole.model.model_dump(), "model.")}
    TrainState(step=7, tokens=700, data={"at": 3}, fingerprint=fields).save(
        folder / "train_state.json"
    )


def _model(
    whole: Whole, layout: Layout, names: list[list[str]], stage: int, rank: int
) -> dict[str, Tensor]:
    dtype: torch.dtype = getattr(torch, layout.dtype)
    held = {
        name: tensor_part(whole.model, name, whole.weights[name], layout.tensor, rank)
        .to(dtype)
        .clone()
        for name in names[stage]
    }
    if whole.model.tied_embeddings and stage == layout.pipeline - 1:
        held["head.weight"] = held["embed.weight"]
        if layout.pipeline > 1:
            del held["embed.weight"]
    return held


def _optimizer(
    whole: Whole, layout: Layout, names: list[str], rank: int, replica: int
) -> dict[str, Any]:
    dtype: torch.dtype = getattr(torch, layout.optimizer_dtype)

    def local(tensors: Mapping[str, Tensor], name: str) -> Tensor:
        return tensor_part(whole.model, name, tensors[name], layout.tensor, rank)

    def share(tensors: Mapping[str, Tensor], name: str) -> Tensor:
        part = local(tensors, name)
        # A view, as NxD's on a CPU: the file has the whole storage.
        return zero_shard(part.to(dtype), layout.data, replica) if layout.zero else part.clone()

    state = {
        number: {
            "step": torch.tensor(whole.step),
            **{kind: share(tensors, name) for kind, tensors in whole.moments.items()},
        }
        for number, name in enumerate(names)
    }
    groups = [{"lr": 1e-3, "betas": (0.9, 0.95), "params": list(range(len(names)))}]
    if not layout.zero:
        return {"state": state, "param_groups": groups}
    held: dict[str, Any] = {
        "state": {},
        "param_groups": groups,
        "base_state": state,
        "shape_info": {i: local(whole.weights, name).shape for i, name in enumerate(names)},
    }
    if layout.masters:
        held["sharded_master_weights"] = {
            i: share(whole.weights, name) for i, name in enumerate(names)
        }
    return held


def write_dcp(folder: Path, tensors: Mapping[tuple[str, ...], Tensor], workers: int = 1) -> None:
    """Write `.metadata`, and each worker's rows of every tensor into a file of its own."""
    folder.mkdir(exist_ok=True)
    chunks: list[Chunk] = []
    places: list[Place] = []
    files = ChecksumFiles()
    for rank in range(workers):
        with files.create(folder / file_name(rank, 0)) as stream:
            for keys, whole in tensors.items():
                if rank and not whole.dim():
                    continue
                rows = whole.tensor_split(workers)[rank] if whole.dim() else whole
                start = sum(len(rows) for rows in whole.tensor_split(workers)[:rank]) if rank else 0
                offsets = (start, *(0 for _ in whole.shape[1:])) if whole.dim() else ()
                chunk = Chunk(keys, whole.dtype, tuple(whole.shape), offsets, tuple(rows.shape))
                chunks.append(chunk)
                places.append(write_chunk(stream, file_name(rank, 0), rows))
    index = SaveIndex(ControlPlane(), chunks)
    index.collect(places)
    (folder / METADATA).write_bytes(index.content)


def write_native(folder: Path, whole: Whole, workers: int) -> None:
    """Write the native folder, without its manifest."""
    tensors = {("model", name): weight for name, weight in whole.weights.items()}
    for kind, moments in whole.moments.items():
        tensors |= {("optimizer", name, kind): moment for name, moment in moments.items()}
    for name in whole.weights:
        tensors["optimizer", name, "step"] = torch.tensor(whole.step)
    write_dcp(folder, tensors, workers)
    write_state(folder, whole)
