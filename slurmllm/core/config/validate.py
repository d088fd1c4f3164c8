"""The validation of a configuration: all faults of recipe and profile, with their sources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from slurmllm.core.config.cluster import Cluster
from slurmllm.core.config.command import REFUSED
from slurmllm.core.config.families import CHOSEN, find_family
from slurmllm.core.config.profiles import did_you_mean
from slurmllm.core.config.recipe import ParallelConfig, Recipe, with_family
from slurmllm.core.config.rules import broken_rules
from slurmllm.core.config.variables import MASK, has_password, is_secret_at
from slurmllm.core.config.yaml_source import Values, flatten
from slurmllm.core.errors import ConfigError
from slurmllm.core.format import format_plural
from slurmllm.core.plugins import is_known
from slurmllm.core.removed import field_message

PLANNER = "planner: "  # prefix of the origins of the planner's choices
# Settings that are left to the planner if a recipe does not set them.
OPEN = ("train.micro_batch", "train.activation_checkpointing")
# Sections of which a recipe with a `command` has nothing but KEEP; `REFUSED` has the others.
OF_OUR_TRAINERS = ("backend", "checkpoint")
KEEP = "checkpoint.keep"
M = TypeVar("M", bound=BaseModel)
Origins = dict[str, str]  # dotted path → source of the value


def is_set(path: str, origins: Origins) -> bool:
    """Whether a value was set: it is neither a default nor the planner's choice."""
    source = origins.get(path, "default")
    return source != "default" and not source.startswith(PLANNER)


def validate(
    tree: Values,
    origins: Origins,
    faults: Sequence[str],
    title: str,
    *,
    trusted: bool = True,
) -> tuple[Recipe, Cluster, Origins]:
    """Validate the sections of a recipe, with the cluster profile under `cluster`.

    Args:
        trusted: Whether the modules of `plugins` may be imported, for a family that they register.

    Raises:
        ConfigError: with `faults` and all faults of the tree.
    """
    faults = list(faults)
    origins = dict(origins)
    recipe_tree = {name: value for name, value in tree.items() if name != "cluster"}
    _open_auto_settings(recipe_tree, origins)
    if isinstance(recipe_tree.get("model"), Mapping):
        faults += _add_family(recipe_tree, origins, trusted)
    if recipe_tree.get("command") is not None:
        faults += _take_training_out(recipe_tree, origins)
    recipe, bad = _build(Recipe, recipe_tree, "", faults, origins)
    if "model.family" in bad:  # which would have had the values of these
        left_out = tuple(f"model.{name}: missing" for name in CHOSEN)
        faults = [fault for fault in faults if not fault.startswith(left_out)]
    cluster, _ = _build(Cluster, tree.get("cluster", {}), "cluster.", faults, origins)
    leaves = flatten(recipe_tree)
    filled = {path.rpartition(".")[0] for path in leaves}  # mappings that are not empty
    values = {path: value for path, value in _defaults(Recipe).items() if path not in filled}
    values |= leaves
    if values.get("parallel.auto") is True and not is_set("parallel.pipeline", origins):
        # The planner will choose it: the rules on layers must not judge the default.
        values.pop("parallel.pipeline", None)
    # A rule is checked only if all of its fields are valid in themselves, elements of lists too.
    bad |= {fault.rpartition(".")[0] for fault in bad}.intersection(leaves)
    valid = {
        path: value
        for path, value in values.items()
        if not f"{path}.".startswith(tuple(f"{fault}." for fault in bad))
    }
    faults += broken_rules(valid)
    hidden = ("env.", "cluster.env.", "cluster.data_mirrors")  # kept apart, or not stored
    faults += [
        f"{path}: an address with a password; give the password in a variable of the environment"
        for path, value in flatten(tree).items()
        if has_password(value) and not path.startswith(hidden)
    ]
    if recipe is None or cluster is None or faults:
        raise ConfigError(f"{title}: {format_plural(len(faults), 'error')}", faults)
    return recipe, cluster, origins


def _add_family(recipe_tree: Values, origins: Origins, trusted: bool) -> list[str]:
    """Add what the model's family sets; return the fault of a family that is not there."""
    model: Any = recipe_tree["model"]
    family = model.get("family")
    faults = []
    modules: Any = recipe_tree.get("plugins") if trusted else None
    modules = [modules] if isinstance(modules, str) else modules
    named = isinstance(modules, list | tuple) and all(isinstance(name, str) for name in modules)
    try:
        if isinstance(family, str):
            find_family(family, modules if named else ())
    except ConfigError as error:
        # The validation of the field itself reports a package's.
        if not is_known("models", family):
            faults = [str(error)]
    recipe_tree["model"] = with_family(model)
    added = recipe_tree["model"].keys() - model.keys()
    origins.update({f"model.{name}": f"family {family}" for name in added})
    return faults


def _take_training_out(recipe_tree: Values, origins: Origins) -> list[str]:
    names = [name for name in (*REFUSED, *OF_OUR_TRAINERS) if recipe_tree.get(name)]
    taken = flatten({name: recipe_tree.pop(name) for name in names})
    if KEEP in taken:
        recipe_tree["checkpoint"] = {"keep": taken.pop(KEEP)}
        if fault := _keep_fault(recipe_tree["command"], origins):
            return [fault]
    places: Origins = {}  # section → the first source of its values
    for path in taken:
        source = f" ({origins[path]})" if path in origins else ""
        places.setdefault(path.partition(".")[0], source)
    if not places:
        return []
    named = ", ".join(f"{name}{source}" for name, source in places.items())
    return [
        f"command: with it a recipe has no {named}; leave these out, and give the trainer its own "
        f"arguments in command.run (of checkpoint it has {KEEP})"
    ]


def _keep_fault(command: Any, origins: Origins) -> str | None:
    """Return why `checkpoint.keep` could remove what another run wrote."""
    pattern = command.get("checkpoints") if isinstance(command, Mapping) else None
    if not isinstance(pattern, str):
        return None
    first, *folders = pattern.split("/")
    if first == "{run}" and folders and ".." not in folders:
        return None
    source = f" ({origins[KEEP]})" if KEEP in origins else ""
    return (
        f"{KEEP}{source}: removes only what is in the run's directory, and command.checkpoints is "
        f"{pattern!r}; let the trainer save below {{run}}, or leave {KEEP} out"
    )


def _open_auto_settings(recipe_tree: Values, origins: Origins) -> None:
    """Leave degrees that are `auto` (by `parallel.auto`) and null settings to the planner."""
    train = recipe_tree.get("train")
    if isinstance(train, Mapping):
        recipe_tree["train"] = settings = {**train}
        for path in OPEN:
            name = path.removeprefix("train.")
            if settings.get(name, ...) is None:
                del settings[name]
                origins.pop(path, None)
    section = recipe_tree.get("parallel")
    if isinstance(section, Mapping):
        recipe_tree["parallel"] = degrees = {**section}
        for name, value in section.items():
            if value == "auto" and name in ParallelConfig.model_fields and name != "auto":
                del degrees[name]
                degrees["auto"] = True
                origins["parallel.auto"] = origins.pop(f"parallel.{name}", "default")


def _defaults(model: type[BaseModel], prefix: str = "") -> Values:
    defaults = {}
    for name, info in model.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            defaults.update(_defaults(info.annotation, f"{prefix}{name}."))
        elif not info.is_required():
            defaults[f"{prefix}{name}"] = info.get_default(call_default_factory=True)
    return defaults


def _build(
    model: type[M], tree: Any, prefix: str, faults: list[str], origins: Origins
) -> tuple[M | None, set[str]]:
    """Validate one tree; appends its faults and returns the faulty paths."""
    try:
        return model.model_validate(tree), set()
    except ValidationError as error:
        bad = set()
        for item in error.errors():
            # Field names only: no numbers of list elements, no `[tag]` of a union.
            names = (key for key in item["loc"] if isinstance(key, str))
            path = ".".join(key for key in names if not key.startswith("["))
            if path in bad:
                continue  # another element of one list
            bad.add(path)
            faults.append(_describe(model, f"{prefix}{path}", path, dict(item), origins))
        return None, bad


def _describe(
    model: type[BaseModel], dotted: str, path: str, item: Values, origins: Origins
) -> str:
    origin = f" ({origins[dotted]})" if dotted in origins else ""
    if item["type"] == "extra_forbidden":
        if message := field_message(dotted):
            return f"{message}{origin}"
        *sections, name = path.split(".")
        for section in sections:
            info = model.model_fields.get(section)
            model = (info and _section_type(info.annotation)) or model
        names = list(model.model_fields)
        return (
            f"{dotted}: unknown field{origin}; {did_you_mean(name, names)}known here: "
            f"{', '.join(names)}"
        )
    if item["type"] == "missing":
        if isinstance(item["loc"][-1], int):
            return f"{dotted}: {list(item['input'])}{origin}: an element is missing"
        if dotted == "command.run":
            return (
                "command.run: missing; set it in the recipe, or write the command line after `--`"
            )
        file = "profile" if dotted.startswith("cluster.") else "recipe"
        return f"{dotted}: missing; it has no default, so the {file} must set it"
    rule = (
        str(item["msg"])
        .removeprefix("Value error, ")
        .replace("Input should be", "must be")
        .replace("a valid tuple", "a list, such as [a, b]")
        .replace("String", "it")
        .replace("Tuple", "it")
    )
    if not path:
        return rule
    hidden = dotted in ("env", "cluster.env") or is_secret_at(dotted, item["input"])
    return f"{dotted}: {MASK if hidden else repr(item['input'])}{origin}: {rule}"


def _section_type(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_section_type, get_args(annotation))), None)
