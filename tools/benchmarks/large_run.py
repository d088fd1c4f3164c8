"""How long `status`, `logs` and `report` take for a run of 4,096 workers with 200 attempts.

    python tools/benchmarks/large_run.py [--nodes 128] [--attempts 200] [--steps 500] [--times 5]
        [--only TEXT] [--folder DIR] [--reference CHECKOUT] [--json FILE]

Writes the run into a temporary folder (or DIR, where it is kept and used again): 32 workers a node,
in the real file formats, the last attempt in training. Every command is a process of its own; those
of a reference, a checkout of another version, run in turn with ours, so that a slow moment meets
both. Per command: `first`, before the others; median and CPU seconds of the later processes; the
files and folders of the run that it opens; and `slow`, the seconds if opening one of these takes
2 ms longer, as on a busy shared file system. Slurm is replaced by scripts that answer from a file
at once: the time of a real slurmctld and slurmdbd comes on top.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from _large_run.write import Size, write_run

from slurmllm.run.records import AttemptRecord, JobsRecord
from slurmllm.run.rundir import RunDir
from slurmllm.supervise.attempts import load_attempts

NAME = "large"
COMMANDS = (
    "status large", "status large --json", "status", "status --json",
    "logs large", "logs large -n 20", "logs large --rank 0 --attempt {last}", "logs large --rank 7",
    "logs large --ranks 0-63", "logs large --all-ranks", "logs large --all-ranks -n 20",
    "logs large --failed", "logs large --stacks",
    "report large", "report large --json", "report large --no-html", "report large --no-files",
    "report large --no-files --json",
)  # fmt: skip
# Counts and delays what a command opens below $LARGE_RUN, then runs the command line.
_SLOW_S = 0.002
_SLOW = f"""
import atexit, os, runpy, sys, time
run, counts = os.environ["LARGE_RUN"], {{"open": 0, "os.scandir": 0, "os.listdir": 0}}
def count(event, args):
    if event in counts and isinstance(args[0], (str, os.PathLike)):
        if os.fspath(args[0]).startswith(run):
            counts[event] += 1
            time.sleep({_SLOW_S})
sys.addaudithook(count)
def show():
    with open(os.environ["LARGE_RUN_COUNTS"], "w") as stream:
        print(counts["open"], counts["os.scandir"] + counts["os.listdir"], file=stream)
atexit.register(show)
runpy.run_module("slurmllm", run_name="__main__", alter_sys=True)
"""


class Taken(NamedTuple):
    """What a process took, s."""

    wall: float
    cpu: float


def write_slurm(folder: Path, run: RunDir) -> None:
    """Scripts in place of Slurm's commands, with the run's jobs: the last one is running."""
    jobs, last = folder / "jobs", JobsRecord.of(run).last
    assert last is not None
    records = [*load_attempts(run, "precompile"), *load_attempts(run, "train")]
    folder.mkdir(exist_ok=True)
    jobs.write_text("".join(map(_accounting_row, records)))
    nodes = f"trn1-dy-[0000-{len(records[-1].nodes) - 1:04d}]"
    find_job = "for a; do case $a in --jobs=*) ids=${a#--jobs=};; esac; done"
    scripts = {
        "squeue": f"echo '{last.train_job}|RUNNING|None|{nodes}'",
        "sacct": f'{find_job}; grep -E "^(${{ids//,/|}})\\|" {shlex.quote(str(jobs))}',
        "scontrol": f"printf 'trn1-dy-%04d\\n' {{0..{len(records[-1].nodes) - 1}}}",
        "sinfo": "true",
    }
    for name, script in scripts.items():
        path = folder / name
        path.write_text(f"#!/bin/bash\n{script}\n")
        path.chmod(0o755)


def _accounting_row(record: AttemptRecord) -> str:
    begin, end = (
        "Unknown" if at is None else time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(at))
        for at in (record.started_at, record.ended_at)
    )
    state = "RUNNING" if record.ended_at is None else "REQUEUED"
    nodes = f"trn1-dy-[0000-{len(record.nodes) - 1:04d}]"
    return f"{record.job_id}|{state}|0:0|{nodes}|{begin}|{end}|{begin}|{begin}\n"


def environment(folder: Path) -> dict[str, str]:
    """The environment of the commands: the scripts of `write_slurm` come first."""
    return os.environ | {
        "PATH": f"{folder / 'slurm'}:{os.environ['PATH']}",
        "SLURMLLM_RUNS": str(folder / "runs"),
        "LARGE_RUN": str(folder / "runs" / NAME), "LARGE_RUN_COUNTS": str(folder / "counts"),
    }  # fmt: skip


def make(folder: Path, size: Size) -> RunDir:
    """The run in a folder, written if it is not there, and the scripts in place of Slurm."""
    run = RunDir(folder / "runs" / NAME)
    if not run.path.is_dir():
        began = time.perf_counter()
        write_run(run, size)
        print(f"wrote {run.path} in {time.perf_counter() - began:.0f} s", file=sys.stderr)
    write_slurm(folder / "slurm", run)
    return run


def take(arguments: Sequence[str], folder: Path, code: Path | None = None) -> Taken:
    """Run a process with this code, or that of another checkout."""
    variables = environment(folder) | ({} if code is None else {"PYTHONPATH": str(code)})
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-P", *arguments], env=variables, capture_output=True, check=False
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(f"{shlex.join(arguments)}: exit {done.returncode}\n{done.stderr.decode()}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Taken(time.perf_counter() - began, cpu)


def benchmark(
    folder: Path, size: Size, times: int, only: str, codes: dict[str, Path | None]
) -> list[dict[str, float | str]]:
    """Make the run, and measure every command with every code."""
    run = make(folder, size)
    attempts = load_attempts(run, "train")
    endings = sorted({str(a.ending) for a in attempts if a.ending})
    steps = sum((a.last_step or 0) - (a.first_step or 1) + 1 for a in attempts if a.last_step)
    print(
        f"{attempts[-1].world_size} workers on {len(attempts[-1].nodes)} nodes, {len(attempts)} "
        f"train attempts, {steps} steps; endings: {', '.join(endings)}"
    )
    lines = [command.format(last=attempts[-1].attempt) for command in COMMANDS if only in command]
    rows = {"--help": ["-m", "slurmllm", "--help"]}
    rows |= {line: ["-m", "slurmllm", *line.split()] for line in lines}
    print(f"{'slurmllm …':<36} {'code':<10} {'first s':>8} {'median':>7} {'min':>6} {'CPU s':>6} "
          f"{'files':>6} {'folders':>8} {'slow s':>7}")  # fmt: skip
    found: list[dict[str, float | str]] = []
    for name, arguments in rows.items():
        first = {which: take(arguments, folder, code) for which, code in codes.items()}
        taken: dict[str, list[Taken]] = {which: [] for which in codes}
        for _ in range(times):
            for which, code in codes.items():
                taken[which].append(take(arguments, folder, code))
        for which, code in codes.items():
            slow = take(["-c", _SLOW, *arguments[2:]], folder, code)
            files, folders = map(int, (folder / "counts").read_text().split())
            row: dict[str, float | str] = {
                "command": name, "code": which, "first_s": first[which].wall,
                "median_s": statistics.median(one.wall for one in taken[which]),
                "min_s": min(one.wall for one in taken[which]),
                "cpu_s": statistics.median(one.cpu for one in taken[which]),
                "files": files, "folders": folders, "slow_s": slow.wall,
            }  # fmt: skip
            found.append(row)
            print(
                f"{name:<36} {which:<10} {row['first_s']:8.2f} {row['median_s']:7.2f} "
                f"{row['min_s']:6.2f} {row['cpu_s']:6.2f} {files:6} {folders:8} "
                f"{row['slow_s']:7.2f}", flush=True,
            )  # fmt: skip
    return found


def main() -> None:
    """Read the options and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=Size.nodes)
    parser.add_argument("--attempts", type=int, default=Size.attempts)
    parser.add_argument("--steps", type=int, default=Size.steps, help="mean of an attempt")
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--only", default="", metavar="TEXT", help="commands that contain TEXT")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--reference", type=Path, metavar="CHECKOUT")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    size = Size(options.nodes, options.attempts, options.steps)
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.folder or Path(temporary)).absolute()
        codes: dict[str, Path | None] = {"this": None}
        if options.reference:
            codes["reference"] = options.reference.absolute()
        rows = benchmark(folder, size, options.times, options.only, codes)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
