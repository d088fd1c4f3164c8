"""A recipe's file: what it extends, its layouts by hardware, and what it may not set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slurmllm.core.config.directives import FROM_FILE
from slurmllm.core.config.huggingface import read_model
from slurmllm.core.config.layers import (
    Tree,
    Value,
    as_section,
    is_section,
    make_node,
    merge,
    value_at,
    with_source,
)
from slurmllm.core.config.profiles import read_chain
from slurmllm.core.config.variables import MASK, TUNING, is_secret, may_be_in_file
from slurmllm.core.errors import ConfigError

AUTO = {"auto": True}  # the meaning of `parallel: auto`
LAYOUT = "layout of "  # prefix of the origins of what a layout sets
# What a layout sets; `parallel` as a whole.
_SETTINGS = ("parallel", "train.micro_batch", "train.activation_checkpointing")


def read_recipe(path: Path, shipped: Path) -> Tree:
    """Read a recipe with all that it extends.

    Its values replace those of the recipe that it extends, section by section; null takes one out.
    `parallel: auto` and the file of a published model replace the whole section.

    Args:
        shipped: Folder of the recipes that are extended by name.
    """
    recipe: Tree = {}
    for file, changes in reversed(read_chain(path, shipped, "recipe")):
        for name in _read_sections(file, changes):
            recipe.pop(name, None)
        recipe = merge(recipe, changes) if recipe else changes
    return recipe


def _read_sections(file: Path, tree: Tree) -> set[str]:
    """Replace `parallel: auto` and `model: FILE` by their sections; returns these."""
    replaced = set()
    parallel = tree.get("parallel")
    model = tree.get("model")
    if isinstance(parallel, Value) and parallel.value == "auto":
        tree["parallel"] = make_node(AUTO, parallel.source)
        replaced.add("parallel")
    if isinstance(model, Value) and isinstance(model.value, str):
        model_file = file.parent / model.value
        tree["model"] = make_node(read_model(model_file), str(model_file))
        replaced.add("model")
    return replaced


def apply_layouts(tree: Tree, cluster: Tree) -> None:
    """Move the settings for a cluster from a recipe's `layouts` to their sections, in place.

    The recipe's own value has precedence over the layout of the profile, and that over the layout
    of the device. Without any of them, and with `parallel: auto`, the planner chooses. What is
    no setting of a layout is left, for the validation.

    Args:
        cluster: The profile.
    """
    layouts = tree.get("layouts")
    if not is_section(layouts):
        return
    name = str(value_at(cluster, "name"))
    device = str(value_at(cluster, "device"))
    if not value_at(tree, "parallel.auto"):
        for hardware in (name, device):
            for path in _SETTINGS:
                _move(path, as_section(layouts).get(hardware), hardware, tree)
    parallel = tree.get("parallel")
    if isinstance(parallel, Value) and parallel.value == "auto":  # a layout's
        tree["parallel"] = make_node(AUTO, parallel.source)
    if parallel is None:
        tree["parallel"] = make_node(AUTO, f"no layout for {name}")


def _move(path: str, layout: Any, hardware: str, tree: Tree) -> None:
    section, _, name = path.rpartition(".")
    source = as_section(layout)
    target = tree
    if section:
        source = as_section(source.get(section))
        target = tree.setdefault(section, {})
    if name not in source or not isinstance(target, dict):
        return
    node = source.pop(name)
    if name not in target:
        target[name] = with_source(node, lambda line: f"{LAYOUT}{hardware}, {line}")


def default_cluster(tree: Tree) -> str:
    # A default of another type is a fault that the validation reports.
    node = tree.get("default_cluster")
    if not isinstance(node, Value) or not isinstance(node.value, str):
        return "local"
    if Path(node.value).suffix in (".yaml", ".yml"):  # a profile's setup runs as the user
        raise ConfigError(
            f"default_cluster: {node.value!r} ({node.source}): a recipe, which may "
            "be another user's file, names shipped profiles only; if you trust the profile, "
            f"--cluster {node.value}"
        )
    return node.value


def untrusted_fault(path: str, value: Any, source: str) -> str | None:
    """Return why a recipe's or sweep's file, which may be another user's, may not set a value."""
    section, _, name = path.rpartition(".")
    also = ""
    if path.startswith("env.") and not may_be_in_file(path[4:], value):
        display = MASK if is_secret(path[4:], value) else repr(value)
        reason = (
            f"{display}: a recipe's file sets only variables for tuning ({', '.join(TUNING[:7])}, "
            "…: docs/recipes.md), and none that names a file, a library, a plugin or an address"
        )
        also = ", or the cluster profile's env"
    elif path.startswith("slurm.notify.command") and value:
        reason = "a recipe may not set a program to run"
    elif section.startswith("slurm.directives") and name not in FROM_FILE:
        reason = "a recipe may set options for resources only"
    else:
        return None
    return (
        f"{path} ({source}): {reason}, as it may be another user's file; if you trust it, "
        f"--set {path}=…{also}"
    )
