"""Import of a Hugging Face model folder as a checkpoint folder.

    weights-00001-of-0000N.safetensors   our names, our layout; and an index
    model.json                           the model (`records.ImportedModel`)
    tokenizer/, generation_config.json   unchanged

All inputs are checked before anything is written, and all faults are reported at once. Memory holds
one output file at a time.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from slurmllm.core.config.families import FAMILIES
from slurmllm.core.config.huggingface import SourceConfig, read_config
from slurmllm.core.config.recipe import ModelConfig
from slurmllm.core.errors import ConfigError, DataError, StorageError
from slurmllm.core.format import format_lines, format_plural
from slurmllm.core.run.artifact_records import CheckpointFile, CheckpointManifest, ImportedModel
from slurmllm.core.run.safe_files import read_limited
from slurmllm.train.checkpoint.folder import atomic_folder, describe, write_manifest
from slurmllm.train.checkpoint.formats.huggingface import (
    SHARDS,
    WHOLE,
    TensorMapping,
    TensorPlan,
    not_finite_text,
    tensor_mappings,
)
from slurmllm.train.checkpoint.formats.model_folders import (
    GENERATION,
    TOKENIZER,
    TOKENIZER_FOLDER,
    copy_files,
    tokenizer_in,
)
from slurmllm.train.checkpoint.formats.safetensors_files import (
    DTYPES,
    SafetensorsFiles,
    open_safetensors,
    plan_shards,
    write_index,
    write_shards,
)
from slurmllm.train.checkpoint.state import INDEX, MODEL, fingerprint_digest

if TYPE_CHECKING:
    from slurmllm.core.display.progress import OnProgress


Names = dict[str, str]  # name in the mappings → name in the files


@dataclass(frozen=True)
class ImportPlan(TensorPlan):
    """An import whose inputs have been checked."""

    source: Path  # the Hugging Face folder
    config: SourceConfig  # its config.json
    files: SafetensorsFiles  # its tensors
    names: Names  # name in `mappings` → name in the files

    def convert(self, number: int) -> dict[str, Tensor]:
        mapping = self.mappings[number]
        theirs = []
        for name in mapping.theirs:
            key = self.names[name]
            tensor = self.files.read(key)
            if problem := not_finite_text(tensor):
                self.not_finite.append(f"{key} in {self.files.tensors[key].file}: {problem}")
            theirs.append(tensor)
        joined = mapping.layout.join(self.config.model, theirs)
        ours = joined.to(self.dtype_of(mapping))
        if (
            ours.dtype != joined.dtype
            and not self.not_finite
            and (problem := not_finite_text(ours))
        ):
            self.not_finite.append(
                f"{mapping.ours}, as {ours.dtype}: {problem}; choose a wider type"
            )
        return {mapping.ours: ours}

    def dtype_of(self, mapping: TensorMapping) -> torch.dtype:
        # Tensors that become one may differ in type: the smallest that holds all their values.
        stored = (self.files.tensors[self.names[name]].dtype for name in mapping.theirs)
        types = [dtype for dtype in stored if dtype is not None]
        return self.dtype or reduce(torch.promote_types, types)


def plan_import(source: Path, dtype: torch.dtype | None = None) -> ImportPlan:
    """Check a Hugging Face model folder.

    Raises a ConfigError if model or tensors are not supported, a DataError for its tokenizer, a
    StorageError if there are only faults of files.
    """
    config, config_faults = read_config(source)
    files, file_faults = _open_weights(source)
    names: Names = {}
    mappings: list[TensorMapping] = []
    if config is not None and not file_faults:
        mappings = tensor_mappings(config.model)
        names, config_faults = _match_names(config.model, files, mappings)
    title = f"{source} cannot be imported"
    faults = [*config_faults, *file_faults]
    if config_faults:
        raise ConfigError(f"{title}: {format_plural(len(faults), 'error')}", faults)
    if file_faults:
        raise StorageError(f"{title}:{format_lines(faults)}")
    assert config is not None
    tokenizer = tokenizer_in(source)
    if tokenizer.num_ids > config.model.vocab_size:
        raise DataError(
            f"{source / TOKENIZER} has {tokenizer.num_ids} entries and the model "
            f"{config.model.vocab_size}; it is another model's: fetch the model's own, or remove it"
        )
    return ImportPlan(mappings, dtype, tokenizer, source, config, files, names)


def _open_weights(source: Path) -> tuple[SafetensorsFiles, list[str]]:
    nothing = SafetensorsFiles(source, {})
    if (source / WHOLE).is_file():  # transformers prefers this one, too
        return open_safetensors(source, [WHOLE])
    if not (source / SHARDS).is_file():
        fault = f"neither {WHOLE} nor {SHARDS} is there; fetch the model's weights"
        if pickled := sorted(path.name for path in source.glob("pytorch_model*.bin")):
            fault = (
                f"{pickled[0]}: pickled weights are not read; load the model in transformers and "
                "save it again with save_pretrained, which writes safetensors"
            )
        return nothing, [fault]
    try:
        weight_map = json.loads(read_limited(source / SHARDS))["weight_map"]
        file_of = {str(key): str(file) for key, file in weight_map.items()}
    except OSError as error:
        return nothing, [f"{SHARDS} cannot be read: {error.strerror or error}"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return nothing, [f"{SHARDS} is no index of safetensors files; fetch it again"]
    names = sorted(set(file_of.values()))
    if outside := [name for name in names if Path(name).name != name]:  # untrusted input
        return nothing, [f"{SHARDS} names {name!r}, outside the folder" for name in outside]
    return open_safetensors(source, names, file_of)


def _match_names(
    model: ModelConfig, files: SafetensorsFiles, mappings: list[TensorMapping]
) -> tuple[Names, list[str]]:
    """Return name in the mappings → name in the files, and one line per fault of a tensor."""
    family = FAMILIES[model.family].hugging_face
    expected = {name: shape for mapping in mappings for name, shape in mapping.theirs.items()}
    theirs = {module.ours: f"{module.theirs[0]}.weight" for module in family.modules}
    head = theirs["head"]
    embedding = theirs["embed"]
    names: Names = {}
    faults: list[str] = []
    for key, stored in files.tensors.items():
        name = family.current_name(key)
        if name is None:
            continue
        if name not in expected and family.prefix + name in expected:
            name = family.prefix + name
        if name in expected or (name == head and model.tied_embeddings):
            if name in names:  # under its old and its current name
                faults.append(f"{key}: is also stored as {names[name]}; keep one of them")
            names[name] = key
        else:
            faults.append(f"{key}: is no tensor of this model; {list(stored.shape)} was found")
    types = ", ".join(DTYPES)
    for name, shape in expected.items():
        if name not in names:
            faults.append(f"{name}: is missing; {list(shape)} was expected")
            continue
        key = names[name]
        stored = files.tensors[names[name]]
        if stored.shape != shape:
            faults.append(f"{key}: is {list(stored.shape)}; {list(shape)} was expected")
        elif stored.dtype is None:
            faults.append(f"{key}: is of type {stored.code}; weights must be one of {types}")
    if not faults and model.tied_embeddings and head in names:
        # A tied head may be stored all the same; it is ignored if it equals the embedding.
        stored_head = names.pop(head)
        a = files.read(stored_head)
        b = files.read(names[embedding])
        # NaN equals nothing; that of the embedding is reported as such.
        if a.shape != b.shape or (not torch.equal(a, b) and not not_finite_text(b)):
            faults.append(
                f"{stored_head}: is not equal to {names[embedding]}, and config.json ties them; "
                'set "tie_word_embeddings": false there, or remove the tensor'
            )
    return names, faults


def run_import(
    plan: ImportPlan, out: Path, shard_bytes: int, on_progress: OnProgress = lambda _: None
) -> CheckpointManifest:
    """Write the checkpoint folder, complete or not at all.

    Raises a DataError if a weight is NaN or infinite.

    `shard_bytes` is the largest output file, and about the memory needed.
    """
    started_at = time.time()
    with atomic_folder(out) as folder:
        sizes = plan.sizes_bytes
        shards = plan_shards(sizes, shard_bytes, "weights", "weights-00001-of-00001.safetensors")
        described: list[CheckpointFile] = []
        weight_map = write_shards(
            folder,
            shards,
            sizes,
            plan.convert,
            on_progress,
            # A file of many GB is hashed while it is in the page cache.
            on_file=lambda name: described.append(describe(folder, name)),
        )
        if plan.not_finite:
            raise DataError(
                f"{plan.source} cannot be imported, as a run from these weights diverges; fetch it "
                f"again, or save another checkpoint of it:{format_lines(plan.not_finite)}"
            )
        write_index(folder / INDEX, weight_map, sum(sizes))
        types = {str(plan.dtype_of(mapping)).removeprefix("torch.") for mapping in plan.mappings}
        eos = plan.config.eos_token_id
        ImportedModel(
            source=str(plan.source),
            architecture=plan.config.architecture,
            model=plan.config.model.model_dump(mode="json"),
            parameters=plan.num_parameters,
            dtypes=tuple(sorted(types)),
            bos_token_id=plan.config.bos_token_id,
            eos_token_id=tuple(eos) if isinstance(eos, list) else eos,
        ).save(folder / MODEL)
        if plan.tokenizer.files:
            (folder / TOKENIZER_FOLDER).mkdir()
            copy_files(plan.tokenizer.files, folder / TOKENIZER_FOLDER)
        if plan.tokenizer.generation is not None:
            copy_files({GENERATION: plan.tokenizer.generation}, folder)
        return write_manifest(
            folder,
            started_at,
            described,
            step=0,
            tokens=0,
            world_size=1,
            attempt=0,
            recipe=plan.config.architecture,
            fingerprint=fingerprint_digest(plan.config.model.model_dump(mode="json")),
        )
