"""The logs of a run's workers as one, each line with its stage, attempt and rank.

What workers print bears no time, so of what lies there the order is: attempt by attempt; of an
attempt rank 0 (the stage's log, with the supervisor's words) up to the line that names its ending,
then the other ranks, each as a block, then the ending. What is added later comes in the order in
which it is found.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from slurmllm.log import message_of
from slurmllm.rundir import RunDir, Stage
from slurmllm.supervise.log_files import GrowingLog

_RANK = re.compile(r"^rank_(\d+)\.log$")


class RankLine(NamedTuple):
    """A line of a log, without its end."""

    stage: Stage
    attempt: int
    rank: int
    text: str


@dataclass
class MergedLogs:
    """The logs of some ranks of a run.

    Args:
        run: The run.
        stages: Of these stages, in this order.
        wanted: Whether a rank is among them.
        first: Stage → the attempt to begin with; a stage that is absent begins with its first.
        attempt: The one attempt to show; None: all from there on.
    """

    run: RunDir
    stages: Sequence[Stage]
    wanted: Callable[[int], bool]
    first: Mapping[Stage, int] = field(default_factory=dict)
    attempt: int | None = None
    _stage_logs: dict[Stage, GrowingLog] = field(default_factory=dict, init=False)
    _logs: dict[tuple[Stage, int, int], GrowingLog] = field(default_factory=dict, init=False)
    _now: dict[Stage, int] = field(default_factory=dict, init=False)

    def begin_with_last(self, lines: int) -> None:
        """Leave out of every log all but its last so many lines."""
        for stage in self.stages:
            log = self._stage_log(stage)
            if self.attempt is None:
                log.skip_to_last(lines)
                self._now[stage] = self._attempt_at(stage, log)
            for _, worker in self._workers(stage, None):
                worker.skip_to_last(lines)

    def any_file(self) -> bool:
        """Whether there is a log of any of the ranks."""
        return any(
            (self.wanted(0) and self._stage_log(stage).path.is_file())
            or any(True for _ in self._workers(stage, None))
            for stage in self.stages
        )

    def poll(self, last: bool = False) -> Iterator[RankLine]:
        """What has come since the last call.

        Args:
            last: Whether nothing more will come: lines without an end are handed out too.
        """
        for stage in self.stages:
            begins = re.compile(rf"{stage} attempt (\d+)\b.*?: (\d+ node|\S+ → )?")
            log = self._stage_log(stage)
            yield from self._stage(stage, log.lines(), begins)
            if last:
                yield from self._stage(stage, log.flush(), begins)
            yield from self._others(stage, None, last)

    def _stage(
        self, stage: Stage, texts: Iterator[str], begins: re.Pattern[str]
    ) -> Iterator[RankLine]:
        for text in texts:
            if found := begins.match(message_of(text)):
                now = int(found[1])
                if now != self._now.get(stage, 0) or "→" in (found[2] or ""):
                    yield from self._others(stage, self._now.get(stage, 0))
                self._now[stage] = now
            now = self._now.get(stage, 0)
            if self._shown(stage, now) and self.wanted(0):
                yield RankLine(stage, now, 0, text)

    def _others(self, stage: Stage, attempt: int | None, last: bool = False) -> Iterator[RankLine]:
        for (number, rank), log in self._workers(stage, attempt):
            for text in log.lines():
                yield RankLine(stage, number, rank, text)
            for text in log.flush() if last else ():
                yield RankLine(stage, number, rank, text)

    def _workers(
        self, stage: Stage, attempt: int | None
    ) -> Iterator[tuple[tuple[int, int], GrowingLog]]:
        """The logs of the workers other than rank 0, of an attempt or of all."""
        for number in worker_log_attempts(self.run, stage):
            if not self._shown(stage, number) or attempt not in (None, number):
                continue
            for rank in ranks_with_logs(self.run, stage, number):
                if self.wanted(rank):
                    path = self.run.worker_log(stage, number, rank)
                    key = (stage, number, rank)
                    yield (number, rank), self._logs.setdefault(key, GrowingLog(path))

    def _shown(self, stage: Stage, attempt: int) -> bool:
        if self.attempt is not None:
            return attempt == self.attempt
        return attempt >= self.first.get(stage, 0)

    def _stage_log(self, stage: Stage) -> GrowingLog:
        return self._stage_logs.setdefault(stage, GrowingLog(self.run.stage_log(stage)))

    def _attempt_at(self, stage: Stage, log: GrowingLog) -> int:
        """Which attempt a stage's log tells of from where it will be read on."""
        following = GrowingLog(log.path, log.position)
        begins = re.compile(rf"{stage} attempt (\d+)\b.*?: \d+ node")
        for text in following.lines():
            if found := begins.match(message_of(text)):
                return max(int(found[1]) - 1, 0)
        return max((attempt.number for attempt in self.run.attempts(stage)), default=0)


def worker_log_attempts(run: RunDir, stage: Stage) -> list[int]:
    """The attempts of a stage that have logs of workers other than rank 0."""
    found = []
    with suppress(OSError):
        for entry in run.logs.iterdir():
            name, _, number = entry.name.rpartition("_")
            if name == stage and number.isdigit() and entry.is_dir():
                found.append(int(number))
    return sorted(found)


def ranks_with_logs(run: RunDir, stage: Stage, attempt: int) -> list[int]:
    """The ranks, other than 0, of an attempt that have a log."""
    folder = run.worker_log(stage, attempt, 1).parent
    with suppress(OSError):
        matches = (_RANK.match(entry.name) for entry in folder.iterdir())
        return sorted(int(match[1]) for match in matches if match)
    return []
