"""Run the tests in a few processes, each with files of its own.

    python tools/run_tests.py [--record] [PYTEST_OPTION …]

One process plays the scenes on a real Slurm (tests/end_to_end/scenes.py), one has the other files
with tests on a real Slurm, and two share the folders without. These are dealt by their CPU seconds
in tests/seconds.txt, the longest first; `--record` writes the list anew, by the clock. A process's
output is printed when it ends.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
SECONDS = ROOT / "tests" / "seconds.txt"
SHORT_S = 1.0  # of a file that is not in the list
LISTED_S = 10.0  # files that take less are not listed
PROCESSES = {"scenes": 1, "slurm": 1, "cpu": 2}
NO_TESTS = 5  # exit code of pytest if its options select none


def deal(paths: Iterable[str], count: int, seconds: Mapping[str, float]) -> list[list[str]]:
    """Share folders among processes: the longest that is left to the one with the least to do.

    The files of a folder stay together, as they share fixtures that are expensive.
    """
    groups: dict[str, list[str]] = defaultdict(list)
    for path in paths:
        groups[str(Path(path).parent)].append(path)
    taken_s = {
        name: sum(seconds.get(path, SHORT_S) for path in group) for name, group in groups.items()
    }
    shares: list[list[str]] = [[] for _ in range(count)]
    totals = [0.0] * count
    for name in sorted(groups, key=lambda name: (-taken_s[name], name)):
        index = totals.index(min(totals))
        shares[index] += groups[name]
        totals[index] += taken_s[name]
    return [sorted(share) for share in shares]


def read_seconds() -> dict[str, float]:
    lines = SECONDS.read_text(encoding="utf-8").splitlines()
    return {path: float(number) for number, path in map(str.split, lines)}


def kind_of(path: Path) -> str:
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


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    options = [option for option in sys.argv[1:] if option != "--record"]
    paths: dict[str, list[str]] = defaultdict(list)
    for path in (ROOT / "tests").rglob("test_*.py"):
        paths[kind_of(path)].append(str(path.relative_to(ROOT)))
    seconds = read_seconds()
    shares = [
        share for kind, count in PROCESSES.items() for share in deal(paths[kind], count, seconds)
    ]
    with tempfile.TemporaryDirectory(prefix="slurmllm-tests-") as temporary:
        folder, started = Path(temporary), time.monotonic()
        # One for all: a graph that two of them need is compiled once.
        environment = os.environ | {"SLURMLLM_TEST_CACHES": str(folder / "caches")}
        running: dict[int, subprocess.Popen[bytes]] = {}
        reports = [folder / f"{number}.xml" for number in range(len(shares))]
        for number, share in enumerate(shares):
            report = ("-o", "junit_family=xunit1", f"--junitxml={reports[number]}")
            with (folder / f"{number}.log").open("wb") as log:
                running[number] = subprocess.Popen(
                    [sys.executable, "-m", "pytest", *options, *report, *share],
                    cwd=ROOT,
                    env=environment,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
        codes: set[int] = set()
        try:
            codes = set(wait_for(running, folder, started))
        except SystemExit:  # by SIGTERM; Ctrl-C reaches the processes by itself
            for process in running.values():
                process.send_signal(signal.SIGINT)
            raise
        finally:  # they stop their clusters
            for process in running.values():
                process.wait()
        if "--record" in sys.argv:
            listed = sorted((-s, path) for path, s in measured(reports).items() if s >= LISTED_S)
            SECONDS.write_text("".join(f"{-s:.0f} {path}\n" for s, path in listed))
    return int(bool(codes - {0, NO_TESTS}))


def wait_for(
    running: dict[int, subprocess.Popen[bytes]], folder: Path, started: float
) -> Iterable[int]:
    """Print the output of each process as it ends, and yield its exit code."""
    while running:
        time.sleep(1)
        for number, process in list(running.items()):
            if process.poll() is not None:
                del running[number]
                print((folder / f"{number}.log").read_text(errors="replace"))
                print(
                    f"test process {number}: exit code {process.returncode} after "
                    f"{time.monotonic() - started:.0f} s, {len(running)} still running",
                    flush=True,
                )
                yield process.returncode


if __name__ == "__main__":
    sys.exit(main())
