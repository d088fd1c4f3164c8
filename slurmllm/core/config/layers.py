"""Trees of settings whose leaves know their source, and how one layer replaces parts of another.

A recipe with all that it extends, a cluster profile, layouts and the options of the command line
are layers, folded into one tree before it is validated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

DEFAULT = "default"  # source of a value that nothing sets


class Value(NamedTuple):
    """A leaf: anything but a mapping with entries."""

    value: Any
    source: str


Tree: TypeAlias = "dict[str, Any]"  # of Values and Trees
Node: TypeAlias = "Value | Tree"


def make_node(value: Any, source: str) -> Node:
    """Return a value, or a section, with one source."""
    if isinstance(value, Mapping) and value:
        return {key: make_node(entry, source) for key, entry in value.items()}
    return Value(value, source)


def make_tree(values: Mapping[str, Any], sources: Mapping[str, str], prefix: str = "") -> Tree:
    """Return nested values with the sources of dotted paths."""
    tree: Tree = {}
    for key, value in values.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            tree[key] = make_tree(value, sources, f"{path}.")
        else:
            tree[key] = Value(value, sources.get(path, DEFAULT))
    return tree


def leaves(tree: Tree, prefix: str = "") -> Iterator[tuple[str, Value]]:
    """Yield the dotted path of each leaf, and the leaf."""
    for key, node in tree.items():
        if isinstance(node, Value):
            yield f"{prefix}{key}", node
        else:
            yield from leaves(node, f"{prefix}{key}.")


def plain(node: Node) -> Any:
    if isinstance(node, Value):
        return node.value
    return {key: plain(entry) for key, entry in node.items()}


def sources(tree: Tree) -> dict[str, str]:
    """Return dotted path → source of the values that are set."""
    return {path: leaf.source for path, leaf in leaves(tree) if leaf.source != DEFAULT}


def value_at(tree: Tree, path: str, default: Any = None) -> Any:
    """Return the value at a dotted path, or a section's plain values."""
    node: Any = tree
    for name in path.split("."):
        if not isinstance(node, dict) or name not in node:
            return default
        node = node[name]
    return plain(node)


def with_source(node: Node, change: Callable[[str], str]) -> Node:
    """Return a copy whose sources are changed."""
    if isinstance(node, Value):
        return Value(node.value, change(node.source))
    return {key: with_source(entry, change) for key, entry in node.items()}


def merge(base: Tree, changes: Tree) -> Tree:
    """Return a layer over the one that it extends, section by section; null takes one out."""
    merged = dict(base)
    for key, node in changes.items():
        before = merged.get(key)
        if is_section(before) and is_section(node):
            merged[key] = merge(as_section(before), as_section(node)) or before
        elif isinstance(node, Value) and node.value is None:
            merged.pop(key, None)
        else:
            merged[key] = node
    return merged


def is_section(node: Any) -> bool:
    return isinstance(node, dict) or (isinstance(node, Value) and node.value == {})


def as_section(node: Any) -> Tree:
    """Return a section's entries; none of a section that is empty or absent."""
    return node if isinstance(node, dict) else {}
