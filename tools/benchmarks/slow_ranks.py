"""False alarms of the slow-rank detection, and its time to find a slow rank, on simulated steps.

python tools/benchmarks/slow_ranks.py --ranks 64,256,1024 --days 4

It simulates the mean step times that ranks report each minute, of 30 steps. A step's time is
log-normal (4 %), one in 500 is interrupted (Pareto, exponent 1.3: 0.3 to 60 steps). Ranks differ
permanently by up to 2 %, and nodes of 8 ranks drift within 5 % over hours. Once a day each node is
1.1 to 2 times slower for 1 to 6 minutes, and in 5 % of the minutes all ranks are. None of this is a
slow rank.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from statistics import median

import numpy as np
import numpy.typing as npt

from slurmllm.core.config.operation import COMPARED_WINDOWS
from slurmllm.launch.supervise.slow_ranks import find_slow

MINUTES = 24 * 60
STEPS = 30  # a minute
PER_NODE = 8
Times = npt.NDArray[np.float64]  # [minute, rank]


def simulate_day(ranks: int, random: np.random.Generator) -> Times:
    nodes = -(-ranks // PER_NODE)
    times = np.empty((MINUTES, ranks))
    for minute in range(MINUTES):
        steps = random.lognormal(0.0, 0.04, (STEPS, ranks))
        hit = random.random(steps.shape) < 1 / 500
        steps[hit] += np.minimum(0.3 * (1 + random.pareto(1.3, int(hit.sum()))), 60.0)
        times[minute] = steps.mean(axis=0)
    times *= random.uniform(0.98, 1.02, ranks)
    # A sum of two waves of random phase, of 2 to 12 hours, is within 5 %.
    clock = np.arange(MINUTES)[:, None]
    drift = np.zeros((MINUTES, nodes))
    for _ in range(2):
        period, phase = random.uniform(120, 720, nodes), random.uniform(0, 2 * np.pi, nodes)
        drift += 0.025 * np.sin(2 * np.pi * clock / period + phase)
    for node in range(nodes):
        begin = random.integers(MINUTES)
        drift[begin : begin + random.integers(1, 7), node] += random.uniform(0.1, 1.0)
    times *= 1 + np.repeat(drift, PER_NODE, axis=1)[:, :ranks]
    shared = np.where(random.random(MINUTES) < 0.05, random.uniform(1, 2, MINUTES), 1.0)
    slowed: Times = times * shared[:, None]
    return slowed


def alarms(times: Times, begin: int = 0, end: int = MINUTES) -> Iterator[tuple[int, int]]:
    """Yield (minute, rank) of each new alarm."""
    windows = [dict(enumerate(row)) for row in times.tolist()]
    slow: dict[int, float] = {}
    for minute in range(max(begin, COMPARED_WINDOWS), end):
        before, slow = slow, find_slow(windows[minute - COMPARED_WINDOWS : minute], slow)
        yield from ((minute, rank) for rank in slow if rank not in before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", default="4,64,256,1024")
    parser.add_argument("--days", type=int, default=4)
    options = parser.parse_args()
    for ranks in map(int, options.ranks.split(",")):
        random, false = np.random.default_rng([1, ranks]), 0
        minutes: dict[float, list[int]] = {1.2: [], 1.5: []}
        for _ in range(options.days):
            times = simulate_day(ranks, random)
            false += sum(1 for _ in alarms(times))
            for factor, found in minutes.items():
                for _ in range(20):
                    begin = int(random.integers(60, MINUTES - 60))
                    slow = int(random.integers(ranks))
                    slowed = times.copy()
                    slowed[begin:, slow] *= factor
                    around = alarms(slowed, begin - 30, begin + 60)
                    found += [m - begin for m, rank in around if rank == slow][:1]
        print(f"{ranks:5d} ranks: {false} false alarms in {options.days} days", end="")
        for factor, found in minutes.items():
            number = f"{len(found)} of {20 * options.days} within an hour"
            print(f"; {factor} ×: {number}, median {median(found):.0f} min", end="")
        print(flush=True)


if __name__ == "__main__":
    main()
