"""`submit --smoke`: a short run of any recipe, with its schedule in proportion."""

from pathlib import Path

import pytest
from command_line import call, printed

from slurmllm.core.config.profiles import available
from slurmllm.core.config.resolve import recipes_dir, resolve, shorten
from slurmllm.core.errors import ConfigError


@pytest.mark.parametrize("name", available(recipes_dir())[::4])
def test_every_recipe_can_be_shortened(name: str) -> None:
    config = resolve(name)
    for steps in (1, 2, 7, 20):
        short = shorten(config, steps).recipe
        assert short.train.steps == steps
        assert short.optim.warmup(steps) < steps
        assert short.checkpoint.every_steps in (max(1, steps // 2), (steps + 1) // 2)
        assert short.model == config.recipe.model


def test_what_is_scaled_and_what_is_not() -> None:
    settings = ["eval.every_steps=10", "data.validation=0.1", "optim.decay_start=60"]
    settings += ["profile.steps=[50,52]"]
    config = resolve("tiny_neox", overrides=settings)
    unchanged = ("eval.every_steps", "optim.decay_start", "profile.steps")
    unset = {path: source for path, source in config.origins.items() if path not in unchanged}
    short = shorten(type(config)(config.recipe, config.cluster, unset), 40)
    assert short.recipe.optim.warmup_steps == 3  # of 10 in 120
    assert short.recipe.optim.decay_start == 20
    assert short.recipe.eval.every_steps == 10
    assert short.recipe.profile.steps == (38, 40)
    assert short.origins["optim.warmup_steps"] == "--steps 40"
    with pytest.raises(ConfigError, match=r"--smoke and --set train.steps exclude each other"):
        shorten(resolve("tiny_neox", overrides=["train.steps=30"]))
    with pytest.raises(ConfigError, match="1 error") as caught:
        shorten(resolve("tiny_neox", overrides=["optim.warmup_steps=30"]), 20)
    assert caught.value.faults[0].startswith("optim.warmup_steps: 30 is not less than 20")


def test_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["submit", "tiny_neox", "--local", "--dry-run", "--json"]
    for options, steps in ((["--smoke"], 20), (["--steps=4"], 4), (["--smoke", "--steps=6"], 6)):
        shown = printed(call(*command, *options))
        assert f'"steps": {steps}, "global_batch"' in shown
