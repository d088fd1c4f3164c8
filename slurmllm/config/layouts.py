"""The part of a recipe that belongs to hardware: its `layouts`, by cluster profile or device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LAYOUT = "layout of "  # prefix of the origins of what a layout sets
# What a layout sets; `parallel` as a whole.
_SETTINGS = ("parallel", "train.micro_batch", "train.activation_checkpointing")


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
    """Set one setting to a layout's, if the recipe does not set it."""
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
