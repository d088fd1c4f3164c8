"""A run's config.yaml, read as far as it goes: also one that another version wrote."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from slurmllm.config.cluster import Cluster
from slurmllm.config.load import load
from slurmllm.config.recipe import Recipe
from slurmllm.config.resolve import RunConfig, flatten
from slurmllm.config.yaml_source import read_yaml
from slurmllm.errors import ConfigError
from slurmllm.rundir import RunDir

M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True)
class Configuration:
    """What is known of a run's configuration.

    Attributes:
        config: All of it; None where the file does not hold that.
        values: Dotted path → value, as the file has them.
        warnings: What is wrong with the file.
    """

    config: RunConfig | None = None
    values: Mapping[str, Any] | None = None
    warnings: tuple[str, ...] = ()

    def text(self, path: str) -> str | None:
        """A value that must be a text; None where it is none."""
        value = (self.values or {}).get(path)
        return value if isinstance(value, str) else None

    def count(self, path: str) -> int | None:
        """A value that must be a whole number above 0; None where it is none."""
        value = (self.values or {}).get(path)
        return value if type(value) is int and value > 0 else None


def read_configuration(run: RunDir) -> Configuration:
    """Read a run's config.yaml; fields that this version does not know are passed over."""
    if not run.config.is_file():
        return Configuration(warnings=(f"{run.config} is absent: nothing tells what was trained",))
    try:
        config = load(run.config)
        return Configuration(config, flatten(config.values()))
    except ConfigError as error:
        words = f"{error.title}: {error.faults[0]}" if error.faults else str(error)
        fault = " ".join(words.split())  # YAML's own words are of several lines
    try:
        tree, _ = read_yaml(run.config)
    except ConfigError:
        return Configuration(warnings=(f"{fault}; the file is left out",))
    values = flatten({key: value for key, value in tree.items() if key != "origin"})
    cluster = _known(Cluster, tree.get("cluster"))
    recipe = _known(Recipe, {k: v for k, v in tree.items() if k not in ("cluster", "origin")})
    whole = None if recipe is None or cluster is None else RunConfig(recipe, cluster)
    return Configuration(whole, values, (f"{fault}; the file is read as far as it goes",))


def _known(model: type[M], tree: Any) -> M | None:
    """A model of what it knows of a tree; None where that is not enough."""
    tree = deepcopy(tree)
    while True:
        try:
            return model.model_validate(tree)
        except ValidationError as error:
            unknown = [e["loc"] for e in error.errors() if e["type"] == "extra_forbidden"]
        if not unknown:
            return None
        for *sections, leaf in unknown:
            node = tree
            for section in sections:
                node = node[section]
            del node[leaf]
