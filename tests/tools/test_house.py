"""The figures of `tools/house.py`, on a small tree, and the answers of `tools/audit.py`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
    """Return the other."""
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
SOURCES = {"slurmllm/a.py": FIRST, "slurmllm/b.py": SECOND}


def test_what_is_counted() -> None:
    figures = house.figures(SOURCES)
    assert (figures["modules"], figures["nodes"]) == (2, 57)
    assert figures["class names defined twice"] == 1
    assert figures["fmt: skip"] == 1
    assert figures["private functions called once, in 1,000 lines of code"] == 1000 / 12
    assert figures["comments, % of the lines of code"] == 100 / 12


def test_packed_conditions_and_large_records() -> None:
    text = "a = ['x'] * late\nb = 'x' * 3\nc = '-' * len(a)\nd = f'{b}' * (not a)\nf(*(a, b))\n"
    assert house.packed_conditions(house.nodes_of(text)) == 3
    records = ["class A:\n" + "    x: int\n" * count for count in (20, 21)]
    assert [house.large_records(house.nodes_of(record)) for record in records] == [0, 1]


def test_pronouns_hard_functions_and_modules_that_import_each_other() -> None:
    text = "for one in runs:\n    found = one\ndef f(given, *, kept=3): return lambda own: found\n"
    assert house.pronouns(house.nodes_of(text)) == 5
    branching = "def f(a):\n    return " + " or ".join(f"a == {n}" for n in range(27)) + "\n"
    long = "def g():\n" + "    h()\n" * 60
    texts = branching + long, "def g():\n" + "    h()\n" * 59
    hard, fair = (house.hard_functions(house.nodes_of(text)) for text in texts)
    assert (hard, fair) == ([("f", 2, 26), ("g", 61, 0)], [])
    assert house.file_cycles(SOURCES) == [["slurmllm.a", "slurmllm.b"]]
    assert house.file_cycles({**SOURCES, "slurmllm/b.py": "x = 1\n"}) == []


def test_a_figure_above_its_budget() -> None:
    assert list(house.over_budget({"modules": 3, "lines": 5}, {"modules": 3, "lines": 5})) == []
    assert list(house.over_budget({"modules": 4}, {"modules": 3, "rooms": 1})) == [
        "modules: 4, budget 3 ([tool.house] in pyproject.toml)",
        "[tool.house] rooms: no such figure; there are modules",
    ]


@pytest.mark.long  # `make check` counts this tree
def test_the_table_of_this_tree() -> None:
    command = [sys.executable, str(ROOT / "tools/house.py"), "--before", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("|  | before | now |\n|---|---|---|\n| modules | ")


import audit  # noqa: E402

SOUND = {"name": "click", "version": "8.1", "vulns": []}
SKIPPED = {"name": "torch", "skip_reason": "Dependency not found on PyPI"}
FAULT = {"id": "PYSEC-1", "fix_versions": ["3.2"], "aliases": [], "description": "…"}


def test_codes() -> None:
    assert audit.summarize([SOUND], "db")[1] == 0
    text, code = audit.summarize([SOUND, SKIPPED], "db")
    assert code == 2
    assert "1 packages are not in db, or it cannot be reached: torch" in text
    text, code = audit.summarize([SKIPPED, {**SOUND, "vulns": [FAULT]}], "db")
    assert code == 1
    assert "click 8.1: PYSEC-1; fixed in 3.2" in text
    editable = {"name": "slurmllm", "skip_reason": "distribution marked as editable"}
    assert audit.summarize([SOUND, editable], "db")[1] == 0
    assert audit.summarize([], "db")[1] == 2


@pytest.mark.long
def test_without_the_database() -> None:
    pytest.importorskip("pip_audit")
    unreachable = {**os.environ, "HTTPS_PROXY": "http://127.0.0.1:9", "NO_PROXY": ""}
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools/audit.py")],
        env=unreachable,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "not done: pypi's database (pypi.org) cannot be reached" in done.stderr
