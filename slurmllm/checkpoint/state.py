"""What the training loop must remember besides the backend's shards, and whose checkpoint it is."""

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
# What AdamW keeps of each parameter besides `step`, as torch names it.
MOMENTS = ("exp_avg", "exp_avg_sq")


class TrainState(Record):
    """`checkpoints/step_XXXXXXXX/train_state.json`."""

    step: int
    tokens: int = Field(description="trained on so far")
    data: dict[str, Any] = Field(description="position in the corpus, of all workers together")
    fingerprint: dict[str, Any] = Field(description="see `fingerprint`")
    guard: dict[str, Any] = Field(
        default_factory=dict, description="what the divergence guard has seen of the gradient norm"
    )


def fingerprint(recipe: Recipe, corpus: str, tokenizer: str) -> dict[str, Any]:
    """What must be equal for a checkpoint to be continued: dotted path → value.

    Model and data order. Not the learning rate, the mesh or the number of steps, which may change.

    Args:
        recipe: The run's.
        corpus: Identity of the corpus by its content.
        tokenizer: Identity of the tokenizer by its content.
    """
    return {
        **flatten(recipe.model.model_dump(mode="json"), "model."),
        "data.corpus": corpus,
        "data.tokenizer": tokenizer,
        "data.mask": recipe.data.mask,
        "train.seed": recipe.train.seed,
        "train.global_batch": recipe.train.global_batch,
    }


def fingerprint_digest(fields: Mapping[str, Any]) -> str:
    """One word for a fingerprint's fields."""
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:32]


def fingerprint_differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """One line for each field that differs; fields newer than the checkpoint have their default."""
    saved = _completed(saved)
    return [
        f"{path}: the checkpoint has {saved.get(path)!r}, the run {current.get(path)!r}"
        for path in [*saved, *(path for path in current if path not in saved)]
        if saved.get(path) != current.get(path)
    ]


def _completed(saved: Mapping[str, Any]) -> dict[str, Any]:
    prefix = "model."
    stored = {
        path.removeprefix(prefix): value for path, value in saved.items() if path.startswith(prefix)
    }
    try:
        model = ModelConfig.model_validate(stored).model_dump(mode="json")
    except ValidationError:  # of another version, whose fields then show as differences
        return dict(saved)
    return {**saved, **flatten(model, prefix)}
