"""The training loop's state in a checkpoint, and the fingerprint that a resume compares."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from pydantic import Field, ValidationError

from slurmllm.config.recipe import ModelConfig, Recipe
from slurmllm.config.resolve import flatten
from slurmllm.records import Record

TRAIN_STATE = "train_state.json"
# AdamW's state per parameter next to `step`, by torch's names.
MOMENTS = ("exp_avg", "exp_avg_sq")
_MODEL_PREFIX = "model."


class TrainState(Record):
    """`checkpoints/step_XXXXXXXX/train_state.json`."""

    step: int
    tokens: int = Field(description="trained on so far")
    data: dict[str, Any] = Field(description="position in the corpus, of all workers together")
    fingerprint: dict[str, Any] = Field(description="see `fingerprint`")
    guard: dict[str, Any] = Field(
        default_factory=dict,
        description="the divergence guard's statistics of the gradient norm",
    )


def fingerprint(recipe: Recipe, corpus: str, tokenizer: str) -> dict[str, Any]:
    """Returns what must be equal for training to continue a checkpoint: dotted path → value.

    Model and data order. Learning rate, mesh and number of steps may change.

    Args:
        corpus: Content hash of the corpus.
        tokenizer: Content hash of the tokenizer.
    """
    return {
        **flatten(recipe.model.model_dump(mode="json"), _MODEL_PREFIX),
        "data.corpus": corpus,
        "data.tokenizer": tokenizer,
        "data.mask": recipe.data.mask,
        "train.seed": recipe.train.seed,
        "train.global_batch": recipe.train.global_batch,
    }


def fingerprint_digest(fields: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:32]


def model_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the model section of a fingerprint."""
    return {
        path.removeprefix(_MODEL_PREFIX): value
        for path, value in fields.items()
        if path.startswith(_MODEL_PREFIX)
    }


def fingerprint_differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Returns one line per field that differs."""
    try:
        model = ModelConfig.model_validate(model_fields(saved)).model_dump(mode="json")
        # Fields that are newer than the checkpoint take their defaults.
        saved = {**saved, **flatten(model, _MODEL_PREFIX)}
    except ValidationError:  # of another version, whose fields then show as differences
        pass
    return [
        f"{path}: the checkpoint has {saved.get(path)!r}, the run {current.get(path)!r}"
        for path in [*saved, *(path for path in current if path not in saved)]
        if saved.get(path) != current.get(path)
    ]
