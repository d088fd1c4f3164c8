"""Whose checkpoint it is, also where the checkpoint is older than a field of the model."""

from __future__ import annotations

from train.gang import small_config

from slurmllm.checkpoint.state import fingerprint, fingerprint_differences

RECIPE = small_config().recipe
FIELDS = fingerprint(RECIPE, "corpus", "tokenizer")
YOUNGER = ("model.activation", "model.tied_embeddings", "model.scaled_init")


def test_fields_newer_than_the_checkpoint_have_their_default() -> None:
    old = {path: value for path, value in FIELDS.items() if path not in YOUNGER}
    assert fingerprint_differences(old, FIELDS) == []


def test_a_newer_field_that_the_run_sets_otherwise_is_a_difference() -> None:
    old = {path: value for path, value in FIELDS.items() if path not in YOUNGER}
    other = fingerprint(small_config("model.activation=gelu_tanh").recipe, "corpus", "tokenizer")
    assert fingerprint_differences(old, other) == [
        "model.activation: the checkpoint has 'gelu', the run 'gelu_tanh'"
    ]


def test_a_model_that_this_version_does_not_know() -> None:
    strange = {**FIELDS, "model.family": "mamba"}
    assert fingerprint_differences(strange, FIELDS) == [
        "model.family: the checkpoint has 'mamba', the run 'neox'"
    ]
