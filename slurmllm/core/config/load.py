"""Readers of a run's config.yaml: strict, lenient, and a fast summary for lists of runs."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from slurmllm.core import removed
from slurmllm.core.config.cluster import Cluster
from slurmllm.core.config.command import CommandConfig
from slurmllm.core.config.recipe import ModelConfig, Recipe
from slurmllm.core.config.resolve import RunConfig
from slurmllm.core.config.validate import Origins, is_set, validate
from slurmllm.core.config.variables import MASK
from slurmllm.core.config.yaml_source import LARGEST_YAML, Values, flatten, parse_yaml, read_yaml
from slurmllm.core.errors import ConfigError
from slurmllm.core.format import Texts
from slurmllm.core.run.rundir import RunDir, write_atomic
from slurmllm.core.run.safe_files import LARGEST_RECORD, open_trusted, read_limited

M = TypeVar("M", bound=BaseModel)


def load(path: Path, *, trusted: bool = False) -> RunConfig:
    """Read a run's config.yaml; a file that has not changed is read once in a process.

    Args:
        trusted: Whether only this user and root may have written it, as if it is going to run.

    Raises:
        ConfigError: It is unreadable, no longer valid, or not trusted.
    """
    return _load(path, trusted, _signature(path), _signature(RunDir(path.parent).secrets))


Signature = tuple[int, ...] | None  # of a file; None: there is none


def _signature(path: Path) -> Signature:
    """Return what changes with a file's content, owner or mode; None if there is no file."""
    with suppress(OSError):
        status = path.stat()
        return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
    return None


@lru_cache(maxsize=16)
def _load(path: Path, trusted: bool, *_: Signature) -> RunConfig:
    tree, origins = _read(path, trusted)
    # Masked values stay masked if the file of secrets is another user's or unreadable.
    sections = {"env": tree.get("env")}
    if isinstance(cluster := tree.get("cluster"), dict):
        sections["cluster.env"] = cluster.get("env")
    masked = [
        (variables, name, f"{section}.{name}")
        for section, variables in sections.items()
        if isinstance(variables, dict)
        for name, value in variables.items()
        if value == MASK
    ]
    if masked:
        with suppress(OSError, ValueError), open_trusted(RunDir(path.parent).secrets) as stream:
            secrets = json.loads(stream.read(LARGEST_RECORD))
            for variables, name, dotted in masked:
                variables[name] = str(secrets.get(dotted, MASK))
    return RunConfig(*validate(tree, origins, [], str(path), trusted=trusted))


def save(config: RunConfig, run: RunDir) -> None:
    """Write a run's config.yaml, and its secrets into a file that only this user can read.

    Raises:
        ConfigError: the value of a secret is missing.
        StorageError: the file system refused.
    """
    if config.worker_secrets():
        write_atomic(run.secrets, json.dumps(config.secrets(), indent=2) + "\n", mode=0o600)
    else:
        with suppress(OSError):
            run.secrets.unlink()
    write_atomic(run.config, config.to_yaml())


def _read(path: Path, trusted: bool = False) -> tuple[Values, Origins]:
    tree, _ = read_yaml(path, trusted=trusted)
    origins = tree.pop("origin", {})
    origins = origins if isinstance(origins, dict) else {}
    _drop_removed(tree, origins)
    return tree, origins


def _drop_removed(tree: Values, origins: Origins) -> None:
    """Delete removed fields that an older version recorded and on which its run does not depend."""
    for field in removed.FIELDS:
        if field not in removed.UNUSED_BY_RUNS and any(
            is_set(path, origins) for path in origins if f"{path}.".startswith(f"{field}.")
        ):
            continue
        *sections, leaf = field.split(".")
        section: Any = tree
        for name in sections:
            section = section.get(name) if isinstance(section, dict) else None
        if isinstance(section, dict):
            section.pop(leaf, None)


@dataclass(frozen=True)
class LenientConfig:
    """The readable part of a config.yaml, which another version may have written."""

    config: RunConfig | None = None  # the whole configuration; None if the file does not hold one
    # Dotted path → value, as stored; None if the file is unreadable.
    values: Values | None = None
    warnings: Texts = ()  # faults of the file

    @property
    def model(self) -> ModelConfig | None:
        """The model; None if it is unknown, as that of a command."""
        if self.config is None or not self.config.recipe.worker.has_model:
            return None
        return self.config.recipe.model

    def text(self, path: str) -> str | None:
        value = (self.values or {}).get(path)
        return value if isinstance(value, str) else None

    def count(self, path: str) -> int | None:
        """Return the value at `path` if it is an integer above 0, else None."""
        value = (self.values or {}).get(path)
        # Not isinstance: True is an int too.
        return value if type(value) is int and value > 0 else None


def load_leniently(path: Path) -> LenientConfig:
    """Read a run's config.yaml; fields that this version does not know are ignored."""
    if not path.is_file():
        return LenientConfig(warnings=(f"{path} is missing: the run's settings are unknown",))
    try:
        config = load(path)
        return LenientConfig(config, flatten(config.values()))
    except ConfigError as error:
        fault = f"{error.title}: {error.faults[0]}" if error.faults else str(error)
        fault = " ".join(fault.split())  # YAML's messages span several lines
    try:
        tree, _ = _read(path)
    except ConfigError:
        return LenientConfig(warnings=(f"{fault}; ignoring the file",))
    recipe = _validate_known(Recipe, {key: v for key, v in tree.items() if key != "cluster"})
    cluster = _validate_known(Cluster, tree.get("cluster"))
    whole = None if recipe is None or cluster is None else RunConfig(recipe, cluster)
    return LenientConfig(whole, flatten(tree), (f"{fault}; using the fields that are valid",))


def _validate_known(model: type[M], tree: Any) -> M | None:
    """Validate `tree` without its unknown fields; None if it has other faults."""
    # The caller still shows the unknown fields, which are deleted below.
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


@dataclass(frozen=True)
class ConfigSummary:
    """The values of a configuration that a list of runs shows."""

    recipe: str
    steps: int | None  # optimizer steps to the run's end; None if a command does not say
    usd_per_node_hour: float | None  # on-demand price by the cluster profile; None without a price
    command: CommandConfig | None = None  # of a trainer of another project


def summarize(config: RunConfig) -> ConfigSummary:
    price = config.cluster.price
    usd = price.on_demand if price is not None else None
    recipe = config.recipe
    return ConfigSummary(recipe.name, recipe.steps, usd, recipe.command)


def read_summary(path: Path) -> ConfigSummary:
    """Read the summary of a config.yaml without validating all of it.

    Validation takes milliseconds a file, and a list may show hundreds of runs. A file with
    unexpected values is loaded and validated after all.

    Raises:
        ConfigError: the file is unreadable or no longer valid.
    """
    # Another shape than expected is for `load` to refuse.
    with suppress(
        OSError, yaml.YAMLError, RecursionError, LookupError, AttributeError, TypeError, ValueError
    ):
        # `origin` comes last, is the longer half of the file, and is not needed here.
        tree = parse_yaml(read_limited(path, LARGEST_YAML).partition(b"\norigin:")[0].decode())
        price = tree["cluster"].get("price")
        name = tree["name"]
        steps = tree["train"]["steps"]
        usd = None if price is None else float(price["on_demand"])
        valid = type(name) is str and type(steps) is int and 0 < steps < 2**53
        if valid and (usd is None or 0 < usd < math.inf):
            return ConfigSummary(name, steps, usd)
    return summarize(load(path))
