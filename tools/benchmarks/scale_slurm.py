"""A run of hundreds of workers through real Slurm on this machine, with a node that dies.

python tools/benchmarks/scale_slurm.py [--nodes 128] [--workers 4] [--json]

Starts a development cluster of its own with a spare node (needs root and Slurm's packages), trains
tiny_neox with the rehearsal backend, whose control plane, launchers, records and checkpoints are
those of the other backends, cuts the power of a node in the middle, and waits until Slurm has
started the job again and the run is done. Then compares every value of every step with those of an
undisturbed run of a few workers, bit by bit: a rehearsal's values do not depend on the mesh.

All processes share this machine's processors, so start-up times are those of so many Python
processes on so few processors; `processor_s` has what each of them takes.

Exit codes: 0 done, and all values are the same; 1 not; 2 the machine has too little memory.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from recovery import ROOT, SLURMLLM, devcluster, slurmllm

sys.path.append(str(ROOT / "tools"))
from _devcluster.cluster import Cluster

MB = 2**20
# Measured: a worker holds 31 MB that it shares with no other process, a launcher 24 MB, slurmd and
# slurmstepd of a node 3 MB; while the preflight runs, a node has its probe instead of its workers.
WORKER_MB, NODE_MB, REST_MB = 31.5, 27, 500
RESERVE_MB = 1000  # for others: with less than half of it left, the run is cancelled
PATIENCE_S = 3600.0  # only a hang reaches it
MEASURED = 8  # processes of each role whose memory and processor time are read
STARTED = ("starting from step", "resumed from step")  # rank 0, once all workers have connected
TICKS = os.sysconf("SC_CLK_TCK")


class Sampler(threading.Thread):
    """Measures the machine's memory once a second, and cancels the run if it runs out."""

    def __init__(self, give_up: Callable[[], None]) -> None:
        super().__init__(daemon=True)
        self._give_up, self._ended = give_up, threading.Event()
        self.before_mb = available_mb()
        self.lowest_mb = self.before_mb

    def run(self) -> None:
        while not self._ended.wait(1.0):
            self.lowest_mb = min(self.lowest_mb, available_mb())
            if self.lowest_mb < RESERVE_MB / 2:
                self._give_up()
                return

    def stop(self) -> float:
        """The most memory that has been taken since the start, MB."""
        self._ended.set()
        self.join()
        return self.before_mb - self.lowest_mb


class Watched:
    """The files of a run, and when what they show was first seen, Unix time, s."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self._with_workers: dict[int, set[str]] = defaultdict(set)

    def record(self, attempt: int) -> dict[str, Any]:
        return read(self.run / f"attempts/{attempt:03d}/attempt.json")

    def started_nodes(self, attempt: int) -> int:
        """Nodes whose launchers have started their workers."""
        known = self._with_workers[attempt]
        folder = self.run / f"attempts/{attempt:03d}/nodes"
        with suppress(OSError):
            for path in folder.glob("*.json"):
                if path.name not in known and read(path).get("pids"):
                    known.add(path.name)
        return len(known)

    def has_failures(self, attempt: int) -> bool:
        return (self.run / f"attempts/{attempt:03d}/failures").is_dir()

    def rows(self, attempt: int) -> list[dict[str, Any]]:
        found = []
        with suppress(OSError):
            path = self.run / f"metrics/attempt_{attempt:03d}.jsonl"
            for line in path.read_text().splitlines():
                with suppress(ValueError):  # being written
                    found.append(json.loads(line))
        return found

    def opened(self) -> list[float]:
        """When each attempt's workers had all connected, by rank 0's log."""
        log = (self.run / "logs/train.log").read_text(errors="replace").splitlines()
        return [
            datetime.fromisoformat(line.split()[0]).timestamp()
            for line in log
            if any(text in line for text in STARTED)
        ]


def read(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        found: dict[str, Any] = json.loads(path.read_text())
        return found
    return {}


def available_mb() -> float:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) / 1024
    raise SystemExit("/proc/meminfo has no MemAvailable")


def processes(mark: str) -> dict[str, dict[str, float]]:
    """The cluster's processes by role: number, mean memory and processor time of some of them."""
    found: dict[str, list[Path]] = defaultdict(list)
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and mark in (entry / "environ").read_text(errors="replace"):
                command = (entry / "cmdline").read_text().split("\0")
                role = (entry / "comm").read_text().strip()
                if "slurmllm" in command and role != "srun":
                    role = command[command.index("slurmllm") + 1]
                found[role].append(entry)
    return {role: measured(entries) for role, entries in sorted(found.items())}


def measured(entries: list[Path]) -> dict[str, float]:
    sizes, seconds = [], []
    for entry in entries[:MEASURED]:
        with suppress(OSError):
            lines = (entry / "smaps_rollup").read_text().splitlines()
            times = (entry / "stat").read_text().rpartition(")")[2].split()[11:13]
            sizes.append(next(int(at.split()[1]) / 1024 for at in lines if at.startswith("Pss:")))
            seconds.append(sum(map(int, times)) / TICKS)
    return {
        "processes": len(entries),
        "pss_mb": round(statistics.mean(sizes or [0.0]), 1),
        "processor_s": round(statistics.mean(seconds or [0.0]), 2),
    }


def options(given: argparse.Namespace, folder: Path, batch: int) -> list[str]:
    """The `--set` options of both runs."""
    limit_s = PATIENCE_S / 3
    values = {
        "backend": "rehearsal",
        "data.corpus": folder / "tokens.npy",
        "data.tokenizer": "null",  # ids are read without the tokenizers library
        "data.num_workers": 0,
        "model.seq_len": 32,
        "train.steps": given.steps,
        "train.global_batch": batch,
        "train.micro_batch": 1,
        "optim.warmup_steps": 4,
        "checkpoint.every_steps": given.every,
        "slurm.time": "12:00:00",
        "slurm.backoff_s": 1,
        "cluster.health.timeout_s": limit_s,
        "watchdog.start_up_s": limit_s,
        "watchdog.first_step_s": limit_s,
        "watchdog.min_step_s": limit_s,
        "watchdog.save_s": limit_s,
    }
    return [*(f"--set={path}={value}" for path, value in values.items()), *given.set]


def wait_for(condition: Callable[[], Any], what: str, stopped: threading.Event) -> float:
    """Wait for something to be true; returns Unix time, s."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if stopped.is_set():
            raise SystemExit("the memory of this machine runs out; see --nodes, --workers")
        if time.monotonic() > deadline:
            raise SystemExit(f"no {what} after {PATIENCE_S:.0f} s")
        time.sleep(0.2)
    return time.time()


def state_of(runs: Path, name: str) -> str:
    return str(json.loads(slurmllm(runs, "status", name, "--json"))["state"])


def reference_run(runs: Path, given: argparse.Namespace, folder: Path, batch: int) -> None:
    """The undisturbed run, of a few workers with the same global batch."""
    workers = max(n for n in range(1, min(given.nodes, 8) + 1) if batch % n == 0)
    slurmllm(
        runs, "submit", "tiny_neox", f"--nodes={workers}", "--name=reference",
        *options(given, folder, batch), "--set=env.SLURMLLM_REHEARSAL_STEP_S=0",
    )  # fmt: skip
    deadline = time.monotonic() + PATIENCE_S
    while (state := state_of(runs, "reference")) != "done":
        if state in ("stopped", "interrupted", "cancelled") or time.monotonic() > deadline:
            raise SystemExit(f"the undisturbed run is {state}")
        time.sleep(1.0)


def broken_run(
    runs: Path, given: argparse.Namespace, cluster: Path, batch: int, stopped: threading.Event
) -> dict[str, Any]:
    """Submit the large run, cut a node's power, and follow it to its end; what was seen when."""
    run = Watched(runs / "large")
    begun = time.time()
    slurmllm(
        runs, "submit", "tiny_neox", f"--nodes={given.nodes}", "--name=large",
        *options(given, cluster.parent, batch), f"--set=cluster.devices_per_node={given.workers}",
        f"--set=env.SLURMLLM_REHEARSAL_STEP_S={given.step_s}",
    )  # fmt: skip
    submitted = time.time()
    seen: dict[str, Any] = {"submitting": (begun, submitted), "launchers": []}

    def follow(attempt: int) -> None:
        wait_for(lambda: run.record(attempt), f"attempt {attempt}", stopped)
        started = wait_for(
            lambda: run.started_nodes(attempt) >= given.nodes or run.has_failures(attempt),
            "launcher on every node", stopped,
        )  # fmt: skip
        seen["launchers"].append(started)
        report(f"attempt {attempt}: every launcher has started its workers")
        wait_for(lambda: run.rows(attempt) or run.has_failures(attempt), "step", stopped)
        report(f"attempt {attempt}: first step")
        if run.has_failures(attempt):
            raise SystemExit(f"attempt {attempt} failed by itself; see {run.run}")

    def measure_processes() -> None:
        seen["processes"] = processes(str(cluster))

    follow(0)
    victim = run.record(0)["nodes"][given.nodes // 2]
    node = Cluster(cluster).init(victim)
    assert node is not None
    measuring = threading.Thread(target=measure_processes)  # the run goes on meanwhile
    measuring.start()
    wait_for(lambda: run.rows(0)[-1]["step"] >= given.kill_at, "step", stopped)
    seen["victim"], seen["failed"] = victim, time.time()
    os.kill(node, signal.SIGKILL)  # the first process of its namespace: all of the node
    measuring.join()
    report(f"power of {victim} cut after step {given.kill_at}")
    seen["detected"] = wait_for(lambda: run.has_failures(0), "failure record", stopped)
    wait_for(lambda: run.record(0).get("ended_at"), "end of the attempt", stopped)
    report(f"attempt 0: {run.record(0)['class']}, {run.record(0)['action']}")
    follow(1)
    wait_for(lambda: run.record(1).get("ended_at"), "end of the run", stopped)
    report(f"attempt 1: {run.record(1)['class']}")
    return seen | {"run": run}


def report(text: str) -> None:
    print(f"{datetime.now():%H:%M:%S}  {text}", file=sys.stderr, flush=True)


def summarize(given: argparse.Namespace, seen: dict[str, Any], memory_mb: float) -> dict[str, Any]:
    run: Watched = seen["run"]
    first, second = run.record(0), run.record(1)
    rows = run.rows(0), run.rows(1)
    opened = run.opened()
    times: dict[str, float] = {
        "submit": seen["submitting"][1] - seen["submitting"][0],
        "queue": first["started_at"] - seen["submitting"][1],
        "detection": seen["detected"] - seen["failed"],
        "ending": first["ended_at"] - seen["detected"],
        "requeue": second["started_at"] - first["ended_at"],
        "failure_to_next_step": rows[1][0]["time"] - seen["failed"],
        "first_step_to_end": second["ended_at"] - rows[1][0]["time"],
        "whole": second["ended_at"] - seen["submitting"][0],
    }
    starts = []
    for index, record in enumerate((first, second)):
        phases = record["phases_s"]
        launched = record["started_at"] + phases["preflight"] + phases["cache"]
        starts.append(
            {
                "preflight": phases["preflight"],
                "cache": phases["cache"],
                "workers_started": seen["launchers"][index] - launched,
                "workers_connected": opened[index] - launched,
                "first_step": rows[index][0]["time"] - launched,
                "checkpoint": record["checkpoint_before"],
                "class": record["class"],
            }
        )
    steps = [row["step_time_s"] for row in (*rows[0][1:], *rows[1][1:])]
    return {
        "nodes": given.nodes,
        "workers": given.nodes * given.workers,
        "steps": given.steps,
        "step_at_least_s": given.step_s,
        "victim": seen["victim"],
        "evidence": first["evidence"],
        "times_s": {name: round(seconds, 2) for name, seconds in times.items()},
        "starts_s": [
            {k: round(v, 2) if isinstance(v, float) else v for k, v in start.items()}
            for start in starts
        ],
        "step_s": {
            "median": round(statistics.median(steps), 3),
            "largest": round(max(steps), 3),
        },
        "resumed_from": second["checkpoint_before"],
        "recomputed_steps": rows[0][-1]["step"] - second["checkpoint_before"],
        "memory_mb": round(memory_mb),
        "processes": seen["processes"],
    }


def table(found: dict[str, Any]) -> str:
    times, (first, second) = found["times_s"], found["starts_s"]
    lines = [
        f"{found['nodes']} nodes, {found['workers']} workers, {found['steps']} steps of "
        f"{found['step_at_least_s']:g} s or more; power of {found['victim']} cut",
        "",
        f"{'sbatch to supervisor':<44}{times['queue']:8.1f} s",
        f"{'':<44}{'start':>8}  {'resume':>8}",
    ]
    for name, title in {
        "preflight": "preflight of all nodes",
        "cache": "graph cache",
        "workers_started": "srun to all workers started",
        "workers_connected": "srun to all workers connected",
        "first_step": "srun to the end of the first step",
    }.items():
        lines.append(f"{title:<44}{first[name]:8.1f}  {second[name]:8.1f} s")
    for name, title in {
        "detection": "power cut to the first failure record",
        "ending": "to the end of the attempt",
        "requeue": "to the supervisor of the next one (Slurm)",
        "failure_to_next_step": "power cut to the next completed step",
        "whole": "submit to done",
    }.items():
        lines.append(f"{title:<44}{times[name]:8.1f} s")
    step = found["step_s"]
    lines += [
        f"{'step, median and largest':<44}{step['median']:8.2f}  {step['largest']:8.2f} s",
        f"{'memory of the machine, at most':<44}{found['memory_mb'] / 1024:8.1f} GiB",
        f"resumed from step {found['resumed_from']}, {found['recomputed_steps']} steps recomputed; "
        f"values {'identical to' if found['identical'] else 'DIFFER from'} the undisturbed run's",
        "",
        f"{'process':<14}{'number':>8}{'memory MB':>12}{'processor s':>13}",
    ]
    for role, own in found["processes"].items():
        lines.append(
            f"{role:<14}{own['processes']:8}{own['pss_mb']:12.1f}{own['processor_s']:13.2f}"
        )
    return "\n".join(lines)


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=128)
    parser.add_argument("--workers", type=int, default=4, help="of each node (4)")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints (10)")
    parser.add_argument("--kill-at", type=int, default=36, help="step after which a node dies (36)")
    parser.add_argument("--step-s", type=float, default=0.5, help="shortest step, s (0.5)")
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE")
    parser.add_argument("--dir", type=Path, help="for cluster and runs, which are kept")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    given = parser.parse_args()
    given.set = [f"--set={value}" for value in given.set]
    batch = given.nodes * given.workers
    needed_mb = batch * WORKER_MB + (given.nodes + 1) * NODE_MB + REST_MB + RESERVE_MB
    if available_mb() < needed_mb:
        print(
            f"{batch} workers on {given.nodes} nodes need {needed_mb / 1024:.1f} GiB of memory, "
            f"and {available_mb() / 1024:.1f} GiB are available; choose fewer",
            file=sys.stderr,
        )
        return 2
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the cluster is stopped
    with tempfile.TemporaryDirectory(prefix="scale-slurm-") as temporary:
        folder = (given.dir or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        try:
            found = measure(given, folder, batch)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return 130
    print(json.dumps(found, indent=2) if given.json else table(found))
    return 0 if found["identical"] else 1


def measure(given: argparse.Namespace, folder: Path, batch: int) -> dict[str, Any]:
    cluster, runs, stopped = folder / "cluster", folder / "runs", threading.Event()
    ids = np.random.default_rng(1).integers(0, 4096, 200_000, dtype=np.uint16)
    np.save(folder / "tokens.npy", ids)
    sampler = Sampler(stopped.set)
    sampler.start()
    try:
        devcluster(
            cluster, "up", f"--nodes={given.nodes + 1}", "--kill-wait=120",
            f"--slurmd-timeout={60 if given.nodes > 16 else 10}",
        )  # fmt: skip
        report(f"cluster of {given.nodes + 1} nodes")
        text = devcluster(cluster, "env")
        os.environ["SLURM_CONF"] = text.split("SLURM_CONF=", 1)[1].split()[0].strip("'\"")
        reference_run(runs, given, folder, batch)
        report("undisturbed run done")
        seen = broken_run(runs, given, cluster, batch, stopped)
        found = summarize(given, seen, sampler.stop())
        compared = compare(runs)
    finally:
        devcluster(cluster, "down")
    return found | {"identical": compared}


def compare(runs: Path) -> bool:
    """Whether all values of all steps are those of the undisturbed run, bit by bit."""
    command = [*SLURMLLM, "compare", "reference", "large", "--exact", f"--runs-dir={runs}"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    report(done.stdout.strip())
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
