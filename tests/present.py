"""Types of what a test knows to be there."""

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import TypeVar

T = TypeVar("T")


def present(value: T | None) -> T:
    """Return `value`; fail if it is None."""
    assert value is not None
    return value


def load_script(path: Path) -> ModuleType:
    spec = present(importlib.util.spec_from_file_location(path.stem, path))
    script = importlib.util.module_from_spec(spec)
    present(spec.loader).exec_module(script)
    return script
