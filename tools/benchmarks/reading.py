"""How long it takes to read curves: our metrics, and event files against TensorBoard's own reader.

python tools/benchmarks/reading.py [--steps 500000] [--tensorboard-steps 500000] [--folder DIR]

Writes two runs, each with a restart that makes 2 % of the steps again, and an event file of five
tags, into a temporary folder (or DIR, where they are kept and reused); reads each in a process
of its own, and runs `slurmllm compare` on the two runs. Peak memory is that of
the process.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from slurmllm.run.records import MetricsRow

TAGS = ("train/loss", "train/grad_norm", "train/lr", "throughput/seq_per_s", "time/step_time_s")


def write_run(run: Path, steps: int, seed: int) -> None:
    """A run of two attempts, the second from 2 % before the middle on."""
    rng = random.Random(seed)
    (run / "metrics").mkdir(parents=True)
    (run / "config.yaml").write_text("name: bench\ntrain: {global_batch: 16}\n")
    middle = steps // 2
    for attempt, first, last in ((0, 1, middle), (1, max(1, middle - steps // 50), steps)):
        path = run / "metrics" / f"attempt_{attempt:03d}.jsonl"
        with path.open("w") as stream:
            for step in range(first, last + 1):
                step_time_s = 0.5 + 0.01 * rng.random()
                row = MetricsRow.model_construct(
                    step=step,
                    attempt=attempt,
                    loss=2 + 8 / (1 + step / 1000) + rng.gauss(0, 1e-4),
                    grad_norm=1 + 1e-4 * rng.random(),
                    param_norm=100 + 0.001 * step,
                    lr=1e-3 * (1 - step / (2 * steps)),
                    tokens=32768 * step,
                    seq_per_s=16 / step_time_s,
                    tokens_per_s=32768 / step_time_s,
                    step_time_s=step_time_s,
                    data_wait_s=1e-3 * rng.random(),
                    forward_backward_s=0.8 * step_time_s,
                    optimizer_s=0.1 * step_time_s,
                    time=1.7e9 + 0.5 * step + rng.random(),
                )
                stream.write(row.model_dump_json() + "\n")
        os.utime(path, (1.7e9, 1.7e9))  # columns are kept of files that are no longer written to


def write_events(folder: Path, steps: int) -> None:
    """An event file as torch's SummaryWriter writes it: an event for each value."""
    from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[import-untyped]
    from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
    from tensorboard.summary.writer.record_writer import (  # type: ignore[import-untyped]
        RecordWriter,
    )

    folder.mkdir(parents=True)
    with (folder / "events.out.tfevents.1700000000.bench.1.0").open("wb") as stream:
        writer = RecordWriter(stream)
        writer.write(Event(wall_time=1.7e9, file_version="brain.Event:2").SerializeToString())
        for step in range(1, steps + 1):
            for tag in TAGS:
                values = [Summary.Value(tag=tag, simple_value=random.random())]
                event = Event(wall_time=1.7e9 + step, step=step, summary=Summary(value=values))
                writer.write(event.SerializeToString())


def read(what: str, path: Path) -> None:
    """In a child: read, and print seconds (imports included) and peak memory."""
    began = time.perf_counter()
    if what == "event accumulator":
        from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped]
            EventAccumulator,
        )

        EventAccumulator(str(path), size_guidance={"scalars": 0}).Reload()
    else:
        from slurmllm.metrics.source import read_curve

        for source in sorted(path.iterdir()) if what == "both runs" else (path,):
            read_curve(source)
    seconds = time.perf_counter() - began
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps([seconds, peak_mib]))


def measured(what: str, path: Path, times: int) -> tuple[float, float]:
    """Median seconds and largest peak memory, MiB, of several readings."""
    found = []
    for _ in range(times):
        command = [sys.executable, __file__, "--read", what, str(path)]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        found.append(json.loads(output))
    return statistics.median(s for s, _ in found), max(peak for _, peak in found)


def compare_seconds(runs: Path, options: list[str]) -> float:
    """Wall time of `slurmllm compare` on the two runs, s."""
    command = [sys.executable, "-m", "slurmllm", "compare", "a", "b", "--runs-dir", str(runs)]
    began = time.perf_counter()
    done = subprocess.run([*command, "--json", *options], capture_output=True, text=True)
    if done.returncode not in (0, 1):
        raise SystemExit(f"{' '.join(command)}: exit {done.returncode}\n{done.stderr}")
    return time.perf_counter() - began


def benchmark(folder: Path, steps: int, tensorboard_steps: int, times: int) -> None:
    """Make what is missing, and measure."""
    runs, events = folder / "runs", folder / "tensorboard"
    for seed, name in enumerate(("a", "b")):
        if not (runs / name).is_dir():
            write_run(runs / name, steps, seed)
    if not events.is_dir():
        write_events(events, tensorboard_steps)
    print(f"{'':<34} {'median s':>9} {'peak MiB':>9}")
    took: dict[str, float] = {}
    for what, path, number in (
        ("one run", runs / "a", times),
        ("both runs", runs, times),
        ("event file", events, times),
        ("event accumulator", events, 1),
    ):
        took[what], peak = measured(what, path, number)
        print(f"{what:<34} {took[what]:9.2f} {peak:9.0f}")
    for options in ([], ["--no-plot"]):
        name = " ".join(["slurmllm compare a b", *options])
        seconds = [compare_seconds(runs, options) for _ in range(times)]
        print(f"{name:<34} {statistics.median(seconds):9.2f}")
    ratio = took["event accumulator"] / took["event file"]
    print(f"event file: {ratio:.0f} times faster than EventAccumulator")


def main() -> None:
    """Read the options and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=500_000)
    parser.add_argument("--tensorboard-steps", type=int, default=500_000)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--read", nargs=2, metavar=("WHAT", "PATH"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.read:
        read(options.read[0], Path(options.read[1]))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        benchmark(folder, options.steps, options.tensorboard_steps, options.times)


if __name__ == "__main__":
    main()
