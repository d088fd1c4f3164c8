"""The demonstration: train tiny_neox twice on this machine, kill one of the two, compare.

Everything goes through the command line, as a user would type it; only the kill is done here.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from slurmllm.drill.injector import signal_worker
from slurmllm.metrics.row_reader import last_row
from slurmllm.run.rundir import RunDir

ROOT = Path(__file__).resolve().parent.parent
RUNS = ROOT / ".demo" / "runs"
KILL_AT_STEP = 50
PATIENCE_S = 240.0


def slurmllm(*arguments: str) -> list[str]:
    """The command line of a verb, shown before it runs."""
    print(f"\n$ slurmllm {' '.join(arguments)}", flush=True)
    return [sys.executable, "-m", "slurmllm", *arguments, "--runs-dir", str(RUNS)]


def kill_a_worker(name: str) -> None:
    """Wait until the run has made some steps, then kill its second worker outright."""
    run = RunDir(RUNS / name)
    deadline = time.monotonic() + PATIENCE_S
    while (row := last_row(run)) is None or row["step"] < KILL_AT_STEP:
        if time.monotonic() > deadline:
            raise SystemExit(f"{name} made no {KILL_AT_STEP} steps in {PATIENCE_S:.0f} s")
        time.sleep(0.1)
    pid = signal_worker(run, 0, "local1", 1, signal.SIGKILL)
    print(f"\n$ kill -9 {pid}        # the worker of local1\n", flush=True)


def main() -> int:
    """Run it; returns 0 where the killed run's curve is the unbroken one's, bit by bit."""
    began = time.monotonic()
    shutil.rmtree(RUNS, ignore_errors=True)
    train = ("submit", "tiny_neox", "--nodes", "2", "--local", "--name")
    subprocess.run(slurmllm(*train, "unbroken"), check=True)
    killed = subprocess.Popen(slurmllm(*train, "killed"))
    try:
        kill_a_worker("killed")
    except BaseException:
        killed.terminate()
        raise
    if killed.wait() != 0:
        return 1
    subprocess.run(slurmllm("status", "killed"), check=True)
    done = subprocess.run(slurmllm("compare", "unbroken", "killed", "--exact"), check=False)
    print(f"\nthe demonstration took {time.monotonic() - began:.0f} s; its runs are in {RUNS}")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
