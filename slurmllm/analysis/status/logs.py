"""The logs of a run's workers, merged, and the command that prints one from the disk of its node.

Lines of an attempt are merged by the time of their log records; a line without a time, such as a
library's output or a traceback, follows the previous line of its file. In files without any times
rank 0 (the stage's log, with the supervisor's records) comes first, then the other ranks. The
record of an attempt's ending follows all its lines.
"""

from __future__ import annotations

import logging
import re
import socket
import subprocess
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from heapq import merge
from itertools import chain, groupby
from math import inf
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from slurmllm.core.errors import RunError, SlurmError, StorageError
from slurmllm.core.format import Json, format_plural, printable
from slurmllm.core.log import message_of, parse_line
from slurmllm.core.run.records import AttemptRecord, NodeRecord
from slurmllm.core.run.rundir import RunDir, Stage, files_by_rank
from slurmllm.core.run.safe_files import open_regular
from slurmllm.core.slurm.client import step_beside
from slurmllm.core.slurm.setup import slurm_environment

log = logging.getLogger(__name__)
_BLOCK_BYTES = 64 * 1024
# A program without newlines must not fill the memory: a longer line is cut into pieces.
_LONGEST_BYTES = 1024 * 1024
_LONGEST_TAIL_BYTES = 64 << 20  # without the lines that are looked for


@dataclass
class GrowingLog:
    """A log file and the position up to which it has been read.

    Only whole lines are returned: a line without its newline may still be written to.
    """

    path: Path
    position: int = 0
    rest: bytes = b""

    def lines(self) -> Iterator[str]:
        """Yield the lines appended since the last call; none if the file is unreadable.

        The file is opened for every block: a merge reads the logs of thousands of ranks at a time,
        more than the limit of open files. Most have one block: the end is not looked for again.
        """
        while True:
            block = b""
            with suppress(OSError), open_regular(self.path) as stream:
                if stream.seek(0, 2) < self.position:  # the file was truncated
                    self.position = 0
                    self.rest = b""
                stream.seek(self.position)
                block = stream.read(_BLOCK_BYTES)
            self.position += len(block)
            *whole, self.rest = (self.rest + block).split(b"\n")
            yield from map(text_of, whole)
            if len(self.rest) > _LONGEST_BYTES:
                yield from self.flush()
            if len(block) < _BLOCK_BYTES:
                return

    def flush(self) -> Iterator[str]:
        """Yield the text after the last newline, if any."""
        remainder = self.rest
        self.rest = b""
        if remainder:
            yield text_of(remainder)

    def skip_to_last(self, lines: int) -> None:
        """Continue before the last `lines` lines; at the start if the file is unreadable."""
        with suppress(OSError), open_regular(self.path) as stream:
            end = stream.seek(0, 2)
            length = _BLOCK_BYTES
            while True:
                begin = max(0, end - length)
                stream.seek(begin)
                block = stream.read(end - begin)
                newlines = lines + block.endswith(b"\n")
                before, *remainder = block.rsplit(b"\n", newlines)
                if len(remainder) == newlines:
                    begin += len(before) + 1
                elif begin > 0 and length < _LONGEST_TAIL_BYTES:
                    length *= 4
                    continue
                self.position = begin
                return


def text_of(line: bytes) -> str:
    """Return a line made safe for a terminal; of a progress bar only its last state."""
    return printable(line.decode("utf-8", errors="replace").rstrip("\r").rpartition("\r")[2])


def node_of(record: AttemptRecord, rank: int) -> str:
    """Return the node of a worker of an attempt; empty if it has no such worker."""
    per_node = record.world_size // max(len(record.nodes), 1)
    return "".join(record.nodes[rank // per_node :][:1]) if per_node else ""


@dataclass(frozen=True)
class LogSelection:
    """The logs to show."""

    run: RunDir
    stages: tuple[Stage, ...]  # in this order
    ranks: frozenset[int] | None = None  # None: all
    attempt: int | None = None  # the only attempt; None: all
    newest: bool = False  # of each stage only the newest attempt, and those that begin later
    worker: int | None = None  # the rank of the only worker, whose lines have no labels

    def includes(self, rank: int) -> bool:
        return self.ranks is None or rank in self.ranks

    def newest_attempt(self) -> AttemptRecord | None:
        """Return the record of the only attempt, else of the newest of the last stage with any."""
        for stage in reversed(self.stages):
            attempts = self.run.attempts(stage)
            if attempts or self.attempt is not None:
                number = attempts[-1].number if self.attempt is None else self.attempt
                return AttemptRecord.find(self.run.attempt(stage, number).record)
        return None


def select_logs(
    run: RunDir,
    stage: Stage | None,
    attempt: int | None,
    rank: int | None,
    ranks: frozenset[int] | None,
    lines: int | None,
    all_ranks: bool,
) -> LogSelection:
    """Return which logs `slurmllm logs` shows.

    Args:
        all_ranks: Whether those of several ranks: of `ranks`, or, if None, of all.
        lines: How many of each log; None: all.
    """
    stages: tuple[Stage, ...] = ("precompile", "train") if stage is None else (stage,)
    single = rank is not None or not all_ranks  # worker
    plain = single and rank is None and attempt is None  # rank 0, in all attempts
    if single:
        ranks = frozenset({rank or 0})
    if attempt is not None or (single and not plain):
        stages = stages[-1:]
    # Earlier attempts can be long: the last lines are those of the newest attempt.
    newest = (single or lines is not None) and not plain
    return LogSelection(run, stages, ranks, attempt, newest, (rank or 0) if single else None)


_Key = tuple[Stage, int, int]  # stage, attempt and rank


class RankLine(NamedTuple):
    """A line of a log, without its newline."""

    stage: Stage
    attempt: int
    rank: int
    text: str


class RunLogs(tuple[RankLine, ...]):
    """Lines of a run's logs, each with `stage`, `attempt`, `rank` and `text`; `str` joins them."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<RunLogs: {format_plural(len(self), 'line')}>"

    def __str__(self) -> str:
        return "\n".join(line.text for line in self)

    def to_dict(self) -> Json:
        """Return them for JSON."""
        return {"lines": [line._asdict() for line in self]}


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
        for line in chain(self.file.lines(), self.file.flush() if last else ()):
            record = parse_line(line)
            if self.rank == 0 and (match := begin.match(record.message if record else line)):
                if int(match[1]) != self.attempt:
                    self.attempt = int(match[1])
                    self.time = -inf
                if match[2]:  # its ending, which follows the lines of all ranks
                    self.time = inf
            if record:
                self.time = max(record.time, self.time)
            yield self.time, RankLine(self.stage, self.attempt, self.rank, line)


class MergedLogs:
    """The merged logs of a selection."""

    def __init__(self, selection: LogSelection) -> None:
        self._selection = selection
        self._run = selection.run
        self._stage_logs = {
            stage: _RankLog(GrowingLog(self._run.stage_log(stage)), stage, 0, 0)
            for stage in selection.stages
        }
        self._first = dict.fromkeys(selection.stages, 0)  # attempt to show
        if selection.newest:
            for stage in selection.stages:
                self._first[stage] = max((a.number for a in self._run.attempts(stage)), default=0)
        self._logs: dict[_Key, _RankLog] = {}
        self._printed: set[_Key] = set()  # from a node's disk: left out
        self._tried: set[tuple[Stage, int]] = set()  # attempts whose node was asked

    def any_file(self) -> bool:
        """Return whether there is a log of any of the ranks."""
        attempt = self._selection.attempt
        for stage, log in self._stage_logs.items():
            started = attempt is None or self._run.attempt(stage, attempt).path.is_dir()
            if self._selection.includes(0) and started and log.file.path.is_file():
                return True
        return any(any(self._worker_logs(stage).values()) for stage in self._stage_logs)

    def poll(self, last: bool = False) -> Iterator[RankLine]:
        """Yield the lines added since the last call, of the `last` one also an unfinished line."""
        for stage, stage_log in self._stage_logs.items():
            workers = self._worker_logs(stage)
            for attempt, lines in groupby(stage_log.read(last), lambda timed: timed[1].attempt):
                is_selected = self._selection.includes(0) and self._shows(stage, attempt)
                logs = workers.pop(attempt, [])
                yield from _merge(
                    [*([lines] if is_selected else []), *(log.read(last) for log in logs)]
                )
            # Attempts that the stage's log does not name: it may be written later than theirs.
            for logs in workers.values():
                yield from _merge([log.read(last) for log in logs])

    def poll_last(self, lines: int, last: bool = False) -> Iterator[RankLine]:
        """Yield the last lines of every log, in the order of all lines; as the first poll."""
        for stage, log in self._stage_logs.items():
            if self._selection.attempt is None:
                log.file.skip_to_last(lines)
                # These lines are the first attempt's to show, or they have its beginning.
                begin = re.compile(rf"{stage} attempt \d+\b.*?: \d+ node")
                texts = map(message_of, GrowingLog(log.file.path, log.file.position).lines())
                log.attempt = max(self._first[stage] - any(map(begin.match, texts)), 0)
            for worker in chain.from_iterable(self._worker_logs(stage).values()):
                worker.file.skip_to_last(lines)
        tails: dict[_Key, deque[tuple[int, RankLine]]]
        tails = defaultdict(lambda: deque(maxlen=lines))
        for index, line in enumerate(self.poll(last)):
            tails[line[:3]].append((index, line))
        return (line for _, line in merge(*tails.values()))

    def on_node(
        self, rank: int, lines: int | None, follow: bool
    ) -> Generator[Iterable[RankLine], None, bool]:
        """Yield a worker's lines on the disk of its node, once; return whether its log is there.

        `follow`: until the worker ends.
        """
        command = None
        with suppress(StorageError):  # a record that is damaged
            record = self._selection.newest_attempt()
            if record is not None and (record.stage, record.attempt) not in self._tried:
                command = node_log_command(self._run, record, rank, lines, follow)
        if command is None or record is None:
            return False
        key = (record.stage, record.attempt, rank)
        self._tried.add(key[:2])
        try:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, env=slurm_environment())
        except OSError as error:
            raise SlurmError(f"{command[0]} cannot be started: {error}") from error
        with process:
            assert process.stdout is not None
            try:
                while line := process.stdout.readline(_LONGEST_BYTES):
                    self._printed.add(key)
                    yield [RankLine(*key, text_of(line.removesuffix(b"\n")))]
            except BaseException:
                process.terminate()  # srun survives a first Ctrl-C
                raise
        return process.returncode == 0

    def _worker_logs(self, stage: Stage) -> dict[int, list[_RankLog]]:
        """Return the logs of the workers other than rank 0, by attempt."""
        logs: dict[int, list[_RankLog]] = {}
        if self._selection.ranks == frozenset({0}):
            return logs  # no folder of an attempt is listed
        for number in worker_log_attempts(self._run, stage):
            if self._shows(stage, number):
                ranks = ranks_with_logs(self._run, stage, number)
                logs[number] = []
                for rank in filter(self._selection.includes, ranks):
                    key = (stage, number, rank)
                    if key in self._printed:
                        continue
                    if key not in self._logs:
                        self._logs[key] = _RankLog(GrowingLog(self._run.worker_log(*key)), *key)
                    logs[number].append(self._logs[key])
        return logs

    def _shows(self, stage: Stage, attempt: int) -> bool:
        if self._selection.attempt is not None:
            return attempt == self._selection.attempt
        return attempt >= self._first[stage]


def last_lines(run: RunDir, record: AttemptRecord, rank: int, lines: int) -> list[str]:
    """Return the last lines of a worker in an attempt; for rank 0 mixed with the supervisor's."""
    if rank != 0:  # without reading the stage's log, which may be long: many workers may be asked
        log = GrowingLog(run.worker_log(record.stage, record.attempt, rank))
        log.skip_to_last(lines)
        return list(deque(chain(log.lines(), log.flush()), lines))
    selection = LogSelection(run, (record.stage,), frozenset({rank}), record.attempt)
    return [line.text for line in MergedLogs(selection).poll_last(lines, last=True)]


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
    with suppress(OSError):
        return sorted(
            files_by_rank(str(run.worker_log(stage, attempt, 1).with_name("rank_")), ".log")
        )
    return []


def node_log_command(
    run: RunDir, record: AttemptRecord, rank: int, lines: int | None, follow: bool
) -> list[str] | None:
    """Return the command that prints the log of a running worker on the disk of its node.

    `follow`: until the worker ends. Returns None if the log is not there, or not any longer.

    Raises:
        RunError: a local run is on another machine.
    """
    node = node_of(record, rank)
    if rank == 0 or not node or record.ended_at is not None:
        return None
    node_record = NodeRecord.find(record.files(run).node(node))
    if not node_record or node_record.log_folder is None or rank in node_record.exit_codes:
        return None
    tail = ["tail", f"--lines={lines or '+1'}"]
    if follow:
        tail += ["--follow", f"--pid={node_record.pids[rank]}"]
    tail.append(f"{node_record.log_folder}/rank_{rank:05d}.log")
    if record.job_id is None:
        if record.host not in (None, socket.gethostname()):
            raise RunError(
                f"the log of rank {rank} is on the disk of {record.host}; print it there"
            )
        return tail
    return [*step_beside(record.job_id, [node]), *tail]


def log_batches(
    selection: LogSelection,
    lines: int | None,
    state: Callable[[], str],
    endings: Iterable[bool] | None = None,
) -> Iterator[Iterable[RankLine]]:
    """Yield the lines of logs, as many at a time as there are.

    Args:
        lines: How many of each log, the last; None: all.
        state: Returns the state of the run, for the error that there is no log.
        endings: Yields whether the run has ended, to read on until then; None: to read once.

    Raises:
        RunError: there are no such logs, or they are on another machine.
    """
    rank = selection.worker
    follow = endings is not None
    merged = MergedLogs(selection)
    if rank and not follow and (yield from merged.on_node(rank, lines, follow)):
        return
    if rank is None and not follow:
        _warn_of_missing_logs(selection)
    if not merged.any_file() and (message := _explain_no_log(selection, follow, state)):
        log.warning("%s", message)
        return
    for path in map(selection.run.stage_log, selection.stages if selection.includes(0) else ()):
        if path.is_file():
            open_regular(path).close()  # `GrowingLog` ignores a file that cannot be read
    for ended in [True] if endings is None else endings:
        yield merged.poll_last(lines, ended) if lines else merged.poll(ended)
        if rank and not ended:
            yield from merged.on_node(rank, lines, follow)
        lines = None  # for the first look


def _warn_of_missing_logs(selection: LogSelection) -> None:
    with suppress(StorageError):
        record = selection.newest_attempt()
        if not record or record.ended_at is not None:
            return
        if missing := {*filter(selection.includes, range(1, record.world_size))}.difference(
            ranks_with_logs(selection.run, record.stage, record.attempt)
        ):
            log.warning(
                "without %s on the disks of the nodes, collected when %s attempt %d ends; "
                "`slurmllm logs %s --rank %d -f` shows one",
                format_plural(len(missing), "log"),
                record.stage,
                record.attempt,
                selection.run.name,
                min(missing),
            )


def _explain_no_log(selection: LogSelection, follow: bool, state: Callable[[], str]) -> str | None:
    """Return that the only worker printed nothing; None if a log may still be written.

    Raises:
        RunError: There are no such workers, or the log is still on its node.
    """
    run = selection.run
    stage = selection.stages[-1]
    rank = selection.worker
    record = None
    with suppress(StorageError):
        record = selection.newest_attempt()
    node = node_of(record, rank) if record and rank is not None else ""
    if follow and not record:
        log.warning("%s has no logs yet: %s", run.name, state())
        return None
    if follow and (rank is None or node):
        return None
    if not record or not (rank and node):
        attempts = ", ".join(str(attempt.number) for attempt in run.attempts(stage))
        listed = ranks_with_logs(run, stage, record.attempt) if record else "none"
        logs = f"such logs ({stage} attempts: {attempts}; ranks with a log: {listed})"
        raise RunError(f"{run.name} has no {logs if attempts else 'logs yet'}: {state()}")
    worker = f"rank {rank} on {node}, {stage} attempt {record.attempt}"
    node_record = NodeRecord.find_readable(run.attempt(stage, record.attempt).node(node))
    if node_record and rank in node_record.exit_codes:  # whose logs are collected
        return f"{worker}: it printed nothing"
    raise RunError(
        f"{worker}: its log is on the disk of {node}, whose launcher has not collected it; the "
        f"next attempt on {node} does"
    )
