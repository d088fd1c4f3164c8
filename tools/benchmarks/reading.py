"""How long it takes to read curves: our metrics, and event files against TensorBoard's own reader.

python tools/benchmarks/reading.py [--steps 500000] [--times 5]

Writes two runs, each with a restart that makes 2 % of the steps again, and an event file of five
tags, into a temporary folder; reads each in a process of its own, and runs `slurmllm compare` on
the two runs. Peak memory is that of the process.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from slurmllm.core.run.records import MetricsRow

TAGS = ("train/loss", "train/grad_norm", "train/lr", "throughput/seq_per_s", "time/step_time_s")
# In a child: read, and print seconds (imports included) and peak memory, MiB.
READ = """
import json, resource, sys, time
began = time.perf_counter()
if sys.argv[1] == "event accumulator":
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    EventAccumulator(sys.argv[2], size_guidance={"scalars": 0}).Reload()
else:
    from pathlib import Path
    from slurmllm.core.metrics.source import read_curve
    for source in sys.argv[2:]:
        read_curve(Path(source))
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps([time.perf_counter() - began, peak]))
"""


def write_run(run: Path, steps: int, seed: int) -> None:
    """Write a run of two attempts, the second from 2 % before the middle on."""
    rng = random.Random(seed)
    (run / "metrics").mkdir(parents=True)
    (run / "config.yaml").write_text("name: bench\ntrain: {global_batch: 16}\n")
    middle = steps // 2
    for attempt, first, last in ((0, 1, middle), (1, max(1, middle - steps // 50), steps)):
        with (run / "metrics" / f"attempt_{attempt:03d}.jsonl").open("w") as stream:
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


def write_events(folder: Path, steps: int) -> None:
    """Write an event file as torch's SummaryWriter does: an event for each value."""
    make_writer: Any = importlib.import_module("torch.utils.tensorboard").SummaryWriter
    with make_writer(str(folder)) as writer:
        for step in range(1, steps + 1):
            for tag in TAGS:
                writer.add_scalar(tag, random.random(), step)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=500_000)
    parser.add_argument("--times", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs, events = Path(folder) / "runs", Path(folder) / "tensorboard"
        for seed, name in enumerate(("a", "b")):
            write_run(runs / name, options.steps, seed)
        write_events(events, options.steps)
        print(f"{'':<34} {'median s':>9} {'peak MiB':>9}")
        took: dict[str, float] = {}
        for name, paths, times in (
            ("one run", [runs / "a"], options.times),
            ("both runs", [runs / "a", runs / "b"], options.times),
            ("event file", [events], options.times),
            ("event accumulator", [events], 1),
        ):
            command = [sys.executable, "-c", READ, name, *map(str, paths)]
            readings = [json.loads(subprocess.check_output(command)) for _ in range(times)]
            took[name] = statistics.median(seconds for seconds, _ in readings)
            print(f"{name:<34} {took[name]:9.2f} {max(peak for _, peak in readings):9.0f}")
        for more in ([], ["--no-plot"]):
            compare = ["compare", "a", "b", "--runs-dir", str(runs), "--json", *more]
            seconds = []
            for _ in range(options.times):
                began = time.perf_counter()
                subprocess.run([sys.executable, "-m", "slurmllm", *compare], capture_output=True)
                seconds.append(time.perf_counter() - began)
            print(f"{' '.join(['compare', *more]):<34} {statistics.median(seconds):9.2f}")
        ratio = took["event accumulator"] / took["event file"]
        print(f"event file: {ratio:.0f} times faster than EventAccumulator")


if __name__ == "__main__":
    main()
