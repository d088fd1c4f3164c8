"""Files of settings by name, and cluster profiles that extend another."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slurmllm.config.yaml_source import flatten, read_yaml
from slurmllm.errors import ConfigError

Level = tuple[dict[str, Any], dict[str, str]]  # a profile's values, and `file:line` of each

# Figure of a data sheet → constants that were fitted with it: assumed if a profile changes it.
_REACHED = {
    "bf16_tflops": ("matrix_efficiency", "matrix_half", "attention_efficiency"),
    "memory_gb_s": ("memory_efficiency",),
    "node_link_gb_s": ("node_link_efficiency",),
    "network_gb_s": ("network_efficiency", "overlap"),
}
_MAKERS = {*_REACHED, "fp32_tflops", "memory_gib"}
_FORM = "a cluster profile may be as short as `extends: PROFILE`, of `slurmllm recipes --clusters`"
_NODES = ("device", "devices_per_node")


def shipped_dir() -> Path:
    """Return the folder that holds `configs/` and `sbatch/`.

    In a checkout (an editable install too) it is the top of the tree; the wheel carries the same
    two folders inside the package.
    """
    package = Path(__file__).resolve().parent.parent
    installed = package / "_shipped"
    return installed if installed.is_dir() else package.parent


def available(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.yaml"))


def find_yaml(name: str, folder: Path, kind: str, hint: str) -> Path:
    """Return a shipped file by its name, or a file by its path; raise ConfigError without one."""
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        if path.is_file():
            return path
        raise ConfigError(f"no {kind} file {name!r}; {hint}")
    names = available(folder)
    if name in names:
        return folder / f"{name}.yaml"
    raise ConfigError(
        f"unknown {kind} {name!r}; {did_you_mean(name, names)}choose one of {', '.join(names)}, "
        "or a .yaml file"
    )


def did_you_mean(name: str, names: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, names)
    close = close or [other for other in names if other.startswith(name)]
    return f"did you mean {' or '.join(map(repr, close))}? " if close else ""


def read_profile(path: Path, folder: Path) -> Level:
    """Read a cluster profile with all that it extends: its values, and `file:line` of each.

    `extends` names a shipped profile or a file, relative to the profile's own. The profile's values
    replace the other's, section by section; null takes a value or section out. Figures of a maker
    that it replaces leave what training reaches of them assumed (`hardware.assumed`), and make them
    other nodes, as do another device and number of devices: then instance type and price are not
    the other's. A price is never merged with the other's; null is no price, not even that which the
    tables have for the instance type.

    Args:
        folder: The shipped profiles.

    Raises:
        ConfigError: a file cannot be read, or profiles extend each other.
    """
    chain: list[Path] = []
    levels: list[Level] = []
    following: Path | None = path
    while following is not None:
        if following.resolve() in (file.resolve() for file in chain):
            names = " extends ".join(map(str, [*chain, following]))
            raise ConfigError(
                f"cluster profiles extend each other: {names}; remove one `extends`, or name a "
                f"profile outside of the chain: {', '.join(available(folder))}"
            )
        chain.append(following)
        values, origins = read_yaml(following, form=_FORM)
        following = _base(values, origins, following, folder)
        levels.append((values, origins))
    if len(chain) > 1:
        values_of_file, origins = levels[0]
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).lstrip("._-") or "profile"
        levels[0] = {"name": name, **values_of_file}, {"name": path.name, **origins}
    profile = levels.pop()
    while levels:
        profile = extended(profile, levels.pop())
    return profile


def _base(values: dict[str, Any], origins: dict[str, str], path: Path, folder: Path) -> Path | None:
    """Return the profile that one extends; None if it extends none."""
    if "extends" not in values:
        return None
    name, where = values.pop("extends"), origins.pop("extends", path.name)
    if not isinstance(name, str) or not name:
        raise ConfigError(
            f"extends ({where}): {name!r}: must be a profile's name, such as p5, or a .yaml file"
        )
    file = path.parent / name
    source = str(file) if file.suffix in (".yaml", ".yml") else name
    try:
        return find_yaml(source, folder, "cluster profile", "its path is relative to this file's")
    except ConfigError as error:
        raise ConfigError(f"extends ({where}): {error.title}") from None


def extended(base: Level, extension: Level) -> Level:
    """Return a base profile with the values of one that extends it in place of its own."""
    (values, origins), (changes, new_origins) = base, extension
    hardware, before = changes.get("hardware", {}), values.get("hardware")
    other_nodes = any(key in changes and changes[key] != values.get(key) for key in _NODES)
    changed: list[str] = []
    if isinstance(hardware, Mapping) and isinstance(before, Mapping) and (hardware or other_nodes):
        changed = [name for name in hardware if name in _MAKERS]
        reached = [share for name in changed for share in _REACHED.get(name, ())]
        # A node's links are those of as many devices.
        links = ("network_gb_s", *_REACHED["network_gb_s"])
        reached += links if other_nodes else ()
        reached = [name for name in reached if name in before]
        assumed = dict.fromkeys([*(before.get("assumed") or ()), *reached])
        # What the profile gives itself is assumed only if it lists that itself.
        derived: dict[str, Any] = {"assumed": [name for name in assumed if name not in hardware]}
        if changed:
            derived["source"] = f"{', '.join(changed)} as given; {before.get('source')}"
        new_origins = {f"hardware.{name}": "extends" for name in derived} | new_origins
        changes = {**changes, "hardware": {**derived, **hardware}}
    # Not merged: the date and source of the other's price are not this one's.
    dropped = {"price"} if {"price", "instance_type"} & changes.keys() else set()
    if changed or other_nodes:
        dropped |= {"price", "instance_type"}
    values = {key: value for key, value in values.items() if key not in dropped}
    merged = _merged(values, changes)
    if changes.get("price", ...) is None:
        merged["price"] = None  # not the tables' price either
    sources = origins | new_origins
    return merged, {path: sources[path] for path in flatten(merged) if path in sources}


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return values of nested mappings over others; None takes one out."""
    merged = dict(base)
    for key, value in changes.items():
        before = merged.get(key)
        if isinstance(before, Mapping) and isinstance(value, Mapping):
            merged[key] = _merged(before, value)
        elif value is None:
            merged.pop(key, None)
        else:
            merged[key] = value
    return merged
