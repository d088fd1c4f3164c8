"""A Hugging Face model's folder, from the hub's cache, and its tokenizer's files; no torch."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from slurmllm.core.config.recipe import ModelConfig
from slurmllm.core.config.yaml_source import read_yaml
from slurmllm.core.errors import DataError, InfrastructureError, UserError
from slurmllm.core.format import Json, format_bytes, format_count
from slurmllm.core.run.rundir import RunDir, is_run, storage_errors
from slurmllm.core.run.safe_files import open_regular
from slurmllm.data.tokenizer import TokenEncoder, count_ids, read_settings, read_tokenizer

Paths = Mapping[str, Path]  # by file name
TOKENIZER_FOLDER = "tokenizer"  # in an imported checkpoint
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
GENERATION = "generation_config.json"
# All files that transformers reads a tokenizer from.
FILES = (
    TOKENIZER,
    TOKENIZER_CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)

_PREFIX = "hf://"
# The tokenizer, configuration and safetensors of a model: no pickles, nor other programs' weights.
_WEIGHTS = ["model.safetensors", "model-*.safetensors", "model.safetensors.index.json"]
_PATTERNS = ["config.json", *_WEIGHTS, *FILES]


class TokenizerFiles(NamedTuple):
    """Files of a tokenizer."""

    files: Paths  # file name → path
    end_of_document: int | None = None  # id of what ends one; None: see config.json
    end_token: str | None = None  # that token
    num_ids: int = 0  # largest id + 1, 0 if the tokenizer was not loaded
    generation: Path | None = None  # the model's generation_config.json


@dataclass(frozen=True)
class ExportedModel:
    """A Hugging Face model folder that was written from a checkpoint."""

    path: Path  # the folder
    checkpoint: Path  # the checkpoint's folder
    model: ModelConfig
    tokenizer: tuple[str, ...]  # names of its files; empty: none is known
    files: tuple[str, ...]  # names of all files
    num_bytes: int  # of the weights
    num_parameters: int

    def __repr__(self) -> str:
        return (
            f"<ExportedModel {self.path}: {format_count(self.num_parameters)} parameters, "
            f"{format_bytes(self.num_bytes)}>"
        )

    def to_dict(self) -> Json:
        """Return it for JSON, as `slurmllm checkpoint export --json` prints it."""
        return {
            "checkpoint": str(self.checkpoint),
            "out": str(self.path),
            "model": self.model.model_dump(mode="json"),
            "tokenizer": list(self.tokenizer),
            "files": list(self.files),
            "bytes": self.num_bytes,
        }


def tokenizer_in(folder: Path) -> TokenizerFiles:
    """Return the checked tokenizer files of a model folder, which may be somebody else's.

    Links must stay in it or in its Hugging Face cache: else a file of the user's would be copied
    into what he publishes. Raises a DataError for others, and for files that are no tokenizer's.
    """
    files = {name: folder / name for name in (*FILES, GENERATION) if (folder / name).is_file()}
    allowed = [Path(os.path.realpath(folder))]
    if allowed[0].parent.name == "snapshots":
        allowed.append(allowed[0].parent.parent / "blobs")
    for name, path in files.items():
        real = Path(os.path.realpath(path))
        if not any(real.is_relative_to(root) for root in allowed):
            raise DataError(
                f"{path} is a link to {real}, outside the model's folder; replace it by a copy if "
                "it belongs to the tokenizer"
            )
        if name.endswith(".json") and name != TOKENIZER:
            read_settings(path)  # transformers reads it
    generation = files.pop(GENERATION, None)
    num_ids = count_ids(read_tokenizer(files[TOKENIZER])[0]) if TOKENIZER in files else 0
    return TokenizerFiles(files, num_ids=num_ids, generation=generation)


def tokenizer_from_file(path: Path) -> TokenizerFiles:
    """Load a tokenizer.json, with the tokenizer files next to it."""
    encoder = TokenEncoder(path)
    end = encoder.end_of_document
    files: Paths = {TOKENIZER: path}
    if path.name == TOKENIZER and (path.parent / TOKENIZER_CONFIG).is_file():
        files = tokenizer_in(path.parent).files
    return TokenizerFiles(files, end, encoder.decode(np.array([end])), encoder.num_ids)


def checkpoint_tokenizer(directory: Path, named: Path | None) -> TokenizerFiles:
    """Find a checkpoint's tokenizer: `named`, else the imported one, else its run's, if any."""
    if named is not None:
        return tokenizer_from_file(named)
    if (directory / TOKENIZER_FOLDER).is_dir():
        return tokenizer_in(directory / TOKENIZER_FOLDER)
    run = RunDir(directory.absolute().parent.parent)
    # Not validated: the run may be of another version.
    values = read_yaml(run.config)[0] if is_run(run.path) else {}
    path = (values.get("data") or {}).get("tokenizer")
    if not path:
        return TokenizerFiles({})
    try:
        return tokenizer_from_file(Path(path))
    except DataError as error:
        raise DataError(f"the run's tokenizer: {error}; or give --tokenizer FILE") from error


def copy_files(files: Paths, folder: Path) -> None:
    """Copy files into a folder durably (fsync); StorageError if one cannot be read."""
    for name, path in files.items():
        with storage_errors(f"cannot read {path}"):
            source = open_regular(path)
        # Errors of the copy are of the target: `atomic_folder` reports them.
        with source, (folder / name).open("wb") as target:
            shutil.copyfileobj(source, target)
            target.flush()
            os.fsync(target.fileno())


def write_tokenizer_config(folder: Path, *, seq_len: int, end_token: str | None) -> None:
    """Write the tokenizer_config.json that AutoTokenizer needs to load a bare tokenizer.json."""
    values: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": seq_len,
        "clean_up_tokenization_spaces": False,
    }
    if end_token is not None:
        values.update(bos_token=end_token, eos_token=end_token)
    content = json.dumps(values, indent=2) + "\n"
    (folder / TOKENIZER_CONFIG).write_text(content, encoding="utf-8")


def model_folder(source: str) -> Path:
    """Return the folder of a model: `source` itself, or that of `hf://ORG/NAME[@REVISION]`.

    As for other users of the hub, HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE apply. Raises a
    UserError for the name or its rights, an InfrastructureError for the hub or the cache.
    """
    if not source.startswith(_PREFIX):
        return Path(source)
    from huggingface_hub import constants, errors, snapshot_download  # 0.3 s of imports

    name, _, revision = source.removeprefix(_PREFIX).partition("@")
    try:
        folder = Path(snapshot_download(name, revision=revision or None, allow_patterns=_PATTERNS))
    except (errors.HFValidationError, errors.RepositoryNotFoundError) as error:
        raise UserError(
            f"{source} cannot be downloaded: {error}; write {_PREFIX}ORG/NAME[@REVISION], and for "
            "a private or gated model log in with `hf auth login`, or set HF_TOKEN"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise UserError(
            f"{source}: no such branch, tag or commit; see {constants.ENDPOINT}/{name}/tree/main"
        ) from error
    # The base of the errors of the hub's http library need not be an OSError.
    except (OSError, errors.HTTPError) as error:  # type: ignore[attr-defined]
        offline = constants.HF_HUB_OFFLINE
        version = f" --revision {revision}" if revision else ""
        reason = "HF_HUB_OFFLINE is set; unset it" if offline else f"{error}; try again"
        raise (DataError if offline else InfrastructureError)(
            f"{source} cannot be downloaded to {constants.HF_HUB_CACHE}: {reason}, or copy there "
            f"what `hf download {name}{version}` caches on a machine with internet access"
        ) from error
    if not any(folder.glob("*.safetensors")):
        raise DataError(
            f"{source} has no safetensors, and pickled weights are not read; load the model in "
            "transformers and save it with save_pretrained, then import that folder"
        )
    return folder
