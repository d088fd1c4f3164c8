"""Packages import one way, as docs/architecture.md says."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import slurmllm

ROOT = Path(slurmllm.__file__).parent


def imported(source: Path) -> Iterator[str]:
    """The packages and top modules of slurmllm that a module imports, inside functions too."""
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            first, *rest = name.split(".")
            if first == "slurmllm" and rest:
                yield rest[0]


def test_no_package_imports_one_that_imports_it() -> None:
    direct: dict[str, set[str]] = defaultdict(set)
    for source in ROOT.rglob("*.py"):
        package = source.relative_to(ROOT).parts[0].removesuffix(".py")
        direct[package] |= set(imported(source)) - {package}
    assert direct["train"] >= {"checkpoint", "data"}  # the imports are seen at all
    reached = {package: set(targets) for package, targets in direct.items()}
    for _ in direct:
        for targets in reached.values():
            targets.update(*(direct.get(target, ()) for target in tuple(targets)))
    assert {package for package, targets in reached.items() if package in targets} == set()
