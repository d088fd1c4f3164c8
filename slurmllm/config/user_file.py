"""The user's own configuration, config.yaml: the default cluster profile, and where data sets are.

Only this user and root may have written it: a profile's `setup` runs as the user.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

import yaml

from slurmllm.config.profiles import Level, extended
from slurmllm.config.yaml_source import parse_yaml, read_yaml, write_yaml
from slurmllm.errors import ConfigError
from slurmllm.run.rundir import write_atomic

_FIELDS = ("cluster", "data", "data_folder", "data_mirrors")
_FORM = "see docs/site.md#the-default-cluster and docs/data.md#published-data-sets"


def user_configuration() -> Path:
    """Return the file of this user's settings for every run, which need not exist."""
    base = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    path = os.environ.get("SLURMLLM_CONFIG") or f"{base}/slurmllm/config.yaml"
    return Path(path).expanduser()


def choose_cluster(cluster: str | None) -> tuple[str | None, str]:
    """Return the cluster profile to use, and its source; None: the recipe's `default_cluster`.

    Raises:
        ConfigError: the user's configuration is faulty.
    """
    if cluster:
        return cluster, "--cluster"
    if name := os.environ.get("SLURMLLM_CLUSTER"):
        return name, "$SLURMLLM_CLUSTER"
    if name := default_cluster():
        return name, str(user_configuration())
    return None, "the recipe's default_cluster"


def default_cluster() -> str | None:
    """Return the profile that config.yaml names; a file's path is relative to config.yaml."""
    name = _read()[0].get("cluster")
    if name is None:
        return None
    path = user_configuration()
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{path}: cluster: {name!r} must be a profile's name or a .yaml file")
    is_file = Path(name).suffix in (".yaml", ".yml")
    return str(path.parent / Path(name).expanduser()) if is_file else name


def set_default_cluster(profile: Path) -> None:
    """Name a profile in config.yaml, whose other lines stay as they are.

    Raises:
        ConfigError: config.yaml is not written line by line.
    """
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
    """Return a cluster profile with the user's own settings of data in place of its own.

    Raises:
        ConfigError: the file may be another user's, is not YAML, or has other fields.
    """
    values, lines = _read()
    values.pop("cluster", None)
    if not values:
        return profile
    where = {dotted: f"{user_configuration().parent.name}/{line}" for dotted, line in lines.items()}
    return extended(profile, (values, where))


def _read() -> Level:
    path = user_configuration()
    if not path.is_file():
        return {}, {}
    values, lines = read_yaml(path, trusted=True, form=_FORM)
    if unknown := values.keys() - {*_FIELDS}:
        fields = ", ".join(_FIELDS)
        raise ConfigError(f"{path}: unknown field {min(unknown)!r}; it may set {fields}; {_FORM}")
    return values, lines
