"""YAML read with the file and line of every value, with YAML 1.2's numbers.

PyYAML follows YAML 1.1, which reads `1:30:00` as the number 5400 and `1e-4` as a string; both
occur in recipes, and both would be misread silently.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from slurmllm.core.errors import ConfigError
from slurmllm.core.format import format_plural
from slurmllm.core.run.safe_files import os_error_text, read_limited

Values = dict[str, Any]  # by name; those of sections are nested
# PyYAML's implicit types that are replaced below; a timestamp stays a string.
_TAGS = {"tag:yaml.org,2002:int", "tag:yaml.org,2002:float", "tag:yaml.org,2002:timestamp"}
_FLOAT = re.compile(
    r"^[-+]?(\d[\d_]*\.[\d_]*([eE][-+]?\d+)?|\.\d+([eE][-+]?\d+)?|\d[\d_]*[eE][-+]?\d+"
    r"|\.inf|\.Inf|\.INF)$|^(\.nan|\.NaN|\.NAN)$"
)
# Levels without brackets, and brackets: libyaml's stack overflows from 20,000 levels on.
_DEEP = re.compile(r"([-?]\s+){50}")
_MAX_BRACKETS = 1000
# Of a file of settings: a recipe has 2 KB, a run's config.yaml 10 KB. PyYAML reads 60 KB/s.
LARGEST_YAML = 1 << 17
_DEEPEST = 100
LineNumbers = dict[str, int]  # by dotted path
_MOST_NODES = 100_000  # with every alias written out: nine levels of nine aliases have 10^9


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Values:
    """Return nested mappings → dotted path → leaf. An empty mapping is a leaf."""
    flat = {}
    for key, value in tree.items():
        dotted = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{dotted}."))
        else:
            flat[dotted] = value
    return flat


def without_nulls(values: Mapping[str, Any]) -> Values:
    return {name: value for name, value in values.items() if value is not None}


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


# PyYAML may be built without libyaml.
class _FastLoader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """The same with libyaml, several times as fast."""

    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes strings that YAML 1.1 or 1.2 would read as a number."""


_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


def write_yaml(values: Values, *, inline: bool = False) -> str:
    """Return YAML that `read_yaml` reads back unchanged; `inline`: one line, for one key."""
    if inline:
        document = yaml.dump(values, Dumper=_Dumper, default_flow_style=True, width=1 << 30)
        return document.strip()[1:-1]  # without the outer braces
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False)


def parse_scalar(scalar: str) -> Any:
    """Return the value after the `=` of a `--set`: a number, a list, true, null or a string."""
    try:
        return parse_yaml(scalar)
    except (yaml.YAMLError, RecursionError):
        return scalar


def read_yaml(
    path: Path, *, trusted: bool = False, form: str = "see `slurmllm recipes tiny_neox`"
) -> tuple[Values, dict[str, str]]:
    """Read a YAML mapping: its nested values, and `file:line` for each leaf's dotted path.

    Raises:
        ConfigError: the file cannot be read, is not YAML, is not a mapping, or must be `trusted`
            and is not.
    """
    try:
        content = read_limited(path, LARGEST_YAML, trusted=trusted).decode()
    except OSError as error:
        fix = "; `chmod go-w` it if it is yours, else start a run of your own"
        raise ConfigError(
            f"cannot read {path}: {os_error_text(error)}"
            + fix * (trusted and error.errno == errno.EPERM)
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"cannot read {path}: {error}; it must be UTF-8 text") from error
    lines: LineNumbers = {}
    faults: list[str] = []
    try:
        values = parse_yaml(content, lines, faults)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {_without_text(error)}") from error
    except RecursionError:
        raise ConfigError(f"{path} is nested too deeply; a recipe has two levels") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds no mapping of sections; {form}")
    if faults:
        raise ConfigError(f"{path}: {format_plural(len(faults), 'error')}", faults)
    return values, {dotted: f"{path.name}:{line}" for dotted, line in lines.items()}


def _without_text(error: yaml.YAMLError) -> str:
    """Return the problem and its place, without the text, which may be of another user's run."""
    problem = getattr(error, "problem", None)
    mark = getattr(error, "problem_mark", None)
    if problem is None or mark is None:
        return str(error)
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}"


def parse_yaml(
    content: str, lines: LineNumbers | None = None, faults: list[str] | None = None
) -> Any:
    """Return the value of a document.

    Args:
        lines: Filled with the line of each leaf's dotted path.
        faults: Filled with the keys that are written twice.

    Raises:
        YAMLError: it is no YAML, or a few lines of it stand for too much.
        RecursionError: it is nested too deeply.
    """
    lines = {} if lines is None else lines
    faults = [] if faults is None else faults
    brackets = content.count("[") + content.count("{")
    is_deep = brackets > _MAX_BRACKETS or _DEEP.search(content)
    loader = _Loader if is_deep else _FastLoader
    node = yaml.compose(content, loader)
    if node is None:
        return None
    _limit_size(node)
    constructor = loader("")
    if isinstance(node, yaml.MappingNode):
        _walk(node, "", lines, faults, constructor)
    try:
        return constructor.construct_document(node)
    except ValueError as error:  # a number of more than 4,300 digits
        raise yaml.YAMLError(str(error)) from error


def _limit_size(document: yaml.Node) -> None:
    """Limit levels and nodes of a document with every alias written out.

    Raises:
        YAMLError: there are too many nodes, or no end to them.
        RecursionError: there are too many levels.
    """
    num_nodes = 0
    waiting: list[tuple[yaml.Node, tuple[int, ...]]] = [(document, ())]
    while waiting:
        node, parents = waiting.pop()
        num_nodes += 1
        if id(node) in parents:
            raise yaml.YAMLError("it holds an alias of itself; write the value out")
        if len(parents) == _DEEPEST:
            raise RecursionError
        if num_nodes > _MOST_NODES:
            raise yaml.YAMLError(f"its aliases stand for more than {_MOST_NODES:,} values")
        parts = node.value if isinstance(node, yaml.CollectionNode) else ()
        if isinstance(node, yaml.MappingNode):
            parts = chain.from_iterable(parts)
        waiting += [(part, (*parents, id(node))) for part in parts]


def _walk(
    node: yaml.MappingNode, prefix: str, lines: LineNumbers, faults: list[str], constructor: Any
) -> None:
    seen = set()
    for key, _ in node.value:
        if str(key.value) in seen:
            line = key.start_mark.line + 1
            faults.append(
                f"{prefix}{key.value}: written twice, again in line {line}; remove one of them"
            )
        seen.add(str(key.value))
    # Before the lines: what `<<` merges is set, too. A mapping's own keys come last, and count.
    constructor.flatten_mapping(node)
    pairs = {f"{prefix}{key.value}": (key, value) for key, value in node.value}
    node.value = list(pairs.values())  # an alias of it is walked again
    for dotted, (key, value) in pairs.items():
        if isinstance(value, yaml.MappingNode):
            _walk(value, f"{dotted}.", lines, faults, constructor)
        else:
            lines[dotted] = key.start_mark.line + 1
