"""The worker that made an attempt fail, and the lines that show why.

The order is that of `classify`: a hang without an earlier failure, then failure records, then exit
codes, then nodes without a report. Failures of workers that only lost a peer are echoes, used if
there is nothing else.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from slurmllm.log import message_of
from slurmllm.run.error_patterns import cause_line
from slurmllm.run.records import AttemptRecord, FailureRecord, HangRecord, NodeRecord
from slurmllm.run.rundir import AttemptDir, RunDir, Stage, read_all
from slurmllm.run.safe_files import read_limited
from slurmllm.supervise.attempts import failure_records, load_attempts, node_records
from slurmllm.supervise.classify import (
    FailedWorker,
    failed_workers,
    hang_text,
    how_ended,
    is_echo,
    reported_all,
    workers_without_failure_record,
)
from slurmllm.supervise.log_files import GrowingLog, node_of

_NO_FAILURES = ("done", "advance_signal", "cancelled", "superseded")
_SEARCHED_LINES = 200  # of a log, for the line that names a cause
# Frames as faulthandler and py-spy print them.
_FAULTHANDLER = re.compile(r'File "(?P<path>[^"]+)", line (?P<line>\d+) in (?P<name>.+)')
_PY_SPY = re.compile(r"^\s+(?P<name>\S+) \((?P<path>[^:)]+):(?P<line>\d+)\)$")
# Frames of a worker that computes or waits for the others.
_COLLECTIVE = re.compile(r"/torch/|/torch_xla/|/neuronx_distributed/|slurmllm/backends/")
_MAX_LINES = 4


@dataclass(frozen=True)
class Culprit:
    """The worker that made an attempt fail, as far as known."""

    record: AttemptRecord
    rank: int | None  # None if unknown
    node: str  # empty if unknown
    how: tuple[str, ...]  # the facts, one line each
    failure: FailureRecord | None = None  # the worker's failure record
    stacks: bool = False  # whether the attempt hung and left stacks


def failed_attempts(run: RunDir, stages: Sequence[Stage]) -> list[AttemptRecord]:
    """Return the attempts that failed or are failing, by start time."""
    records = [record for stage in stages for record in load_attempts(run, stage)]
    failed = [record for record in records if _has_failed(run, record)]
    return sorted(failed, key=lambda record: record.started_at)


def _has_failed(run: RunDir, record: AttemptRecord) -> bool:
    if record.ending is not None:
        return record.ending not in _NO_FAILURES
    if run.attempt(record.stage, record.attempt).hang.is_file():
        return True
    return bool(failure_records(run, record) or failed_workers(node_records(run, record)))


def culprit(run: RunDir, record: AttemptRecord) -> Culprit:
    """Find the worker that made an attempt fail; StorageError if a record is damaged."""
    nodes, failures = node_records(run, record), failure_records(run, record)
    primary = [failure for failure in failures if not is_echo(failure)]
    first = min(primary, key=lambda failure: failure.time, default=None)
    hang_path = run.attempt(record.stage, record.attempt).hang
    if hang_path.is_file() and record.ending in (None, "hang"):
        hang = HangRecord.load(hang_path)
        if first is None or first.time >= hang.found_at:
            locations = read_locations(run.attempt(record.stage, record.attempt))
            rank = next(iter((*outliers(locations), *hang.behind)), None)
            how = hang_text(hang)[: 1 + bool(hang.unresponsive_nodes)]
            if rank in locations:
                how.append(f"its stack was in {locations[rank].text}")
            name = "" if rank is None else node_of(record, rank)
            return Culprit(record, rank, name, tuple(how), stacks=bool(locations))
    if record.launch_failure is not None and not failures:  # before any worker
        return Culprit(record, None, "", ())
    silent = [name for name in record.nodes if not reported_all(nodes.get(name))]
    lost = [name for name in silent if name in record.blamed_nodes]
    if lost and record.ending is not None:
        return _lost(record, lost)
    if first is not None:
        return Culprit(record, first.rank, first.node, _exit(nodes, first.rank), first)
    if unrecorded := workers_without_failure_record(nodes, failures):
        likely = _most_likely(run, record, unrecorded)
        return Culprit(record, likely.rank, likely.node, _exit(nodes, likely.rank))
    if silent and record.ending is not None:
        return _lost(record, silent)
    echo = min(failures, key=lambda failure: failure.time, default=None)
    if echo is not None:
        facts = ("it only lost a peer, and no other worker recorded a failure",)
        return Culprit(record, echo.rank, echo.node, facts, echo)
    return Culprit(record, None, "", ())


def log_of(run: RunDir, record: AttemptRecord, rank: int) -> Path:
    if rank == 0:
        return run.stage_log(record.stage)
    return run.worker_log(record.stage, record.attempt, rank)


def last_lines(run: RunDir, record: AttemptRecord, rank: int, lines: int) -> list[str]:
    """Return the last lines of a worker's log; for rank 0 mixed with the supervisor's."""
    log = GrowingLog(log_of(run, record, rank))
    if rank != 0:
        log.skip_to_last(lines)
        return list(deque(chain(log.lines(), log.flush()), lines))
    # Rank 0 shares the stage's log with the supervisor and the other attempts.
    tail: deque[str] = deque(maxlen=lines)
    begin, following = (f"{record.stage} attempt {n}" for n in (record.attempt, record.attempt + 1))
    for text in (*log.lines(), *log.flush()):
        message = message_of(text)
        if message.startswith((f"{following}:", f"{following} ")):
            break
        if message.startswith((f"{begin}:", f"{begin} ")) and "→" not in message:
            tail.clear()
        tail.append(text)
    return list(tail)


def _most_likely(
    run: RunDir, record: AttemptRecord, failed: Sequence[FailedWorker]
) -> FailedWorker:
    """Return the worker whose log names a cause; else the first ended by a signal, or the first."""
    for worker in failed:
        line = cause_line(last_lines(run, record, worker.rank, _SEARCHED_LINES))
        if line is not None and line[1] != "lost_peer":
            return worker
    return next((worker for worker in failed if worker.code < 0), failed[0])


def _exit(nodes: Mapping[str, NodeRecord], rank: int) -> tuple[str, ...]:
    return tuple(how_ended(n.exit_codes[rank]) for n in nodes.values() if rank in n.exit_codes)


def _lost(record: AttemptRecord, nodes: Sequence[str]) -> Culprit:
    """A node that stopped responding, represented by its first worker."""
    per_node = record.world_size // max(len(record.nodes), 1)
    rank = record.nodes.index(nodes[0]) * per_node
    how = (f"{', '.join(nodes)} stopped responding: its launcher left no report",)
    return Culprit(record, rank, nodes[0], how)


class StackLocation(NamedTuple):
    """Location of a worker's main thread."""

    text: str
    outside_step: bool  # whether it neither computed nor waited for the others


def read_locations(attempt: AttemptDir) -> dict[int, StackLocation]:
    """Return the location of each worker of an attempt that hung, by rank."""
    return {rank: stack_location(dump) for rank, dump in read_stacks(attempt).items()}


def read_stacks(attempt: AttemptDir) -> dict[int, str]:
    """Return the dumps of the workers' stacks that can be read, by rank."""
    folder = attempt.stacks(0).parent

    def read(path: Path) -> tuple[int, str] | None:
        try:
            rank = int(path.stem.removeprefix("rank_"))
            return rank, read_limited(path).decode(errors="replace")
        except (OSError, ValueError):
            return None

    paths = sorted(folder.glob("rank_*.txt")) if folder.is_dir() else []
    return dict(dump for dump in read_all(read, paths) if dump is not None)


def stack_location(dump: str) -> StackLocation:
    """Return the location of a worker's main thread in a dump of its stacks."""
    if dump.startswith("no answer"):
        return StackLocation(dump.splitlines()[0], outside_step=True)
    # faulthandler prints the thread that took the signal, the main one, under "Current thread",
    # and the innermost frame first.
    main = dump.rpartition("Current thread")[2]
    frames = list(_FAULTHANDLER.finditer(main)) or list(_PY_SPY.finditer(main))
    if not frames:
        return StackLocation("no Python frames", outside_step=False)
    inner = frames[0]
    text = f"{inner['name']} ({_short(inner['path'])}:{inner['line']})"
    caller = next((frame for frame in frames if "slurmllm/" in frame["path"]), None)
    if caller is not None and caller is not inner:
        text += f" from {caller['name']} ({_short(caller['path'])}:{caller['line']})"
    # A frame of a library or a backend: it is in the step that all workers take together.
    return StackLocation(text, not any(_COLLECTIVE.search(frame["path"]) for frame in frames))


def outliers(locations: Mapping[int, StackLocation]) -> tuple[int, ...]:
    """Return the ranks for which the others wait; empty if all or none are outside the step."""
    ranks = tuple(sorted(rank for rank, location in locations.items() if location.outside_step))
    return ranks if len(ranks) < len(locations) else ()


def stack_lines(locations: Mapping[int, StackLocation]) -> tuple[str, ...]:
    """Return a line for each outlier; without outliers, one with the most common location."""
    ranks = outliers(locations)
    lines = [f"rank {rank}: {locations[rank].text}" for rank in ranks[:_MAX_LINES]]
    if not ranks and locations:
        texts = [location.text for location in locations.values()]
        most = max(set(texts), key=texts.count)
        lines = [f"{texts.count(most)} of {len(texts)} workers: {most}"]
    return tuple(lines)


def _short(path: str) -> str:
    return "/".join(path.split("/")[-2:])
