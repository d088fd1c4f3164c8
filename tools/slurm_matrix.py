"""Run the Slurm tests on several versions of Slurm, and print a table.

    .venv/bin/python tools/slurm_matrix.py [--tests FILE…] [--only SUITE…]

The machine's own Slurm, and those of Debian's releases, each in a root directory that debootstrap
makes once (build/slurm-roots). Writes build/slurm-matrix.md.
"""

import argparse
import os
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from _devcluster.root import REPOSITORY

BUILD = REPOSITORY / "build"
SUITES = ("machine", "trixie", "sid")  # Debian 13 has 24.11; unstable the newest
# Of the Slurm cluster, and libraries of a Python that was built on Debian 12.
PACKAGES = (
    "slurm-wlm,slurmdbd,mariadb-server,munge,iproute2,hostname,procps,e2fsprogs,g++,libc6-dev,"
    "ca-certificates,libffi8,libsqlite3-0,libssl3t64,xz-utils"
)
TESTS = "tests/core/slurm tests/launch/diagnose tests/cli tests/data/corpus tests/end_to_end"


@dataclass(frozen=True)
class Outcome:
    """The tests on one version."""

    version: str
    counts: Counter[str]  # passed, failed, skipped
    seconds: float
    notes: tuple[str, ...]  # the tests that failed, and why others were skipped

    @property
    def row(self) -> str:
        shown = " | ".join(str(self.counts[name]) for name in ("passed", "failed", "skipped"))
        return f"| {self.version} | {shown} | {self.seconds:.0f} s |"


def root_of(suite: str) -> Path:
    """The root of a Debian release, made if it is missing."""
    root = BUILD / "slurm-roots" / suite
    if not (root / "usr/sbin/slurmctld").exists():
        root.parent.mkdir(parents=True, exist_ok=True)
        command = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", suite, str(root)]
        subprocess.run(command, check=True)
    return root


def run_tests(suite: str, root: Path | None, tests: list[str]) -> Outcome:
    """Run the tests marked `slurm` in a root, None: on this machine itself."""
    results = BUILD / f"slurm-matrix-{suite}.xml"
    results.unlink(missing_ok=True)
    pytest = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "slurm"]
    started = time.monotonic()
    run_in(root, [*pytest, "-q", f"--junitxml={results}", *tests])
    seconds = time.monotonic() - started
    version = run_in(root, ["slurmctld", "-V"], capture=True).split()[-1]
    counts: Counter[str] = Counter()
    notes: list[str] = []
    for case in ElementTree.parse(results).iter("testcase"):  # noqa: S314 (pytest wrote it)
        kinds = {child.tag: child.get("message") or "" for child in case}
        kind = next((k for k in ("failure", "error", "skipped") if k in kinds), "passed")
        counts[{"failure": "failed", "error": "failed"}.get(kind, kind)] += 1
        if kind != "passed":
            first = (kinds[kind].splitlines() or [""])[0][:200]
            notes.append(f"{version}: {kind}: {case.get('classname')}.{case.get('name')}: {first}")
    return Outcome(f"{version} ({suite})", counts, seconds, tuple(notes))


def run_in(root: Path | None, command: list[str], capture: bool = False) -> str:
    """Run a command in a root; what it prints, if it is captured."""
    environment = {**os.environ, "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}
    if root is not None:
        inside = f"from _devcluster.root import *; enter(Path({str(root)!r}), {command!r})"
        command = [sys.executable, "-c", inside]
        environment["PYTHONPATH"] = str(Path(__file__).parent)
    output = subprocess.PIPE if capture else None
    done = subprocess.run(command, env=environment, stdout=output, text=True, cwd=REPOSITORY)
    return done.stdout if capture else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tests", nargs="+", default=TESTS.split(), help="files or folders")
    parser.add_argument("--only", nargs="+", default=SUITES, choices=SUITES, help="versions")
    args = parser.parse_args()
    if os.geteuid() != 0:
        print("must be root: nodes have namespaces and mounts of their own", file=sys.stderr)
        return 2
    BUILD.mkdir(exist_ok=True)
    outcomes = []
    for suite in args.only:
        try:
            root = None if suite == "machine" else root_of(suite)
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"{suite}: cannot make its root: {error}", file=sys.stderr)
            return 2
        outcomes.append(run_tests(suite, root, list(args.tests)))
    lines = ["| Slurm | passed | failed | skipped | time |", "|---|---:|---:|---:|---:|"]
    lines += [outcome.row for outcome in outcomes]
    lines += ["", *(f"- {note}" for outcome in outcomes for note in outcome.notes)]
    text = "\n".join(lines).rstrip() + "\n"
    (BUILD / "slurm-matrix.md").write_text(text)
    print(text, end="")
    return 1 if any(outcome.counts["failed"] for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
