"""Finds ranks that are slower than others with the same work, by the times in their heartbeats.

All ranks take as long for a step as the slowest, as the others wait for it. Workers therefore
measure their time without waits, and the supervisor compares the medians of the ranks of a pipeline
stage over the last windows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import median, median_low

from slurmllm.core.config.operation import COMPARED_WINDOWS
from slurmllm.core.errors import StorageError
from slurmllm.core.run.records import AttemptRecord, SlowRank, SlowRanksRecord, WorkerPhases
from slurmllm.core.run.rundir import RunDir
from slurmllm.plan.mesh import load_mesh

# Equal GPUs differ by 8 % in the time of a product (Sinha et al. 2022, "Not All GPUs Are Created
# Equal", SC22). `tools/benchmarks/slow_ranks.py` shows the false alarms with both limits.
MIN_RATIO = 1.15
# Of the logarithm, as robust standard deviations: applies if ranks differ more, as on mixed nodes.
MIN_DEVIATIONS = 4.5
EXCEPTIONS = 2  # windows that may differ from the others
RankSeconds = dict[int, float]  # by rank


@dataclass
class SlowRanks:
    """Compares the ranks of one attempt over windows of `window_s` seconds."""

    run: RunDir
    record: AttemptRecord
    window_s: float
    slow: dict[int, SlowRank] = field(default_factory=dict)
    _windows: dict[int, RankSeconds] = field(default_factory=dict)  # by number

    def update(self, phases: WorkerPhases) -> list[SlowRank]:
        """Read new heartbeats; returns the ranks that have become slow."""
        windows, before = self._windows, self.slow
        compared = max(windows, default=0)
        for rank, phase in phases.items():
            if phase.own_s > 0:
                windows.setdefault(phase.window, {})[rank] = phase.own_s
        # Once one rank reports a window, all have reported the windows before it.
        *numbers, newest = sorted(windows)[-1 - COMPARED_WINDOWS :] or [compared]
        if newest == compared or len(numbers) < COMPARED_WINDOWS:
            return []
        self._windows = {number: windows[number] for number in (*numbers, newest)}
        began = numbers[EXCEPTIONS] * self.window_s
        self.slow = {}
        with suppress(StorageError):  # a damaged plan, or a full disk, shows elsewhere
            mesh = load_mesh(self.run.plan)
            of_stage = mesh.tensor * mesh.data
            for first in range(0, mesh.world_size, of_stage):
                ranks = range(first, first + of_stage)
                times = [
                    {rank: own_s for rank, own_s in windows[number].items() if rank in ranks}
                    for number in numbers
                ]
                for rank, ratio in find_slow(times, before).items():
                    self.slow[rank] = SlowRank(
                        rank=rank,
                        node=self.record.nodes[rank // mesh.devices_per_node],
                        ratio=round(ratio, 2),
                        peers=of_stage,
                        since=before[rank].since if rank in before else began,
                    )
            SlowRanksRecord(ranks=tuple(self.slow.values())).save(
                self.record.files(self.run).slow_ranks
            )
        return [slow for rank, slow in self.slow.items() if rank not in before]


def read_slow_ranks(run: RunDir, record: AttemptRecord) -> tuple[SlowRank, ...] | None:
    """Return the slow ranks of an attempt; None if they cannot be compared."""
    slow = SlowRanksRecord.find_readable(record.files(run).slow_ranks)
    return None if slow is None else slow.ranks


def find_slow(windows: Iterable[RankSeconds], slow_before: Iterable[int] = ()) -> RankSeconds:
    """Return slow rank → median of its ratios to the median of all ranks.

    `windows`: rank → seconds in each of the last windows, of ranks with equal work.
    """
    ratios: dict[int, list[float]] = {}
    for times in windows:
        reference = median_low(times.values() or [1.0])  # of two ranks the faster one
        for rank, own_s in times.items():
            ratios.setdefault(rank, []).append(own_s / reference)
    logs = [math.log(median(values)) for values in ratios.values()] or [0.0]
    center = median_low(logs)
    # The median absolute deviation as a standard deviation; of two ranks it is 0.
    deviation = 1.4826 * median_low([abs(value - center) for value in logs])
    limit = max(MIN_RATIO, math.exp(MIN_DEVIATIONS * deviation))
    slow = {}
    for rank, values in ratios.items():
        # A rank becomes slow, or normal again, if most windows say so.
        index = -1 - EXCEPTIONS if rank in slow_before else EXCEPTIONS
        if len(values) >= COMPARED_WINDOWS - EXCEPTIONS and sorted(values)[index] > limit:
            slow[rank] = median(values)
    return slow
