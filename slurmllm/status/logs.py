"""The logs of a run's workers, merged: each line with its stage, attempt and rank.

Lines of an attempt are merged by the time of their log records; a line without a time, such as a
library's output or a traceback, follows the previous line of its file. In files without any times
rank 0 (the stage's log, with the supervisor's records) comes first, then the other ranks. The
record of an attempt's ending follows all its lines.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from heapq import merge
from math import inf
from typing import NamedTuple

from slurmllm.log import message_of, parse_line
from slurmllm.rundir import RunDir, Stage
from slurmllm.supervise.log_files import GrowingLog

_RANK = re.compile(r"^rank_(\d+)\.log$")


class RankLine(NamedTuple):
    """A line of a log, without its newline."""

    stage: Stage
    attempt: int
    rank: int
    text: str


_Worker = tuple[Stage, int, int]  # stage, attempt, rank


@dataclass
class MergedLogs:
    """The merged logs of some ranks of a run."""

    run: RunDir
    stages: Sequence[Stage]  # the stages, in this order
    wanted: Callable[[int], bool]  # whether to include a rank
    # stage → first attempt to show; by default all attempts of a stage
    first: Mapping[Stage, int] = field(default_factory=dict)
    attempt: int | None = None  # the only attempt to show; None: all from the first on
    _stage_logs: dict[Stage, GrowingLog] = field(default_factory=dict, init=False)
    _logs: dict[_Worker, GrowingLog] = field(default_factory=dict, init=False)
    _current: dict[Stage, int] = field(default_factory=dict, init=False)
    _times: dict[_Worker, float] = field(default_factory=dict, init=False)
    # In this poll: logs that were read, and the ranks of attempts whose folders were listed
    _read: set[_Worker] = field(default_factory=set, init=False)
    _listed: dict[tuple[Stage, int], list[int]] = field(default_factory=dict, init=False)

    def begin_with_last(self, lines: int) -> None:
        """Skip all but the last `lines` lines of every log."""
        for stage in self.stages:
            log = self._stage_log(stage)
            if self.attempt is None:
                log.skip_to_last(lines)
                # The attempt at this position: the one before the next that begins after it.
                begins = re.compile(rf"{stage} attempt (\d+)\b.*?: \d+ node")
                texts = map(message_of, GrowingLog(log.path, log.position).lines())
                following = next(filter(None, map(begins.match, texts)), None)
                self._current[stage] = (
                    max(int(following[1]) - 1, 0)
                    if following is not None
                    else max((attempt.number for attempt in self.run.attempts(stage)), default=0)
                )
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
        """The lines added since the last call, of the `last` one also those without a newline."""
        self._read.clear()
        self._listed.clear()
        for stage in self.stages:
            log = self._stage_log(stage)
            yield from self._merge_attempts(stage, log.lines(), last=False)
            yield from self._merge_attempts(stage, log.flush() if last else iter(()), last)
            # Attempts that the stage's log does not name: it may be written later than theirs.
            for number in worker_log_attempts(self.run, stage):
                yield from merge_by_time(self._streams(stage, number, last))

    def _merge_attempts(self, stage: Stage, texts: Iterator[str], last: bool) -> Iterator[RankLine]:
        """Merge the stage's log, one attempt after the other, with those of the other ranks."""
        begins = re.compile(rf"{stage} attempt (\d+)\b.*?: (\d+ node|\S+ → )?")
        boundary: list[str] = []  # the line that ended the current part of the stage's log

        def lines_of_part() -> Iterator[RankLine]:
            for text in texts:
                found = begins.match(message_of(text))
                current = self._current.get(stage, 0)
                if found and (int(found[1]) != current or "→" in (found[2] or "")):
                    boundary.append(text)
                    return
                yield RankLine(stage, current, 0, text)

        while True:
            current = self._current.get(stage, 0)
            own = self._timed((stage, current, 0), lines_of_part())
            parts = [own, *self._streams(stage, current, last)]
            for line in merge_by_time(parts):
                if line.rank or (self._shown(stage, line.attempt) and self.wanted(0)):
                    yield line
            if not boundary:
                return
            text = boundary.pop()
            found = begins.match(message_of(text))
            assert found is not None
            self._current[stage] = current = int(found[1])
            if self._shown(stage, current) and self.wanted(0):
                yield RankLine(stage, current, 0, text)

    def _streams(
        self, stage: Stage, attempt: int, last: bool
    ) -> list[Iterator[tuple[float, RankLine]]]:
        """The lines of the ranks other than 0 of an attempt, with their times."""

        def lines(number: int, rank: int, log: GrowingLog) -> Iterator[RankLine]:
            # An attempt is merged up to three times in a poll; its files are opened once.
            known = (stage, number, rank) in self._read
            self._read.add((stage, number, rank))
            for text in () if known else log.lines():
                yield RankLine(stage, number, rank, text)
            for text in log.flush() if last else ():
                yield RankLine(stage, number, rank, text)

        return [
            self._timed((stage, number, rank), lines(number, rank, log))
            for (number, rank), log in self._workers(stage, attempt)
        ]

    def _timed(
        self, worker: _Worker, lines: Iterator[RankLine]
    ) -> Iterator[tuple[float, RankLine]]:
        """Lines with the time of the last record of their file, which never goes back.

        A clock that is set back must not move the lines that follow before those already shown.
        """
        for line in lines:
            record = parse_line(line.text)
            if record is not None:
                self._times[worker] = max(record.time, self._times.get(worker, -inf))
            yield self._times.get(worker, -inf), line

    def _workers(
        self, stage: Stage, attempt: int | None
    ) -> Iterator[tuple[tuple[int, int], GrowingLog]]:
        """The logs of the workers other than rank 0, of an attempt or of all."""
        for number in worker_log_attempts(self.run, stage) if attempt is None else [attempt]:
            if not self._shown(stage, number):
                continue
            if (stage, number) not in self._listed:
                self._listed[stage, number] = ranks_with_logs(self.run, stage, number)
            for rank in self._listed[stage, number]:
                if self.wanted(rank):
                    key = (stage, number, rank)
                    if key not in self._logs:
                        self._logs[key] = GrowingLog(self.run.worker_log(stage, number, rank))
                    yield (number, rank), self._logs[key]

    def _shown(self, stage: Stage, attempt: int) -> bool:
        if self.attempt is not None:
            return attempt == self.attempt
        return attempt >= self.first.get(stage, 0)

    def _stage_log(self, stage: Stage) -> GrowingLog:
        return self._stage_logs.setdefault(stage, GrowingLog(self.run.stage_log(stage)))


def merge_by_time(streams: Sequence[Iterator[tuple[float, RankLine]]]) -> Iterator[RankLine]:
    """Merge lines by time; lines of one time stay in the order of the streams."""
    for _, line in merge(*streams, key=lambda timed: timed[0]):
        yield line


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
