"""The worker that made an attempt fail, and the lines that show why.

The order is that of `classify`: a hang without an earlier failure, then failure records, then exit
codes, then nodes without a report. Failures of workers that only lost a peer are echoes, used if
there is nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slurmllm.analysis.status.logs import last_lines, node_of
from slurmllm.core.run.error_patterns import cause_line
from slurmllm.core.run.records import AttemptRecord, FailureRecord, HangRecord, NodeRecord
from slurmllm.core.run.rundir import RunDir, Stage
from slurmllm.launch.supervise.attempts import failure_records, load_attempts, node_records
from slurmllm.launch.supervise.classify import (
    FailedWorker,
    failed_workers,
    hang_text,
    how_ended,
    is_echo,
    reported_all,
    workers_without_failure_record,
)
from slurmllm.launch.supervise.stacks import outliers, read_locations

_SEARCHED_LINES = 200  # of a log, for the line that names a cause


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
        return record.ending not in ("done", "advance_signal", "cancelled", "superseded")
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
