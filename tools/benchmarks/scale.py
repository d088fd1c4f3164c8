"""What the control plane costs at 16 to 1,024 workers, and at 4,096 and 8,192 by a model.

    python tools/benchmarks/scale.py [--workers 16,64,256,512] [--per-node 32] [--rounds 5]
        [--step-s 1.0] [--reference [256]] [--latency-us 50] [--json]

Forks real launchers (relays) and workers (control planes) after one import, without the model's
arithmetic, on this machine. Measured for each number of workers:

    open      from the start of the relays until all workers have completed a first barrier
    agree     an agreement as a step pays for it: post the flags, and read those of the step before;
              the step's own work is a sleep of --step-s. Median over workers and steps, and the
              CPU time of a worker and of a launcher
    decide    an agreement that is waited for, as before a save
    save      what a save exchanges (data positions, verdicts, the files for the manifest)
    resume    what a resume exchanges (listing, manifest shares, faults, training state)

`--reference` adds the former way in the same run: a world-sized gloo group whose workers call
`all_gather_object` in every step, up to the number of workers given.

Model for more workers. Here all N workers and their launchers share this machine's cores, so that
what is waited for grows with N whatever the algorithm; on a cluster each worker and each launcher
has a core. So the model takes the CPU time of one worker and of one launcher, and the hops:

    step      CPU time of a worker for post and read. The result arrives while the next step runs,
              as long as a step is longer than `decide`
    decide    4 hops, and the CPU time of a launcher and of the root's for their messages
    open      the root's CPU time for all connections, and two connections of 4 hops, each with a
              wait of at most one retry (0.1 s)
    hop       half a round trip between two processes on this machine, plus --latency-us
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from scale_workers import deadline, fork, measure

from slurmllm.control.relay import RETRY_S
from slurmllm.control.wire import Connection, Frame, Kind

EXTRAPOLATED = (4096, 8192)
LIMIT_S = 600  # for one number of workers
Row = dict[str, float]
# Key → title and format of a column.
COLUMNS: Mapping[str, tuple[str, str]] = {
    "workers": ("workers", ".0f"),
    "open_s": ("open, s", ".2f"),
    "agree_ms": ("agree, ms", ".3f"),
    "agree_cpu_us": ("CPU, µs", ".0f"),
    "launcher_cpu_us": ("launcher, µs", ".0f"),
    "decide_ms": ("decide, ms", ".1f"),
    "save_ms": ("save, ms", ".1f"),
    "resume_ms": ("resume, ms", ".1f"),
    "messages": ("messages", ".0f"),
    "bytes": ("bytes", ".0f"),
    "connections": ("connections", ".0f"),
    "descriptors": ("descriptors", ".0f"),
    "launcher_descriptors": ("launcher's", ".0f"),
    "reference_open_s": ("former open, s", ".1f"),
    "reference_agree_ms": ("former agree, ms", ".0f"),
}
FITTED = ("open_s", "agree_ms", "agree_cpu_us", "launcher_cpu_us", "decide_ms", "save_ms",
          "resume_ms", "messages", "bytes", "connections", "descriptors")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", default="16,64,256,512", help="numbers of workers")
    parser.add_argument("--per-node", type=int, default=32, help="workers a launcher")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--step-s", type=float, default=1.0, help="sleep in the place of a step")
    parser.add_argument("--latency-us", type=float, default=50.0, help="of the cluster's network")
    parser.add_argument(
        "--reference", type=int, nargs="?", const=256, default=0, metavar="WORKERS",
        help="also measure the former way, up to so many workers",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    args = parser.parse_args()
    rows = []
    for workers in map(int, args.workers.split(",")):
        row = measured(workers, args.per_node, args.rounds, args.step_s)
        if workers <= args.reference:
            row |= reference(workers)
        rows.append(row)
        print(f"{workers} workers done, load {os.getloadavg()[0]:.1f}", file=sys.stderr)
    hop_us = round_trip_us() / 2
    if args.json:
        print(json.dumps(rows))
        return
    print_table(rows)
    print_fits(rows)
    print_model(rows, args.per_node, hop_us, args.latency_us)


def measured(workers: int, per_node: int, rounds: int, step_s: float) -> Row:
    with deadline(LIMIT_S):
        begun, found = measure(workers, per_node, rounds, step_s)
    messages, num_bytes = found.traffic.max(0)
    connections, descriptors = found.files.max(0)
    launcher_connections, launcher_descriptors = found.relay_files.max(0)
    return {
        "workers": workers,
        "nodes": len(found.relay_cpu),
        "open_s": found.opened.max() - begun,
        "open_cpu_us": np.median(found.open_cpu) * 1e6,
        "launcher_open_cpu_us": found.relay_open_cpu.max() * 1e6,
        "agree_ms": np.median(found.step) * 1e3,
        "agree_slowest_ms": np.median(found.step.max(0)) * 1e3,
        "agree_cpu_us": np.median(found.step_cpu) * 1e6,
        "launcher_cpu_us": found.relay_cpu.max() * 1e6,
        "decide_ms": np.median(found.decide) * 1e3,
        "save_ms": np.median(found.save) * 1e3,
        "resume_ms": np.median(found.resume) * 1e3,
        "messages": messages,
        "bytes": num_bytes,
        "connections": connections,
        "descriptors": descriptors,
        "launcher_connections": launcher_connections,
        "launcher_descriptors": launcher_descriptors,
        "load": os.getloadavg()[0],
    }


def reference(workers: int) -> Row:
    program = Path(__file__).with_name("scale_reference.py")
    command = [sys.executable, str(program), str(workers)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: Row = json.loads(done.stdout)
    return found


def round_trip_us(rounds: int = 2000) -> float:
    """Median of the round trips of a frame between two processes over TCP, µs."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection = Connection(server.accept()[0])
            for _ in range(rounds):
                connection.queue(connection.receive()[0])

        child = fork(answer)
        connection = Connection(socket.create_connection(server.getsockname()))
    times = []
    for number in range(rounds):
        begun = time.perf_counter()
        connection.queue(Frame(Kind.MAX, number, b"[0, 0, 0]"))
        connection.receive()
        times.append(time.perf_counter() - begun)
    connection.socket.close()
    os.waitpid(child, 0)
    return float(np.median(times)) * 1e6


def print_table(rows: Sequence[Row]) -> None:
    shown = [key for key in COLUMNS if key in rows[0]]
    print("| " + " | ".join(COLUMNS[key][0] for key in shown) + " |")
    print("|" + "---|" * len(shown))
    for row in rows:
        cells = (f"{row[key]:{COLUMNS[key][1]}}" if key in row else "" for key in shown)
        print("| " + " | ".join(cells) + " |")


def fit(rows: Sequence[Row], key: str) -> tuple[str, Callable[[float], float]]:
    """The better of a + b·log2 N and a + b·N by least squares, as text and as a function."""
    workers = np.array([row["workers"] for row in rows])
    values = np.array([row[key] for row in rows])
    if np.ptp(values) <= 0.02 * abs(values).max():
        return f"constant, {values.mean():.4g}", lambda n: float(values.mean())
    found = []
    for name, basis in (("log2 N", np.log2), ("N", np.asarray)):
        slope, constant = np.polyfit(basis(workers), values, 1)
        rest = float(np.sum((constant + slope * basis(workers) - values) ** 2))

        def predict(n: float, s: float = slope, c: float = constant, b: object = basis) -> float:
            return float(c + s * (np.log2(n) if b is np.log2 else n))

        found.append((rest, f"{constant:.4g} + {slope:.4g}·{name}", predict))
    total = float(np.sum((values - values.mean()) ** 2))
    rest, text, best = min(found, key=lambda one: one[0])
    if rest > 0.5 * total:
        return f"no trend, {np.median(values):.4g}", lambda n: float(np.median(values))
    return f"{text} (R² {1 - rest / total:.3f})", best


def print_fits(rows: Sequence[Row]) -> None:
    if len(rows) < 3:
        return
    print("\nGrowth on this machine, whose cores all workers share:\n")
    print("| | fits | " + " | ".join(f"at {n:,}" for n in EXTRAPOLATED) + " |")
    print("|---|---|" + "---|" * len(EXTRAPOLATED))
    for key in FITTED:
        text, predict = fit(rows, key)
        print(f"| {key} | {text} | " + " | ".join(f"{predict(n):.4g}" for n in EXTRAPOLATED) + " |")


def print_model(rows: Sequence[Row], per_node: int, hop_us: float, latency_us: float) -> None:
    hop = (hop_us + latency_us) * 1e-6
    step_us = float(np.median([row["agree_cpu_us"] for row in rows]))
    # CPU time of a launcher for a message in an agreement, and for a peer that connects.
    peers = [min(per_node, row["workers"]) + row["nodes"] - 1 for row in rows]
    message_us = float(
        np.median([row["launcher_cpu_us"] / 2 / n for row, n in zip(rows, peers, strict=True)])
    )
    connect_us = float(
        np.median([row["launcher_open_cpu_us"] / n for row, n in zip(rows, peers, strict=True)])
    )
    opened_us = float(np.median([row["open_cpu_us"] for row in rows]))
    print(
        f"\nMeasured for the model: a hop {hop_us:.0f} µs here + {latency_us:.0f} µs of network; "
        f"a worker's CPU time {step_us:.0f} µs an agreement and {opened_us:.0f} µs to open; a "
        f"launcher's {message_us:.0f} µs a message and {connect_us:.0f} µs a connection."
    )
    here = EXTRAPOLATED[0] * (opened_us + connect_us) * 1e-6 / (os.cpu_count() or 1)
    print(
        f"{EXTRAPOLATED[0]:,} workers would open within {here:.0f} s on this machine's "
        f"{os.cpu_count()} cores without other load."
    )
    print("With a core for each worker and each launcher:\n")
    print("| workers | nodes | agreement in a step, ms | waited for, ms | open, s |")
    print("|---|---|---|---|---|")
    for workers in EXTRAPOLATED:
        nodes = workers // per_node
        decide = 2 * (2 * hop + (2 * per_node + nodes - 1) * message_us * 1e-6)
        root = (per_node + nodes - 1) * connect_us * 1e-6
        opened = opened_us * 1e-6 + root + 2 * (4 * hop + RETRY_S) + decide
        print(
            f"| {workers:,} | {nodes} | {step_us / 1e3:.3f} | {decide * 1e3:.1f} | {opened:.2f} |"
        )


if __name__ == "__main__":
    main()
