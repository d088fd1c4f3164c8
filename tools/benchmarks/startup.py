"""How long the login node's commands take as whole processes; the bare interpreter beside them.

python tools/benchmarks/startup.py [--runs 10]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time

COMMANDS: dict[str, list[str]] = {
    "python -c pass": ["-c", "pass"],
    "slurmllm --help": ["-m", "slurmllm", "--help"],
    "slurmllm recipes": ["-m", "slurmllm", "recipes"],
    "slurmllm submit neox_20b --nodes 4 --fetch --dry-run": [
        *("-m", "slurmllm", "submit", "neox_20b", "--nodes", "4", "--fetch", "--dry-run")
    ],
    "slurmllm status": ["-m", "slurmllm", "status"],
    "slurmllm plan llama2_70b --nodes 4096": [
        *("-m", "slurmllm", "plan", "llama2_70b", "--nodes", "4096")
    ],
    "slurmllm plan pythia_6.9b --cluster p4d --nodes 4096": [
        *("-m", "slurmllm", "plan", "pythia_6.9b", "--cluster", "p4d", "--nodes", "4096"),
        *("--set", "train.global_batch=65536"),
    ],
}


def seconds(arguments: list[str], folder: str) -> float:
    """Wall time of one process, s."""
    began = time.perf_counter()
    subprocess.run([sys.executable, *arguments], cwd=folder, check=True, capture_output=True)
    return time.perf_counter() - began


def main() -> None:
    """Time the commands in turn, so that a slow moment meets all of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=10)
    runs = parser.parse_args().runs
    with tempfile.TemporaryDirectory() as folder:
        times = [{name: seconds(a, folder) for name, a in COMMANDS.items()} for _ in range(runs)]
    bare = statistics.median(row["python -c pass"] for row in times)
    print(f"{'command':<46} {'median s':>9} {'min':>6} {'max':>6} {'× bare':>7}")
    for name in COMMANDS:
        found = [row[name] for row in times]
        median = statistics.median(found)
        print(f"{name:<46} {median:9.3f} {min(found):6.3f} {max(found):6.3f} {median / bare:7.1f}")


if __name__ == "__main__":
    main()
