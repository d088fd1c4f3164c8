"""A checkpoint folder, a run's or an imported one → a Hugging Face model folder.

A run's checkpoint may come from any mesh. Weights pass through memory one output file at a time;
the optimizer's are never read.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from slurmllm.checkpoint.folder import atomic_folder
from slurmllm.checkpoint.formats import tokenizer_files
from slurmllm.checkpoint.formats.huggingface import (
    SHARDS,
    WHOLE,
    TensorMapping,
    tensor_mappings,
    unpadded,
    with_their_biases,
)
from slurmllm.checkpoint.formats.huggingface_config import CONFIG, config_faults, write_config
from slurmllm.checkpoint.formats.safetensors_files import (
    TensorFiles,
    fsync_file,
    own_storage,
    plan_shards,
    write_index,
    write_shard,
)
from slurmllm.checkpoint.formats.tokenizer_files import TokenizerFiles
from slurmllm.checkpoint.formats.weights import VOCABULARY, open_weights
from slurmllm.checkpoint.origin import Origin, read_origin
from slurmllm.config.recipe import ModelConfig
from slurmllm.errors import ConfigError, DataError, StorageError

if TYPE_CHECKING:
    from slurmllm.progress import OnProgress


@dataclass(frozen=True)
class ExportPlan:
    """An export that nothing stands against.

    Attributes:
        origin: The checkpoint.
        model: Its model, with the biases that transformers' has.
        weights: Its tensors.
        pieces: Ours, to be taken apart.
        dtype: Of the weights to write; None keeps each as it is.
        tokenizer: Files to put beside the weights.
    """

    origin: Origin
    model: ModelConfig
    weights: TensorFiles
    mappings: list[TensorMapping]
    dtype: torch.dtype | None
    tokenizer: TokenizerFiles

    def dtype_of(self, piece: TensorMapping) -> torch.dtype:
        """The type that a piece is to have."""
        stored = self.weights.tensors.get(piece.ours, self.weights.tensors["embed.weight"])
        assert stored.dtype is not None
        return self.dtype or stored.dtype

    @property
    def sizes_bytes(self) -> list[int]:
        """What each piece will take."""
        return [torch.Size(p.shape).numel() * self.dtype_of(p).itemsize for p in self.mappings]

    def read(self, piece: TensorMapping) -> Tensor:
        """One of our tensors, without padding rows; zeros for a bias that only theirs has."""
        stored = self.weights.tensors.get(piece.ours)
        if stored is None:
            return torch.zeros(piece.shape, dtype=self.dtype_of(piece))
        whole = stored.shape == piece.shape
        region = None if whole else tuple(slice(0, size) for size in piece.shape)
        return self.weights.read(piece.ours, region).to(self.dtype_of(piece))


def plan_export(
    directory: Path, tokenizer: TokenizerFiles, dtype: torch.dtype | None = None
) -> ExportPlan:
    """Look at a checkpoint that is to be exported.

    Raises:
        RunError: it is no checkpoint.
        ConfigError: transformers has no such model.
        DataError: the tokenizer has more entries than the model.
        StorageError: it is damaged.
    """
    origin = read_origin(directory)
    faults = config_faults(origin.model)
    if faults:
        raise ConfigError(f"{directory} cannot be exported: {len(faults)} fault(s)", faults)
    if tokenizer.num_ids > origin.model.vocab_size:
        raise DataError(
            f"the tokenizer has {tokenizer.num_ids} entries and the model {origin.model.vocab_size}"
            "; give the one that it was trained with: --tokenizer FILE"
        )
    weights = open_weights(origin)
    model = with_their_biases(unpadded(origin.model))
    plan = ExportPlan(origin, model, weights, tensor_mappings(model), dtype, tokenizer)
    faults = _unlike(plan)
    if faults:
        lines = "\n".join(f"  {fault}" for fault in faults)
        raise StorageError(f"{directory} is damaged; restore it:\n{lines}")
    return plan


def _unlike(plan: ExportPlan) -> list[str]:
    """Every tensor of the checkpoint that is not as its model says."""
    faults = []
    own_names = {piece.ours for piece in tensor_mappings(plan.origin.model)}
    for piece in plan.mappings:
        stored = plan.weights.tensors.get(piece.ours)
        if stored is None:
            if piece.ours in own_names:
                faults.append(f"{piece.ours}: is missing; {list(piece.shape)} was expected")
            continue
        padded = piece.ours in VOCABULARY and len(stored.shape) == 2
        fits = stored.shape[1:] == piece.shape[1:] and stored.shape[0] >= piece.shape[0]
        if not (fits if padded else stored.shape == piece.shape):
            faults.append(
                f"{piece.ours}: is {list(stored.shape)}; {list(piece.shape)} was expected"
            )
    faults += [
        f"{name}: is no tensor of this model"
        for name in sorted(plan.weights.tensors)
        if name not in own_names
    ]
    return faults


def run_export(
    plan: ExportPlan, out: Path, shard_bytes: int, on_progress: OnProgress = lambda _: None
) -> list[str]:
    """Write the Hugging Face folder, whole or not at all.

    Args:
        plan: What to export.
        out: The folder to make.
        shard_bytes: Largest output file, and about what is held in memory.
        on_progress: Told the bytes of weights converted so far.

    Returns:
        Names of the files.

    Raises:
        RunError: there is something at `out` already.
        StorageError: a file cannot be read or written.
    """
    imported, end = plan.origin.imported, plan.tokenizer.end_of_document
    bos: int | None = end  # documents are packed one after the other: the end is the beginning too
    eos: int | tuple[int, ...] | None = end
    if imported is not None and end is None:
        bos, eos = imported.bos_token_id, imported.eos_token_id
    with atomic_folder(out) as folder:
        _write_weights(plan, folder, shard_bytes, on_progress)
        write_config(
            plan.model,
            folder / CONFIG,
            dtype=str(plan.dtype_of(plan.mappings[0])).removeprefix("torch."),
            bos_token_id=bos,
            eos_token_id=list(eos) if isinstance(eos, tuple) else eos,
        )
        files = plan.tokenizer.files
        tokenizer_files.copy_files(files, folder)
        if tokenizer_files.TOKENIZER in files and tokenizer_files.TOKENIZER_CONFIG not in files:
            tokenizer_files.write_tokenizer_config(
                folder, seq_len=plan.model.seq_len, end_token=plan.tokenizer.end_token
            )
        for path in folder.glob("*.json"):
            fsync_file(path)
        return sorted(path.name for path in folder.iterdir())


def _write_weights(
    plan: ExportPlan, folder: Path, shard_bytes: int, on_progress: OnProgress
) -> None:
    sizes = plan.sizes_bytes
    shards = plan_shards(sizes, shard_bytes, "model", WHOLE)
    weight_map: dict[str, str] = {}
    done_bytes = 0
    for shard in shards:
        tensors: dict[str, Tensor] = {}
        for index in shard.parts:
            piece = plan.mappings[index]
            parts = piece.layout.split(plan.model, plan.read(piece))
            for name, part in zip(piece.theirs, parts, strict=True):
                tensors[name] = own_storage(part)
            done_bytes += sizes[index]
            on_progress(done_bytes)
        write_shard(folder / shard.file, tensors)
        weight_map.update(dict.fromkeys(tensors, shard.file))
    if len(shards) > 1:
        write_index(folder / SHARDS, weight_map, sum(sizes))
