"""Wings and rooms import one way, as docs/architecture.md says; old names of rooms still work."""

from __future__ import annotations

import ast
import importlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

import slurmllm

ROOT = Path(slurmllm.__file__).parent
WINGS = ("core", "plan", "data", "train", "launch", "analysis", "cli")


def imported(source: Path) -> Iterator[tuple[str, ...]]:
    """Yield the modules of slurmllm that a module imports, inside functions too, as path parts."""
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            package, *parts = name.split(".")
            if package == "slurmllm" and parts:
                yield tuple(parts)


def room_of(parts: tuple[str, ...]) -> str:
    """Return `WING/ROOM`; of train, data and plan, whose own modules are a room, the wing."""
    wing, *names = parts
    is_room = bool(names) and slurmllm._WING_OF_ROOM.get(names[0]) == wing
    return "/".join(parts[:2]) if is_room else wing


def test_a_wing_imports_only_the_wings_above_it() -> None:
    checked = 0
    for source in ROOT.rglob("*.py"):
        wing = source.relative_to(ROOT).parts[0]
        if wing in WINGS:
            for parts in imported(source):
                if parts[0] in WINGS:
                    checked += 1
                    assert WINGS.index(parts[0]) <= WINGS.index(wing), f"{source}: {parts}"
    assert checked > 1000  # the imports are seen at all


def test_no_room_imports_one_that_imports_it() -> None:
    direct: dict[str, set[str]] = defaultdict(set)
    for source in ROOT.rglob("*.py"):
        room = room_of(source.relative_to(ROOT).with_suffix("").parts)
        direct[room] |= {room_of(parts) for parts in imported(source)} - {room}
    assert direct["launch/submit"] >= {"core/config", "core/run"}
    reached = {room: set(targets) for room, targets in direct.items()}
    for _ in direct:
        for targets in reached.values():
            targets.update(*(direct.get(target, ()) for target in tuple(targets)))
    assert {room for room, targets in reached.items() if room in targets} == set()


@pytest.mark.parametrize("name", ["plugins", "train.hooks", "model", "config.families"])
def test_names_that_plugins_import_still_work(name: str) -> None:
    wing = {"plugins": "core.", "model": "train.", "config.families": "core."}.get(name, "")
    new = importlib.import_module(f"slurmllm.{wing}{name}")
    if wing:
        with pytest.warns(DeprecationWarning, match="has moved to slurmllm"):
            module = importlib.import_module(f"slurmllm.{name}")
    else:
        module = importlib.import_module(f"slurmllm.{name}")
    assert module is new
    assert new.__spec__ is not None
    assert new.__spec__.name == f"slurmllm.{wing}{name}"
