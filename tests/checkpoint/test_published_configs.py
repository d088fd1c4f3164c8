"""The config.json files of published checkpoints: read, counted, planned and written back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from slurmllm.backends.environment import load_environment
from slurmllm.checkpoint.formats.huggingface_config import read_config, write_config
from slurmllm.config.recipe import ModelConfig
from slurmllm.config.resolve import resolve
from slurmllm.plan.estimate import predict
from slurmllm.plan.mesh import make_mesh
from slurmllm.plan.parameters import parameters

transformers = pytest.importorskip("transformers")

FOLDER = Path(__file__).parent / "published"
# Parameters that the model cards' safetensors hold, a tied head once.
COUNTS = {
    "llama3.1_8b": 8_030_261_248,
    "llama3.2_1b": 1_235_814_400,
    "qwen3_0.6b": 596_049_920,
    "qwen3_8b": 8_190_735_360,
}


def published(name: str) -> ModelConfig:
    found, faults = read_config(FOLDER / name)
    assert faults == []
    assert found is not None
    return found.model


@pytest.mark.parametrize("name", COUNTS)
def test_parameters(name: str) -> None:
    assert parameters(published(name)) == COUNTS[name]
    config = transformers.AutoConfig.from_pretrained(FOLDER / name)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == COUNTS[name]


@pytest.mark.parametrize("name", COUNTS)
def test_the_recipe_is_of_the_published_model(name: str) -> None:
    model = published(name)
    recipe = resolve(name).recipe.model
    assert model.head_width == (64 if name == "llama3.2_1b" else 128)
    assert recipe == model.model_copy(update={"seq_len": recipe.seq_len})


@pytest.mark.parametrize(
    ("name", "nodes"),
    [
        ("llama3_8b", 1), ("llama3.1_8b", 32), ("llama3_70b", 16), ("llama3.2_1b", 1),
        ("qwen3_0.6b", 1), ("qwen3_8b", 1),
    ],
)  # fmt: skip
def test_the_recipe_s_layout_fits(name: str, nodes: int) -> None:
    config = resolve(name)
    assert load_environment(config.backend).unsupported(config) == []
    assert predict(config, make_mesh(config, nodes)).fits


@pytest.mark.parametrize("name", COUNTS)
def test_written_back(name: str, tmp_path: Path) -> None:
    model = published(name)
    write_config(model, tmp_path / "config.json", dtype="bfloat16", bos_token_id=1, eos_token_id=2)
    found, faults = read_config(tmp_path)
    assert faults == []
    assert found is not None
    assert found.model == model
    before = transformers.AutoConfig.from_pretrained(FOLDER / name)
    after = transformers.AutoConfig.from_pretrained(tmp_path)
    own = {"bos_token_id", "eos_token_id", "transformers_version", "_name_or_path"}
    values, changed = before.to_dict(), after.to_dict()
    changed["rope_parameters"].pop("partial_rotary_factor", None)
    for key in values.keys() - own - {"pretraining_tp", "max_window_layers"}:
        assert changed[key] == values[key], key
