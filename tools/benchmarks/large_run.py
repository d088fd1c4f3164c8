"""How long `status`, `logs` and `report` take for a run of 4,096 workers with 200 attempts.

    python tools/benchmarks/large_run.py [--nodes 128] [--attempts 200] [--steps 500] [--times 5]
        [--folder DIR] [--json FILE]

Writes the run into a temporary folder (or DIR, where it is kept and used again): 32 workers a node,
in the real file formats, the last attempt in training. Every command is a process of its own, in
turn, so that a slow moment meets all of them; `files` and `listings` are the files and folders of
the run that it opens. Slurm is replaced by scripts that answer at once from a file: the time of a
real slurmctld and slurmdbd comes on top.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from _large_run.write import Size, write_run

from slurmllm.records import AttemptRecord, JobsRecord
from slurmllm.rundir import RunDir
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
# Counts what a command opens below $LARGE_RUN; its own process then runs the command line.
_COUNT = """
import atexit, os, sys
run, counts = os.environ["LARGE_RUN"], {"open": 0, "os.scandir": 0, "os.listdir": 0}
def count(event, args):
    if event in counts:
        path = args[0]
        if isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(run):
            counts[event] += 1
sys.addaudithook(count)
def show():
    with open(os.environ["LARGE_RUN_COUNTS"], "w") as stream:
        print(counts["open"], counts["os.scandir"] + counts["os.listdir"], file=stream)
atexit.register(show)
import runpy
sys.argv = ["slurmllm", *sys.argv[1:]]
runpy.run_module("slurmllm", run_name="__main__")
"""


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


def counts(arguments: Sequence[str], folder: Path) -> tuple[int, int]:
    """The files and folders of the run that a command opens."""
    command = [sys.executable, "-c", _COUNT, *arguments]
    done = subprocess.run(command, env=environment(folder), capture_output=True, check=False)
    if done.returncode:
        raise SystemExit(f"{shlex.join(arguments)}: exit {done.returncode}\n{done.stderr.decode()}")
    files, listings = (folder / "counts").read_text().split()
    return int(files), int(listings)


def seconds(arguments: Sequence[str], folder: Path) -> float:
    """Wall time of one process, s."""
    began = time.perf_counter()
    subprocess.run(
        [sys.executable, *arguments], env=environment(folder), check=True, capture_output=True
    )
    return time.perf_counter() - began


def benchmark(folder: Path, size: Size, times: int, only: str) -> list[dict[str, float | str]]:
    """Make the run, and measure every command."""
    run = make(folder, size)
    attempts = load_attempts(run, "train")
    endings = sorted({str(a.ending) for a in attempts})
    steps = sum((a.last_step or 0) - (a.first_step or 1) + 1 for a in attempts if a.last_step)
    print(
        f"{attempts[-1].world_size} workers on {len(attempts[-1].nodes)} nodes, {len(attempts)} "
        f"train attempts, {steps} steps; endings: {', '.join(endings)}"
    )
    last = attempts[-1].attempt
    rows = {"python -c pass": ["-c", "pass"], "slurmllm --help": ["-m", "slurmllm", "--help"]}
    for command in COMMANDS:
        if only in command:
            line = command.format(last=last)
            rows[f"slurmllm {line}"] = ["-m", "slurmllm", *line.split()]
    first = {name: seconds(arguments, folder) for name, arguments in rows.items()}
    taken = [{name: seconds(a, folder) for name, a in rows.items()} for _ in range(times)]
    print(f"{'command':<44} {'first s':>8} {'median':>7} {'min':>6} {'max':>6} "
          f"{'files':>6} {'listings':>8}")  # fmt: skip
    found: list[dict[str, float | str]] = []
    for name, arguments in rows.items():
        own = [row[name] for row in taken]
        files, listings = counts(arguments[2:], folder) if "slurmllm " in name else (0, 0)
        median = statistics.median(own)
        print(f"{name:<44} {first[name]:8.2f} {median:7.2f} {min(own):6.2f} {max(own):6.2f} "
              f"{files:6} {listings:8}")  # fmt: skip
        found.append({"command": name, "first_s": first[name], "median_s": median,
                      "files": files, "listings": listings})  # fmt: skip
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
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    size = Size(options.nodes, options.attempts, options.steps)
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.folder or Path(temporary)).absolute()
        rows = benchmark(folder, size, options.times, options.only)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
