"""Numbers of parameters against those that the models' authors give."""

from __future__ import annotations

import pytest

from slurmllm.config.resolve import resolve
from slurmllm.plan.parameters import parameters


# Pythia: the table in the README of github EleutherAI/pythia; Llama 2 and GPT-NeoX 20B: the sum of
# the tensors in their safetensors files on Hugging Face.
@pytest.mark.parametrize(
    ("recipe", "published"),
    [
        ("pythia_70m", 70_426_624),
        ("pythia_160m", 162_322_944),
        ("pythia_410m", 405_334_016),
        ("pythia_1b", 1_011_781_632),
        ("pythia_1.4b", 1_414_647_808),
        ("pythia_2.8b", 2_775_208_960),
        ("neox_20b_finetune", 20_554_567_680),
        ("llama2_7b", 6_738_415_616),
        ("llama2_70b", 68_976_648_192),
    ],
)
def test_published_models(recipe: str, published: int) -> None:
    assert parameters(resolve(recipe).recipe.model) == published


def test_gpt2_has_124_million() -> None:
    model = resolve("gpt3_125m").recipe.model.model_copy(
        update={"seq_len": 1024, "vocab_pad_multiple": 1}
    )
    assert parameters(model) == 124_439_808
