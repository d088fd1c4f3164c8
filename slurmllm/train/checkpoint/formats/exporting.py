"""Export of a checkpoint folder, a run's or an imported one, to a Hugging Face folder.

Memory holds one output file at a time; the optimizer's state is never read.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from slurmllm.core.config.huggingface import CONFIG, config_faults, write_config
from slurmllm.core.config.recipe import ModelConfig
from slurmllm.core.errors import ConfigError, DataError, StorageError
from slurmllm.core.format import format_plural
from slurmllm.train.checkpoint.folder import atomic_folder, fsync_file
from slurmllm.train.checkpoint.formats.huggingface import (
    SHARDS,
    WHOLE,
    TensorMapping,
    TensorPlan,
    tensor_mappings,
    unpadded,
    with_their_biases,
)
from slurmllm.train.checkpoint.formats.model_folders import (
    GENERATION,
    TOKENIZER,
    TOKENIZER_CONFIG,
    TokenizerFiles,
    copy_files,
    write_tokenizer_config,
)
from slurmllm.train.checkpoint.formats.safetensors_files import (
    TensorFiles,
    plan_shards,
    write_index,
    write_shards,
)
from slurmllm.train.checkpoint.formats.weights import VOCABULARY, open_weights
from slurmllm.train.checkpoint.state import Origin, read_origin

if TYPE_CHECKING:
    from slurmllm.core.display.progress import OnProgress


@dataclass(frozen=True)
class ExportPlan(TensorPlan):
    """An export whose inputs have been checked."""

    origin: Origin
    model: ModelConfig  # the checkpoint's model, with the biases that transformers' model has
    weights: TensorFiles  # the checkpoint's tensors

    def dtype_of(self, mapping: TensorMapping) -> torch.dtype:
        # A bias that only theirs has takes the embedding's type.
        stored = self.weights.tensors.get(mapping.ours, self.weights.tensors["embed.weight"])
        assert stored.dtype is not None
        return self.dtype or stored.dtype

    def convert(self, number: int) -> dict[str, Tensor]:
        """Return the tensors of a mapping, without padding rows; zeros for their biases."""
        mapping = self.mappings[number]
        stored, dtype = self.weights.tensors.get(mapping.ours), self.dtype_of(mapping)
        if stored is None:
            ours = torch.zeros(mapping.shape, dtype=dtype)
        else:
            region = tuple(slice(0, size) for size in mapping.shape)
            ours = self.weights.read(mapping.ours, region).to(dtype)
        return dict(zip(mapping.theirs, mapping.layout.split(self.model, ours), strict=True))


def plan_export(
    directory: Path, tokenizer: TokenizerFiles, dtype: torch.dtype | None = None
) -> ExportPlan:
    """Check a checkpoint that is to be exported.

    Raises a ConfigError if transformers has no such model, a DataError for the tokenizer.
    """
    origin = read_origin(directory)
    faults = config_faults(origin.model)
    if faults:
        raise ConfigError(
            f"{directory} cannot be exported: {format_plural(len(faults), 'error')}", faults
        )
    if tokenizer.num_ids > origin.model.vocab_size:
        raise DataError(
            f"the tokenizer has {tokenizer.num_ids} entries and the model {origin.model.vocab_size}"
            "; give the one that it was trained with: --tokenizer FILE"
        )
    weights = open_weights(origin)
    model = with_their_biases(unpadded(origin.model))
    plan = ExportPlan(tensor_mappings(model), dtype, tokenizer, origin, model, weights)
    names = {mapping.ours: mapping.shape for mapping in tensor_mappings(origin.model)}
    for name, shape in names.items():
        if (stored := weights.tensors.get(name)) is None:
            faults.append(f"{name}: is missing; {list(shape)} was expected")
            continue
        # The vocabulary may have padding rows, whose number depends on the mesh.
        rows = max(shape[0], 0, *stored.shape[:1]) if name in VOCABULARY else shape[0]
        if stored.shape != (rows, *shape[1:]):
            faults.append(f"{name}: is {list(stored.shape)}; {list(shape)} was expected")
    faults += [
        f"{name}: is no tensor of this model" for name in sorted({*weights.tensors} - {*names})
    ]
    if faults:
        lines = "\n".join(f"  {fault}" for fault in faults)
        raise StorageError(f"{directory} is damaged; restore it:\n{lines}")
    return plan


def run_export(
    plan: ExportPlan, out: Path, shard_bytes: int, on_progress: OnProgress = lambda _: None
) -> list[str]:
    """Write the Hugging Face folder, complete or not at all; return the names of its files.

    `shard_bytes` is the largest output file, and about the memory needed.
    """
    imported, end = plan.origin.imported, plan.tokenizer.end_of_document
    bos: int | None = end  # documents are packed back to back: the end token also begins the next
    eos: int | tuple[int, ...] | None = end
    if imported is not None and end is None:
        bos, eos = imported.bos_token_id, imported.eos_token_id
    with atomic_folder(out) as folder:
        shards = plan_shards(plan.sizes_bytes, shard_bytes, "model", WHOLE)
        weight_map = write_shards(folder, shards, plan.sizes_bytes, plan.convert, on_progress)
        if len(shards) > 1:
            write_index(folder / SHARDS, weight_map, sum(plan.sizes_bytes))
        write_config(
            plan.model,
            folder / CONFIG,
            dtype=str(plan.dtype_of(plan.mappings[0])).removeprefix("torch."),
            bos_token_id=bos,
            eos_token_id=list(eos) if isinstance(eos, tuple) else eos,
        )
        files = plan.tokenizer.files
        copy_files(files, folder)
        if (generation := plan.origin.directory / GENERATION).is_file():
            copy_files({GENERATION: generation}, folder)
        if TOKENIZER in files and TOKENIZER_CONFIG not in files:
            write_tokenizer_config(
                folder, seq_len=plan.model.seq_len, end_token=plan.tokenizer.end_token
            )
        for path in folder.glob("*.json"):
            fsync_file(path)
        return sorted(path.name for path in folder.iterdir())
