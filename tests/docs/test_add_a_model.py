"""docs/developing/add_a_model.md, followed: its family against transformers' model."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rounding import assert_rounded, forward_terms

from slurmllm.core.config.families import FAMILIES, register
from slurmllm.core.config.resolve import resolve
from slurmllm.core.errors import ConfigError
from slurmllm.plan.parameters import parameters
from slurmllm.train.checkpoint.formats.exporting import plan_export, run_export
from slurmllm.train.checkpoint.formats.importing import plan_import, run_import
from slurmllm.train.checkpoint.formats.model_folders import TokenizerFiles
from slurmllm.train.checkpoint.formats.weights import weight_reader
from slurmllm.train.checkpoint.state import read_origin
from slurmllm.train.model.decoder import build_model
from slurmllm.train.model.init import fill

transformers = pytest.importorskip("transformers")

PAGE = Path(__file__).resolve().parents[2] / "docs" / "developing" / "add_a_model.md"


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    (source,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(source, str(PAGE), "exec", dont_inherit=True), names)
    register(names["ARCEE"])
    yield
    del FAMILIES["arcee"]


@pytest.mark.numerics
def test_in_and_out(tmp_path: Path) -> None:
    config = transformers.ArceeConfig(
        vocab_size=67, hidden_size=32, intermediate_size=40, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=24,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(3)
    original = transformers.ArceeForCausalLM(config).eval()
    original.save_pretrained(tmp_path / "hub")
    run_import(plan_import(tmp_path / "hub"), tmp_path / "ours", 10**9)
    model = read_origin(tmp_path / "ours").model
    assert model.family == "arcee"
    assert parameters(model) == sum(parameter.numel() for parameter in original.parameters())
    ours = build_model(model)
    fill(ours, weight_reader(tmp_path / "ours", model))
    tokens = torch.randint(0, 67, (2, 24))
    with torch.no_grad():
        assert_rounded(ours(tokens), original(tokens).logits, forward_terms(model))
    run_export(plan_export(tmp_path / "ours", TokenizerFiles({})), tmp_path / "back", 10**9)
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert type(back) is type(original)
    for name, tensor in original.state_dict().items():
        assert torch.equal(tensor, back.state_dict()[name]), name


def test_what_it_refuses_and_a_recipe_that_takes_it(tmp_path: Path) -> None:
    transformers.ArceeConfig(hidden_act="relu").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="hidden_act: 'relu' is not known; known are gelu"):
        plan_import(tmp_path)
    with pytest.raises(ConfigError, match=r"model\.parallel_residual: true does not go with"):
        resolve("tiny_llama", overrides=["model.family=arcee", "model.parallel_residual=true"])
    with pytest.raises(ConfigError, match=r"must be 'neox', 'llama', .*'nanochat' or 'arcee'"):
        resolve("tiny_llama", overrides=["model.family=arceee"])
    config = resolve("tiny_llama", overrides=["model.family=arcee", "model.num_kv_heads=3"])
    assert config.origins["model.qk_norm"] == "family arcee"


@pytest.mark.parametrize(("name", "missing"), [("llama", None), ("new", "qk_norm")])
def test_what_is_not_registered(name: str, missing: str | None) -> None:
    family = FAMILIES["arcee"]
    defaults = {key: value for key, value in family.defaults.items() if key != missing}
    with pytest.raises(ValueError, match=f"model family '{name}': .*{missing or 'already'}"):
        register(replace(family, name=name, defaults=defaults))
