"""`parallel: auto` in recipes and overrides: what is left to the planner, and what is not."""

from pathlib import Path

import pytest
import yaml

from slurmllm.core.config.load import load
from slurmllm.core.config.resolve import RunConfig, change, recipes_dir, resolve
from slurmllm.core.errors import ConfigError

DEGREES = ["tensor", "pipeline", "virtual_pipeline", "sequence", "zero", "shard_nodes"]


def open_degrees(config: RunConfig) -> list[str]:
    """Names of the degrees that the planner is to choose."""
    paths = config.open_settings()
    return [path.removeprefix("parallel.") for path in paths if path.startswith("parallel.")]


def without(*degrees: str) -> list[str]:
    return [degree for degree in DEGREES if degree not in degrees]


def recipe(folder: Path, parallel: str) -> str:
    """Pythia 6.9B with another parallel section."""
    tree = yaml.safe_load((recipes_dir() / "pythia_6.9b.yaml").read_text())
    path = folder / "mine.yaml"
    path.write_text(f"{yaml.safe_dump(tree, sort_keys=False)}{parallel}\n")
    return str(path)


@pytest.mark.parametrize(
    ("parallel", "left"),
    [
        ("parallel: auto", DEGREES),
        ("parallel: {auto: true, tensor: 8}", without("tensor")),
        ("parallel: {tensor: 8, pipeline: auto}", without("tensor")),
        ("parallel: {sequence: true, auto: true, zero: 0}", without("sequence", "zero")),
    ],
)
def test_a_recipe_leaves_degrees_open(tmp_path: Path, parallel: str, left: list[str]) -> None:
    path = recipe(tmp_path, parallel)
    config = resolve(path)
    assert config.recipe.parallel.auto
    assert open_degrees(config) == left
    assert config.origins["parallel.auto"].startswith("mine.yaml:")
    fixed = resolve(path, overrides=["parallel.tensor=2"])
    assert "tensor" not in open_degrees(fixed)
    assert fixed.recipe.parallel.tensor == 2
    assert not resolve(path, overrides=["parallel={tensor: 2}"]).recipe.parallel.auto


def test_auto_and_degrees_of_the_command_line() -> None:
    for order in (["parallel=auto", "parallel.tensor=8"], ["parallel.tensor=8", "parallel=auto"]):
        config = resolve("neox_20b", overrides=order)
        assert open_degrees(config) == without("tensor")
        assert (config.recipe.parallel.tensor, config.recipe.parallel.pipeline) == (8, 1)
        assert config.origins["parallel.auto"] == "--set parallel=auto"
    config = resolve("neox_20b", overrides=["parallel.auto=true"])
    assert open_degrees(config) == ["virtual_pipeline", "shard_nodes"]
    config = resolve("neox_20b", overrides=["parallel.pipeline=auto"])
    assert open_degrees(config) == ["pipeline", "virtual_pipeline", "shard_nodes"]
    assert config.recipe.parallel.tensor == 8


def test_a_run_forgets_its_degrees_for_auto(tmp_path: Path) -> None:
    config = resolve("neox_20b", overrides=["parallel.tensor=8"])
    path = tmp_path / "config.yaml"
    path.write_text(config.to_yaml())
    assert load(path).open_settings() == []
    anew = change(load(path), None, ["parallel=auto"])
    assert open_degrees(anew) == DEGREES
    anew = change(load(path), None, ["parallel.zero=1", "parallel=auto"])
    assert open_degrees(anew) == without("zero")


@pytest.mark.parametrize(
    ("overrides", "fault"),
    [
        (["parallel=Auto"], "parallel: 'Auto' (--set parallel=Auto): must be auto, or degrees"),
        (["parallel.auto=auto"], "parallel.auto: 'auto' (--set parallel.auto=auto): must be a"),
        (["parallel.tenso=auto"], "parallel.tenso: unknown field"),
        (
            ["parallel=auto", "parallel.virtual_pipeline=2", "parallel.pipeline=1"],
            "parallel.virtual_pipeline: 2 chunks a stage need more stages",
        ),
    ],
)
def test_what_is_set_is_held_against_the_model(overrides: list[str], fault: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve("neox_20b", overrides=overrides)
    assert caught.value.faults[0].startswith(fault)
