"""From a failure to the next completed step on the development cluster, and where the time goes.

python tools/benchmarks/recovery.py [--nodes 4] [--kinds worker,node,time_limit,save] [--repeat 3]

Starts a cluster of its own with a spare node (needs root and Slurm's packages), trains tiny_neox
once for the compiled graphs, and then lets `slurmllm drill` break copies of it. Slurm's own
requeue delay is shown and left out of the sum.

With --spare, of the kinds worker and node: a restart in the job, with one spare node, against a
requeue, on one cluster, the whole time from the failure to the next step. A requeued job waits for
--requeue-delay seconds: Slurm's default is 120 s (AuthInfo=cred_expire), the development cluster's
5 s; it starts with the scheduler's next round, in this cluster every two seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
DEVCLUSTER = ROOT / "tools" / "devcluster"
SLURMLLM = [sys.executable, "-m", "slurmllm"]
PARTS = ("detection", "preflight", "cache", "launch", "start_up", "first_step")
PATIENCE_S = 600.0


def devcluster(folder: Path, *arguments: str) -> str:
    """Call the development cluster's own command; returns what it printed."""
    command = [sys.executable, str(DEVCLUSTER), *arguments, "--dir", str(folder)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def slurmllm(runs: Path, *arguments: str) -> str:
    """Call slurmllm in a folder of runs; returns what it printed."""
    command = [*SLURMLLM, *arguments, f"--runs-dir={runs}"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(arguments)}: exit code {done.returncode}\n{done.stdout}")
    return done.stdout


def train_once(runs: Path, name: str, nodes: int, overrides: Sequence[str]) -> None:
    """The run that the drills are of; returns when it is done."""
    slurmllm(runs, "submit", "tiny_neox", f"--nodes={nodes}", f"--name={name}", *overrides)
    deadline = time.monotonic() + PATIENCE_S
    while (state := json.loads(slurmllm(runs, "status", name, "--json"))["state"]) != "done":
        if state in ("stopped", "interrupted", "cancelled") or time.monotonic() > deadline:
            raise SystemExit(f"the run to be broken is {state}")
        time.sleep(2.0)


def print_table(drills: Sequence[dict[str, Any]]) -> None:
    """Medians by kind, s; the last columns are the slowest and Slurm's delay."""
    print(f"{'kind':<12} {'own s':>7}" + "".join(f"{part:>12}" for part in PARTS), end="")
    print(f"{'slowest':>10} {'requeue':>9}")
    for kind in dict.fromkeys(one["kind"] for one in drills):
        found = [one["recovery"] for one in drills if one["kind"] == kind]
        own = [took["total_s"] - took["requeue_s"] for took in found]
        parts = (statistics.median(took[f"{part}_s"] for took in found) for part in PARTS)
        print(f"{kind:<12} {statistics.median(own):7.1f}", end="")
        print("".join(f"{seconds:12.2f}" for seconds in parts), end="")
        print(f"{max(own):10.1f} {statistics.median(took['requeue_s'] for took in found):9.1f}")


def print_ratios(drills: dict[str, list[dict[str, Any]]]) -> None:
    """The time to the next step by kind, restarts against requeues, medians in seconds."""
    print(f"{'kind':<8} {'restart':>8} {'requeue':>8} {'ratio':>6}   of the requeue, the wait")
    for kind in dict.fromkeys(one["kind"] for one in drills["restart"]):
        took = {
            how: [one["recovery"] for one in found if one["kind"] == kind]
            for how, found in drills.items()
        }
        restart, requeue = (
            statistics.median(one["total_s"] for one in took[how]) for how in ("restart", "requeue")
        )
        wait = statistics.median(one["requeue_s"] for one in took["requeue"])
        print(f"{kind:<8} {restart:8.1f} {requeue:8.1f} {restart / requeue:6.2f}   {wait:.1f}")


def main() -> None:
    """Run it; every drill must end exactly."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--kinds", default="worker,node,time_limit,save")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE")
    parser.add_argument("--json", action="store_true", help="print each drill's figures instead")
    parser.add_argument("--spare", action="store_true", help="restarts against requeues")
    parser.add_argument("--requeue-delay", type=int, default=5, metavar="SECONDS")
    given = parser.parse_args()
    if given.spare:
        given.kinds = "worker,node"
    with tempfile.TemporaryDirectory(prefix="recovery-") as folder:
        cluster, runs = Path(folder) / "cluster", Path(folder) / "runs"
        devcluster(
            cluster,
            "up",
            f"--nodes={given.nodes + 1}",
            "--kill-wait=30",
            f"--cred-expire={given.requeue_delay}",
        )
        try:
            words = devcluster(cluster, "env")
            os.environ["SLURM_CONF"] = words.split("SLURM_CONF=", 1)[1].split()[0].strip("'\"")
            overrides = [f"--set={value}" for value in given.set]
            ways = {"requeue": [*overrides, "--set=slurm.restart_in_allocation=false"]}
            if given.spare:
                ways["restart"] = [*overrides, "--set=slurm.spare_nodes=1"]
            found: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
            for way, settings in ways.items():
                train_once(runs, way, given.nodes, settings)
            for seed in range(given.repeat):
                for way, drills in found.items():
                    text = slurmllm(
                        runs, "drill", way, f"--kinds={given.kinds}", f"--seed={seed}", "--json"
                    )
                    drills += json.loads(text)["drills"]
        finally:
            devcluster(cluster, "down")
    if given.json:
        print(json.dumps(found if given.spare else found["requeue"], indent=2))
    elif given.spare:
        print_ratios(found)
    else:
        print_table(found["requeue"])


if __name__ == "__main__":
    main()
