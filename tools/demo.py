"""The demonstration: train tiny_neox twice on this machine, kill one of the two, compare.

Everything goes through the command line, as a user would type it; only the kill is done here.
"""

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from reproduce.demonstrations import wait_for_step
from reproduce.runs import CommandError

from slurmllm.analysis.drill.injector import signal_worker
from slurmllm.core.run.rundir import RunDir

ROOT = Path(__file__).resolve().parent.parent
RUNS = ROOT / ".demo" / "runs"
KILL_AT_STEP = 50


def slurmllm(*arguments: str) -> list[str]:
    """The command line of a verb, shown before it runs."""
    print(f"\n$ slurmllm {' '.join(arguments)}", flush=True)
    return [sys.executable, "-m", "slurmllm", *arguments, "--runs-dir", str(RUNS)]


def kill_a_worker(name: str) -> None:
    """Wait until the run has made some steps, then kill its second worker outright."""
    run = RunDir(RUNS / name)
    try:
        wait_for_step(run, KILL_AT_STEP)
    except CommandError as error:
        raise SystemExit(str(error)) from None
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
