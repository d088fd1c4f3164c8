"""The model of a checkpoint folder, and whether a recipe can use its weights; no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from slurmllm.checkpoint.state import TRAIN_STATE, TrainState, model_fields
from slurmllm.config.families import FAMILIES
from slurmllm.config.recipe import ModelConfig
from slurmllm.errors import RunError, StorageError
from slurmllm.records import ImportedModel

MODEL = "model.json"
INDEX = "weights.safetensors.index.json"
# Fields that change neither the parameters nor what they compute, or that are compared separately.
_IGNORED_FIELDS = {
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
        imported: The record that `checkpoint import` wrote; None for a run's checkpoint.
    """

    directory: Path
    model: ModelConfig
    imported: ImportedModel | None


def read_origin(directory: Path) -> Origin:
    """Reads which model a checkpoint folder holds.

    Raises:
        RunError: The folder is no checkpoint, or its model is unknown to this version.
        StorageError: The folder is damaged.
    """
    imported: ImportedModel | None = None
    try:
        if (directory / MODEL).is_file():
            imported = ImportedModel.load(directory / MODEL)
            values: dict[str, Any] = imported.model
        elif (directory / TRAIN_STATE).is_file():
            values = model_fields(TrainState.load(directory / TRAIN_STATE).fingerprint)
        else:
            raise RunError(
                f"{directory} is no checkpoint: it holds neither {TRAIN_STATE} (a run's) nor "
                f"{MODEL} (an imported one); name runs/<run>/checkpoints/step_XXXXXXXX or a folder "
                "that `slurmllm checkpoint import` created"
            )
        return Origin(directory, ModelConfig.model_validate(values), imported)
    except OSError as error:
        raise StorageError(f"cannot read {directory}: {error.strerror or error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "model"
        raise RunError(
            f"{directory} is of a model that this version does not know: model.{field}: "
            f"{first['msg']}; use the version that wrote it"
        ) from error


def model_differences(stored: ModelConfig, wanted: ModelConfig) -> list[str]:
    """Compares a checkpoint's model with a recipe's; returns one line per incompatible field."""
    fields = [
        (name, getattr(stored, name), getattr(wanted, name))
        for name in ModelConfig.model_fields
        if name not in _IGNORED_FIELDS
    ]
    fields.append(("num_kv_heads", stored.kv_heads, wanted.kv_heads))
    differing = [field for field in fields if field[1] != field[2]]
    # Learned positions are parameters: a shorter table has no rows for the last positions.
    if FAMILIES[stored.family].positions == "learned" and stored.seq_len < wanted.seq_len:
        differing.append(("seq_len", stored.seq_len, wanted.seq_len))
    return [f"model.{name}: the checkpoint has {a!r}, the recipe {b!r}" for name, a, b in differing]


def require_model(directory: Path, wanted: ModelConfig) -> Origin:
    """Checks that a run may start from a checkpoint (`train.init_from`).

    Raises:
        RunError: The folder is no checkpoint, or its model differs.
        StorageError: The folder is damaged.
    """
    origin = read_origin(directory)
    lines = model_differences(origin.model, wanted)
    if lines:
        raise RunError(
            f"the weights in {directory} are of another model than the recipe's:\n"
            + "\n".join(f"  {line}" for line in lines)
            + "\nset the recipe's values to the checkpoint's (--set), or name another checkpoint "
            "in train.init_from"
        )
    return origin
