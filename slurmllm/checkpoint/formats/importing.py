"""A Hugging Face model folder → a checkpoint folder of ours.

    weights-00001-of-0000N.safetensors   our names, our layout
    weights.safetensors.index.json       which tensor is in which of them
    model.json                           the model (`records.ImportedModel`)
    tokenizer/                           the tokenizer's files, as they were
    manifest.json                        every other file with size and sha256, written last

Everything is looked at before anything is written, and all faults are told at once. Weights pass
through memory one output file at a time.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from slurmllm.checkpoint.folder import atomic_folder
from slurmllm.checkpoint.formats import tokenizer_files
from slurmllm.checkpoint.formats.huggingface import (
    FAMILY_MAPPINGS,
    SHARDS,
    WHOLE,
    TensorMapping,
    tensor_mappings,
)
from slurmllm.checkpoint.formats.huggingface_config import SourceConfig, read_config
from slurmllm.checkpoint.formats.safetensors_files import (
    SafetensorsFiles,
    StoredTensor,
    open_safetensors,
    own_storage,
    plan_shards,
    write_index,
    write_shard,
)
from slurmllm.checkpoint.formats.tokenizer_files import TOKENIZER_FOLDER, TokenizerFiles
from slurmllm.checkpoint.manifest import MANIFEST, describe
from slurmllm.checkpoint.origin import INDEX, MODEL
from slurmllm.checkpoint.state import fingerprint_digest
from slurmllm.errors import ConfigError, StorageError
from slurmllm.records import CheckpointFile, CheckpointManifest, ImportedModel

if TYPE_CHECKING:
    from slurmllm.progress import OnProgress

_TRAINABLE = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class ImportPlan:
    """An import that nothing stands against.

    Attributes:
        source: The Hugging Face folder.
        config: What its config.json says.
        files: Its tensors.
        pieces: Ours to make.
        names: Their names as the table has them → as the files have them.
        dtype: Of the weights to write; None keeps each as it is.
        tokenizer: The files that are there.
    """

    source: Path
    config: SourceConfig
    files: SafetensorsFiles
    mappings: list[TensorMapping]
    names: Mapping[str, str]
    dtype: torch.dtype | None
    tokenizer: TokenizerFiles

    def stored(self, piece: TensorMapping) -> list[StoredTensor]:
        """What the files say of a piece's tensors."""
        return [self.files.tensors[self.names[name]] for name in piece.theirs]

    @property
    def read_bytes(self) -> int:
        """What there is to read."""
        return sum(stored.num_bytes for piece in self.mappings for stored in self.stored(piece))

    def dtype_of(self, piece: TensorMapping) -> torch.dtype:
        """The type that a piece is to have."""
        types = [stored.dtype for stored in self.stored(piece) if stored.dtype is not None]
        return self.dtype or reduce(torch.promote_types, types)


def plan_import(source: Path, dtype: torch.dtype | None = None) -> ImportPlan:
    """Look at a Hugging Face model folder.

    Raises:
        ConfigError: it is of a model that we do not have, or its tensors are not that model's.
        StorageError: files are missing, cut short or damaged, and nothing else is wrong.
    """
    config, config_faults = read_config(source)
    files, file_faults = _open(source)
    names: dict[str, str] = {}
    todo: list[TensorMapping] = []
    if config is not None and not file_faults:
        todo = tensor_mappings(config.model)
        names, config_faults = _match(config, files, todo)
    faults = [*config_faults, *file_faults]
    title = f"{source} cannot be imported"
    if config_faults:
        raise ConfigError(f"{title}: {len(faults)} fault(s)", faults)
    if file_faults:
        raise StorageError("\n".join([f"{title}:", *(f"  {fault}" for fault in faults)]))
    assert config is not None
    return ImportPlan(
        source, config, files, todo, names, dtype, tokenizer_files.tokenizer_in(source)
    )


def _open(source: Path) -> tuple[SafetensorsFiles, list[str]]:
    """The tensors of the folder, in one file or in several with an index; and faults."""
    nothing = SafetensorsFiles(source, {})
    if (source / WHOLE).is_file():  # transformers, too, looks for this one first
        return open_safetensors(source, [WHOLE])
    if not (source / SHARDS).is_file():
        pickled = sorted(path.name for path in source.glob("pytorch_model*.bin"))
        if pickled:
            return nothing, [
                f"{pickled[0]}: pickled weights are not read; load the model in transformers and "
                "save it again with save_pretrained, which writes safetensors"
            ]
        return nothing, [f"neither {WHOLE} nor {SHARDS} is there; fetch the model's weights"]
    try:
        weight_map = json.loads((source / SHARDS).read_bytes())["weight_map"]
        placed = {str(key): str(file) for key, file in weight_map.items()}
    except OSError as error:
        return nothing, [f"{SHARDS} cannot be read: {error.strerror or error}"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return nothing, [f"{SHARDS} is no index of safetensors files; fetch it again"]
    names = sorted(set(placed.values()))
    astray = [name for name in names if Path(name).name != name]
    if astray:
        return nothing, [f"{SHARDS} names {name!r}, outside the folder" for name in astray]
    absent = [name for name in names if not (source / name).exists()]
    files, faults = open_safetensors(source, [name for name in names if name not in absent], placed)
    return files, [
        f"{SHARDS} names {name}, which is not there; fetch it" for name in absent
    ] + faults


def _match(
    config: SourceConfig, files: SafetensorsFiles, todo: list[TensorMapping]
) -> tuple[dict[str, str], list[str]]:
    """Their names by the table → in the files, and every tensor that is not as it should be."""
    conversion = FAMILY_MAPPINGS[config.model.family]
    expected = {name: shape for piece in todo for name, shape in piece.theirs.items()}
    head, embedding = (
        f"{row.theirs[0]}.weight"
        for part in ("head", "embed")
        for row in conversion.rows
        if row.ours == part
    )
    names: dict[str, str] = {}
    faults: list[str] = []
    for key in files.tensors:
        name = conversion.todays_name(key)
        if name is None:
            continue
        if name not in expected and conversion.prefix + name in expected:
            name = conversion.prefix + name
        if name in expected or (name == head and config.model.tied_embeddings):
            if name in names:
                faults.append(f"{key}: is there as {names[name]} too; keep one of them")
            names[name] = key
        else:
            faults.append(f"{key}: is no tensor of this model; {_shape(files, key)} was found")
    for name, shape in expected.items():
        if name not in names:
            faults.append(f"{name}: is missing; {list(shape)} was expected")
        elif files.tensors[names[name]].shape != shape:
            faults.append(
                f"{names[name]}: is {_shape(files, names[name])}; {list(shape)} was expected"
            )
        elif files.tensors[names[name]].code not in _TRAINABLE:
            faults.append(
                f"{names[name]}: is of type {files.tensors[names[name]].code}; weights must be one "
                f"of {', '.join(_TRAINABLE)}"
            )
    if not faults and config.model.tied_embeddings and head in names:
        faults += _untied(files, names.pop(head), names[embedding])
    return names, faults


def _shape(files: SafetensorsFiles, key: str) -> str:
    return str(list(files.tensors[key].shape))


def _untied(files: SafetensorsFiles, head: str, embedding: str) -> list[str]:
    """A head that is saved though tied is passed over, if it is the embedding."""
    a, b = files.read(head), files.read(embedding)
    if a.shape == b.shape and torch.equal(a, b):
        return []
    return [
        f"{head}: is not equal to {embedding}, and config.json ties them; set "
        '"tie_word_embeddings": false there, or remove the tensor'
    ]


def run_import(
    plan: ImportPlan, out: Path, shard_bytes: int, on_progress: OnProgress = lambda _: None
) -> CheckpointManifest:
    """Write the checkpoint folder, whole or not at all.

    Args:
        plan: What to import.
        out: The folder to make.
        shard_bytes: Largest output file, and about what is held in memory.
        on_progress: Told the bytes read so far.

    Raises:
        RunError: there is something at `out` already.
        StorageError: a file cannot be read or written.
    """
    begun = time.time()
    with atomic_folder(out) as folder:
        described = _write_weights(plan, folder, shard_bytes, on_progress)
        _record(plan).save(folder / MODEL)
        if plan.tokenizer.files:
            (folder / TOKENIZER_FOLDER).mkdir()
            tokenizer_files.copy_files(plan.tokenizer.files, folder / TOKENIZER_FOLDER)
        weights = {file.path for file in described}
        others = (str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
        described += [describe(folder, name) for name in others if name not in weights]
        manifest = CheckpointManifest(
            step=0,
            tokens=0,
            world_size=1,
            attempt=0,
            recipe=plan.config.architecture,
            saved_at=time.time(),
            save_s=time.time() - begun,
            fingerprint=fingerprint_digest(plan.config.model.model_dump(mode="json")),
            files=tuple(sorted(described, key=lambda file: file.path)),
        )
        manifest.save(folder / MANIFEST)
    return manifest


def _write_weights(
    plan: ImportPlan, folder: Path, shard_bytes: int, on_progress: OnProgress
) -> list[CheckpointFile]:
    sizes = [
        torch.Size(piece.shape).numel() * plan.dtype_of(piece).itemsize for piece in plan.mappings
    ]
    weight_map: dict[str, str] = {}
    described = []
    done_bytes = 0
    for shard in plan_shards(sizes, shard_bytes, "weights", "weights-00001-of-00001.safetensors"):
        tensors: dict[str, Tensor] = {}
        for piece in (plan.mappings[index] for index in shard.parts):
            theirs = [plan.files.read(plan.names[name]) for name in piece.theirs]
            ours = piece.layout.join(plan.config.model, theirs)
            tensors[piece.ours] = own_storage(ours.to(plan.dtype_of(piece)))
            done_bytes += sum(stored.num_bytes for stored in plan.stored(piece))
            on_progress(done_bytes)
        write_shard(folder / shard.file, tensors)
        described.append(describe(folder, shard.file))
        weight_map.update(dict.fromkeys(tensors, shard.file))
    write_index(folder / INDEX, weight_map, sum(sizes))
    return described


def _record(plan: ImportPlan) -> ImportedModel:
    types = {str(plan.dtype_of(piece)).removeprefix("torch.") for piece in plan.mappings}
    eos = plan.config.eos_token_id
    return ImportedModel(
        source=str(plan.source),
        architecture=plan.config.architecture,
        model=plan.config.model.model_dump(mode="json"),
        parameters=sum(torch.Size(piece.shape).numel() for piece in plan.mappings),
        dtypes=tuple(sorted(types)),
        bos_token_id=plan.config.bos_token_id,
        eos_token_id=tuple(eos) if isinstance(eos, list) else eos,
    )
