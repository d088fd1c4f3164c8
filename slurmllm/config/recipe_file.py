"""A recipe's file: what it extends, its layouts by hardware, and what it may not set."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slurmllm.config.directives import may_be_in_file
from slurmllm.config.huggingface import read_model
from slurmllm.config.profiles import Level, merge, read_chain
from slurmllm.config.variables import MASK, TUNING, is_secret
from slurmllm.config.variables import may_be_in_file as may_set_variable
from slurmllm.config.yaml_source import flatten
from slurmllm.errors import ConfigError

AUTO = {"auto": True}  # the meaning of `parallel: auto`
LAYOUT = "layout of "  # prefix of the origins of what a layout sets
# What a layout sets; `parallel` as a whole.
_SETTINGS = ("parallel", "train.micro_batch", "train.activation_checkpointing")


def read_recipe(path: Path, shipped: Path) -> Level:
    """Read a recipe with all that it extends: its values, and the source of each.

    Its values replace those of the recipe that it extends, section by section; null takes one out.
    `parallel: auto` and the file of a published model replace the whole section.

    Args:
        shipped: Folder of the recipes that are extended by name.
    """
    (file, recipe), *extensions = reversed(read_chain(path, shipped, "recipe"))
    _read_sections(file, recipe)
    for file, changes in extensions:
        replaced = _read_sections(file, changes)
        base = {name: value for name, value in recipe[0].items() if name not in replaced}
        recipe = merge((base, recipe[1]), changes)
    return recipe


def _read_sections(file: Path, recipe: Level) -> set[str]:
    """Replace `parallel: auto` and `model: FILE` by their sections; returns these."""
    values, origins = recipe
    sections: dict[str, tuple[dict[str, Any], str]] = {}
    if values.get("parallel") == "auto":
        # A copy: `--set` changes sections in place.
        sections["parallel"] = dict(AUTO), origins["parallel"]
    if isinstance(values.get("model"), str):
        model = file.parent / values["model"]
        sections["model"] = read_model(model), str(model)
    for name, (section, source) in sections.items():
        values[name] = section
        del origins[name]
        origins.update(dict.fromkeys(flatten({name: section}), source))
    return set(sections)


def apply_layouts(
    values: dict[str, Any], origins: dict[str, str], cluster: Mapping[str, Any]
) -> None:
    """Move the settings for a cluster from a recipe's `layouts` to their sections, in place.

    The recipe's own value has precedence over the layout of the profile, and that over the layout
    of the device. Without any of them, and with `parallel: auto`, the planner chooses. What is
    no setting of a layout is left, for the validation.

    Args:
        cluster: The profile's values.
    """
    layouts = values.get("layouts")
    if not isinstance(layouts, dict):
        return
    parallel = values.get("parallel")
    leaves_all_open = parallel == "auto" or (isinstance(parallel, dict) and parallel.get("auto"))
    for name in (str(cluster.get("name")), str(cluster.get("device"))):
        for path in () if leaves_all_open else _SETTINGS:
            _move(path, layouts.get(name), name, values, origins)
    if "parallel" not in values:
        values["parallel"] = "auto"
        origins["parallel"] = f"no layout for {cluster.get('name')}"


def _move(
    path: str, layout: Any, cluster: str, values: dict[str, Any], origins: dict[str, str]
) -> None:
    prefix = f"layouts.{cluster}."
    section, _, name = path.rpartition(".")
    source, target = layout, values
    if section:
        source = layout.get(section) if isinstance(layout, dict) else None
        target = values.setdefault(section, {})
    if not isinstance(source, dict) or name not in source or not isinstance(target, dict):
        return
    places = [p for p in origins if p == f"{prefix}{path}" or p.startswith(f"{prefix}{path}.")]
    moved = {
        place.removeprefix(prefix): f"{LAYOUT}{cluster}, {origins.pop(place)}" for place in places
    }
    value = source.pop(name)
    if name not in target:
        target[name] = value
        origins |= moved


def default_cluster(values: Mapping[str, Any], origins: Mapping[str, str]) -> str:
    # A default of another type is a fault that the validation reports.
    chosen = values.get("default_cluster")
    if not isinstance(chosen, str):
        return "local"
    if Path(chosen).suffix in (".yaml", ".yml"):  # a profile's setup runs as the user
        raise ConfigError(
            f"default_cluster: {chosen!r} ({origins.get('default_cluster')}): a recipe, which may "
            "be another user's file, names shipped profiles only; if you trust the profile, "
            f"--cluster {chosen}"
        )
    return chosen


def untrusted_fault(path: str, value: Any, source: str) -> str | None:
    """Return why a recipe's or sweep's file, which may be another user's, may not set a value."""
    section, _, name = path.rpartition(".")
    also = ""
    if path.startswith("env.") and not may_set_variable(path[4:], value):
        shown = MASK if is_secret(path[4:], value) else repr(value)
        what = f"{shown}: a recipe's file sets only variables for tuning ({', '.join(TUNING[:7])}, "
        what += "…: docs/recipes.md), and none that names a file, a library, a plugin or an address"
        also = ", or the cluster profile's env"
    elif path.startswith("slurm.notify.command") and value:
        what = "a recipe may not set a program to run"
    elif section.startswith("slurm.directives") and not may_be_in_file(name):
        what = "a recipe may set options for resources only"
    else:
        return None
    return (
        f"{path} ({source}): {what}, as it may be another user's file; if you trust it, "
        f"--set {path}=…{also}"
    )
