"""Ranks that are slower than others with the same work, by what heartbeats have of their steps.

All ranks need as long for a step as the slowest, for which the others wait. Workers therefore
measure what they do without waiting, and the supervisor compares it among the ranks of a pipeline
stage, by medians and over most of the last windows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import groupby
from statistics import median, median_low

from slurmllm.core.config.operation import COMPARED_WINDOWS
from slurmllm.core.errors import StorageError
from slurmllm.core.run.records import AttemptRecord, SlowRank, SlowRanksRecord, WorkerPhase
from slurmllm.core.run.rundir import RunDir
from slurmllm.plan.mesh import load_mesh

# Equal GPUs differ by 8 % in the time of a product (Sinha et al. 2022, "Not All GPUs Are Created
# Equal", SC22). `tools/benchmarks/slow_ranks.py` shows the false alarms with both limits.
MIN_RATIO = 1.15
# If ranks differ more, such as on a mix of nodes: robust standard deviations of the logarithm.
MIN_DEVIATIONS = 4.5
EXCEPTIONS = 2  # windows that may differ from the others


class SlowRanks:
    """The comparison of one attempt's ranks, of which windows of `window_s` are known."""

    def __init__(self, run: RunDir, record: AttemptRecord, window_s: float) -> None:
        self._run, self._record, self._window_s = run, record, window_s
        self._compared = 0  # the newest window then
        self._windows: dict[int, dict[int, float]] = {}  # number → rank → seconds
        self.slow: dict[int, SlowRank] = {}

    def update(self, phases: Mapping[int, WorkerPhase]) -> list[SlowRank]:
        """Take new heartbeats; returns the ranks that are slow from now on."""
        windows, before = self._windows, self.slow
        for rank, phase in phases.items():
            windows.setdefault(phase.window, {})[rank] = phase.own_s
        newest = max(windows, default=0)
        if newest == self._compared:
            return []
        self._compared = newest
        # When the first rank reports a window, all have reported those before; 0: none yet.
        numbers = sorted(number for number in windows if 0 < number < newest)[-COMPARED_WINDOWS:]
        self._windows = {number: windows[number] for number in (*numbers, newest)}
        if len(numbers) < COMPARED_WINDOWS:
            return []
        self.slow = {}
        with suppress(StorageError):  # a damaged plan, or a full disk, shows elsewhere
            mesh = load_mesh(self._run.plan)
            for _, stage in groupby(range(mesh.world_size), mesh.pipeline_rank):
                ranks = {*stage}
                times = [
                    {rank: s for rank, s in windows[number].items() if s > 0 and rank in ranks}
                    for number in numbers
                ]
                for rank, ratio in find_slow(times, before).items():
                    self.slow[rank] = SlowRank(
                        rank=rank,
                        node=self._record.nodes[rank // mesh.devices_per_node],
                        ratio=round(ratio, 2),
                        peers=len(ranks),
                        since=before[rank].since
                        if rank in before
                        else numbers[EXCEPTIONS] * self._window_s,
                    )
            path = self._record.files(self._run).slow_ranks
            SlowRanksRecord(ranks=tuple(self.slow.values())).save(path)
        return [slow for rank, slow in self.slow.items() if rank not in before]


def find_slow(
    windows: Iterable[Mapping[int, float]], slow_before: Iterable[int] = ()
) -> dict[int, float]:
    """Return the ranks that are slow, with the median ratio to the median of all.

    `windows` are the last ones: rank → seconds, of ranks with equal work.
    """
    ratios: dict[int, list[float]] = {}
    for times in windows:
        reference = median_low(times.values()) if times else 1.0  # of two ranks the faster one
        for rank, own_s in times.items():
            ratios.setdefault(rank, []).append(own_s / reference)
    medians = {rank: median(values) for rank, values in ratios.items()}
    logs = list(map(math.log, medians.values())) or [0.0]
    center = median_low(logs)
    # The median absolute deviation as a standard deviation; of two ranks it is 0.
    deviation = 1.4826 * median_low([abs(value - center) for value in logs])
    limit = max(MIN_RATIO, math.exp(MIN_DEVIATIONS * deviation))
    slow = {}
    for rank, values in ratios.items():
        # Most windows must be above the limit to begin with, and below it to end.
        index = -1 - EXCEPTIONS if rank in slow_before else EXCEPTIONS
        if len(values) >= COMPARED_WINDOWS - EXCEPTIONS and sorted(values)[index] > limit:
            slow[rank] = medians[rank]
    return slow
