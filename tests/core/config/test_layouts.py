"""`layouts` of a recipe: by profile or device, under what the recipe sets itself."""

from pathlib import Path

import pytest
import yaml

from slurmllm.core.config.load import load
from slurmllm.core.config.resolve import RunConfig, recipes_dir, resolve
from slurmllm.core.errors import ConfigError

LAYOUTS = """
layouts:
  cuda:
    parallel: {tensor: 4}
    train: {micro_batch: 4, activation_checkpointing: full}
  p5: {parallel: {tensor: 8, pipeline: auto}}
  neuron: {parallel: auto}
"""


def recipe(folder: Path, text: str, **train: object) -> str:
    tree = yaml.safe_load((recipes_dir() / "llama2_7b.yaml").read_text())
    del tree["layouts"]
    tree["train"].update(train)
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump(tree, sort_keys=False) + text)
    return str(path)


def values(config: RunConfig) -> tuple[object, ...]:
    train = config.recipe.train
    return config.recipe.parallel.tensor, train.micro_batch, train.activation_checkpointing


def test_the_profile_precedes_its_device(tmp_path: Path) -> None:
    path = recipe(tmp_path, LAYOUTS)
    assert values(resolve(path, "p4d")) == (4, 4, "full")
    p5 = resolve(path, "p5")
    assert values(p5) == (8, 4, "full")
    assert p5.open_settings() == [
        f"parallel.{name}"
        for name in ("pipeline", "virtual_pipeline", "sequence", "zero", "shard_nodes")
    ]
    assert p5.origins["train.micro_batch"].startswith("layout of cuda, mine.yaml:")
    assert len(resolve(path, "trn1").open_settings()) == len(resolve(path, "local").open_settings())
    assert "layouts" not in yaml.safe_load(p5.to_yaml())
    run = tmp_path / "config.yaml"
    run.write_text(p5.to_yaml())
    assert load(run).recipe == p5.recipe


@pytest.mark.parametrize(("text", "overrides"), [("parallel: auto\n", []), ("", ["parallel=auto"])])
def test_auto_leaves_a_layout_to_the_planner(
    tmp_path: Path, text: str, overrides: list[str]
) -> None:
    config = resolve(recipe(tmp_path, LAYOUTS + text, micro_batch=None), "p4d", overrides)
    assert "train.activation_checkpointing" in config.open_settings()
    assert len(config.open_settings()) == 8


def test_what_the_recipe_sets_precedes_layouts(tmp_path: Path) -> None:
    path = recipe(tmp_path, f"{LAYOUTS}parallel: {{tensor: 2}}\n", micro_batch=2)
    config = resolve(path, "p4d")
    assert values(config) == (2, 2, "full")
    assert config.open_settings() == []
    assert values(resolve(path, "p5", ["parallel.tensor=1", "train.micro_batch=1"]))[:2] == (1, 1)


def test_null_leaves_a_setting_to_the_planner(tmp_path: Path) -> None:
    config = resolve(recipe(tmp_path, "parallel: {tensor: 8}\n"), "p5")
    assert config.open_settings() == ["train.micro_batch"]
    config = resolve("llama2_7b", "trn1", ["train.micro_batch=null"])
    assert config.open_settings() == ["train.micro_batch"]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("layouts: 3\n", "layouts: 3 (mine.yaml:"),
        ("layouts: {cuda: {optim: {lr: 1}}}\n", "layouts.cuda.optim: unknown field"),
        (
            "layouts: {cuda: {parallel: {tensor: x}}}\n",
            "parallel.tensor: 'x' (layout of cuda, mine.yaml:",
        ),
        ("layouts: {cuda: {parallel: {pipeline: 3}}}\n", "parallel.pipeline: 3 does not divide"),
    ],
)
def test_faults(tmp_path: Path, text: str, fault: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(recipe(tmp_path, text), "p5")
    (message,) = caught.value.faults
    assert message.startswith(fault)
