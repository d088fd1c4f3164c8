"""The logs of a run's workers, merged, and requests for those that are on the disks of the nodes.

Lines of an attempt are merged by the time of their log records; a line without a time, such as a
library's output or a traceback, follows the previous line of its file. In files without any times
rank 0 (the stage's log, with the supervisor's records) comes first, then the other ranks. The
record of an attempt's ending follows all its lines.
"""

from __future__ import annotations

import re
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from heapq import merge
from itertools import chain, groupby
from math import inf
from operator import itemgetter
from typing import NamedTuple

from slurmllm.log import message_of, parse_line
from slurmllm.run.records import AttemptRecord
from slurmllm.run.rundir import RunDir, Stage, write_atomic
from slurmllm.supervise.log_files import GrowingLog

_RANK = re.compile(r"^rank_(\d+)\.log$")
# For launchers to notice a request: they look every 5 s, and NFS may hide a new file for half a
# minute.
ANSWER_S = 90.0


class RankLine(NamedTuple):
    """A line of a log, without its newline."""

    stage: Stage
    attempt: int
    rank: int
    text: str


@dataclass
class _RankLog:
    """A log with the attempt of its next lines and the time of its last record.

    The log of rank 0 is the stage's, with the lines of all attempts.
    """

    file: GrowingLog
    stage: Stage
    attempt: int
    rank: int
    time: float = -inf

    def read(self, last: bool) -> Iterator[tuple[float, RankLine]]:
        """Yield the new lines with their times, which never go back within an attempt.

        A clock that is set back must not move the lines that follow before those already shown.
        """
        begin = re.compile(rf"{self.stage} attempt (\d+)\b.*?: (\S+ → )?")
        for text in chain(self.file.lines(), self.file.flush() if last else ()):
            record = parse_line(text)
            if self.rank == 0 and (match := begin.match(record.message if record else text)):
                if int(match[1]) != self.attempt:
                    self.attempt, self.time = int(match[1]), -inf
                if match[2]:  # its ending, which follows the lines of all ranks
                    self.time = inf
            if record is not None:
                self.time = max(record.time, self.time)
            yield self.time, RankLine(self.stage, self.attempt, self.rank, text)


class MergedLogs:
    """The merged logs of some ranks of a run.

    Args:
        stages: The stages, in this order.
        includes: Whether to include a rank.
        first: Stage → the first attempt to show; by default all attempts are shown.
        attempt: The only attempt to show; None: all from the first on.
    """

    def __init__(
        self,
        run: RunDir,
        stages: Sequence[Stage],
        includes: Callable[[int], bool],
        first: Mapping[Stage, int] | None = None,
        attempt: int | None = None,
    ) -> None:
        self._run, self._includes = run, includes
        self._first, self._attempt = first or {}, attempt
        self._stage_logs = {
            stage: _RankLog(GrowingLog(run.stage_log(stage)), stage, 0, 0) for stage in stages
        }
        self._logs: dict[tuple[Stage, int, int], _RankLog] = {}

    def any_file(self) -> bool:
        """Whether there is a log of any of the ranks."""
        for stage, log in self._stage_logs.items():
            started = self._attempt is None or self._run.attempt(stage, self._attempt).path.is_dir()
            if self._includes(0) and started and log.file.path.is_file():
                return True
        return any(any(self._worker_logs(stage).values()) for stage in self._stage_logs)

    def poll(self, last: bool = False) -> Iterator[RankLine]:
        """Yield the lines added since the last call, of the `last` one also an unfinished line."""
        for stage, stage_log in self._stage_logs.items():
            workers = self._worker_logs(stage)
            for attempt, lines in groupby(stage_log.read(last), lambda timed: timed[1].attempt):
                shown = self._includes(0) and self._shows(stage, attempt)
                logs = workers.pop(attempt, [])
                yield from _merge([*([lines] if shown else []), *(log.read(last) for log in logs)])
            # Attempts that the stage's log does not name: it may be written later than theirs.
            for logs in workers.values():
                yield from _merge([log.read(last) for log in logs])

    def poll_last(self, lines: int, last: bool = False) -> Iterator[RankLine]:
        """Yield the last lines of every log, in the order of all lines; as the first poll."""
        for stage, log in self._stage_logs.items():
            if self._attempt is None:
                log.file.skip_to_last(lines)
                # These lines are the first attempt's to show, or they have its beginning.
                begin = re.compile(rf"{stage} attempt \d+\b.*?: \d+ node")
                texts = map(message_of, GrowingLog(log.file.path, log.file.position).lines())
                log.attempt = max(self._first.get(stage, 0) - any(map(begin.match, texts)), 0)
            for worker in chain.from_iterable(self._worker_logs(stage).values()):
                worker.file.skip_to_last(lines)
        tails: dict[tuple[Stage, int, int], deque[tuple[int, RankLine]]]
        tails = defaultdict(lambda: deque(maxlen=lines))
        for place, line in enumerate(self.poll(last)):
            tails[line[:3]].append((place, line))
        return (line for _, line in merge(*tails.values()))

    def _worker_logs(self, stage: Stage) -> dict[int, list[_RankLog]]:
        """Return the logs of the workers other than rank 0, by attempt."""
        logs: dict[int, list[_RankLog]] = {}
        for number in worker_log_attempts(self._run, stage):
            if self._shows(stage, number):
                logs[number] = []
                for rank in filter(self._includes, ranks_with_logs(self._run, stage, number)):
                    key = (stage, number, rank)
                    if key not in self._logs:
                        self._logs[key] = _RankLog(GrowingLog(self._run.worker_log(*key)), *key)
                    logs[number].append(self._logs[key])
        return logs

    def _shows(self, stage: Stage, attempt: int) -> bool:
        if self._attempt is not None:
            return attempt == self._attempt
        return attempt >= self._first.get(stage, 0)


def _merge(streams: Sequence[Iterator[tuple[float, RankLine]]]) -> Iterator[RankLine]:
    """Merge lines by time; lines of one time stay in the order of the streams."""
    return (line for _, line in merge(*streams, key=itemgetter(0)))


def worker_log_attempts(run: RunDir, stage: Stage) -> list[int]:
    """Return the attempts of a stage that have logs of workers other than rank 0."""
    numbers = []
    with suppress(OSError):
        for entry in run.logs.iterdir():
            name, _, number = entry.name.rpartition("_")
            if name == stage and number.isdigit() and entry.is_dir():
                numbers.append(int(number))
    return sorted(numbers)


def ranks_with_logs(run: RunDir, stage: Stage, attempt: int) -> list[int]:
    """Return the ranks, other than 0, of an attempt that have a log."""
    folder = run.worker_log(stage, attempt, 1).parent
    with suppress(OSError):
        matches = (_RANK.match(entry.name) for entry in folder.iterdir())
        return sorted(int(match[1]) for match in matches if match)
    return []


class LogRequests:
    """Requests for logs that are still on the disks of the nodes.

    Of a running attempt the run directory has the logs of rank 0 and of workers that failed. A file
    in the attempt's `log_requests` has the launcher of a worker copy that worker's log into the run
    directory, until the attempt ends.

    Args:
        ranks: The ranks; None for all.
        attempt: The only attempt to ask; None for the newest one of the last stage that has any.
    """

    def __init__(
        self,
        run: RunDir,
        stages: Sequence[Stage],
        ranks: frozenset[int] | None,
        attempt: int | None = None,
    ) -> None:
        self._run, self._stages, self._ranks, self._attempt = run, stages, ranks, attempt
        self._newest: tuple[Stage, int] | None = None
        self.pending: AttemptRecord | None = None  # the attempt whose logs are awaited
        self.deadline = 0.0  # for its nodes to answer, in time.monotonic()

    def ask(self, is_active: Callable[[], bool]) -> AttemptRecord | None:
        """Write the requests to a running attempt not asked before; returns its record.

        None if there is none, or nothing is missing.

        Args:
            is_active: Whether the run is active: an attempt whose supervisor was killed is open.

        Raises:
            StorageError: This user may not write to the run, or a record is damaged.
        """
        record = newest_attempt(self._run, self._stages, self._attempt)
        if record is None or (record.stage, record.attempt) == self._newest:
            return None
        self._newest = (record.stage, record.attempt)
        if record.ended_at is not None or not self._missing(record) or not is_active():
            return None
        attempt = self._run.attempt(record.stage, record.attempt)
        for rank in [None] if self._ranks is None else sorted(self._ranks):
            if rank is None or rank < record.world_size:
                write_atomic(attempt.log_request(rank), "")
        self.pending, self.deadline = record, time.monotonic() + ANSWER_S
        return record

    def awaited(self) -> list[int]:
        """Return the ranks whose logs were requested and are not in the run directory yet."""
        if self.pending is None:
            return []
        path = self._run.attempt(self.pending.stage, self.pending.attempt).record
        ranks = self._missing(self.pending)
        if not ranks or AttemptRecord.load(path).ended_at is not None:
            self.pending = None
            return []
        return ranks

    def _missing(self, record: AttemptRecord) -> list[int]:
        ranks = set(range(1, record.world_size))
        if self._ranks is not None:
            ranks &= self._ranks
        return sorted(ranks.difference(ranks_with_logs(self._run, record.stage, record.attempt)))


def newest_attempt(
    run: RunDir, stages: Sequence[Stage], number: int | None = None
) -> AttemptRecord | None:
    """Return the record of an attempt, by default of the newest of the last stage with any."""
    for stage in reversed(stages):
        attempts = run.attempts(stage)
        if attempts or number is not None:
            newest = attempts[-1].number if number is None else number
            return AttemptRecord.find(run.attempt(stage, newest).record)
    return None
