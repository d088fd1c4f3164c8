"""Files of settings by name, recipes and cluster profiles that extend another, the user's own file.

The user's config.yaml has the default cluster profile, and where data sets are. Only this user and
root may have written it: a profile's `setup` runs as the user.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from functools import reduce
from pathlib import Path

import yaml

from slurmllm.core.config.layers import (
    Tree,
    Value,
    as_section,
    is_section,
    make_tree,
    merge,
    plain,
    value_at,
    with_source,
)
from slurmllm.core.config.yaml_source import parse_yaml, read_yaml, write_yaml
from slurmllm.core.errors import ConfigError
from slurmllm.core.run.rundir import write_atomic

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
_LONGEST_CHAIN = 50  # files
Chain = list[tuple[Path, Tree]]  # files that extend each other, with their settings
_NODES = ("device", "devices_per_node")
_USER_FIELDS = ("cluster", "data", "data_folder", "data_mirrors")


def shipped_dir() -> Path:
    """Return the folder that holds `configs/` and `sbatch/`.

    In a checkout (an editable install too) it is the top of the tree; the wheel carries the same
    two folders inside the package.
    """
    package = Path(__file__).resolve().parents[2]
    installed = package / "_shipped"
    return installed if installed.is_dir() else package.parent


def available(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.yaml"))


def any_command(name: str) -> list[str]:
    """Return the setting that an adapter lacks, to show it: `command.run`; none for a recipe."""
    return ["command.run=COMMAND"] if name.startswith(f"{TRAINERS}/") else []


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
    initials = "".join(word[:1] for word in name.split("_"))
    close = close or [other for other in names if other.startswith(name) or other == initials]
    return f"did you mean {' or '.join(map(repr, close))}? " if close else ""


def read_profile(path: Path, folder: Path) -> Tree:
    """Read a cluster profile with all that it extends.

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
    chain = read_chain(path, folder, "cluster profile")
    return reduce(extended, [level for _, level in reversed(chain)])


def read_chain(path: Path, folder: Path, kind: str) -> Chain:
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
    chain: Chain = []
    following: Path | None = path
    while following is not None:
        files = [file for file, _ in chain]
        if len(files) == _LONGEST_CHAIN:
            raise ConfigError(
                f"{kind} {path} extends more than {_LONGEST_CHAIN} others, one by the other; join "
                "some of them"
            )
        if following.resolve() in (file.resolve() for file in files):
            raise ConfigError(
                f"{kind}s extend each other: {' extends '.join(map(str, [*files, following]))}; "
                f"remove one `extends`, or name a {noun} "
                f"outside of the chain: {', '.join(available(folder))}"
            )
        tree = make_tree(*read_yaml(following, form=_FORMS[kind]))
        chain.append((following, tree))
        following = _base(tree, following, folder, kind)
    if len(chain) > 1 or path.parent.name == TRAINERS:
        chain[0] = path, {"name": Value(name_of(path.stem, noun), path.name), **chain[0][1]}
    return chain


def name_of(file: str, default: str) -> str:
    """Return the name of a recipe or profile whose file, or script, has this name."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", file).lstrip("._-") or default


def _base(tree: Tree, path: Path, folder: Path, kind: str) -> Path | None:
    """Return the file that this one extends; None if it extends none."""
    if "extends" not in tree:
        return None
    node = tree.pop("extends")
    name = plain(node)
    origin = node.source if isinstance(node, Value) else path.name
    if not isinstance(name, str) or not name:
        raise ConfigError(
            f"extends ({origin}): {name!r}: must be a {kind.split()[-1]}'s name, such as "
            f"{'p5' if kind == 'cluster profile' else 'llama3_8b'}, or a .yaml file"
        )
    file = path.parent / name
    source = str(file) if file.suffix in (".yaml", ".yml") else name
    try:
        return find_yaml(source, folder, kind, "its path is relative to this file's")
    except ConfigError as error:
        raise ConfigError(f"extends ({origin}): {error.title}") from None


def extended(base: Tree, changes: Tree) -> Tree:
    """Return a base profile with the values of one that extends it in place of its own."""
    hardware = changes.get("hardware", {})
    before = base.get("hardware")
    other_nodes = any(
        key in changes and value_at(changes, key) != value_at(base, key) for key in _NODES
    )
    changed = []
    if is_section(hardware) and is_section(before) and (plain(hardware) or other_nodes):
        figures = as_section(before)
        hardware = as_section(hardware)
        changed = [name for name in hardware if name in _MAKERS]
        reached = [share for name in changed for share in _REACHED.get(name, ())]
        if other_nodes:  # a node's links are those of as many devices
            reached += ["network_gb_s", *_REACHED["network_gb_s"]]
        assumed = [*(value_at(figures, "assumed") or ()), *filter(figures.__contains__, reached)]
        # What the profile gives itself is assumed only if it lists that itself.
        names = [name for name in dict.fromkeys(assumed) if name not in hardware]
        derived = {"assumed": Value(names, "extends")}
        if changed:
            derived["source"] = Value(
                f"{', '.join(changed)} as given; {value_at(figures, 'source')}", "extends"
            )
        changes = {**changes, "hardware": {**derived, **hardware}}
    # Not merged: the date and source of the other's price are not this one's.
    dropped = {"price"} if {"price", "instance_type"} & changes.keys() else set()
    if changed or other_nodes:
        dropped |= {"price", "instance_type"}
    merged = merge({key: node for key, node in base.items() if key not in dropped}, changes)
    if "price" in changes and value_at(changes, "price") is None:  # not the tables' price either
        merged["price"] = changes["price"]
    return merged


def user_configuration() -> Path:
    """Return the file of this user's settings for every run, which need not exist."""
    base = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(os.environ.get("SLURMLLM_CONFIG") or f"{base}/slurmllm/config.yaml").expanduser()


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
    name = value_at(_read_user_file(), "cluster")
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
    content = path.read_text(encoding="utf-8") if path.is_file() else ""
    # A function: a backslash of the name stands for itself.
    content, count = re.subn(r"(?m)^cluster:.*\n?", lambda _: line, content)
    if not count:
        if content and not content.endswith("\n"):
            content += "\n"
        content += line
    with suppress(yaml.YAMLError):
        if parse_yaml(content).get("cluster") == name:
            write_atomic(path, content)
            return
    raise ConfigError(f"{path} cannot be changed by a line; write into it: {line.strip()}")


def with_user_configuration(profile: Tree) -> Tree:
    """Return a cluster profile with the user's own settings of data in place of its own."""
    settings = _read_user_file()
    settings.pop("cluster", None)
    if not settings:
        return profile
    folder = user_configuration().parent.name
    return extended(
        profile,
        {
            name: with_source(node, lambda source: f"{folder}/{source}")
            for name, node in settings.items()
        },
    )


def _read_user_file() -> Tree:
    path = user_configuration()
    if not path.is_file():
        return {}
    form = "see docs/site.md#the-default-cluster and docs/data.md#published-data-sets"
    settings = make_tree(*read_yaml(path, trusted=True, form=form))
    if unknown := settings.keys() - {*_USER_FIELDS}:
        fields = ", ".join(_USER_FIELDS)
        raise ConfigError(f"{path}: unknown field {min(unknown)!r}; it may set {fields}; {form}")
    return settings
