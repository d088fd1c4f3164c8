"""Whose checkpoint it is, also where the checkpoint is older than a field of the model."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurmllm.core.errors import RunError
from slurmllm.core.run.artifact_records import DataRecord
from slurmllm.core.run.rundir import RunDir
from slurmllm.train.checkpoint.state import (
    TRAIN_STATE,
    TrainState,
    fingerprint,
    fingerprint_differences,
    model_differences,
    model_fields,
    require_same_settings,
)
from train.gang import small_config

RECIPE = small_config().recipe
FIELDS = fingerprint(RECIPE, "corpus", "tokenizer")
YOUNGER = ("model.activation", "model.tied_embeddings", "model.scaled_init")


def test_fields_newer_than_the_checkpoint_have_their_default() -> None:
    old = {path: value for path, value in FIELDS.items() if path not in YOUNGER}
    assert fingerprint_differences(old, FIELDS) == []
    other = fingerprint(small_config("model.activation=gelu_tanh").recipe, "corpus", "tokenizer")
    assert fingerprint_differences(old, other) == [
        "model.activation: the checkpoint has 'gelu', the run 'gelu_tanh'"
    ]
    strange = {**FIELDS, "model.family": "mamba"}
    assert fingerprint_differences(strange, FIELDS) == [
        "model.family: the checkpoint has 'mamba', the run 'neox'"
    ]


def test_the_model_is_nested_again() -> None:
    scaling = {"kind": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    values = {**scaling, "original_max_position_embeddings": 8192}
    options = [f"model.rope_scaling.{name}={value}" for name, value in values.items()]
    llama = small_config("model.family=llama", "model.rotary_pct=1", *options).recipe
    fields = fingerprint(llama, "corpus", "tokenizer")
    assert fields["model.rope_scaling.factor"] == 8
    assert model_fields(fields)["rope_scaling"] == values
    assert fingerprint_differences(fields, fields) == []
    unscaled = small_config("model.family=llama", "model.rotary_pct=1").recipe
    (kind, *others) = fingerprint_differences(fields, fingerprint(unscaled, "corpus", "tokenizer"))
    assert kind == "model.rope_scaling.kind: the checkpoint has 'llama3', the run None"
    assert len(others) == 4


def test_a_head_width_is_compared_as_a_number() -> None:
    llama = small_config("model.family=llama", "model.rotary_pct=1").recipe.model
    same = llama.model_copy(update={"head_dim": llama.hidden_size // llama.num_heads})
    assert model_differences(llama, same) == []
    wider = llama.model_copy(update={"head_dim": 2 * llama.head_width})
    (line,) = model_differences(llama, wider)
    assert line.startswith("model.head_dim: the checkpoint has")


def test_settings_are_compared_before_a_resume(tmp_path: Path) -> None:
    run, newest = RunDir(tmp_path / "a"), tmp_path / "a" / "checkpoints" / "step_00000010"
    newest.mkdir(parents=True)
    TrainState(step=10, tokens=1, data={}, fingerprint=FIELDS).save(newest / TRAIN_STATE)
    DataRecord(
        corpora=(), tokenizer=None, seed=1, seq_len=32, global_batch=8, mask="none", validation=0.02
    ).save(run.data)

    def resume(*changes: str) -> None:
        require_same_settings(run, small_config("data.validation=0.02", *changes).recipe, newest)

    resume()
    resume("optim.lr=1", "train.steps=99", "parallel.tensor=2")
    with pytest.raises(RunError, match=r"model.num_layers: the checkpoint has 2, the run 4"):
        resume("model.num_layers=4")
    with pytest.raises(RunError, match=r"data.validation: the run began with 0.02, now 0.1"):
        resume("data.validation=0.1")
    (newest / TRAIN_STATE).write_text("{")
    resume("model.num_layers=4")  # the workers report the damaged file
