"""Run the tests in several processes at a time, each with files of its own.

    python tools/run_tests.py [--record] [PYTEST_OPTION …]

One process plays the scenes on a real Slurm (tests/end_to_end/scenes.py), one has the other files
with tests on a real Slurm. Those without are in groups, a folder each. A group starts when another
has ended, the longest by tests/seconds.txt first; `--record` writes that list anew, by the clock.
A process's output is printed when it ends. A few tests that failed run once more, alone: what only
a busy machine disturbed passes then, and is named. `SLURMLLM_REPEAT_FAILED=0` forbids it.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
SLURM = ("scenes", "slurm")  # kinds of files, a process each
SECONDS = ROOT / "tests" / "seconds.txt"
SHORT_S = 2.0  # of a file that is not in the list
LISTED_S = 10.0  # files that take less are not listed
GROUP_S = 60.0  # folders that take less share a process
AT_A_TIME = 5  # processes, which often wait; a cluster's time limits hold with these on two cores
FAILED = 1  # exit code of pytest if tests failed, and nothing else
NO_TESTS = 5  # exit code of pytest if its options select none
REPEATED = 3  # failed tests at most: more have a cause in the code


def make_groups(paths: Mapping[str, str], seconds: Mapping[str, float]) -> list[list[str]]:
    """Return groups of test files, a process each: Slurm's first, then those that take longest.

    The files of a folder are in one group, as they share fixtures that are expensive.

    Args:
        paths: File → its kind (`kind_of`).
        seconds: File → what its tests took.
    """
    folders: dict[str, list[str]] = defaultdict(list)
    for path, kind in sorted(paths.items()):
        folders[kind if kind in SLURM else str(Path(path).parent)].append(path)

    def taken(group: list[str]) -> float:
        return sum(seconds.get(path, SHORT_S) for path in group)

    groups: list[list[str]] = [[]]
    for name, files in sorted(folders.items()):
        if name in SLURM or taken(files) >= GROUP_S:
            groups.insert(0, files)
        else:
            if taken(groups[-1]) >= GROUP_S:
                groups.append([])
            groups[-1] += files
    return sorted(
        filter(None, groups), key=lambda group: (paths[group[0]] not in SLURM, -taken(group))
    )


def read_seconds() -> dict[str, float]:
    lines = SECONDS.read_text(encoding="utf-8").splitlines()
    return {path: float(number) for number, path in map(str.split, lines)}


def kind_of(path: Path) -> str:
    """Return "scenes", "slurm" or "cpu"."""
    text = path.read_text(encoding="utf-8")
    if "\n@scene(" in text:
        return "scenes"
    return "slurm" if "pytest.mark.slurm" in text else "cpu"


def measured(reports: Iterable[Path]) -> dict[str, float]:
    """Return file → seconds of its tests, with their fixtures, from pytest's XML reports."""
    seconds: dict[str, float] = defaultdict(float)
    for report in reports:
        for case in ElementTree.parse(report).iter("testcase"):  # noqa: S314 - pytest wrote it
            seconds[case.attrib["file"]] += float(case.attrib["time"])
    return seconds


def failed_tests(reports: Iterable[Path]) -> list[str]:
    """Return the names of the tests that failed, as pytest's arguments, from its XML reports."""
    return [
        # Not its `file`, which is that of the decorator of a scene
        f"{case.attrib['classname'].replace('.', '/')}.py::{case.attrib['name']}"
        for report in reports
        for case in ElementTree.parse(report).iter("testcase")  # noqa: S314 - pytest wrote it
        if case.find("failure") is not None or case.find("error") is not None
    ]


def repeat(tests: Sequence[str], options: Sequence[str]) -> int:
    """Run tests again, alone; return pytest's exit code."""
    print("failed; run again, alone: " + ", ".join(tests), flush=True)
    command = [sys.executable, "-m", "pytest", *options, *tests]
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    print("passed the second time" if code == 0 else "failed again", flush=True)
    return code


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    options = [option for option in sys.argv[1:] if option != "--record"]
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    paths = {str(path.relative_to(ROOT)): kind_of(path) for path in files}
    groups = make_groups(paths, read_seconds())
    with tempfile.TemporaryDirectory(prefix="slurmllm-tests-") as temporary:
        folder = Path(temporary)
        running: dict[int, subprocess.Popen[bytes]] = {}
        codes: set[int] = set()
        try:
            codes = set(run_groups(groups, options, folder, running))
        except SystemExit:  # by SIGTERM; Ctrl-C reaches the processes by itself
            for process in running.values():
                process.send_signal(signal.SIGINT)
            raise
        finally:  # they stop their clusters
            for process in running.values():
                process.wait()
        codes.discard(NO_TESTS)
        if codes - {0} == {FAILED} and os.environ.get("SLURMLLM_REPEAT_FAILED") != "0":
            tests = failed_tests(sorted(folder.glob("*.xml")))
            if len(tests) <= REPEATED:
                codes = {repeat(tests, options)}
        if "--record" in sys.argv:
            listed = sorted(
                (-s, path) for path, s in measured(folder.glob("*.xml")).items() if s >= LISTED_S
            )
            SECONDS.write_text("".join(f"{-s:.0f} {path}\n" for s, path in listed))
    return int(bool(codes - {0}))


def children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run_groups(
    groups: Sequence[Sequence[str]],
    options: Sequence[str],
    folder: Path,
    running: dict[int, subprocess.Popen[bytes]],
) -> Iterable[int]:
    """Run groups of files, print the output of each as it ends, and yield its exit code."""
    # One for all: a graph that two of them need is compiled once.
    environment = os.environ | {"SLURMLLM_TEST_CACHES": str(folder / "caches")}
    waiting = deque(enumerate(groups))
    started = time.monotonic()
    while waiting or running:
        while waiting and len(running) < AT_A_TIME:
            number, files = waiting.popleft()
            report = ("-o", "junit_family=xunit1", f"--junitxml={folder / f'{number}.xml'}")
            with (folder / f"{number}.log").open("wb") as log:
                running[number] = subprocess.Popen(
                    [sys.executable, "-m", "pytest", *options, *report, *files],
                    cwd=ROOT,
                    env=environment,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
        time.sleep(1)
        for number, process in list(running.items()):
            before_s = children_cpu_s()
            if process.poll() is not None:
                del running[number]
                print((folder / f"{number}.log").read_text(errors="replace"))
                print(
                    f"test process {number} ({groups[number][0]}, …): exit code "
                    f"{process.returncode} after {time.monotonic() - started:.0f} s, "
                    f"{children_cpu_s() - before_s:.0f} s of CPU, {len(running)} running, "
                    f"{len(waiting)} waiting",
                    flush=True,
                )
                yield process.returncode


if __name__ == "__main__":
    sys.exit(main())
