"""tools/run_tests.py: every test file runs once, and the list of seconds is of files that exist."""

import subprocess
import sys
from pathlib import Path

import pytest
from present import load_script

ROOT = Path(__file__).resolve().parents[2]
run_tests = load_script(ROOT / "tools" / "run_tests.py")


def test_folders_are_groups_and_the_longest_starts_first() -> None:
    kinds = dict.fromkeys(("a/x", "a/y", "b/x", "c/x", "d/x", "e/x"), "cpu")
    kinds |= {"a/slurm": "slurm", "c/scene": "scenes", "d/slurm": "slurm"}
    seconds = {"a/x": 50.0, "a/y": 30.0, "b/x": 99.0, "c/x": 58.0, "c/scene": 400.0}
    assert run_tests.make_groups(kinds, seconds) == [
        ["c/scene"],
        ["a/slurm", "d/slurm"],
        ["b/x"],
        ["a/x", "a/y"],
        ["c/x", "d/x"],
        ["e/x"],
    ]


def test_the_list_is_of_files_that_exist() -> None:
    assert [path for path in run_tests.read_seconds() if not (ROOT / path).is_file()] == []


def test_seconds_are_read_from_the_reports(tmp_path: Path) -> None:
    for name, seconds in (("a", "1.5"), ("b", "2")):
        case = f'<testcase file="tests/test_{name}.py" name="x" time="{seconds}"/>'
        (tmp_path / f"{name}.xml").write_text(f"<testsuites>{case}{case}</testsuites>")
    measured_s = run_tests.measured(sorted(tmp_path.iterdir()))
    assert measured_s == {"tests/test_a.py": 3.0, "tests/test_b.py": 4.0}


def test_failed_tests_are_repeated_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A test that fails once passes when repeated; one that always fails does not."""
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "decorating.py").write_text(
        "def decorate(play):\n"
        "    def test(n):\n"
        "        play(n)\n"
        "    test.__name__, test.__module__ = play.__name__, play.__module__\n"
        "    return test\n"
    )
    tests = tmp_path / "test_x.py"
    tests.write_text(
        "import pathlib, pytest\n"
        "from decorating import decorate\n"
        "mark = pathlib.Path(__file__).with_name('mark')\n"
        "@pytest.mark.parametrize('n', [1, 2])\n"
        "@decorate\n"
        "def test_once(n):\n"
        "    existed = mark.exists()\n"
        "    mark.touch()\n"
        "    assert existed\n"
    )
    report = tmp_path / "report.xml"
    options = ["-c", str(tmp_path / "pytest.ini"), f"--rootdir={tmp_path}", "-q"]
    arguments = [*options, "-o", "junit_family=xunit1", f"--junitxml={report}", str(tests)]
    assert subprocess.run([sys.executable, "-m", "pytest", *arguments], check=False).returncode == 1
    failed = run_tests.failed_tests([report])
    assert failed == ["test_x.py::test_once[1]"]
    again = [str(tmp_path / failed[0])]
    assert run_tests.repeat(again, options) == 0
    (tmp_path / "mark").unlink()
    assert run_tests.repeat(again, options) == 1
    printed = capfd.readouterr().out
    assert "passed the second time" in printed
    assert "failed again" in printed
