"""How long the login node's commands take as whole processes; the bare interpreter beside them.

python tools/benchmarks/startup.py [--runs 10]
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time

BARE = "python -c pass"
COMMANDS = (
    BARE,
    "slurmllm --help",
    "slurmllm recipes",
    "slurmllm submit neox_20b --nodes 4 --fetch --dry-run",
    "slurmllm status",
    "slurmllm plan llama2_70b --nodes 4096",
    "slurmllm plan pythia_6.9b --cluster p4d --nodes 4096 --set train.global_batch=65536",
)


def seconds(name: str, folder: str) -> float:
    program, *arguments = name.split()
    module = [] if program == "python" else ["-m", program]
    command = [sys.executable, *module, *arguments]
    began = time.perf_counter()
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return time.perf_counter() - began


def main() -> None:
    """Time the commands in turn, so that a slow moment meets all of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=10)
    runs = parser.parse_args().runs
    with tempfile.TemporaryDirectory() as folder:
        times = [{name: seconds(name, folder) for name in COMMANDS} for _ in range(runs)]
    bare = statistics.median(row[BARE] for row in times)
    print(f"{'command':<83} {'median s':>9} {'min':>6} {'max':>6} {'× bare':>7}")
    for name in COMMANDS:
        took = [row[name] for row in times]
        median = statistics.median(took)
        print(f"{name:<83} {median:9.3f} {min(took):6.3f} {max(took):6.3f} {median / bare:7.1f}")


if __name__ == "__main__":
    main()
