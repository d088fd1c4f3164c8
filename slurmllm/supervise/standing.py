"""Where the workers of a running attempt stand, for `status`: as the watchdog sees them."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass

from slurmllm.config.recipe import WatchdogConfig
from slurmllm.errors import StorageError
from slurmllm.records import AttemptRecord, Heartbeat, Phase, RankBeat
from slurmllm.rundir import RunDir
from slurmllm.supervise.watchdog import behind, limit_s, recent_step_times, slow_step_s


@dataclass(frozen=True)
class Standing:
    """What the slowest workers are doing.

    Attributes:
        phase: Of the workers furthest behind.
        step: Last one that they finished.
        unchanged_s: Seconds since any worker began anything new, by the nodes' clocks.
        limit_s: From which on it counts as a hang; None: nobody watches.
        behind: Ranks behind the others; none where all stand alike.
    """

    phase: Phase
    step: int
    unchanged_s: float
    limit_s: float | None
    behind: tuple[int, ...]


def standing(run: RunDir, record: AttemptRecord, config: WatchdogConfig) -> Standing | None:
    """Where an open attempt stands; None where its launchers have said nothing."""
    beats: dict[int, RankBeat] = {}
    for name in record.nodes:
        with suppress(StorageError):
            beats |= Heartbeat.load(run.attempt(record.stage, record.attempt).heartbeat(name)).ranks
    if not beats:
        return None
    last = behind(beats)
    beat = beats[last[0]]
    slow_s = slow_step_s(recent_step_times(run))
    return Standing(
        phase=beat.phase,
        step=beat.step,
        unchanged_s=max(time.time() - max(b.since for b in beats.values()), 0.0),
        limit_s=limit_s(beat.phase, config, slow_s) if config.enabled else None,
        behind=() if len(last) == len(beats) else last,
    )
