"""The training state and the model of a checkpoint, and whether a run can use them; no torch."""

from __future__ import annotations

import hashlib
import json
import logging
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from pydantic import Field, ValidationError

from slurmllm.core.config.families import FAMILIES
from slurmllm.core.config.recipe import ADAMW, ModelConfig, Recipe
from slurmllm.core.config.yaml_source import flatten
from slurmllm.core.errors import RunError, StorageError
from slurmllm.core.format import Json, Values, format_lines
from slurmllm.core.run.artifact_records import DataRecord, ImportedModel
from slurmllm.core.run.records import Record, first_problem
from slurmllm.core.run.rundir import RunDir, storage_errors

log = logging.getLogger(__name__)
TRAIN_STATE = "train_state.json"
# AdamW's state per parameter next to `step`, by torch's names.
MOMENTS = ("exp_avg", "exp_avg_sq")
MOMENTUM = "momentum_buffer"  # Muon's, likewise
MODEL = "model.json"
INDEX = "weights.safetensors.index.json"
_MODEL_PREFIX = "model."
_OPTIMIZER = "optim.name"
# Fields that change neither the parameters nor what they compute, or that are compared separately.
_IGNORED_FIELDS = {
    "init_std",
    "scaled_init",
    "output_init_std",
    "vocab_pad_multiple",
    "num_kv_heads",
    "head_dim",
    "seq_len",
}
# Sections that decide what is trained, and fields of them that only decide how it is computed, or
# are compared separately.
_TRAINING = {"train", "optim", "guard", "hooks", "plugins"}
_EXECUTION = {
    "train.micro_batch",
    "train.activation_checkpointing",
    "train.compile",
    "train.log_every",
    "train.incomplete_graphs",
    "train.init_from",
    "train.finetune",
}


class TrainState(Record):
    """`checkpoints/step_XXXXXXXX/train_state.json`."""

    step: int
    tokens: int  # trained on so far
    data: Json  # position in the corpus, of all workers together
    fingerprint: Json  # see `fingerprint`
    # The divergence guard's statistics of the gradient norm.
    guard: Json = Field(default_factory=dict)
    # Dotted path → value that it was trained with; empty in checkpoints of older versions.
    settings: Json = Field(default_factory=dict)

    def changed_settings(self, recipe: Recipe) -> str:
        """Return what a recipe changes of the settings that it was trained with; empty: nothing."""
        changed = [
            f"{path} {self.settings[path]!r} → {value!r}"
            for path, value in training_settings(recipe).items()
            if self.settings.get(path, value) != value
        ]
        if not changed:
            return ""
        return (
            f"config.yaml differs from what step {self.step} was trained with: {', '.join(changed)}"
        )


def fingerprint(recipe: Recipe, corpus: str, tokenizer: str) -> Json:
    """Return what must be equal for training to continue: model, optimizer and data order."""
    optimizer = {} if recipe.optim.name == ADAMW else {_OPTIMIZER: recipe.optim.name}
    return {
        **flatten(recipe.model.model_dump(mode="json"), _MODEL_PREFIX),
        **optimizer,
        "data.corpus": corpus,
        "data.tokenizer": tokenizer,
        "data.mask": recipe.data.mask,
        "train.seed": recipe.train.seed,
        "train.global_batch": recipe.train.global_batch,
    }


def training_settings(recipe: Recipe) -> Json:
    """Return dotted path → value of all settings that decide what a run trains."""
    values = recipe.model_dump(mode="json", include=_TRAINING)
    whole = {name: values.pop(name) for name in ("hooks", "plugins")}
    fields = {path: value for path, value in flatten(values).items() if path not in _EXECUTION}
    return {**fields, **whole}


def fingerprint_digest(fields: Values) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:32]


def model_fields(fields: Values) -> Json:
    """Return the model section of a fingerprint, nested as in a recipe."""
    model: Json = {}
    for path, value in fields.items():
        if path.startswith(_MODEL_PREFIX):
            section, _, name = path.removeprefix(_MODEL_PREFIX).partition(".")
            if name:  # a field of rope_scaling
                model.setdefault(section, {})[name] = value
            else:
                model[section] = value
    return model


def fingerprint_differences(saved: Values, current: Values) -> list[str]:
    with suppress(ValidationError):  # of another version, whose fields then show as differences
        model = ModelConfig.model_validate(model_fields(saved)).model_dump(mode="json")
        # Fields that are newer than the checkpoint take their defaults.
        saved = {**saved, **flatten(model, _MODEL_PREFIX)}
    saved = {_OPTIMIZER: ADAMW, **saved}
    current = {_OPTIMIZER: ADAMW, **current}
    return [
        f"{path}: the checkpoint has {saved.get(path)!r}, the run {current.get(path)!r}"
        for path in {**saved, **current}
        if saved.get(path) != current.get(path)
    ]


def require_same_settings(run: RunDir, recipe: Recipe, directory: Path | None) -> None:
    """Raise a RunError if a recipe cannot continue a run from `directory`, if that is known."""
    lines: list[str] = []
    with suppress(StorageError):  # the workers report damaged files
        if directory is not None:
            state = TrainState.load(directory / TRAIN_STATE)
            if warning := state.changed_settings(recipe):
                log.warning("%s", warning)
            saved = state.fingerprint
            corpus = saved.get("data.corpus", "")
            tokenizer = saved.get("data.tokenizer", "")
            lines += fingerprint_differences(saved, fingerprint(recipe, corpus, tokenizer))
    with suppress(StorageError):
        began_with = DataRecord.find(run.data)
        now = recipe.data.validation
        if began_with is not None and began_with.validation != now:
            lines.append(f"data.validation: the run began with {began_with.validation}, now {now}")
    if lines:
        raise RunError(
            f"run {run.name!r} cannot be resumed: settings differ from those it has trained with:"
            f"{format_lines(lines)}\n"
            "restore the original values with --set, or start a new run with another --name"
        )


class Origin(NamedTuple):
    """A checkpoint folder and its model."""

    directory: Path
    model: ModelConfig
    imported: ImportedModel | None  # record of `checkpoint import`; None for a run's checkpoint


def read_origin(directory: Path) -> Origin:
    """Read a folder's model; RunError if it holds no known one, StorageError if it is damaged."""
    imported: ImportedModel | None = None
    with storage_errors(f"cannot read {directory}"):
        if (directory / MODEL).is_file():
            imported = ImportedModel.load(directory / MODEL)
            values = imported.model
        elif (directory / TRAIN_STATE).is_file():
            values = model_fields(TrainState.load(directory / TRAIN_STATE).fingerprint)
        else:
            raise RunError(
                f"{directory} is not a checkpoint: it holds neither {TRAIN_STATE} (a run's) nor "
                f"{MODEL} (an imported one); name runs/<run>/checkpoints/step_XXXXXXXX or a folder "
                "that `slurmllm checkpoint import` created"
            )
    try:
        return Origin(directory, ModelConfig.model_validate(values), imported)
    except ValidationError as error:
        raise RunError(
            f"{directory} is of a model that this version does not know: "
            f"model.{first_problem(error, 'model')}; use the version that wrote it"
        ) from error


def model_differences(stored: ModelConfig, required: ModelConfig) -> list[str]:
    """Compare a checkpoint's model with a recipe's; return one line per incompatible field."""
    a, b = (
        {
            **model.model_dump(mode="json", exclude=_IGNORED_FIELDS),
            "num_kv_heads": model.kv_heads,
            "head_dim": model.head_width,
        }
        for model in (stored, required)
    )
    if _attention(stored) == _attention(required):
        for name in ("rotary_base", "rope_scaling", "attention_pattern"):
            b[name] = a[name]
    # Learned positions are parameters: a shorter table has no rows for the last positions.
    if FAMILIES[stored.family].positions == "learned" and stored.seq_len < required.seq_len:
        a["seq_len"] = stored.seq_len
        b["seq_len"] = required.seq_len
    return [
        f"model.{name}: the checkpoint has {a[name]!r}, the recipe {b[name]!r}"
        for name in a
        if a[name] != b[name]
    ]


def _attention(model: ModelConfig) -> list[object]:
    """Return window and rotary positions of each layer: different settings may be equivalent."""
    return [
        (kind.window, kind.rope if kind.rope == "none" else model.rotary_scheme(kind))
        for kind in model.layer_kinds
    ]


def require_model(directory: Path, required: ModelConfig) -> Origin:
    """Raise a RunError if the folder is not of this model, a StorageError if it is damaged."""
    origin = read_origin(directory)
    lines = model_differences(origin.model, required)
    if lines:
        raise RunError(
            f"the weights in {directory} are of another model than the recipe's:"
            f"{format_lines(lines)}\n"
            "set the recipe's values to the checkpoint's (--set), or name another checkpoint "
            "in train.init_from"
        )
    return origin
