"""Recipe + cluster profile + overrides → one resolved configuration that knows its origins."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeGuard, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from slurmllm.config import shipped
from slurmllm.config.cluster import Cluster
from slurmllm.config.recipe import CorpusShare, ParallelConfig, Recipe, with_family
from slurmllm.config.rules import broken_rules
from slurmllm.config.yaml_source import parse_scalar, read_yaml, write_yaml
from slurmllm.errors import ConfigError

M = TypeVar("M", bound=BaseModel)

PLANNER = "planner: "  # how the sources of the planner's choices begin

# Fields of earlier versions. A recipe must use the new name; `load` translates old runs.
RENAMED = {
    "checkpoint.second_tier": "checkpoint.replica",
    "checkpoint.second_tier_keep": "checkpoint.replica_keep",
}


@dataclass(frozen=True)
class RunConfig:
    """Everything that decides what a run does.

    Attributes:
        recipe: What is trained.
        cluster: On what hardware.
        origins: Dotted path → where the value came from; paths left out are defaults.
    """

    recipe: Recipe
    cluster: Cluster
    origins: Mapping[str, str] = field(default_factory=dict)

    @property
    def backend(self) -> str:
        """The backend's name, `auto` resolved."""
        if self.recipe.backend != "auto":
            return self.recipe.backend
        return "nxd" if self.cluster.device == "neuron" else "native"

    def rows(self) -> list[tuple[str, Any, str]]:
        """(dotted path, value, source) of every value, in the models' order."""
        values = flatten(self.values())
        return [(path, value, self.origins.get(path, "default")) for path, value in values.items()]

    def values(self) -> dict[str, Any]:
        """The nested values, as config.yaml holds them."""
        return {
            **self.recipe.model_dump(mode="json"),
            "cluster": self.cluster.model_dump(mode="json"),
        }

    def is_set(self, path: str) -> bool:
        """Whether somebody set a value: it is neither a default nor the planner's choice."""
        return _is_set(path, self.origins)

    def unchosen(self) -> list[str]:
        """The dotted paths that `parallel.auto` leaves to the planner, which has not chosen yet."""
        degrees = (f"parallel.{name}" for name in ParallelConfig.model_fields if name != "auto")
        return [path for path in degrees if self.recipe.parallel.auto and not self.is_set(path)]

    def with_data(self, corpus: str | tuple[CorpusShare, ...], tokenizer: str | None) -> RunConfig:
        """This configuration with the inputs settled; their origins stay."""
        data = self.recipe.data.model_copy(update={"corpus": corpus, "tokenizer": tokenizer})
        return replace(self, recipe=self.recipe.model_copy(update={"data": data}))

    def with_init_from(self, folder: str) -> RunConfig:
        """This configuration with the weights to start from settled; the origin stays."""
        train = self.recipe.train.model_copy(update={"init_from": folder})
        return replace(self, recipe=self.recipe.model_copy(update={"train": train}))

    def to_yaml(self) -> str:
        """The text of a run's config.yaml."""
        origin = {path: source for path, _, source in self.rows()}
        return "# Resolved by slurmllm; `origin` names each value's source.\n" + write_yaml(
            {**self.values(), "origin": origin}
        )


_AUTO = {"auto": True}  # what the text `auto` for the section `parallel` stands for


def _is_set(path: str, origins: Mapping[str, str]) -> bool:
    source = origins.get(path, "default")
    return source != "default" and not source.startswith(PLANNER)


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings → dotted path → leaf. An empty mapping is a leaf."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        dotted = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{dotted}."))
        else:
            flat[dotted] = value
    return flat


def available(folder: Path) -> list[str]:
    """Names of the YAML files in a folder of recipes or profiles."""
    return sorted(path.stem for path in folder.glob("*.yaml"))


def resolve(
    recipe: str,
    cluster: str | None = None,
    overrides: Iterable[str] = (),
    options: Mapping[str, tuple[str, Any]] | None = None,
) -> RunConfig:
    """Put a run's configuration together.

    Args:
        recipe: Name of a shipped recipe, or a YAML file's path.
        cluster: Name of a shipped profile, or a YAML file's path; where None
            $SLURMLLM_CLUSTER, else the recipe's `default_cluster`.
        overrides: `a.b=value`, as given to --set, later ones stronger.
        options: Dotted path → (option's name, value), from options such as --partition.

    Raises:
        ConfigError: with all faults of recipe, profile and overrides.
    """
    recipe_path = _find(recipe, shipped.recipes_dir(), "recipe", "slurmllm recipes")
    values, origins = read_yaml(recipe_path)
    if values.get("parallel") == "auto":
        values["parallel"] = dict(_AUTO)
        origins["parallel.auto"] = origins.pop("parallel")
    chosen = cluster or os.environ.get("SLURMLLM_CLUSTER")
    if not chosen:
        default = values.get("default_cluster")
        chosen = default if isinstance(default, str) else "local"
    cluster_path = _find(chosen, shipped.clusters_dir(), "cluster profile", "--cluster FILE.yaml")
    cluster_values, cluster_origins = read_yaml(cluster_path)
    tree: dict[str, Any] = {**values, "cluster": cluster_values}
    origins.update({f"cluster.{path}": source for path, source in cluster_origins.items()})
    faults: list[str] = []
    if "cluster" in values:
        faults.append("cluster: belongs into a profile, not into a recipe; see --cluster")
    _override(tree, overrides, origins, faults)
    for dotted, (option, value) in (options or {}).items():
        if value is not None:
            _assign(tree, dotted, value, option, origins, faults)
    return _validate(tree, origins, faults, f"{recipe_path.name} with {cluster_path.name}")


def change(config: RunConfig, cluster: str | None, overrides: Iterable[str]) -> RunConfig:
    """A run's configuration with another cluster profile or other values.

    Args:
        config: The run's.
        cluster: Name of a shipped profile, or a YAML file's path; None leaves it.
        overrides: `a.b=value`, as given to --set.

    Raises:
        ConfigError: with all faults.
    """
    tree, origins = config.values(), dict(config.origins)
    if cluster is not None:
        path = _find(cluster, shipped.clusters_dir(), "cluster profile", "--cluster FILE.yaml")
        tree["cluster"], sources = read_yaml(path)
        origins = {name: how for name, how in origins.items() if not name.startswith("cluster.")}
        origins |= {f"cluster.{name}": source for name, source in sources.items()}
    faults: list[str] = []
    _override(tree, overrides, origins, faults)
    return _validate(tree, origins, faults, f"run of {config.recipe.name}")


def _override(
    tree: dict[str, Any], overrides: Iterable[str], origins: dict[str, str], faults: list[str]
) -> None:
    given: list[tuple[str, Any, str]] = []
    for item in overrides:
        dotted, equals, text = item.partition("=")
        if not equals or not all(dotted.strip().split(".")):
            faults.append(f"--set {item!r}: expected path=value, such as optim.lr=1e-4")
            continue
        dotted = dotted.strip()
        # A variable's value is a text whatever it looks like: 1, true, 007 and nothing at all.
        value = text if dotted.startswith(("env.", "cluster.env.")) else parse_scalar(text)
        given.append((dotted, value, f"--set {item}"))
    # `parallel=auto` empties the section, whichever degrees are set beside it.
    for dotted, value, source in sorted(given, key=lambda one: one[:2] != ("parallel", "auto")):
        whole = (dotted, value) == ("parallel", "auto")
        _assign(tree, dotted, dict(_AUTO) if whole else value, source, origins, faults)


def load(path: Path) -> RunConfig:
    """Read a run's config.yaml.

    Raises:
        ConfigError: the file is unreadable or no longer valid.
    """
    tree, _ = read_yaml(path)
    origins = tree.pop("origin", {})
    origins = origins if isinstance(origins, dict) else {}
    for old, new in RENAMED.items():
        section, _, field = old.partition(".")
        fields = tree.get(section)
        if isinstance(fields, dict) and field in fields:
            fields[new.rpartition(".")[2]] = fields.pop(field)
            origins[new] = origins.pop(old, "default")
    return _validate(tree, origins, [], str(path))


def _find(name: str, folder: Path, what: str, remedy: str) -> Path:
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        if path.is_file():
            return path
        raise ConfigError(f"no {what} file {name!r}; {remedy}")
    shipped_path = folder / f"{name}.yaml"
    names = available(folder)
    if name in names:
        return shipped_path
    close = difflib.get_close_matches(name, names, n=1)
    guess = f"did you mean {close[0]!r}? " if close else ""
    raise ConfigError(
        f"unknown {what} {name!r}; {guess}choose one of {', '.join(names)}, or a .yaml file"
    )


def _assign(
    tree: dict[str, Any],
    dotted: str,
    value: Any,
    source: str,
    origins: dict[str, str],
    faults: list[str],
) -> None:
    """Set one value; unknown paths are left to validation, which names them."""
    *sections, leaf = dotted.split(".")
    node = tree
    for section in sections:
        child = node.setdefault(section, {})
        if not isinstance(child, dict):
            faults.append(f"{dotted}: {section} is no section; see `slurmllm recipes NAME`")
            return
        node = child
    node[leaf] = value
    for path in [path for path in origins if path.startswith(f"{dotted}.")]:
        del origins[path]
    for path in flatten({leaf: value}, "".join(f"{section}." for section in sections)):
        origins[path] = source


def _validate(
    tree: dict[str, Any], origins: Mapping[str, str], faults: Sequence[str], title: str
) -> RunConfig:
    faults = list(faults)
    recipe_tree = {key: value for key, value in tree.items() if key != "cluster"}
    origins = _ask_the_planner(recipe_tree, origins)
    origins |= _ask_the_family(recipe_tree)
    recipe, bad = _build(Recipe, recipe_tree, "", faults, origins)
    cluster, _ = _build(Cluster, tree.get("cluster", {}), "cluster.", faults, origins)
    values = {**_defaults(Recipe), **flatten(recipe_tree)}
    if values.get("parallel.auto") is True and not _is_set("parallel.pipeline", origins):
        values.pop("parallel.pipeline", None)  # its default is nobody's choice
    faults += broken_rules({path: v for path, v in values.items() if not _faulty(path, bad)})
    if recipe is None or cluster is None or faults:
        raise ConfigError(f"{title}: {len(faults)} fault(s)", faults)
    return RunConfig(recipe, cluster, dict(origins))


def _ask_the_planner(recipe_tree: dict[str, Any], origins: Mapping[str, str]) -> dict[str, str]:
    """Leave degrees whose value is the text `auto` to the planner; returns all sources."""
    given, sources = recipe_tree.get("parallel"), dict(origins)
    if isinstance(given, Mapping):
        degrees = ParallelConfig.model_fields.keys() - {"auto"}
        left = [name for name, value in given.items() if value == "auto" and name in degrees]
        for name in left:
            sources["parallel.auto"] = sources.pop(f"parallel.{name}", "default")
        kept = {name: value for name, value in given.items() if name not in left}
        recipe_tree["parallel"] = {**kept, "auto": True} if left else kept
    return sources


def _ask_the_family(recipe_tree: dict[str, Any]) -> dict[str, str]:
    """Fill in what the recipe leaves to the model's family; returns the sources."""
    given = recipe_tree.get("model")
    if not isinstance(given, Mapping):
        return {}
    recipe_tree["model"] = with_family(given)
    left = recipe_tree["model"].keys() - given.keys()
    return {f"model.{field}": f"family {given['family']}" for field in left}


def _faulty(path: str, bad: set[str]) -> bool:
    return any(path == fault or path.startswith(f"{fault}.") for fault in bad)


def _defaults(model: type[BaseModel], prefix: str = "") -> dict[str, Any]:
    """Dotted path → default of every field that has one."""
    found: dict[str, Any] = {}
    for name, info in model.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            found.update(_defaults(info.annotation, f"{prefix}{name}."))
        elif not info.is_required():
            found[f"{prefix}{name}"] = info.get_default(call_default_factory=True)
    return found


def _build(
    model: type[M],
    tree: Any,
    prefix: str,
    faults: list[str],
    origins: Mapping[str, str],
) -> tuple[M | None, set[str]]:
    """Validate one tree; adds its faults and returns the faulty paths."""
    try:
        return model.model_validate(tree), set()
    except ValidationError as error:
        bad: set[str] = set()
        for item in error.errors():
            path = ".".join(part for part in item["loc"] if _is_field(part))
            if path in bad:
                continue  # another element of one list
            bad.add(path)
            faults.append(_describe(model, f"{prefix}{path}", path, dict(item), origins))
        return None, bad


def _describe(
    model: type[BaseModel],
    dotted: str,
    path: str,
    item: dict[str, Any],
    origins: Mapping[str, str],
) -> str:
    where = f" ({origins[dotted]})" if dotted in origins else ""
    if dotted in RENAMED:
        return f"{dotted}: renamed{where}; write {RENAMED[dotted]}"
    if item["type"] == "extra_forbidden":
        known = _fields_beside(model, path)
        close = difflib.get_close_matches(path.rpartition(".")[2], known, n=1)
        guess = f"did you mean {close[0]!r}? " if close else ""
        return f"{dotted}: unknown field{where}; {guess}known here: {', '.join(known)}"
    if item["type"] == "missing" and isinstance(item["loc"][-1], int):
        return f"{dotted}: {list(item['input'])}{where}: an element is missing"
    if item["type"] == "missing":
        where = "profile" if dotted.startswith("cluster.") else "recipe"
        return f"{dotted}: missing; it has no default, so the {where} must set it"
    rule = (
        str(item["msg"])
        .removeprefix("Value error, ")
        .replace("Input should be", "must be")
        .replace("String", "it")
    )
    return f"{dotted}: {item['input']!r}{where}: {rule}"


def _is_field(part: str | int) -> TypeGuard[str]:
    """Whether a part of a place is a name, not the number of an element or a union's `[tag]`."""
    return isinstance(part, str) and not part.startswith("[")


def _fields_beside(model: type[BaseModel], path: str) -> list[str]:
    """The fields of the section that a path lies in."""
    for part in path.split(".")[:-1]:
        info = model.model_fields.get(part)
        inner = None if info is None else _section_of(info.annotation)
        if inner is None:
            break
        model = inner
    return list(model.model_fields)


def _section_of(annotation: Any) -> type[BaseModel] | None:
    """The section in a type, or in the types that it is made of."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for a in get_args(annotation) if (found := _section_of(a))), None)
