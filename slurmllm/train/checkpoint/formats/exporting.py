"""Export of a checkpoint folder, a run's or an imported one, to a Hugging Face folder.

Memory holds one output file at a time; the optimizer's state is never read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from slurmllm.core.config.huggingface import CONFIG, config_faults, write_config
from slurmllm.core.config.recipe import ModelConfig
from slurmllm.core.errors import CheckpointError, ConfigError, DataError, StorageError
from slurmllm.core.format import format_lines, format_plural
from slurmllm.train.checkpoint.catalogue import (
    find_checkpoint,
    newest_verified,
    read_entry,
    verify_entry,
)
from slurmllm.train.checkpoint.folder import atomic_folder, fsync_file, require_absent
from slurmllm.train.checkpoint.formats.huggingface import (
    SHARDS,
    WHOLE,
    TensorMapping,
    TensorPlan,
    not_finite_text,
    tensor_mappings,
    unpadded,
    with_their_biases,
)
from slurmllm.train.checkpoint.formats.model_folders import (
    GENERATION,
    TOKENIZER,
    TOKENIZER_CONFIG,
    ExportedModel,
    TokenizerFiles,
    checkpoint_tokenizer,
    copy_files,
    write_tokenizer_config,
)
from slurmllm.train.checkpoint.formats.safetensors_files import (
    WEIGHT_TYPES,
    TensorFiles,
    plan_shards,
    write_index,
    write_shards,
)
from slurmllm.train.checkpoint.formats.weights import VOCABULARY, open_weights
from slurmllm.train.checkpoint.state import Origin, read_origin
from slurmllm.train.model.regions import whole_region

if TYPE_CHECKING:
    from slurmllm.core.display.progress import OnProgress

log = logging.getLogger(__name__)


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
        stored = self.weights.tensors.get(mapping.ours)
        dtype = self.dtype_of(mapping)
        if stored is None:
            ours = torch.zeros(mapping.shape, dtype=dtype)
        else:
            ours = self.weights.read(mapping.ours, whole_region(mapping.shape)).to(dtype)
        if problem := not_finite_text(ours):
            self.not_finite.append(f"{mapping.ours}: {problem}")
        return dict(zip(mapping.theirs, mapping.layout.split(self.model, ours), strict=True))


def export_model(
    source: str,
    root: Path,
    out: Path,
    dtype: str,
    tokenizer_file: Path | None,
    shard_bytes: int,
    progress: Callable[[str, int], AbstractContextManager[OnProgress]] = lambda *_: nullcontext(
        lambda _: None
    ),
) -> ExportedModel:
    """Export a checkpoint, after verifying it.

    Args:
        source: As for `find_checkpoint`, with `root`.
        dtype: A name of `WEIGHT_TYPES`.
        tokenizer_file: A tokenizer.json; None: the imported one, or the run's.
        shard_bytes: As for `run_export`.
        progress: Shows what is done, and how many bytes.
    """
    require_absent(out)
    directory = _verified_checkpoint(source, root, progress)
    tokenizer = checkpoint_tokenizer(directory, tokenizer_file)
    plan = plan_export(directory, tokenizer, WEIGHT_TYPES[dtype])
    num_bytes = sum(plan.sizes_bytes)
    with progress("exporting", num_bytes) as on_progress:
        files = run_export(plan, out, shard_bytes, on_progress)
    return ExportedModel(
        path=out,
        checkpoint=directory,
        model=plan.model,
        tokenizer=tuple(sorted(tokenizer.files)),
        files=tuple(files),
        num_bytes=num_bytes,
        num_parameters=plan.num_parameters,
    )


def _verified_checkpoint(
    source: str, root: Path, progress: Callable[[str, int], AbstractContextManager[OnProgress]]
) -> Path:
    """Return the checkpoint folder that the arguments name, after verifying it."""
    directory = find_checkpoint(source, root)
    if not isinstance(directory, Path):
        directory, skipped = newest_verified(directory)
        for line in skipped:
            log.warning("skipped a checkpoint that does not verify: %s", line)
        return directory
    read_origin(directory)  # refuses other folders before their files are read
    entry = read_entry(directory)
    with progress("verifying", entry.num_bytes) as on_progress:
        entry = verify_entry(entry, on_progress)
    if entry.faults:
        raise CheckpointError(
            f"{directory} does not verify; restore it, or name another:{format_lines(entry.faults)}"
        )
    return directory


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
        raise StorageError(f"{directory} is damaged; restore it:{format_lines(faults)}")
    return plan


def run_export(
    plan: ExportPlan, out: Path, shard_bytes: int, on_progress: OnProgress = lambda _: None
) -> list[str]:
    """Write the Hugging Face folder, complete or not at all; return the names of its files.

    `shard_bytes` is the largest output file, and about the memory needed.
    """
    imported = plan.origin.imported
    end = plan.tokenizer.end_of_document
    bos: int | None = end  # documents are packed back to back: the end token also begins the next
    eos: int | tuple[int, ...] | None = end
    if imported is not None and end is None:
        bos = imported.bos_token_id
        eos = imported.eos_token_id
    with atomic_folder(out) as folder:
        shards = plan_shards(plan.sizes_bytes, shard_bytes, "model", WHOLE)
        weight_map = write_shards(folder, shards, plan.sizes_bytes, plan.convert, on_progress)
        if plan.not_finite:  # written all the same: whoever exports it may look for the cause
            log.warning("the model has diverged:%s", format_lines(plan.not_finite))
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
