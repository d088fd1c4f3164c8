"""YAML read with the file and line of every value, with YAML 1.2's numbers.

PyYAML follows YAML 1.1, which reads `1:30:00` as the number 5400 and `1e-4` as a string; both
occur in recipes, and both would be misread silently.
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from slurmllm.errors import ConfigError

# PyYAML's implicit types that are replaced below; a timestamp stays a string.
_TAGS = {"tag:yaml.org,2002:int", "tag:yaml.org,2002:float", "tag:yaml.org,2002:timestamp"}
_FLOAT = re.compile(
    r"^[-+]?(\d[\d_]*\.[\d_]*([eE][-+]?\d+)?|\.\d+([eE][-+]?\d+)?|\d[\d_]*[eE][-+]?\d+"
    r"|\.inf|\.Inf|\.INF)$|^(\.nan|\.NaN|\.NAN)$"
)
# libyaml's stack overflows on 100 KB of brackets; a recipe has 2 KB.
_LARGEST_FOR_LIBYAML = 1 << 15
# A tab, tag, question mark or byte order mark, or a comment after `|`, which libyaml parses
# differently from PyYAML, mostly if that finds an error.
_READ_OTHERWISE = re.compile(r"[\t!?\ufeff]|[|>]\S*#")
_DEEPEST = 100


class _Loader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2's numbers."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, regexp) for tag, regexp in resolvers if tag not in _TAGS]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int", re.compile(r"^[-+]?\d[\d_]*$"), list("-+0123456789")
)
_FastLoader: type[_Loader | yaml.CSafeLoader] = _Loader
# PyYAML may be built without libyaml.
if yaml.__with_libyaml__:

    class _LibyamlLoader(yaml.CSafeLoader):
        """The same with libyaml, several times as fast."""

        yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers

    _FastLoader = _LibyamlLoader


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes strings that YAML 1.1 or 1.2 would read as a number."""


_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


def write_yaml(values: dict[str, Any]) -> str:
    """YAML that `read_yaml` reads back unchanged."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False)


def parse_scalar(text: str) -> Any:
    """The value of `text` after the `=` of a `--set`: a number, a list, true, null or a string."""
    try:
        return _parse(text)[1]
    except (yaml.YAMLError, RecursionError):
        return text


def read_yaml(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Read a YAML mapping: its nested values, and `file:line` for each leaf's dotted path.

    Raises:
        ConfigError: the file cannot be read, is not YAML or is not a mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}; it must be UTF-8 text") from error
    try:
        node, values = _parse(text)
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


def _parse(text: str) -> tuple[yaml.Node | None, Any]:
    """The document as nodes (with lines) and as values; raises YAMLError or RecursionError."""
    if len(text) <= _LARGEST_FOR_LIBYAML and not _READ_OTHERWISE.search(text):
        with suppress(yaml.YAMLError):  # the other one's message shows the place in the text
            return _document(text, _FastLoader)
    return _document(text, _Loader)


def _document(text: str, loader: type[_Loader | yaml.CSafeLoader]) -> tuple[yaml.Node | None, Any]:
    node: yaml.Node | None = yaml.compose(text, loader)
    if node is None:
        return None, None
    # Level by level, each node once: aliases share nodes, and a recursive check would overflow too.
    level, seen = {id(node): node}, set[int]()
    for _ in range(_DEEPEST):
        seen |= level.keys()
        following: list[yaml.Node] = []
        for one in level.values():
            if isinstance(one, yaml.MappingNode):
                following += (part for pair in one.value for part in pair)
            elif isinstance(one, yaml.SequenceNode):
                following += one.value
        level = {id(one): one for one in following if id(one) not in seen}
    if level:
        raise RecursionError
    # Loaded again: constructing writes the keys that `<<` merges into the nodes.
    return node, yaml.load(text, loader)


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
