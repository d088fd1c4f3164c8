"""Which model's weights a checkpoint folder holds, and whether they fit a recipe; torch-free."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from slurmllm.checkpoint.state import TRAIN_STATE, TrainState
from slurmllm.config.families import FAMILIES
from slurmllm.config.recipe import ModelConfig
from slurmllm.errors import RunError, StorageError
from slurmllm.records import ImportedModel

MODEL = "model.json"
INDEX = "weights.safetensors.index.json"
_PREFIX = "model."
# Fields that change neither the parameters nor what they compute, or are looked at by themselves.
_FREE = {
    "init_std",
    "scaled_init",
    "output_init_std",
    "vocab_pad_multiple",
    "num_kv_heads",
    "seq_len",
}


class Origin(NamedTuple):
    """A checkpoint folder and its model.

    Attributes:
        directory: The folder.
        model: The model whose weights it holds.
        imported: Its record, where `checkpoint import` made it; None for a run's checkpoint.
    """

    directory: Path
    model: ModelConfig
    imported: ImportedModel | None


def read_origin(directory: Path) -> Origin:
    """Look what a checkpoint folder holds.

    Raises:
        RunError: it is no checkpoint, or of a model that this version does not know.
        StorageError: it is damaged.
    """
    imported: ImportedModel | None = None
    try:
        if (directory / MODEL).is_file():
            imported = ImportedModel.load(directory / MODEL)
            values: dict[str, Any] = imported.model
        elif (directory / TRAIN_STATE).is_file():
            fields = TrainState.load(directory / TRAIN_STATE).fingerprint
            values = {
                path.removeprefix(_PREFIX): value
                for path, value in fields.items()
                if path.startswith(_PREFIX)
            }
        else:
            raise RunError(
                f"{directory} is no checkpoint: it holds neither {TRAIN_STATE} (a run's) nor "
                f"{MODEL} (an imported one); name runs/<run>/checkpoints/step_XXXXXXXX or what "
                "`slurmllm checkpoint import` made"
            )
        return Origin(directory, ModelConfig.model_validate(values), imported)
    except OSError as error:
        raise StorageError(f"cannot look at {directory}: {error.strerror or error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "model"
        raise RunError(
            f"{directory} is of a model that this version does not know: model.{where}: "
            f"{first['msg']}; use the version that wrote it"
        ) from error


def model_differences(stored: ModelConfig, wanted: ModelConfig) -> list[str]:
    """Why weights cannot serve a recipe: a line for each field that differs, empty where they fit.

    Args:
        stored: The checkpoint's model.
        wanted: The recipe's.
    """
    lines = []
    for field in ModelConfig.model_fields:
        if field not in _FREE and getattr(stored, field) != getattr(wanted, field):
            lines.append((field, getattr(stored, field), getattr(wanted, field)))
    if stored.kv_heads != wanted.kv_heads:
        lines.append(("num_kv_heads", stored.kv_heads, wanted.kv_heads))
    learned = FAMILIES[stored.family].positions == "learned"
    if learned and stored.seq_len < wanted.seq_len:
        lines.append(("seq_len", stored.seq_len, wanted.seq_len))
    return [f"model.{name}: the checkpoint has {a!r}, the recipe {b!r}" for name, a, b in lines]


def require_model(directory: Path, wanted: ModelConfig) -> Origin:
    """Look at the checkpoint that a run is to start from (`train.init_from`).

    Raises:
        RunError: it is no checkpoint, or another model's.
        StorageError: it is damaged.
    """
    origin = read_origin(directory)
    lines = model_differences(origin.model, wanted)
    if lines:
        raise RunError(
            f"the weights in {directory} are of another model than the recipe's:\n"
            + "\n".join(f"  {line}" for line in lines)
            + "\nput the recipe's values to the checkpoint's (--set), or name another checkpoint "
            "in train.init_from"
        )
    return origin
