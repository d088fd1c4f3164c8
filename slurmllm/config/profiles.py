"""Files of settings by name, recipes and cluster profiles that extend another, the user's own file.

The user's config.yaml has the default cluster profile, and where data sets are. Only this user and
root may have written it: a profile's `setup` runs as the user.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from slurmllm.config.yaml_source import flatten, parse_yaml, read_yaml, write_yaml
from slurmllm.errors import ConfigError
from slurmllm.run.rundir import write_atomic

Level = tuple[dict[str, Any], dict[str, str]]  # a file's values, and `file:line` of each

# Figure of a data sheet → constants that were fitted with it: assumed if a profile changes it.
_REACHED = {
    "bf16_tflops": ("matrix_efficiency", "matrix_half", "attention_efficiency"),
    "memory_gb_s": ("memory_efficiency",),
    "node_link_gb_s": ("node_link_efficiency",),
    "network_gb_s": ("network_efficiency", "overlap"),
}
_MAKERS = {*_REACHED, "fp32_tflops", "memory_gib"}
# Of a file that holds no settings, by kind.
_FORMS = {
    "recipe": "a recipe may be as short as `extends: RECIPE`, of `slurmllm recipes`",
    "cluster profile": "a cluster profile may be as short as `extends: PROFILE`, of "
    "`slurmllm recipes --clusters`",
}
TRAINERS = "trainers"  # folder of adapters, beside that of the recipes; part of their names
_NODES = ("device", "devices_per_node")
_USER_FIELDS = ("cluster", "data", "data_folder", "data_mirrors")


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


def any_command(name: str) -> list[str]:
    """Return the setting that an adapter lacks, to show it: `command.run`; none for a recipe."""
    return ["command.run=COMMAND"] * name.startswith(f"{TRAINERS}/")


def find_yaml(name: str, folder: Path, kind: str, hint: str) -> Path:
    """Return a shipped file by its name, or a file by its path; raise ConfigError without one."""
    path = Path(name)
    if path.parent.name == TRAINERS and (adapter := folder.parent / f"{name}.yaml").is_file():
        return adapter
    if path.suffix in (".yaml", ".yml"):
        if path.is_file():
            return path
        raise ConfigError(f"no {kind} file {name!r}; {hint}")
    names = available(folder)
    if name in names:
        return folder / f"{name}.yaml"
    if kind == "recipe" and (path.parent.name == TRAINERS or name == TRAINERS):
        names = [f"{TRAINERS}/{trainer}" for trainer in available(folder.parent / TRAINERS)]
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

    The profile's values replace the other's, section by section; null takes a value or section out.
    Figures of a maker that it replaces leave what training reaches of them assumed
    (`hardware.assumed`), and make them other nodes, as do another device and number of devices:
    then instance type and price are not the other's. A price is never merged with the other's; null
    is no price, not even that which the tables have for the instance type.

    Args:
        folder: The shipped profiles.

    Raises:
        ConfigError: a file cannot be read, or profiles extend each other.
    """
    levels = [level for _, level in read_chain(path, folder, "cluster profile")]
    profile = levels.pop()
    while levels:
        profile = extended(profile, levels.pop())
    return profile


def read_chain(path: Path, folder: Path, kind: str) -> list[tuple[Path, Level]]:
    """Read a recipe or cluster profile and all that it extends, the file itself first.

    `extends` names a shipped file, or one relative to the file's own folder. A file that extends
    another and sets no name has that of the file.

    Args:
        folder: The shipped files of this kind.
        kind: `recipe` or `cluster profile`.

    Raises:
        ConfigError: a file cannot be read, or files extend each other.
    """
    noun = kind.split()[-1]
    chain: list[tuple[Path, Level]] = []
    following: Path | None = path
    while following is not None:
        files = [file for file, _ in chain]
        if following.resolve() in (file.resolve() for file in files):
            names = " extends ".join(map(str, [*files, following]))
            raise ConfigError(
                f"{kind}s extend each other: {names}; remove one `extends`, or name a {noun} "
                f"outside of the chain: {', '.join(available(folder))}"
            )
        values, origins = read_yaml(following, form=_FORMS[kind])
        chain.append((following, (values, origins)))
        following = _base(values, origins, following, folder, kind)
    if len(chain) > 1 or path.parent.name == TRAINERS:
        _, (values, origins) = chain[0]
        chain[0] = path, ({"name": name_of(path, noun), **values}, {"name": path.name, **origins})
    return chain


def name_of(path: Path, default: str) -> str:
    """Return the name of a recipe or profile of this file."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).lstrip("._-") or default


def _base(
    values: dict[str, Any], origins: dict[str, str], path: Path, folder: Path, kind: str
) -> Path | None:
    """Return the file that this one extends; None if it extends none."""
    if "extends" not in values:
        return None
    name, where = values.pop("extends"), origins.pop("extends", path.name)
    if not isinstance(name, str) or not name:
        raise ConfigError(
            f"extends ({where}): {name!r}: must be a {kind.split()[-1]}'s name, such as "
            f"{'p5' if kind == 'cluster profile' else 'llama3_8b'}, or a .yaml file"
        )
    file = path.parent / name
    source = str(file) if file.suffix in (".yaml", ".yml") else name
    try:
        return find_yaml(source, folder, kind, "its path is relative to this file's")
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
    merged, sources = merge((values, origins), (changes, new_origins))
    if changes.get("price", ...) is None:  # not the tables' price either
        merged["price"], sources["price"] = None, new_origins["price"]
    return merged, sources


def merge(base: Level, changes: Level) -> Level:
    """Return the values of a file over those of the one that it extends; None takes one out."""
    values, sources = _merged(base[0], changes[0]), base[1] | changes[1]
    return values, {path: sources[path] for path in flatten(values) if path in sources}


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
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


def user_configuration() -> Path:
    """Return the file of this user's settings for every run, which need not exist."""
    base = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    path = os.environ.get("SLURMLLM_CONFIG") or f"{base}/slurmllm/config.yaml"
    return Path(path).expanduser()


def choose_cluster(cluster: str | None) -> tuple[str | None, str]:
    """Return the cluster profile to use, and its source; None: the recipe's `default_cluster`."""
    if cluster:
        return cluster, "--cluster"
    if name := os.environ.get("SLURMLLM_CLUSTER"):
        return name, "$SLURMLLM_CLUSTER"
    if name := default_cluster():
        return name, str(user_configuration())
    return None, "the recipe's default_cluster"


def default_cluster() -> str | None:
    """Return the profile that config.yaml names; a file's path is relative to config.yaml."""
    name = _read_user_file()[0].get("cluster")
    if name is None:
        return None
    path = user_configuration()
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{path}: cluster: {name!r} must be a profile's name or a .yaml file")
    is_file = Path(name).suffix in (".yaml", ".yml")
    return str(path.parent / Path(name).expanduser()) if is_file else name


def set_default_cluster(profile: Path) -> None:
    """Name a profile in config.yaml, whose other lines stay; ConfigError if that takes more."""
    path = user_configuration().resolve()
    name = profile.name if profile.parent == path.parent else str(profile)
    line = write_yaml({"cluster": name})
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    # A function: a backslash of the name stands for itself.
    text, count = re.subn(r"(?m)^cluster:.*\n?", lambda _: line, text)
    if not count:
        text += "\n" * (text != "" and not text.endswith("\n")) + line
    with suppress(yaml.YAMLError):
        if parse_yaml(text).get("cluster") == name:
            write_atomic(path, text)
            return
    raise ConfigError(f"{path} cannot be changed by a line; write into it: {line.strip()}")


def with_user_configuration(profile: Level) -> Level:
    """Return a cluster profile with the user's own settings of data in place of its own."""
    values, lines = _read_user_file()
    values.pop("cluster", None)
    if not values:
        return profile
    where = {dotted: f"{user_configuration().parent.name}/{line}" for dotted, line in lines.items()}
    return extended(profile, (values, where))


def _read_user_file() -> Level:
    path = user_configuration()
    if not path.is_file():
        return {}, {}
    form = "see docs/site.md#the-default-cluster and docs/data.md#published-data-sets"
    values, lines = read_yaml(path, trusted=True, form=form)
    if unknown := values.keys() - {*_USER_FIELDS}:
        fields = ", ".join(_USER_FIELDS)
        raise ConfigError(f"{path}: unknown field {min(unknown)!r}; it may set {fields}; {form}")
    return values, lines
