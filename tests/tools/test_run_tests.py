"""tools/run_tests.py: every test file runs once, and the list of seconds is of files that exist."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SPEC = importlib.util.spec_from_file_location("run_tests", ROOT / "tools" / "run_tests.py")
assert SPEC is not None
assert SPEC.loader is not None
run_tests = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(run_tests)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_folders_are_dealt_by_their_seconds(count: int) -> None:
    seconds = {"a/long": 60.0, "b/middle": 21.0, "b/other": 10.0, "c/middle": 30.0}
    shares = run_tests.deal([*seconds, "d/short"], count, seconds)
    assert sorted(path for share in shares for path in share) == sorted([*seconds, "d/short"])
    assert shares[0][0] == "a/long"
    if count == 2:
        assert shares[1] == ["b/middle", "b/other", "c/middle"]


def test_the_list_is_of_files_that_exist() -> None:
    assert [path for path in run_tests.read_seconds() if not (ROOT / path).is_file()] == []


def test_seconds_are_read_from_the_reports(tmp_path: Path) -> None:
    for name, seconds in (("a", "1.5"), ("b", "2")):
        case = f'<testcase file="tests/test_{name}.py" name="x" time="{seconds}"/>'
        (tmp_path / f"{name}.xml").write_text(f"<testsuites>{case}{case}</testsuites>")
    measured_s = run_tests.measured(sorted(tmp_path.iterdir()))
    assert measured_s == {"tests/test_a.py": 3.0, "tests/test_b.py": 4.0}
