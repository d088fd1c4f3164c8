"""YAML read with the file and line of every value, by YAML 1.2's idea of a number.

PyYAML follows YAML 1.1, which reads `1:30:00` as the number 5400 and `1e-4` as a string; both
occur in recipes, and both would be misread silently.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from slurmllm.errors import ConfigError


class _Loader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2's numbers."""


_TAGS = {"tag:yaml.org,2002:int", "tag:yaml.org,2002:float", "tag:yaml.org,2002:timestamp"}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, regexp) for tag, regexp in resolvers if tag not in _TAGS]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_FLOAT = re.compile(
    r"^[-+]?(\d[\d_]*\.[\d_]*([eE][-+]?\d+)?|\.\d+([eE][-+]?\d+)?|\d[\d_]*[eE][-+]?\d+"
    r"|\.inf|\.Inf|\.INF)$|^(\.nan|\.NaN|\.NAN)$"
)
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int", re.compile(r"^[-+]?\d[\d_]*$"), list("-+0123456789")
)


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes what either idea would take for a number."""


_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


def write_yaml(values: dict[str, Any]) -> str:
    """YAML that `read_yaml` reads back as it was."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False)


def parse_scalar(text: str) -> Any:
    """The value of `text` after the `=` of a `--set`: a number, a list, true, null or a string."""
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError:
        return text


def read_yaml(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Read a YAML mapping.

    Returns:
        The nested values, and for each leaf's dotted path `file:line`.

    Raises:
        ConfigError: the file cannot be read, is not YAML or is not a mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}; it must be UTF-8 text") from error
    try:
        node = yaml.compose(text, _Loader)
        values = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    except RecursionError:
        raise ConfigError(f"{path} is nested too deeply; a recipe has two levels") from None
    if not isinstance(values, dict) or not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{path} holds no mapping of sections; see `slurmllm recipes tiny_neox`")
    origins: dict[str, str] = {}
    faults: list[str] = []
    try:
        _walk(node, "", path, origins, faults)
    except RecursionError:
        raise ConfigError(f"{path} holds an alias of itself; write the value out") from None
    if faults:
        raise ConfigError(f"{path}: {len(faults)} fault(s)", faults)
    return values, origins


def _walk(
    node: yaml.MappingNode, prefix: str, path: Path, origins: dict[str, str], faults: list[str]
) -> None:
    seen: set[str] = set()
    for key, value in node.value:
        dotted = f"{prefix}{key.value}"
        line = key.start_mark.line + 1
        if dotted in seen:
            faults.append(f"{dotted}: written twice, again in line {line}; remove one of them")
        seen.add(dotted)
        if isinstance(value, yaml.MappingNode):
            _walk(value, f"{dotted}.", path, origins, faults)
        else:
            origins[dotted] = f"{path.name}:{line}"
