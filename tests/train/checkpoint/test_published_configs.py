"""The config.json files of published checkpoints: read, counted, planned and written back."""

import json
import re
import shutil
from pathlib import Path

import pytest

from slurmllm.core.config.families import FAMILIES
from slurmllm.core.config.huggingface import read_config, write_config
from slurmllm.core.config.recipe import ModelConfig
from slurmllm.core.config.resolve import recipes_dir, resolve
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
# Parameters: the model cards, nanochat's discussion 8; of the 4b only the text model's.
WITHOUT_RECIPE = {
    "gemma3_1b": 999_885_952,
    "gemma3_270m": 268_098_176,
    "gemma3_4b": 3_880_263_168,
    "mistral_7b": 7_241_732_096,
    "nanochat_d32": 1_879_048_192,
    "olmo3_7b": 7_298_011_136,
    "olmo3_32b": 32_233_522_176,
    "smollm3_3b": 3_075_098_624,
}


def published(name: str) -> ModelConfig:
    config, faults = read_config(FOLDER / name)
    assert faults == []
    return config.model


@pytest.mark.parametrize("name", COUNTS)
def test_the_recipe_is_of_the_published_model(name: str) -> None:
    model = published(name)
    assert parameters(model) == COUNTS[name]
    recipe = resolve(name).recipe.model
    assert model.head_width == (64 if name == "llama3.2_1b" else 128)
    assert recipe == model.model_copy(update={"seq_len": recipe.seq_len})


@pytest.mark.parametrize("name", [*COUNTS, *WITHOUT_RECIPE])
def test_written_back(name: str, tmp_path: Path) -> None:
    model = published(name)
    assert parameters(model) == {**COUNTS, **WITHOUT_RECIPE}[name]
    write_config(model, tmp_path / "config.json", dtype="bfloat16", bos_token_id=1, eos_token_id=2)
    config, faults = read_config(tmp_path)
    assert faults == []
    assert config.model == model
    assert_same_settings(FOLDER / name, tmp_path)


def assert_same_settings(source: Path, written: Path) -> None:
    """Assert that transformers reads the same from both."""
    before = transformers.AutoConfig.from_pretrained(source)
    before = getattr(before, "text_config", before)
    after = transformers.AutoConfig.from_pretrained(written)
    written_only = {"bos_token_id", "eos_token_id", "pad_token_id", "use_cache", "dtype"}
    unread = {"transformers_version", "_name_or_path", "pretraining_tp", "max_window_layers"}
    unread |= {"cache_implementation", "architectures", "_sliding_window_pattern"}
    unread |= {"sliding_window_pattern"}
    values, changed = before.to_dict(), after.to_dict()
    ropes = changed["rope_parameters"]
    for rope in (ropes, *(rope for rope in ropes.values() if isinstance(rope, dict))):
        rope.pop("partial_rotary_factor", None)
        rope.pop("truncate", None)  # the default
    for key in values.keys() - written_only - unread:
        assert changed[key] == values[key], key


MINIMAL = {"vocab_size": 67, "hidden_size": 32, "num_hidden_layers": 13, "num_attention_heads": 8}


@pytest.mark.parametrize("family", ["llama", "mistral", "smollm3", "olmo3", "gemma3", "nanochat"])
def test_settings_left_out_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    dialect = FAMILIES[family].hugging_face
    values = {**MINIMAL, "intermediate_size": 40, "model_type": dialect.model_type}
    null = {"rope_theta": None, "rope_scaling": None, "partial_rotary_factor": None}
    for name, more in (("left_out", {}), ("null", null)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(values | more))
        source, faults = read_config(folder)
        assert faults == []
        assert source is not None
        (folder / "written").mkdir()
        path = folder / "written" / "config.json"
        write_config(source.model, path, dtype="float32", bos_token_id=None, eos_token_id=None)
        assert_same_settings(tmp_path / "left_out", folder / "written")


@pytest.mark.parametrize("file", ["", "config.json"], ids=["folder", "file"])
def test_a_recipe_s_model_is_a_config_json(file: str, tmp_path: Path) -> None:
    path = FOLDER / "qwen3_0.6b" / file
    by_option = resolve("tiny_llama", "p5", [f"model={path}", "model.seq_len=4096"])
    expected = published("qwen3_0.6b").model_copy(update={"seq_len": 4096})
    assert by_option.recipe.model == expected
    assert by_option.origins["model.qk_norm"] == f"--set model={path}"
    recipe = (recipes_dir() / "qwen3_8b.yaml").read_text()
    section = re.compile(r"^model:\n(?:  .*\n)+", re.M)
    (tmp_path / "own.yaml").write_text(section.sub("model: theirs\n", recipe))
    (tmp_path / "theirs").mkdir()
    shutil.copy(FOLDER / "qwen3_0.6b" / "config.json", tmp_path / "theirs")
    by_recipe = resolve(str(tmp_path / "own.yaml"), None, ["model.seq_len=4096"])
    assert by_recipe.recipe.model == expected
    assert by_recipe.origins["model.family"] == str(tmp_path / "theirs")
