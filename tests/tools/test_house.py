"""The figures of `tools/house.py`, on a small tree."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import house  # noqa: E402

FIRST = '''"""The words of it."""

from slurmllm.b import other


class Plan:
    """A plan."""


def public() -> int:
    # Slurm kills the step after 30 s.
    return _once() + _twice() + _twice()  # fmt: skip


def _once() -> int:
    """Returns None where there is none; words, words."""
    return other()


def _twice() -> int:
    return 1
'''
SECOND = '''"""Another module."""


class Plan:
    def other(self) -> int:
        from slurmllm.a import public

        return public()
'''


def test_what_is_counted() -> None:
    found = house.measure({"slurmllm/a.py": FIRST, "slurmllm/b.py": SECOND})
    assert (found.modules, found.lines, found.median) == (2, 29, 14.5)
    assert (found.once, found.repeated, found.comments) == (1, 1, 1)
    assert found.code == 12
    assert found.terms["words"] == 3
    assert found.terms["None where"] == 1


def test_modules_that_import_each_other() -> None:
    sources = {"slurmllm/a.py": FIRST, "slurmllm/b.py": SECOND}
    assert house.file_cycles(sources) == [["slurmllm.a", "slurmllm.b"]]
    assert house.file_cycles({**sources, "slurmllm/b.py": "x = 1\n"}) == []


def test_no_modules_of_this_tree_import_each_other() -> None:
    assert house.file_cycles(house.read_tree("slurmllm/*.py")) == []


def test_the_table_of_this_tree() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "house.py")],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.startswith("modules ")
    rooms = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "house.py"), "--rooms"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "checkpoint" in rooms.stdout
