"""The torch-free statements on families against the decoder that is built of them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import nn

from slurmllm.core.config.families import FAMILIES, sharding_plan
from slurmllm.core.config.families.family import Activation
from slurmllm.core.config.huggingface import ACTIVATION_NAMES, config_faults, write_config
from slurmllm.core.config.profiles import available
from slurmllm.core.config.recipe import ModelConfig
from slurmllm.core.config.resolve import recipes_dir, resolve
from slurmllm.plan.parameters import parameter_shapes
from slurmllm.train.model.decoder import ACTIVATIONS, Decoder, build_model


def on_meta(config: ModelConfig) -> Decoder:
    with torch.device("meta"):
        return build_model(config)


@pytest.mark.parametrize("recipe", available(recipes_dir()))
def test_parameters_are_counted_exactly(recipe: str) -> None:
    config = resolve(recipe).recipe.model
    built = {name: tuple(p.shape) for name, p in on_meta(config).named_parameters()}
    assert parameter_shapes(config) == built


@pytest.mark.parametrize(
    ("layers", "written", "stored"),
    [
        (6, [{}], ()),
        (6, [{"window": 4}, {}] * 3, ((4, None), (None, None))),
        (5, [{"window": 4}, {"window": 4}, {}], ((4, None), (4, None), (None, None))),
        (2, [{"window": 4}, {"window": 4}, {}], ((4, None),)),
        (4, [{"rope": 100}, {"rope": "none"}], ((None, None), (None, "none"))),
    ],
)
def test_equal_layers_have_one_form(
    layers: int, written: list[Any], stored: tuple[tuple[object, object], ...]
) -> None:
    model = resolve("tiny_llama").recipe.model.model_dump(mode="json")
    changes = {"family": "gemma3", "num_layers": layers, "rotary_base": 100.0}
    model |= {**changes, "attention_pattern": written, "activation": "gelu_tanh"}
    config = ModelConfig.model_validate(model)
    assert tuple((kind.window, kind.rope) for kind in config.attention_pattern) == stored
    assert ModelConfig.model_validate(config.model_dump(mode="json")) == config
    assert ModelConfig.model_validate(model | {"query_pre_attn_scalar": 32}) == config
    # Whole numbers of earlier versions' runs.
    assert ModelConfig.model_validate(model | {"query_pre_attn_scalar": 32.0}) == config


def test_each_activation_can_be_computed_and_exported() -> None:
    assert set(get_args(Activation)) == set(ACTIVATIONS) == set(ACTIVATION_NAMES)


def test_an_export_has_the_settings_that_a_family_writes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    family = FAMILIES["llama"]
    dialect = replace(family.hugging_face, written={"pad_token_id": 3})
    monkeypatch.setitem(FAMILIES, "llama", replace(family, hugging_face=dialect))
    file = tmp_path / "config.json"
    model = resolve("tiny_llama").recipe.model
    write_config(model, file, dtype="bfloat16", bos_token_id=1, eos_token_id=2)
    assert json.loads(file.read_text())["pad_token_id"] == 3


def test_an_activation_without_a_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = resolve("tiny_llama").recipe.model
    assert config_faults(model) == []
    monkeypatch.delitem(ACTIVATION_NAMES, "silu")
    (fault,) = config_faults(model)
    assert "'silu' has no name in transformers" in fault


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_sharding_plan_names_all_modules(family: str, bias: bool, tied: bool) -> None:
    sizes = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "ffn_hidden_size": 64}
    choices = {"attention_bias": bias, "mlp_bias": bias, "tied_embeddings": tied}
    config = ModelConfig.model_validate(
        {"family": family, "vocab_size": 61, "seq_len": 16, **sizes, **choices}
    )
    assert {name: tuple(p.shape) for name, p in on_meta(config).named_parameters()} == (
        parameter_shapes(config)
    )
    plan = sharding_plan(family, tied, config.qk_norm)
    modules = {name.rpartition(".")[0] for name in parameter_shapes(config)}
    # Those of nanochat have no weight.
    norms = (nn.LayerNorm, nn.RMSNorm)
    modules |= {n for n, part in on_meta(config).named_modules() if isinstance(part, norms)}
    layers = {f"layers.{layer}.{name}" for layer in range(2) for name in plan.block}
    assert modules == layers | set(plan.outside)
