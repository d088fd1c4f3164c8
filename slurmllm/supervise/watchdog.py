"""Whether a run still gets on: its workers' phases as the launchers report them, against limits.

All workers advance together, so a run hangs when nothing of it has changed for longer than the
phase of its slowest workers may take. How long a step may take, the run itself has shown.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from slurmllm.config.recipe import WatchdogConfig
from slurmllm.errors import StorageError
from slurmllm.records import AttemptRecord, HangRecord, Heartbeat, Phase, RankBeat
from slurmllm.rundir import RunDir

LOOK_S = 2.0  # between two looks at the heartbeats
SIGN_OF_LIFE_S = 15.0  # a launcher writes at least as often, whether or not anything changed
SILENT_S = 4 * SIGN_OF_LIFE_S  # so long without one, a launcher gives no sign of life
STEPS_LEARNED = 200
SLOW = 0.95  # the quantile of the steps that counts as a slow one
_TAIL_BYTES = 128 * 1024
_ORDER: Mapping[Phase, int] = {phase: place for place, phase in enumerate(get_args(Phase))}


@dataclass(frozen=True)
class Standing:
    """Where the workers of an attempt stand.

    Attributes:
        beats: Rank → what it is doing; ranks that have said nothing yet are starting.
        nodes: Rank → node.
        unchanged_s: Seconds since anything of all this changed last.
        silent_nodes: Nodes whose launchers give no sign of life.
    """

    beats: Mapping[int, RankBeat]
    nodes: Mapping[int, str]
    unchanged_s: float
    silent_nodes: tuple[str, ...] = ()


def limit_s(phase: Phase, config: WatchdogConfig, slow_step_s: float | None) -> float:
    """How long a phase may take.

    Args:
        phase: What the workers are doing.
        config: The recipe's.
        slow_step_s: What a slow step of this run takes; None: it has made none that tells.
    """
    if phase in ("starting", "resuming"):
        return config.start_up_s
    if phase in ("saving", "stopping"):
        return config.save_s
    if phase == "first_step" or slow_step_s is None:
        return config.first_step_s
    return max(config.min_step_s, config.step_factor * slow_step_s)


def behind(beats: Mapping[int, RankBeat]) -> tuple[int, ...]:
    """The ranks furthest behind, which may be all of them."""
    if not beats:
        return ()
    places = {rank: _place(beat) for rank, beat in beats.items()}
    last = min(places.values())
    return tuple(sorted(rank for rank, place in places.items() if place == last))


def judge(
    seen: Standing, config: WatchdogConfig, slow_step_s: float | None, now: float
) -> HangRecord | None:
    """Whether a run hangs, and which nodes are suspected by what the workers say.

    Args:
        seen: Where they stand.
        config: The recipe's.
        slow_step_s: See limit_s.
        now: Unix time, s.
    """
    last = behind(seen.beats)
    if not last:
        return None
    beat = seen.beats[last[0]]
    limit = limit_s(beat.phase, config, slow_step_s)
    if seen.unchanged_s <= limit:
        return None
    alike = len(last) == len(seen.beats)
    lagging = () if alike else last
    # Frozen launchers say more than late workers; all of them silent is the file system's doing.
    some_silent = len(seen.silent_nodes) < len(set(seen.nodes.values()))
    suspects = seen.silent_nodes if some_silent else ()
    if not suspects:
        suspects = tuple(dict.fromkeys(seen.nodes[rank] for rank in lagging))
    return HangRecord(
        found_at=now,
        phase=beat.phase,
        step=beat.step,
        waited_s=seen.unchanged_s,
        limit_s=limit,
        behind=lagging,
        silent_nodes=seen.silent_nodes,
        suspects=suspects,
    )


def slow_step_s(step_times: Sequence[float]) -> float | None:
    """What a slow one of the last steps took; None where there are none."""
    if not step_times:
        return None
    ordered = sorted(step_times[-STEPS_LEARNED:])
    return ordered[min(int(SLOW * len(ordered)), len(ordered) - 1)]


def recent_step_times(run: RunDir) -> list[float]:
    """Seconds of the last steps of a run, oldest first, over its attempts.

    The first one of each attempt is left out: it compiles.
    """
    found: list[float] = []
    for path in reversed(run.metrics_files()):
        found = _step_times(path) + found
        if len(found) >= STEPS_LEARNED:
            break
    return found[-STEPS_LEARNED:]


def _step_times(path: Path) -> list[float]:
    with suppress(OSError), path.open("rb") as stream:
        start = max(0, stream.seek(0, 2) - _TAIL_BYTES)
        stream.seek(start)
        times = []
        for line in stream.read().splitlines()[1:]:
            with suppress(ValueError, KeyError, TypeError):  # a line that was cut
                times.append(float(json.loads(line)["step_time_s"]))
        return times
    return []


def _place(beat: RankBeat) -> tuple[int, int, int]:
    """How far a worker has come: start-up before steps; of one step a save before the next."""
    place = _ORDER[beat.phase]
    if beat.phase in ("starting", "resuming"):
        return place, 0, 0
    within = {"saving": 0, "first_step": 1, "stepping": 1, "stopping": 2}[beat.phase]
    return len(_ORDER), beat.step, within


@dataclass
class Watchdog:
    """The supervisor's eye on one train attempt: reads heartbeats now and then.

    Args:
        run: The run.
        record: The attempt.
        config: The recipe's.
    """

    run: RunDir
    record: AttemptRecord
    config: WatchdogConfig
    _heartbeats: dict[str, Heartbeat] = field(default_factory=dict, init=False)
    _mtimes: dict[str, float] = field(default_factory=dict, init=False)
    _heard: dict[str, float] = field(default_factory=dict, init=False)
    _rows_bytes: int = field(default=-1, init=False)

    def __post_init__(self) -> None:
        self._changed = self._looked = time.monotonic()

    def look(self) -> HangRecord | None:
        """Read what is new, and judge; None where the run gets on."""
        now = time.monotonic()
        if now - self._looked > SILENT_S / 2:  # this process itself was frozen: all are heard anew
            self._changed, self._heard = now, dict.fromkeys(self._heard, now)
        self._looked = now
        self._read(now)
        unchanged_s = now - self._changed
        beats, nodes = self._beats()
        phase = min(beats.values(), key=_place).phase
        if unchanged_s <= limit_s(phase, self.config, 0.0):
            return None  # not even the shortest limit is reached: no need to learn the steps
        silent = tuple(
            name for name in self.record.nodes
            if now - self._heard.get(name, self._changed) > SILENT_S
        )  # fmt: skip
        seen = Standing(beats, nodes, unchanged_s, silent)
        return judge(seen, self.config, slow_step_s(recent_step_times(self.run)), time.time())

    def _read(self, now: float) -> None:
        attempt = self.run.attempt("train", self.record.attempt)
        for name in self.record.nodes:
            path = attempt.heartbeat(name)
            try:
                mtime = path.stat().st_mtime
                if self._mtimes.get(name) == mtime:
                    continue
                beat = Heartbeat.load(path)
            except (OSError, StorageError):
                continue
            self._mtimes[name], self._heard[name] = mtime, now
            before = self._heartbeats.get(name)
            if before is None or before.ranks != beat.ranks:
                self._changed = now
            self._heartbeats[name] = beat
        with suppress(OSError):  # rank 0 writes a row a step
            size = self.run.metrics(self.record.attempt).stat().st_size
            if size != self._rows_bytes:
                self._rows_bytes, self._changed = size, now

    def _beats(self) -> tuple[dict[int, RankBeat], dict[int, str]]:
        per_node = self.record.world_size // len(self.record.nodes)
        nodes = {
            rank: name
            for index, name in enumerate(self.record.nodes)
            for rank in range(index * per_node, (index + 1) * per_node)
        }
        starting = RankBeat(phase="starting", step=0, since=self.record.started_at)
        beats = dict.fromkeys(nodes, starting)
        for heartbeat in self._heartbeats.values():
            beats |= {rank: beat for rank, beat in heartbeat.ranks.items() if rank in nodes}
        return beats, nodes
