"""Recipe + cluster profile + overrides → one validated configuration with each value's origin."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from slurmllm.config.cluster import Cluster
from slurmllm.config.command import REFUSED
from slurmllm.config.directives import parse_options, user_defaults
from slurmllm.config.families import CHOSEN, find_family
from slurmllm.config.huggingface import read_model
from slurmllm.config.layouts import LAYOUT, apply_layouts
from slurmllm.config.profiles import did_you_mean, find_yaml, read_profile, shipped_dir
from slurmllm.config.recipe import ParallelConfig, Recipe, with_family
from slurmllm.config.recipe_file import AUTO, default_cluster, read_recipe, untrusted_fault
from slurmllm.config.rules import broken_rules
from slurmllm.config.user_file import (
    choose_cluster,
    user_configuration,
    with_user_configuration,
)
from slurmllm.config.variables import MASK, is_secret_at, mask
from slurmllm.config.yaml_source import flatten, parse_scalar, write_yaml
from slurmllm.errors import ConfigError
from slurmllm.format import format_plural
from slurmllm.plugins import is_known

M = TypeVar("M", bound=BaseModel)

TRIAL = "--data builtin"  # origin of the corpus of a first trial
PLANNER = "planner: "  # prefix of the origins of the planner's choices

# Mappings by name that `--set section.name=null` removes an entry from.
_REMOVED_BY_NULL = ("hooks", "eval.corpora")

# Settings that are left to the planner if a recipe does not set them.
OPEN = ("train.micro_batch", "train.activation_checkpointing")


def recipes_dir() -> Path:
    return shipped_dir() / "configs" / "recipes"


def clusters_dir() -> Path:
    return shipped_dir() / "configs" / "clusters"


# Of a recipe with a command, beside `REFUSED`: all but _KEEP
_OF_OUR_TRAINERS = ("backend", "checkpoint")
_KEEP = "checkpoint.keep"


@dataclass(frozen=True)
class RunConfig:
    """Everything that determines a run."""

    recipe: Recipe
    cluster: Cluster
    # Dotted path → source of the value; paths left out are defaults.
    origins: Mapping[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"<RunConfig {self.recipe.name} on {self.cluster.name}>"

    @property
    def backend(self) -> str:
        """The backend's name, `auto` resolved; `command` for a trainer of another project."""
        if self.recipe.command is not None:
            return "command"
        if self.recipe.backend != "auto":
            return self.recipe.backend
        return "nxd" if self.cluster.device == "neuron" else "native"

    @property
    def workers_per_node(self) -> int:
        """Processes that a launcher starts: one for each device, or one that starts the others."""
        command = self.recipe.command
        return 1 if command and command.one_per_node else self.cluster.devices_per_node

    def rows(self) -> list[tuple[str, Any, str]]:
        """Return (dotted path, value, source) of every value, in the models' order."""
        values = flatten(self.values())
        return [(path, value, self.origins.get(path, "default")) for path, value in values.items()]

    def values(self) -> dict[str, Any]:
        """Return the nested values, as stored in config.yaml: secrets are masked."""
        unused = {"command"} if self.recipe.command is None else {*REFUSED, *_OF_OUR_TRAINERS}
        recipe = self.recipe.model_dump(mode="json", exclude=unused)
        # Not its default, which would be set for whoever reads it: a trainer's files are kept.
        if self.recipe.command is not None and self.is_set(_KEEP):
            recipe["checkpoint"] = {"keep": self.recipe.checkpoint.keep}
        cluster = self.cluster.model_dump(mode="json")
        cluster["env"] = mask(self.cluster.env)
        return {**recipe, "env": mask(self.recipe.env), "cluster": cluster}

    to_dict = values  # as other public records name it

    def secrets(self) -> dict[str, str]:
        """Return dotted path → value of the variables that hold secrets."""
        sections = {"cluster": {"env": self.cluster.env}, "env": self.recipe.env}
        variables = flatten(sections)
        return {path: value for path, value in variables.items() if is_secret_at(path, value)}

    def worker_secrets(self) -> dict[str, str]:
        """Return name → value of these variables; the recipe's override the profile's.

        Raises:
            ConfigError: the value of one is missing.
        """
        secrets = self.secrets()
        missing = [
            f"{path}: a secret, and its value is not in secrets.json of the run's directory; give "
            f"it again with `slurmllm resume RUN --set {path}=…`"
            for path, value in secrets.items()
            if value == MASK
        ]
        if missing:
            count = format_plural(len(missing), "secret")
            raise ConfigError(f"{self.recipe.name}: {count} missing", missing)
        return {path.rpartition(".")[2]: value for path, value in secrets.items()}

    def variable(self, name: str) -> str | None:
        """Return a variable as recipe or profile set it, else of this process's environment."""
        value = {**self.cluster.env, **self.recipe.env}.get(name, MASK)
        return os.environ.get(name) if value == MASK else value

    def is_set(self, path: str) -> bool:
        """Whether the value was set: it is neither a default nor the planner's choice."""
        return _is_set(path, self.origins)

    @property
    def is_trial(self) -> bool:
        """Whether it reads the built-in texts in place of the recipe's data."""
        return self.origins.get("data.corpus") == TRIAL

    def open_settings(self) -> list[str]:
        """Return the dotted paths that the planner is to choose, at submit.

        With `parallel.auto` they are the degrees and settings of `OPEN` that are not set; without,
        the micro batch alone.
        """
        if self.recipe.command is not None:
            return []
        auto, micro_batch = self.recipe.parallel.auto, self.recipe.train.micro_batch
        degrees = (f"parallel.{name}" for name in ParallelConfig.model_fields if name != "auto")
        paths = (*degrees, *OPEN) if auto else ("train.micro_batch",) * (micro_batch == "auto")
        return [path for path in paths if not self.is_set(path)]

    def with_settings(
        self, section: str, origins: Mapping[str, str] | None = None, /, **values: Any
    ) -> RunConfig:
        """Return a copy with other values of a section of the recipe, which are not validated.

        Args:
            origins: Their sources; those of other values are kept.
        """
        changed = getattr(self.recipe, section).model_copy(update=values)
        recipe = self.recipe.model_copy(update={section: changed})
        return replace(self, recipe=recipe, origins={**self.origins, **(origins or {})})

    def to_yaml(self) -> str:
        origin = {path: source for path, _, source in self.rows()}
        return "# Resolved by slurmllm; `origin` names each value's source.\n" + write_yaml(
            {**self.values(), "origin": origin}
        )


def _is_set(path: str, origins: Mapping[str, str]) -> bool:
    source = origins.get(path, "default")
    return source != "default" and not source.startswith(PLANNER)


def local_cluster(cluster: str | None, local: bool) -> str | None:
    """Return the profile's name; with --local not that of config.yaml, which is the cluster's."""
    of_slurm = local and choose_cluster(cluster)[1] == str(user_configuration())
    return "local" if of_slurm else cluster


def resolve(
    recipe: str,
    cluster: str | None = None,
    overrides: Iterable[str] = (),
    options: Mapping[str, tuple[str, Any]] | None = None,
) -> RunConfig:
    """Merge recipe, cluster profile and overrides into one configuration.

    Args:
        recipe: Name of a shipped recipe, or path of a YAML file.
        cluster: Name of a shipped profile, or path of a YAML file; if None, $SLURMLLM_CLUSTER,
            else that of the user's config.yaml, else the recipe's `default_cluster`.
        overrides: `a.b=value`, as given to --set; later ones win.
        options: Dotted path → (option's name, value), from options such as --partition.

    Raises:
        ConfigError: with all faults of recipe, profile and overrides.
    """
    recipe_path = find_yaml(recipe, recipes_dir(), "recipe", "slurmllm recipes")
    values, origins = read_recipe(recipe_path, recipes_dir())
    chosen, source = choose_cluster(cluster)
    fix = "--cluster FILE.yaml" if chosen == cluster else f"correct {source}, which names it"
    chosen = chosen or default_cluster(values, origins)
    cluster_path = find_yaml(chosen, clusters_dir(), "cluster profile", fix)
    profile = read_profile(cluster_path, clusters_dir())
    cluster_values, cluster_origins = with_user_configuration(profile)
    apply_layouts(values, origins, cluster_values)
    if values.get("parallel") == "auto":
        # A copy: `_assign` changes sections in place.
        values["parallel"] = dict(AUTO)
        origins["parallel.auto"] = origins.pop("parallel")
    layouts = values.pop("layouts", {})
    tree: dict[str, Any] = {**values, "cluster": cluster_values}
    origins.update({f"cluster.{path}": source for path, source in cluster_origins.items()})
    faults: list[str] = []
    if "cluster" in values:
        faults.append("cluster: belongs in a profile, not in a recipe; see --cluster")
    of_files = dict(origins)
    _override(tree, overrides, origins, faults)
    if "layouts" in tree:
        faults.append("layouts: only in a recipe's file; --set parallel.tensor=… has precedence")
    tree["layouts"] = layouts
    leaves = flatten(tree)
    unchanged = [path for path, origin in origins.items() if origin == of_files.get(path)]
    untrusted = (untrusted_fault(path, leaves.get(path), origins[path]) for path in unchanged)
    faults += filter(None, untrusted)
    _assign_options(tree, options or {}, origins, faults)
    _assign_user_defaults(tree, origins, faults)
    config = validate(tree, origins, faults, f"{recipe_path.name} with {cluster_path.name}")
    # Those of other clusters are no part of the run.
    return replace(config, recipe=config.recipe.model_copy(update={"layouts": {}}))


def _assign_user_defaults(tree: dict[str, Any], origins: dict[str, str], faults: list[str]) -> None:
    """Set the options of sbatch that the user's shell has and nothing else sets."""
    cluster, leaves = tree["cluster"], flatten(tree)
    of_profile = {"partition"} if cluster.get("partition") else set[str]()
    with suppress(TypeError, ValueError):  # a fault that the validation reports
        of_profile |= parse_options(cluster.get("directives") or ()).keys()
    for name, value in user_defaults().items():
        path = f"slurm.{name}"
        # A null in a file, such as `slurmllm recipes NAME` prints it, leaves the choice open.
        is_open = leaves.get(path) is None and not origins.get(path, "").startswith("--set")
        if is_open and name not in of_profile:
            _assign(tree, path, value, f"SBATCH_{name.upper()}", origins, faults)


def change(
    config: RunConfig,
    cluster: str | None,
    overrides: Iterable[str],
    options: Mapping[str, tuple[str, Any]] | None = None,
) -> RunConfig:
    """Replace the cluster profile or single values of a run's configuration.

    Args:
        cluster: Name of a shipped profile, or path of a YAML file; None keeps the run's.
        options: As for `resolve`.

    Raises:
        ConfigError: with all faults.
    """
    tree, origins = config.values(), dict(config.origins)
    tree["env"], tree["cluster"]["env"] = dict(config.recipe.env), dict(config.cluster.env)
    if cluster is not None:
        path = find_yaml(cluster, clusters_dir(), "cluster profile", "--cluster FILE.yaml")
        tree["cluster"], sources = with_user_configuration(read_profile(path, clusters_dir()))
        origins = {name: how for name, how in origins.items() if not name.startswith("cluster.")}
        origins |= {f"cluster.{name}": source for name, source in sources.items()}
    faults: list[str] = []
    _override(tree, overrides, origins, faults)
    _assign_options(tree, options or {}, origins, faults)
    return validate(tree, origins, faults, f"run of {config.recipe.name}")


def changed_settings(before: RunConfig, after: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Return dotted path → old and new value of the training's settings that differ."""
    old, new = (flatten(config.values()) for config in (before, after))
    return {
        path: (old.get(path), new.get(path))
        for path in sorted(old.keys() | new.keys())
        if old.get(path) != new.get(path) and not path.startswith(("cluster.", "slurm.", "env."))
    }


def _override(
    tree: dict[str, Any], overrides: Iterable[str], origins: dict[str, str], faults: list[str]
) -> None:
    settings: list[tuple[str, Any, str]] = []
    for item in overrides:
        dotted, equals, text = item.partition("=")
        section, _, name = dotted.strip().rpartition(".")
        if not equals and name and section in ("env", "cluster.env"):
            # The value is this process's own: every user could read it on the command line.
            equals, text = "=", os.environ.get(name, "")
            if not text:
                faults.append(f"--set {item}: {name} is not set here; `export {name}=…` first")
                continue
        if not equals or not all(dotted.strip().split(".")):
            faults.append(f"--set {item!r}: expected path=value, such as optim.lr=1e-4")
            continue
        dotted = dotted.strip()
        # An environment variable is text even if it looks like YAML: 1, true, 007, empty.
        value = text if dotted.startswith(("env.", "cluster.env.")) else parse_scalar(text)
        if dotted == "model" and isinstance(value, str):
            value = read_model(Path(value))
        secret = any(is_secret_at(path, leaf) for path, leaf in flatten({dotted: value}).items())
        settings.append((dotted, value, f"--set {dotted}={MASK if secret else text}"))
    # `parallel=auto` clears the section, so it comes before any degree that is set with it.
    settings.sort(key=lambda setting: setting[:2] != ("parallel", "auto"))
    for dotted, value, source in settings:
        whole = (dotted, value) == ("parallel", "auto")
        _assign(tree, dotted, dict(AUTO) if whole else value, source, origins, faults)
        for path in OPEN if whole else ():  # a layout's are the planner's now
            if origins.get(path, "").startswith(LAYOUT):
                group, _, name = path.partition(".")
                tree[group].pop(name), origins.pop(path)


def _assign_options(
    tree: dict[str, Any],
    options: Mapping[str, tuple[str, Any]],
    origins: dict[str, str],
    faults: list[str],
) -> None:
    for dotted, (option, value) in options.items():
        if value is not None:
            _assign(tree, dotted, value, option, origins, faults)


def _assign(
    tree: dict[str, Any],
    dotted: str,
    value: Any,
    source: str,
    origins: dict[str, str],
    faults: list[str],
) -> None:
    """Set one value. Unknown paths are reported by the validation that follows."""
    *sections, leaf = dotted.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
        if not isinstance(tree, dict):
            faults.append(f"{dotted}: {section} is not a section; see `slurmllm recipes NAME`")
            return
    # A whole section may be replaced: the sources of its former values must go.
    for path in [path for path in origins if path.startswith(f"{dotted}.")]:
        del origins[path]
    if value is not None or ".".join(sections) not in _REMOVED_BY_NULL:
        tree[leaf] = value
        origins.update(dict.fromkeys(flatten({dotted: value}), source))
    elif leaf in tree:
        del tree[leaf]
        origins.pop(dotted, None)
    else:
        names = ", ".join(sorted(tree)) or "it is empty"
        faults.append(f"{source}: there is no {leaf} in {'.'.join(sections)} ({names})")


def validate(
    tree: dict[str, Any],
    origins: Mapping[str, str],
    faults: Sequence[str],
    title: str,
    *,
    trusted: bool = True,
) -> RunConfig:
    """Validate the sections of a recipe, with the cluster profile under `cluster`.

    Args:
        trusted: Whether the modules of `plugins` may be imported, for a family that they register.

    Raises:
        ConfigError: with `faults` and all faults of the tree.
    """
    faults, origins = list(faults), dict(origins)
    recipe_tree = _with_lists({k: v for k, v in tree.items() if k != "cluster"}, Recipe)
    _open_auto_settings(recipe_tree, origins)
    model = recipe_tree.get("model")
    if isinstance(model, Mapping):
        modules = recipe_tree.get("plugins") if trusted else None
        faults += _import_family(model.get("family"), modules)
        recipe_tree["model"] = with_family(model)
        added = recipe_tree["model"].keys() - model.keys()
        origins |= {f"model.{name}": f"family {model['family']}" for name in added}
    if recipe_tree.get("command") is not None:
        faults += _take_training_out(recipe_tree, origins)
    recipe, bad = _build(Recipe, recipe_tree, "", faults, origins)
    if "model.family" in bad:  # which would have had the values of these
        left_out = tuple(f"model.{name}: missing" for name in CHOSEN)
        faults = [fault for fault in faults if not fault.startswith(left_out)]
    cluster, _ = _build(
        Cluster, _with_lists(tree.get("cluster", {}), Cluster), "cluster.", faults, origins
    )
    leaves = flatten(recipe_tree)
    filled = {path.rpartition(".")[0] for path in leaves}  # mappings that are not empty
    defaults = {path: value for path, value in _defaults(Recipe).items() if path not in filled}
    values = {**defaults, **leaves}
    if values.get("parallel.auto") is True and not _is_set("parallel.pipeline", origins):
        # The planner will choose it: the rules on layers must not judge the default.
        values.pop("parallel.pipeline", None)
    # A rule is checked only if all of its fields are valid in themselves.
    valid = {
        path: value
        for path, value in values.items()
        if not any(path == fault or path.startswith(f"{fault}.") for fault in bad)
    }
    faults += broken_rules(valid)
    if recipe is None or cluster is None or faults:
        raise ConfigError(f"{title}: {format_plural(len(faults), 'error')}", faults)
    return RunConfig(recipe, cluster, origins)


def _with_lists(tree: Any, model: type[BaseModel]) -> Any:
    """Return a section in which a single value is a list of it, if its field is a list."""
    if not isinstance(tree, Mapping):
        return tree
    values = dict(tree)
    for name, value in tree.items():
        annotation = info.annotation if (info := model.model_fields.get(name)) else None
        if isinstance(value, Mapping) and (section := _section_type(annotation)) is not None:
            values[name] = _with_lists(value, section)
        elif isinstance(value, str | int | float) and Ellipsis in get_args(annotation):
            values[name] = [value]
    return values


def _import_family(family: Any, modules: Any) -> list[str]:
    """Import a family of another package; returns the fault if that fails."""
    named = isinstance(modules, list | tuple) and all(isinstance(module, str) for module in modules)
    try:
        if isinstance(family, str):
            find_family(family, modules if named else ())
    except ConfigError as error:
        # The validation of the field itself reports a package's.
        return [] if is_known("models", family) else [str(error)]
    return []


def _take_training_out(recipe_tree: dict[str, Any], origins: Mapping[str, str]) -> list[str]:
    """Take out what a recipe with a command does not have; returns the fault."""
    names = [name for name in (*REFUSED, *_OF_OUR_TRAINERS) if recipe_tree.get(name)]
    taken = flatten({name: recipe_tree.pop(name) for name in names})
    if _KEEP in taken:
        recipe_tree["checkpoint"] = {"keep": taken.pop(_KEEP)}
    places: dict[str, str] = {}  # section → the first source of its values
    for path in taken:
        source = f" ({origins[path]})" if path in origins else ""
        places.setdefault(path.partition(".")[0], source)
    if not places:
        return []
    named = ", ".join(f"{name}{source}" for name, source in places.items())
    return [
        f"command: with it a recipe has no {named}; leave these out, and give the trainer its own "
        f"arguments in command.run (of checkpoint it has {_KEEP})"
    ]


def _open_auto_settings(recipe_tree: dict[str, Any], origins: dict[str, str]) -> None:
    """Leave degrees that are `auto` (by `parallel.auto`) and null settings to the planner."""
    train = recipe_tree.get("train")
    if isinstance(train, Mapping):
        null = {path for path in OPEN if train.get(path.removeprefix("train."), ...) is None}
        recipe_tree["train"] = {k: v for k, v in train.items() if f"train.{k}" not in null}
        for path in null:
            origins.pop(path, None)
    section = recipe_tree.get("parallel")
    if not isinstance(section, Mapping):
        return
    degrees = ParallelConfig.model_fields.keys() - {"auto"}
    auto = [name for name, value in section.items() if value == "auto" and name in degrees]
    for name in auto:
        origins["parallel.auto"] = origins.pop(f"parallel.{name}", "default")
    fixed = {name: value for name, value in section.items() if name not in auto}
    recipe_tree["parallel"] = {**fixed, "auto": True} if auto else fixed


def _defaults(model: type[BaseModel], prefix: str = "") -> dict[str, Any]:
    """Return dotted path → default of every field that has one."""
    defaults: dict[str, Any] = {}
    for name, info in model.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            defaults.update(_defaults(info.annotation, f"{prefix}{name}."))
        elif not info.is_required():
            defaults[f"{prefix}{name}"] = info.get_default(call_default_factory=True)
    return defaults


def _build(
    model: type[M], tree: Any, prefix: str, faults: list[str], origins: Mapping[str, str]
) -> tuple[M | None, set[str]]:
    """Validate one tree; appends its faults and returns the faulty paths."""
    try:
        return model.model_validate(tree), set()
    except ValidationError as error:
        bad: set[str] = set()
        for item in error.errors():
            # Field names only: no numbers of list elements, no `[tag]` of a union.
            names = (part for part in item["loc"] if isinstance(part, str))
            path = ".".join(part for part in names if not part.startswith("["))
            if path in bad:
                continue  # another element of one list
            bad.add(path)
            faults.append(_describe(model, f"{prefix}{path}", path, dict(item), origins))
        return None, bad


def _describe(
    model: type[BaseModel], dotted: str, path: str, item: dict[str, Any], origins: Mapping[str, str]
) -> str:
    where = f" ({origins[dotted]})" if dotted in origins else ""
    if item["type"] == "extra_forbidden":
        *sections, name = path.split(".")
        for section in sections:
            info = model.model_fields.get(section)
            model = (info and _section_type(info.annotation)) or model
        names = list(model.model_fields)
        guess = did_you_mean(name, names)
        return f"{dotted}: unknown field{where}; {guess}known here: {', '.join(names)}"
    if item["type"] == "missing" and isinstance(item["loc"][-1], int):
        return f"{dotted}: {list(item['input'])}{where}: an element is missing"
    if item["type"] == "missing" and dotted == "command.run":
        return "command.run: missing; set it in the recipe, or write the command line after `--`"
    if item["type"] == "missing":
        file = "profile" if dotted.startswith("cluster.") else "recipe"
        return f"{dotted}: missing; it has no default, so the {file} must set it"
    rule = (
        str(item["msg"])
        .removeprefix("Value error, ")
        .replace("Input should be", "must be")
        .replace("a valid tuple", "a list, such as [a, b]")
        .replace("String", "it")
    )
    if not path:
        return rule
    hidden = dotted in ("env", "cluster.env") or is_secret_at(dotted, item["input"])
    return f"{dotted}: {MASK if hidden else repr(item['input'])}{where}: {rule}"


def _section_type(annotation: Any) -> type[BaseModel] | None:
    """Return the section in a type annotation, in `X | None` and in containers too."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_section_type, get_args(annotation))), None)
